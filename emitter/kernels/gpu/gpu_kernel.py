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

    The kernel is a `hal.executable.source`, so that each operand is a separate binding. In a
    `stream.executable`, an operand may begin at an offset in a binding; IREE's SPIR-V backend does
    not compile such an offset.

    The other fields say which operations before and after this kernel can be fused into it:

    single_store: whether the kernel stores each element of its only result once and never reads it.
        Then element-wise operations on the result can be fused.
    reads_often: names of operands that many workgroups read. The operations that compute these
        operands should not be fused, because each workgroup would repeat them.
    reads_rarely: names of operands whose elements are each read at most twice. The operations that
        compute these operands may be fused even if they are dot products.
    heads: number of attention heads in a row of the first result, if each workgroup computes one
        head; otherwise 0. The result is f32 [rows, heads * head_dim], and workgroup i computes head
        i % heads of row i / heads. Then operations that need all elements of a head, such as an RMS
        norm, can be fused.
    read_row: None, or a function with which other kernels compute this kernel's only result in
        their own code, instead of loading it. read_row(body, row, **operands) emits code that
        prepares a row, such as the mean of a norm; all threads of a workgroup must run it. It
        returns a function that gets a column and emits code for the element in this column.
    reads_rows: maps the name of an operand f32 [tokens, n] to the number of times that a workgroup
        reads each of its elements. The kernel's code must index the rows of such an operand by
        Python integers, so that the operand can be computed with `read_row` of another kernel.
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
