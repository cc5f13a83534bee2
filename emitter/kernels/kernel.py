"""What a kernel is to the graph: a typed symbol, its text, its NumPy definition and its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.body import Body, Ssa, memref_type
from castiron.emitter.types import TensorType

INDEX = "index"
Work = int | Callable[[int], int]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One `stream.executable` and everything the rest of castiron needs to know about it.

    name: symbol, unique for distinct text, derived from the kernel's parameters.
    operands: by name, in the order of the dispatch, tensor types, or "index" for a scalar given there (a layer number).
    results: tensor types by name.
    text: `stream.executable private @{name} {...}` exporting `@{name}_fn`.
    reference: NumPy definition, operands by name to results by name.
    flops, bytes: work and memory touched by one call; a callable takes the position.
    in_place: results that live in the storage of an operand, by names; the others have storage of their own.
    product: what it computes, if that is a product with a weight, for which other tiles could be chosen.
    """

    name: str
    operands: Mapping[str, TensorType | str]
    results: Mapping[str, TensorType]
    text: str
    reference: Callable[..., Mapping[str, np.ndarray]]
    flops: Work
    bytes: Work
    in_place: Mapping[str, str] = field(default_factory=dict)
    product: Product | None = None

    @property
    def tensors(self) -> dict[str, TensorType]:
        """The operands that are tensors, in order."""
        return {name: t for name, t in self.operands.items() if isinstance(t, TensorType)}

    @property
    def indices(self) -> list[str]:
        """The operands that are indices, in order."""
        return [name for name, t in self.operands.items() if t == INDEX]

    def work(self, position: int) -> tuple[int, int]:
        """FLOP and bytes of one call when the sequence stands at `position`."""
        flops, nbytes = (w(position) if callable(w) else w for w in (self.flops, self.bytes))
        return flops, nbytes


def write_kernel(
    name: str,
    operands: Mapping[str, TensorType | str],
    results: Mapping[str, TensorType],
    workgroups: int,
    write: Callable[..., None],
    *,
    reference: Callable[..., Mapping[str, np.ndarray]],
    flops: Work,
    nbytes: Work,
    in_place: Mapping[str, str] | None = None,
    product: Product | None = None,
    fenced: bool = False,
) -> Kernel:
    """The kernel whose function runs on `workgroups` workgroups and whose body `write(body, **arguments)` writes.

    Arguments, by the names of the operands and of the results that are not `in_place` of one, are memrefs and index values.
    `fenced` is `Body`'s.
    """
    in_place = in_place or {}
    tensors = {name: t for name, t in operands.items() if isinstance(t, TensorType)}
    tensors |= {name: t for name, t in results.items() if name not in in_place}
    indices = [name for name, t in operands.items() if not isinstance(t, TensorType)]
    body = Body(fenced)
    arguments: dict[str, Ssa] = {}
    for i, (given, t) in enumerate(tensors.items()):
        memref = Ssa(f"%m{i}", memref_type(t.shape, t.dtype.name))
        zero = body.index(0)
        body.do(f"{memref} = stream.binding.subspan %b{i}[{zero}] : !stream.binding -> {memref.type}")
        arguments[given] = memref
    scalars = {given: Ssa(f"%i{i}", "index") for i, given in enumerate(indices)}
    write(body, **arguments, **scalars)
    signature = ", ".join([f"%b{i}: !stream.binding" for i in range(len(tensors))] + [f"{s}: index" for s in scalars.values()])
    pipeline = "#iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>"
    text = f"""stream.executable private @{name} {{
  stream.executable.export public @{name}_fn workgroups() -> (index, index, index) {{
    %n = arith.constant {workgroups} : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }}
  builtin.module {{
    func.func @{name}_fn({signature}) attributes {{translation_info = {pipeline}}} {{
{body.text()}
      return
    }}
  }}
}}
"""
    return Kernel(name, operands, results, text, reference, flops, nbytes, in_place, product)
