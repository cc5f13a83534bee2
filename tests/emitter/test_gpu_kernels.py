"""GPU kernels: workgroups and shared memory within what every device has, references if fused."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Op, Value, current_function
from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.attention.decode import DecodeTokens
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import Scores
from castiron.emitter.kernels.gpu.attention import attention
from castiron.emitter.kernels.gpu.embed import embed
from castiron.emitter.kernels.gpu.gemm import gemm
from castiron.emitter.kernels.gpu.gpu_body import MAX_GRID, SHARED_BYTES, grid
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.gpu.heads import QkvRows
from castiron.emitter.kernels.gpu.matvec import MAX_TOKENS, matvec
from castiron.emitter.kernels.gpu.norm import norm
from castiron.emitter.kernels.gpu.route import route
from castiron.emitter.kernels.kernel import kernel_call
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.layers.kv_cache import CACHES
from castiron.emitter.lowering import gpu_fusion
from castiron.emitter.lowering.gpu_fusion import fuse_kernels

# The largest heads: latent attention (DeepSeek), and heads with a norm (Gemma 4).
LATENT, NORMED = HeadLayout(16, 1, 576, None), HeadLayout(8, 2, 512, 512, 1e-6, v_norm=1e-6)
LARGEST = {
    **{
        f"attention-{layout.head_dim}-{tokens.kind}": attention(
            Caches(2, 128, CACHES["f32"], None), layout, Scores(0.1, sinks=True), tokens, QkvRows((layout.row,))
        )
        for layout in (LATENT, NORMED)
        for tokens in (DecodeTokens(), DecodeTokens("chunk", 8))
    },
    **{f"matvec-{n}": matvec(Matmul("f32", n, 96, 64, rms_eps=1e-5, glu="silu")) for n in (1, 2, MAX_TOKENS)},
    "gemm": gemm(Matmul("f32", 64, 96, 64)),
    "route": route(1, 512, 10, "softmax", True, True),
}


@pytest.mark.parametrize("name", LARGEST)
def test_shared_memory_fits_on_every_device(name):
    found = re.findall(r"memref\.alloc\(\) : memref<(\d+)x[fi]32, ", LARGEST[name].text)
    assert 0 < 4 * sum(map(int, found)) <= SHARED_BYTES


@pytest.mark.parametrize("workgroups", [1, MAX_GRID, MAX_GRID + 2, 3 * MAX_GRID + 1])
def test_no_more_workgroups_than_needed_run_the_kernel(workgroups):
    kernel = embed("f32", 9, 8, workgroups)
    assert kernel.workgroups == workgroups
    assert max(grid(workgroups)) <= MAX_GRID
    guard = re.search(rf"(%\w+) = arith\.constant {workgroups} : index", kernel.text)
    guarded = guard and re.search(rf"= arith\.cmpi slt, %\d+, {guard[1]} : index\n\s+scf\.if", kernel.text)
    assert bool(guarded) == (prod(grid(workgroups)) > workgroups)


def small_attention(tokens: DecodeTokens) -> GpuKernel:
    layout = HeadLayout(2, 1, 4, None)
    return attention(Caches(1, 8, CACHES["f32"], None), layout, Scores(0.5), tokens, QkvRows((8, 4, 4)))


def attention_of_doubled(doubled: str):
    """Return attention, and a function that calls it with 2 * x as its operand `doubled`."""
    kernel, module = small_attention(DecodeTokens()), Module("doubled")
    with module.function("f", **kernel.tensors) as values:
        given = dict(zip(kernel.tensors, values))
        given[doubled] = ops.add(given[doubled], given[doubled])
        current_function().returns(**kernel_call(kernel, **given, layer=0))
    return kernel, module.functions["f"]


@pytest.mark.parametrize("doubled", ["rows0", "rows1", "rows2"])
def test_the_reference_of_a_kernel_that_computes_an_operand_joins_its_operands_in_order(doubled):
    kernel, function = attention_of_doubled(doubled)
    (fused,) = [op.attrs["kernel"] for op in fuse_kernels(function).ops]
    rng = np.random.default_rng(3)
    given = {name: rng.normal(size=t.shape).astype(t.dtype.numpy) for name, t in kernel.tensors.items()}
    given["position"] = np.array(2, np.int32)
    renamed = dict(zip(fused.tensors, [x for name, x in given.items() if name != doubled] + [given[doubled]]))
    wanted = kernel.reference(**given | {doubled: 2 * given[doubled]}, layer=0)
    for name, found in fused.reference(**renamed, layer=0).items():
        np.testing.assert_allclose(found, wanted[name], rtol=1e-6)


def results_by_dispatch(module: Module) -> list[list[str]]:
    return [list(op.attrs["kernel"].results) for op in fuse_kernels(module.functions["f"]).ops]


def test_kernels_run_side_by_side_if_neither_needs_the_other():
    module, kernel = Module("matmuls"), matvec(Matmul("f32", 1, 24, 24))
    with module.function("f", x=TensorType((1, 24), F32), weight=TensorType((24, 24), I32)) as (x, weight):
        first = kernel_call(kernel, x=x, weight=weight)["y"]
        second = kernel_call(kernel, x=first, weight=weight)["y"]
        third = kernel_call(kernel, x=x, weight=weight)["y"]
        current_function().returns(second=second, third=third)
    assert results_by_dispatch(module) == [["y"], ["a_y", "b_y"]]


@pytest.mark.parametrize("same_cache", [False, True])
def test_a_kernel_that_overwrites_an_operand_of_a_kernel_does_not_run_beside_it(same_cache):
    kernels = small_attention(DecodeTokens("chunk", 1)), small_attention(DecodeTokens())
    module, caches = Module("caches"), ("k_cache", "v_cache")
    types = {f"{name}{i}": t for i, kernel in enumerate(kernels) for name, t in kernel.tensors.items()}
    with module.function("f", **types) as values:
        given = dict(zip(types, values))
        results = {}
        for i, kernel in enumerate(kernels):
            numbers = {name: 0 if same_cache and name in caches else i for name in kernel.tensors}
            found = kernel_call(kernel, **{name: given[f"{name}{n}"] for name, n in numbers.items()}, layer=0)
            results |= {f"{name}_of_{i}": value for name, value in found.items()}
        current_function().returns(**results)
    assert len(results_by_dispatch(module)) == (2 if same_cache else 1)


def test_a_tensor_with_two_slices_gets_its_own_kernel():
    module, kernel = Module("sliced"), matvec(Matmul("f32", 1, 24, 24))
    with module.function("f", x=TensorType((2, 24, 40), F32), weight=TensorType((24, 24), I32)) as (x, weight):
        sums = ops.reduce("add", ops.multiply(x, x), (2,))
        first, second = (ops.slice_(sums, (i, 0), (i + 1, 24)) for i in range(2))
        y = ops.multiply(kernel_call(kernel, x=first, weight=weight)["y"], second)
        current_function().returns(y=y)
    assert results_by_dispatch(module) == [["y0"], ["y"]]


def norm_and_matmul(tokens: int = 1, **residual: str) -> tuple[Module, GpuKernel, GpuKernel]:
    """Return a function with the results y, a norm of x, and z, a matmul of y; and their kernels.

    residual: the residual of the matmul, "x" or "y".
    """
    matmul = matvec(Matmul("f32", tokens, 24, 24, rms_eps=1e-5, residual=bool(residual)))
    normed, module, rows = norm("rms_norm", tokens, 24, 1e-6, residual=True), Module("norm"), TensorType((tokens, 24), F32)
    types = {"x": rows, "weight": TensorType((24,), F32), "matrix": TensorType((24, 24), I32), "other": rows}
    with module.function("f", **types) as (x, weight, matrix, other):
        y = kernel_call(normed, x=x, weight=weight, residual=other)["y"]
        more = {name: {"x": x, "y": y}[of] for name, of in residual.items()}
        z = kernel_call(matmul, x=y, norm=weight, weight=matrix, **more)["y"]
        current_function().returns(z=z)
    return module, normed, matmul


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("used_again", [False, True])
def test_a_matmul_computes_the_norm_before_it(tokens, used_again):
    module, normed, matmul = norm_and_matmul(tokens)
    function = module.functions["f"]
    if used_again:
        function.outputs = (*function.outputs, function.ops[0].results[0])
    (fused,) = [op.attrs["kernel"] for op in fuse_kernels(function).ops]
    rng = np.random.default_rng(3)
    given = {name: rng.normal(size=t.shape).astype(np.float32) for name, t in fused.tensors.items()}
    given["weight"] = given["weight"].view(np.int32)
    y = normed.reference(**{name: given[f"rows_{name}"] for name in normed.tensors})["y"]
    found, wanted = fused.reference(**given), matmul.reference(x=y, norm=given["norm"], weight=given["weight"])
    assert list(found) == (["y", "rows"] if used_again else ["y"])
    np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-6)
    assert not used_again or (found["rows"] == y).all()


@pytest.mark.parametrize("case", ["residual", "costly", "overwritten"])
def test_a_norm_stays_a_kernel_if_the_matmul_cannot_compute_it_cheaply(case, monkeypatch):
    module, *_ = norm_and_matmul(**({"residual": "y"} if case == "residual" else {}))
    function = module.functions["f"]
    if case == "costly":
        monkeypatch.setattr(gpu_fusion, "MAX_REPEATS", 24 * 8 - 1)  # eight threads compute a row of the weight, of 64
    if case == "overwritten":
        other = function.ops[0].operands[2]
        kernel = GpuKernel("overwrite", {"x": other.type}, {"y": other.type}, 1, lambda b, x: None, dict, in_place={"y": "x"})
        changed = Op("kernel", (other,), (Value(other.type),), {"kernel": kernel, "indices": {}}, "")
        function.ops.insert(1, changed)
        function.outputs = (*function.outputs, *changed.results)
    assert results_by_dispatch(module) == [["y"], ["a_y", "b_y"] if case == "overwritten" else ["y"]]
