"""Recurrent kernels against their definitions: chunks, batches, odd sizes, and unchanged states."""

from __future__ import annotations

import numpy as np

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.recurrent.causal_conv import causal_conv
from castiron.emitter.kernels.recurrent.gated_delta import gated_delta
from castiron.emitter.kernels.recurrent.selective_scan import selective_scan
from castiron.emitter.kernels.recurrent.tokens import Columns, Tokens
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable

# Error of f32 sums relative to the largest number; measured: up to 4e-7.
TOLERANCE = 2e-6
LAYERS, LAYER = 2, 1
# One token, a chunk with padding, a chunk without, and a batch of three sequences.
TOKENS = (Tokens(1, LAYERS), Tokens(9, LAYERS, length=True), Tokens(3, LAYERS), Tokens(3, 3 * LAYERS, batch=True))
# k_heads, heads, k_dim, v_dim and the gated norm's epsilon: an odd width, and several blocks of columns for each head.
DELTAS = [(2, 6, 16, 5, None), (2, 4, 48, 64, 1e-6)]
# groups, heads, head_dim, n
SCANS = [(2, 6, 5, 16), (1, 4, 16, 64)]


def kernels(target: str) -> list[Kernel]:
    isa, found = ISAS[resolve(target).isa], []
    for tokens in TOKENS:
        found.append(causal_conv(tokens, 544, 4, Columns(600, 8), isa=isa, bias=True, activation="silu"))
        found.append(causal_conv(tokens, 6, 3, Columns(6), isa=isa))
        for k_heads, heads, k_dim, v_dim, eps in DELTAS:
            qkv, keys = 2 * k_heads * k_dim + heads * v_dim, k_heads * k_dim
            columns = {name: Columns(qkv, first) for name, first in (("q", 0), ("k", keys), ("v", 2 * keys))}
            columns |= {"alpha": Columns(2 * heads, heads), "beta": Columns(2 * heads)}
            columns |= {"z": Columns(heads * v_dim)} if eps else {}
            found.append(gated_delta(tokens, (k_heads, heads, k_dim, v_dim), columns, isa=isa, norm_eps=eps))
        for groups, heads, head_dim, n in SCANS:
            ends = np.cumsum([heads * head_dim, groups * n, groups * n]).tolist()
            columns = {name: Columns(ends[-1], first) for name, first in zip("xBC", (0, *ends))} | {"dt": Columns(heads)}
            found.append(selective_scan(tokens, (groups, heads, head_dim, n), columns, isa=isa))
    return found


def arguments(kernel: Kernel, length: int) -> dict[str, np.ndarray]:
    """Return random operands; the second sequence of a batch is idle."""
    rng = np.random.default_rng(length)
    given = {name: rng.standard_normal(t.shape).astype(np.float32) for name, t in kernel.tensors.items()}
    numbers = {"length": np.int32(length), "positions": np.array([4, -1, 0], np.int32)}
    rates = {"rate": -np.exp(given["rate"])} if "rate" in given else {}
    return {**given, **rates, **{name: value for name, value in numbers.items() if name in given}}


def test_kernels_match_the_definition(directory, target):
    found = kernels(target)
    runner = Runner(runnable(found, target, directory), 2)
    for kernel in found:
        for length in (0, 1, 7) if "length" in kernel.tensors else (1,):
            given = arguments(kernel, length)
            got, want = runner(kernel, **given, layer=LAYER), kernel.reference(**given, layer=LAYER)
            for name, expected in want.items():
                limit = TOLERANCE * np.abs(expected).max()
                np.testing.assert_allclose(got[name], expected, rtol=0, atol=limit, err_msg=f"{kernel.name}: {name}")
            untouched = slice(0, LAYERS - 1)
            np.testing.assert_array_equal(got["state"][untouched], given["state"][untouched], kernel.name)
            if "positions" in given:
                idle = slice(LAYERS, 2 * LAYERS)
                np.testing.assert_array_equal(got["state"][idle], given["state"][idle], kernel.name)
