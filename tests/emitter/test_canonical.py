"""Canonical numerics: a token's row has the same bits in every kernel, on every vector unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.matmul.selection import kernel_of, numerics_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import AVX2, AVX512, NEON, Isa
from castiron.emitter.kernels.norm import norm
from tests.emitter.kernel_runner import Runner, compile_kernels
from tests.emitter.linear_cases import Case, allowed_error

UNITS = {isa.name: isa for isa in (AVX512, AVX2, NEON)}
TOKENS, IN, OUT = 21, 512, 40
# Codecs that are multiplied in f32; `test_integer_matmuls` has the others.
CODECS = ("bf16", "f32", "e4m3_128_f32", "nf4_64_f32")


def test_no_multiplication_is_fused_with_a_sum():
    text = norm("rms_norm", 3, 64, 1e-5, isa=AVX2).text
    assert text.count("llvm.arithmetic.fence") == text.count("arith.mulf") > 2


def matmul_of(codec: str, tokens: int, isa: Isa, **options) -> Matmul:
    matmul = Matmul(codec, tokens, OUT, IN, **options)
    return replace(matmul, numerics=numerics_of(matmul, isa, "canonical"))


def rows_of(runner: Runner, codec: str, isa: Isa, **options) -> dict[int, np.ndarray]:
    """Return the rows of x times a weight, computed one, three and all at a time."""
    case = Case(matmul_of(codec, TOKENS, isa, **options))
    given = case.arguments()
    found = {}
    for tokens in (1, 3, TOKENS):
        kernel, parts = kernel_of(matmul_of(codec, tokens, isa, **options), isa), []
        for first in range(0, TOKENS, tokens):
            parts.append(runner(kernel, **{**given, "x": given["x"][first : first + tokens]})["y"])
        found[tokens] = np.concatenate(parts)
    want = case.matmul.define(**given)["y"]
    assert (np.abs(found[TOKENS] - want) <= allowed_error(case, given, want)).all(), case
    return found


def kernels_of(codec: str, isa: Isa) -> list[Kernel]:
    return [kernel_of(matmul_of(codec, tokens, isa), isa) for tokens in (1, 3, TOKENS)]


def test_a_row_of_a_matmul_has_the_same_bits_in_every_kernel(directory):
    """One token, few and many, for floats of every kind, on every vector unit."""
    seen: dict[str, np.ndarray] = {}
    for unit, isa in UNITS.items():
        kernels = {kernel.name: kernel for codec in CODECS for kernel in kernels_of(codec, isa)}
        runner = Runner(compile_kernels(list(kernels.values()), directory / f"{unit}.vmfb"), 2)
        for codec in CODECS:
            found = rows_of(runner, codec, isa)
            for tokens, rows in found.items():
                assert rows.tobytes() == found[1].tobytes(), f"{codec} on {unit}: {tokens} tokens at once"
            assert found[1].tobytes() == seen.setdefault(codec, found[1]).tobytes(), f"{codec} on {unit}"
