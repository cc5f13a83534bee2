"""The class `GpuKernel`: a GPU kernel as an IREE `hal.executable.source`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

from castiron.emitter.kernels.gpu.gpu_body import GpuBody, grid
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import I32, Index, Ssa, memref_type


@dataclass(frozen=True, eq=False)
class GpuKernel(Kernel):
    """A kernel for GPUs; its code runs in each of the `threads` threads of a workgroup.

    It is a `hal.executable.source`, so that each operand is a separate binding: IREE's SPIR-V
    backend does not compile operands that begin at an offset in a binding. The other fields say
    what fuses:

    single_store: each element of the only result is stored once and never read, so element-wise
        operations on it can be fused.
    reads_often: operands that many workgroups read; computing them should not be fused.
    reads_rarely: operands whose elements are read at most twice; even dot products may be fused.
    heads: attention heads in a row of the first result f32 [rows, heads * head_dim], of which
        workgroup i computes head i % heads of row i / heads; otherwise 0.
    read_row: read_row(body, row, **operands) emits code that all threads run to prepare a row, and
        returns a function from a column to the element; None if other kernels cannot do this.
    reads_rows: from an operand f32 [tokens, n] to how often a workgroup reads each of its elements;
        its rows are indexed by Python integers, so that `read_row` can compute it.
    """

    threads: int = 64
    single_store: bool = False
    reads_often: tuple[str, ...] = ()
    reads_rarely: tuple[str, ...] = ()
    heads: int = 0
    read_row: Callable[..., Callable[[Index], Ssa]] | None = None
    reads_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def index_type(self) -> str:
        return str(I32)

    @property
    def text(self) -> str:
        """Return the MLIR of the executable, which exports the function `@{name}_fn`."""
        return self._written[0]

    @property
    def shared_bytes(self) -> int:
        return self._written[1]

    @cached_property
    def _written(self) -> tuple[str, int]:
        tensors = self.tensors | {name: t for name, t in self.results.items() if name not in self.in_place}
        written = {*self.results, *self.in_place.values()}
        access = ("" if name in written else ", ReadOnly" for name in tensors)
        bindings = ", ".join(f"#hal.pipeline.binding<storage_buffer{flag}>" for flag in access)
        constants = f"constants = {len(self.indices)}, " if self.indices else ""
        layout = f"#hal.pipeline.layout<{constants}bindings = [{bindings}]>"
        body, arguments = GpuBody(self.threads, self.workgroups, layout), dict[str, Ssa]()
        for i, (name, t) in enumerate(tensors.items()):
            arguments[name] = body.bind(i, memref_type(t.shape, t.dtype.name))
        for i, name in enumerate(self.indices):
            loaded = body.let(f"hal.interface.constant.load layout({layout}) ordinal({i}) : i32", I32)
            arguments[name] = body.to_index(loaded)
        x, y = grid(self.workgroups)
        # The grid may have a few more workgroups than the kernel needs.
        with body.when(body.less(body.workgroup(), self.workgroups)) if x * y > self.workgroups else nullcontext():
            self.write(body, **arguments)
        pipeline = f"#iree_codegen.no_pipeline workgroup_size = [{self.threads}, 1, 1]"
        text = f"""hal.executable.source private @{self.name} {{
  hal.executable.export public @{self.name}_fn ordinal(0)
      layout({layout})
      count(%device: !hal.device) -> (index, index, index) {{
    %x = arith.constant {x} : index
    %y = arith.constant {y} : index
    %z = arith.constant 1 : index
    hal.return %x, %y, %z : index, index, index
  }}
  builtin.module {{
    func.func @{self.name}_fn() attributes {{translation_info = #iree_codegen.translation_info<pipeline = {pipeline}>}} {{
{body.text()}
      return
    }}
  }}
}}
"""
        return text, body.shared_bytes
