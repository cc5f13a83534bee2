"""The description of a kernel: symbol, operand types, MLIR text, NumPy reference and cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from castiron.emitter.graph.ir import Value, append, fail
from castiron.emitter.graph.types import TensorType
from castiron.emitter.kernels.mlir.body import Body, Ssa, Type, memref_type

INDEX = "index"
Work = int | Callable[[int], int]


@dataclass(frozen=True, eq=False)
class Kernel:
    """An IREE `stream.executable` with operand types, a NumPy reference and a cost.

    name: of the MLIR symbol; kernels with different text have different names.
    operands: types by name, in the order of the dispatch; "index" is a scalar.
    write: called as write(body, **arguments), with the memref or index of each operand, and the
        memref of each result that is not in `in_place`.
    reference: NumPy function from operands to results, by name.
    flops, nbytes: of a call, a number or a function of the position of its first token.
    in_place: from a result to the operand that it overwrites.
    matmul: a `Matmul` if `castiron tune` can tune the kernel, otherwise None.
    """

    name: str
    operands: Mapping[str, TensorType | str]
    results: Mapping[str, TensorType]
    workgroups: int
    write: Callable[..., None]
    reference: Callable[..., Mapping[str, np.ndarray]]
    flops: Work = 0
    nbytes: Work = 0
    in_place: Mapping[str, str] = field(default_factory=dict)
    matmul: Any = None

    @property
    def tensors(self) -> dict[str, TensorType]:
        """Return the types of the tensor operands by name, in order."""
        return {name: t for name, t in self.operands.items() if isinstance(t, TensorType)}

    @property
    def indices(self) -> list[str]:
        """Return the names of the operands that are scalar indices, in order."""
        return [name for name, t in self.operands.items() if t == INDEX]

    @property
    def index_type(self) -> str:
        """Return the MLIR type in which a dispatch passes scalar index operands."""
        return INDEX

    def work(self, position: int) -> tuple[int, int]:
        """Return (FLOPs, bytes of memory traffic) of a call whose first token is at `position`."""
        flops, nbytes = (w(position) if callable(w) else w for w in (self.flops, self.nbytes))
        return flops, nbytes

    @cached_property
    def text(self) -> str:
        """Return the MLIR of the executable, which exports the function `@{name}_fn`."""
        name, body, arguments = self.name, Body(), dict[str, Ssa]()
        tensors = self.tensors | {name: t for name, t in self.results.items() if name not in self.in_place}
        for i, (given, t) in enumerate(tensors.items()):
            memref = Ssa(f"%m{i}", memref_type(t.shape, t.dtype.name))
            zero = body.index(0)
            body.do(f"{memref} = stream.binding.subspan %b{i}[{zero}] : !stream.binding -> {memref.type}")
            arguments[given] = memref
        scalars = {given: Ssa(f"%i{i}", Type(INDEX)) for i, given in enumerate(self.indices)}
        self.write(body, **arguments, **scalars)
        bindings = [f"%b{i}: !stream.binding" for i in range(len(tensors))]
        signature = ", ".join(bindings + [f"{scalar}: index" for scalar in scalars.values()])
        pipeline = "#iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>"
        return f"""stream.executable private @{name} {{
  stream.executable.export public @{name}_fn workgroups() -> (index, index, index) {{
    %n = arith.constant {self.workgroups} : index
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


def kernel_call(kernel: Kernel, /, **operands: Value | int) -> dict[str, Value]:
    """Append a call of `kernel` and return its results by name.

    operands: by name, a Value for each tensor and an integer for each operand of type index.
    """
    tensors = {name: v for name, v in operands.items() if isinstance(v, Value)}
    if {name: tensors[name].type if name in tensors else INDEX for name in operands} != kernel.operands:
        expected = ", ".join(f"{name}: {t}" for name, t in kernel.operands.items())
        raise fail(kernel.name, f"the operands do not match; the kernel takes {expected}", list(tensors.values()))
    attrs = {"kernel": kernel, "indices": {name: operands[name] for name in kernel.indices}}
    results = append("kernel", [tensors[name] for name in kernel.tensors], tuple(kernel.results.values()), attrs)
    return dict(zip(kernel.results, results, strict=True))
