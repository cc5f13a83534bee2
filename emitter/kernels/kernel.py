"""A kernel: its symbol, operand types, MLIR text, NumPy reference and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Ssa, Type, memref_type
from castiron.emitter.types import TensorType

INDEX = "index"
Work = int | Callable[[int], int]


@dataclass(frozen=True, eq=False)
class Kernel:
    """An IREE `stream.executable` with operand types, a NumPy reference and a cost.

    name: symbol; kernels with different text have different names. operands: types in the order of
    the dispatch; "index" is a scalar, such as a layer number. text: MLIR of the executable, which
    exports `@{name}_fn`. reference: from operands by name to results by name. flops, bytes: cost of
    a call, a number or a function of the sequence position. in_place: for a result that overwrites
    an operand, the name of the operand. matmul: the specification, if tiles can be tuned for it.
    """

    name: str
    operands: Mapping[str, TensorType | str]
    results: Mapping[str, TensorType]
    text: str
    reference: Callable[..., Mapping[str, np.ndarray]]
    flops: Work
    bytes: Work
    in_place: Mapping[str, str] = field(default_factory=dict)
    matmul: Matmul | None = None

    @property
    def tensors(self) -> dict[str, TensorType]:
        """Return the types of the tensor operands by name, in order."""
        return {name: t for name, t in self.operands.items() if isinstance(t, TensorType)}

    @property
    def indices(self) -> list[str]:
        """Return the names of the scalar index operands, in order."""
        return [name for name, t in self.operands.items() if t == INDEX]

    def work(self, position: int) -> tuple[int, int]:
        """Return the FLOPs and the bytes of memory traffic of one call at a sequence position."""
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
    matmul: Matmul | None = None,
    fenced: bool = False,
) -> Kernel:
    """Return the kernel whose MLIR body the callback `write(body, **arguments)` emits.


    The arguments are memrefs and index values by name: all operands, and the results that are not
    `in_place`. fenced: whether to prevent fused multiply-adds, as in `Body`.
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
    scalars = {given: Ssa(f"%i{i}", Type(INDEX)) for i, given in enumerate(indices)}
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
    return Kernel(name, operands, results, text, reference, flops, nbytes, in_place, matmul)
