"""The text of GPU kernels: workgroups and shared memory stay within what every device has."""

from __future__ import annotations

import re
from math import prod

import pytest

from castiron.emitter.kernels.attention.decode import DecodeTokens
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import Scores
from castiron.emitter.kernels.gpu.attention import attention
from castiron.emitter.kernels.gpu.embed import embed
from castiron.emitter.kernels.gpu.gemm import gemm
from castiron.emitter.kernels.gpu.gpu_body import MAX_GRID, SHARED_BYTES, grid
from castiron.emitter.kernels.gpu.heads import Rows
from castiron.emitter.kernels.gpu.matvec import MAX_TOKENS, matvec
from castiron.emitter.kernels.gpu.route import route
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kv_cache import CACHES

# The largest heads: latent attention (DeepSeek), and heads with a norm (Gemma 4).
LATENT, NORMED = HeadLayout(16, 1, 576, None), HeadLayout(8, 2, 512, 512, 1e-6)
LARGEST = {
    **{
        f"attention-{layout.head_dim}-{tokens.kind}": attention(
            Caches(2, 128, CACHES["f32"], None), layout, Scores(0.1, sinks=True), tokens, Rows((layout.row,))
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
