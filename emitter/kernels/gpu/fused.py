"""Fuse operations and other kernels into a GPU kernel; this saves dispatches and memory traffic."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.types import TensorType
from castiron.emitter.kernels.gpu.expression import Computed, ComputedRows, Expression, Finished, FinishedHead
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.mlir.body import Index, Ssa, memref_type

THREADS = 64


def fused(
    kernel: GpuKernel, inputs: Mapping[str, Expression], output: Expression | None, more: Mapping[str, Value]
) -> GpuKernel:
    """Return a copy of `kernel` with expressions fused into its loads and its stores.

    inputs: expressions of operands, by name. output: applied to the first result, or None.
    more: operands that the expressions read and that `kernel` does not have, by name.
    """
    stored = {name: t for name, t in kernel.operands.items() if name not in inputs}
    result, *others = kernel.results
    assert output is None or kernel.heads or not others, "only a kernel with one result or with heads is continued"
    results = dict(kernel.results) | ({result: output.root.type} if output else {})
    keys = [*(f"{name}={e.key()}" for name, e in inputs.items()), *([output.key()] if output else [])]

    def arguments_of(given: Mapping[str, Ssa]) -> dict[str, Any]:
        kernel_operands = {name: x for name, x in given.items() if name not in more}
        return kernel_operands | {name: Computed(e, given) for name, e in inputs.items()}

    def write(b: GpuBody, **given: Ssa) -> None:
        arguments = arguments_of(given)
        if output and kernel.heads:
            token, head = b.div(b.workgroup(), kernel.heads), b.rem(b.workgroup(), kernel.heads)
            row = b.shared(kernel.results[result].shape[1] // kernel.heads)
            arguments[result] = FinishedHead(output, given, given[result], row, token, head)
        elif output:
            arguments[result] = Finished(output, given, given[result])
        kernel.write(b, **arguments)
        if output and kernel.heads:
            arguments[result].finish(b, kernel.heads)

    def read_row(b: GpuBody, row: Index, **given: Ssa) -> Callable[[Index], Ssa]:
        assert kernel.read_row is not None
        element = kernel.read_row(b, row, **arguments_of(given))
        return (lambda d: output.element(b, given, (row, d), element(d))) if output else element

    def reference(**given: Any) -> Mapping[str, np.ndarray]:
        operands = given | {name: np.asarray(_typed(e, e.array(given))) for name, e in inputs.items()}
        # In the order of `kernel.operands`, because attention joins its rows in this order.
        results = dict(kernel.reference(**{name: operands[name] for name in kernel.operands}))
        if output:
            results[result] = _typed(output, output.array(given, results[result]))
        return results

    return replace(
        kernel,
        name="_".join((kernel.name, *keys)).replace("=", "_"),
        operands={**stored, **{name: value.type for name, value in more.items()}},
        results=results,
        write=write,
        reference=reference,
        read_row=read_row if kernel.read_row else None,
    )


def with_rows(kernel: GpuKernel, names: Sequence[str], rows: GpuKernel, is_stored: bool) -> GpuKernel:
    """Fuse the kernel `rows`, such as a norm, into `kernel`; each workgroup computes its result.

    names: the operands of `kernel` that are the result of `rows`; those of `rows` replace them.
    is_stored: whether the result of `rows` also becomes a result named "rows".
    """
    ((result, type_),) = rows.results.items()
    outer = {name: t for name, t in kernel.operands.items() if name not in names}
    inner = {f"rows_{name}": t for name, t in rows.operands.items()}

    def write(b: GpuBody, **given: Ssa) -> None:
        assert rows.read_row is not None
        row_operands = {name: given[f"rows_{name}"] for name in rows.operands}
        elements = [rows.read_row(b, row, **row_operands) for row in range(type_.shape[0])]
        if is_stored:
            first = b.add(b.mul(b.workgroup(), b.threads), b.thread())
            for row, element in enumerate(elements):
                with b.loop(first, type_.shape[1], b.threads * kernel.workgroups) as d:
                    b.store(element(d.index), given["rows"], row, d.index)
        computed = ComputedRows(memref_type(type_.shape), elements)
        others = {name: x for name, x in given.items() if name != "rows" and name not in inner}
        kernel.write(b, **others, **dict.fromkeys(names, computed))

    def reference(**given: Any) -> Mapping[str, np.ndarray]:
        y = rows.reference(**{name: given[f"rows_{name}"] for name in rows.operands})[result]
        kernel_results = kernel.reference(**{name: y if name in names else given[name] for name in kernel.operands})
        return {**kernel_results, "rows": y} if is_stored else kernel_results

    digest = hashlib.sha256(f"{rows.name} {names} {is_stored}".encode()).hexdigest()[:10]
    return replace(
        kernel,
        name=f"{kernel.name}_rows_{digest}",
        operands=outer | inner,
        results={**kernel.results, "rows": type_} if is_stored else kernel.results,
        write=write,
        reference=reference,
        single_store=False,
        reads_rows={},
    )


def pointwise(roots: Sequence[Expression], leaves: Mapping[str, Value]) -> GpuKernel:
    """Return a kernel that computes expressions; its results are y0, y1, and so on.

    leaves: the inputs of the expressions, by the name of the new kernel's operand.
    """
    results = {f"y{i}": e.root.type for i, e in enumerate(roots)}
    largest = max(t.elements for t in results.values())

    def write(b: GpuBody, **given: Ssa) -> None:
        first = b.add(b.mul(b.workgroup(), THREADS), b.thread())
        for (name, t), e in zip(results.items(), roots):
            with b.when(b.less(first, t.elements)):
                index = [b.rem(b.div(first, prod(t.shape[i + 1 :])), n) for i, n in enumerate(t.shape)]
                b.store(Computed(e, given).load(b, *index), given[name], *index)

    def reference(**given: np.ndarray) -> Mapping[str, np.ndarray]:
        return {name: _typed(e, e.array(given)) for name, e in zip(results, roots)}

    name = "_".join(("gpu_pointwise", *(e.key() for e in roots)))
    operands: dict[str, TensorType | str] = {name: value.type for name, value in leaves.items()}
    return GpuKernel(name, operands, results, -(-largest // THREADS), write, reference, threads=THREADS)


def beside(first: GpuKernel, second: GpuKernel, shared: Mapping[str, str]) -> GpuKernel:
    """Return a kernel whose first workgroups run `first`, and whose others run `second`.

    Names get the prefix a_ or b_. shared: operands of both, from the name in `second` to that in
    `first`.
    """

    names = (first, lambda name: f"a_{name}"), (second, lambda name: f"a_{shared[name]}" if name in shared else f"b_{name}")
    others = {named(name) for kernel, named in names for name in kernel.operands if name not in kernel.reads_rows}
    rows = {named(name): n for kernel, named in names for name, n in kernel.reads_rows.items() if named(name) not in others}
    operands, results, in_place = dict[str, TensorType | str](), dict[str, TensorType](), dict[str, str]()
    for kernel, named in names:
        operands |= {named(name): t for name, t in kernel.operands.items()}
        results |= {named(name): t for name, t in kernel.results.items()}
        in_place |= {named(name): named(operand) for name, operand in kernel.in_place.items()}

    def write(b: GpuBody, **given: Ssa) -> None:
        parts = b.when(b.less(b.workgroup(), first.workgroups)), b.after(first.workgroups)
        for (kernel, named), part in zip(names, parts):
            arguments = {*kernel.operands, *(name for name in kernel.results if name not in kernel.in_place)}
            with part:
                kernel.write(b, **{name: given[named(name)] for name in arguments})

    def reference(**given: Any) -> Mapping[str, np.ndarray]:
        both = dict[str, np.ndarray]()
        for kernel, named in names:
            of_kernel = kernel.reference(**{name: given[named(name)] for name in kernel.operands})
            both |= {named(name): x for name, x in of_kernel.items()}
        return both

    return GpuKernel(
        "_".join(("gpu_beside", hashlib.sha256(f"{first.name} {second.name} {shared}".encode()).hexdigest()[:16])),
        operands, results, first.workgroups + second.workgroups, write, reference,
        flops=lambda position: first.work(position)[0] + second.work(position)[0],
        nbytes=lambda position: first.work(position)[1] + second.work(position)[1],
        in_place=in_place, threads=first.threads, reads_rows=rows,
    )  # fmt: skip


def _typed(e: Expression, array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array, e.root.shape).astype(e.root.dtype.numpy)
