"""Random matmuls with operands and error bounds, for the kernels that read packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, codec_of, dequantise
from castiron.emitter.kernels.epilogue import ACTIVATIONS
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.matmul.schedule import Tiles
from castiron.emitter.kernels.matmul.selection import kernel_of
from castiron.emitter.kernels.matmul_spec import PIECES, Matmul
from castiron.emitter.kernels.mlir.isa import AVX2, ISAS, Isa
from castiron.emitter.kernels.mlir.vector_math import rms_normed
from castiron.emitter.kernels.quantise_x import quantised
from castiron.emitter.kernels.split_x import nearest, split_x
from castiron.emitter.kernels.weights.packing import pack
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable

# A codec for every kind of storage: floats, widths of codes, offsets, minima, sizes of groups, tables, exponents.
EVERY_WAY = ("f32", "bf16", "q4_1", "q5_0", "q6_k", "q8_0", "q2_k", "q3_k", "iq2_s", "iq4_xs", "mxfp4", "nvfp4_scaled", "q1_0")
QUANTISED = [name for name, codec in CODECS.items() if codec.quantised]
FUSED = ("bias", "residual", "length", "glu")
UNIT = 2.0**-24  # half a last place of f32 at 1


@dataclass(frozen=True)
class Case:
    """One use of a matmul kernel, with given or default tiles and random operands."""

    matmul: Matmul
    tiles: Tiles | None = None
    seed: int = 0

    def kernel(self, isa: Isa) -> Kernel:
        return kernel_of(self.matmul, isa, 2, self.tiles)

    def __str__(self) -> str:
        return self.matmul.name

    def weights(self) -> list[np.ndarray]:
        """Return raw rows of one matrix, or of gate and up."""
        p = self.matmul
        return [raw_rows(p.codec, p.out_features, p.in_features, self.seed + i) for i in range(2 if p.glu else 1)]

    def dequantised(self) -> list[np.ndarray]:
        return [dequantise(self.matmul.codec, raw).astype(np.float64) for raw in self.weights()]

    def packed(self) -> np.ndarray:
        return pack(self.matmul.codec, *self.weights()).view(np.int8)

    def arguments(self) -> dict[str, np.ndarray]:
        """Return all operands by name; `length` is half of the tokens."""
        rng, special = np.random.default_rng(self.seed + 7), {"weight": self.packed()}
        if self.matmul.length:
            special["length"] = np.int32((self.matmul.tokens + 1) // 2)
        types = self.matmul.operands()
        if self.matmul.numerics != "f32" and not self.matmul.quantises_x:
            special |= self._made_of(rng.standard_normal((self.matmul.tokens, self.matmul.in_features)).astype(np.float32))
        return {n: special[n] if n in special else rng.standard_normal(t.shape).astype(np.float32) for n, t in types.items()}

    def _made_of(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Return the operands that are computed from x."""
        matmul = self.matmul
        if matmul.digits:
            return quantised(x, matmul.format, matmul.digits)
        made = split_x(*x.shape, PIECES[matmul.numerics], matmul.summed_groups, isa=AVX2).reference(x=x)
        return {"x": made["y"], **({"x_sums": made["sums"]} if matmul.summed_groups else {})}


class Experts(Case):
    """A matmul with experts: half of the pairs chose the first, a quarter the second, and so on."""

    def of(self, expert: int) -> Case:
        """Return the matmul of one token with one expert's weight."""
        single = replace(self.matmul, tokens=1, experts=0, per_row=1, length=False, numerics="f32")
        return Case(single, seed=self.seed + 10 * expert)

    def arguments(self) -> dict[str, np.ndarray]:
        rng, matmul = np.random.default_rng(self.seed + 7), self.matmul
        x = rng.standard_normal((matmul.tokens // matmul.per_row, matmul.in_features)).astype(np.float32)
        packed = np.concatenate([self.of(e).packed() for e in range(matmul.experts)])
        chosen = np.minimum(rng.geometric(0.5, matmul.tokens), matmul.experts).astype(np.int32) - 1
        chosen[0] = matmul.experts - 1
        given = {"x": x, "weight": packed, "chosen": chosen}
        if matmul.numerics != "f32" and not matmul.quantises_x:
            given |= self._made_of(x)
        return given | ({"length": np.int32((len(x) + 1) // 2)} if matmul.length else {})


def expert_cases(codec: str, experts: st.SearchStrategy[int], tokens: list[int], **given: str) -> st.SearchStrategy[Case]:
    """Return matmuls with `tokens` pairs and `experts` experts; `given`: other fields of `Matmul`."""
    options = st.fixed_dictionaries(
        {
            "experts": experts,
            "tokens": st.sampled_from(tokens),
            "out_features": st.integers(1, 70),
            "in_features": in_features(codec),
        },
        optional={"glu": st.sampled_from(list(ACTIVATIONS)), "length": st.just(True), "per_row": st.sampled_from([1, 2, 3])},
    )
    return st.builds(Experts, options.map(lambda drawn: Matmul(codec, **drawn, **given)), seed=st.integers(0, 1000))


def dot_error(codec_name: str, x: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Return a bound of the error of x W^T in f32.

    It is 4 * 2^-24 * sum |x| |w|, and for groups 8 * 2^-24 * sum |x| max |w|.

    A sum of n normal terms, term by term, has an error of 0.41 * 2^-24 * n deviations, and the sum
    of absolute values is 0.64 * n deviations: the bound is six times the error for every n. Kernels
    sum x * code and x separately. With an offset or a minimum each is a few times larger than
    x * w, hence the largest weight of the group.
    """
    weights = 2 * np.abs(dequantise(codec_name, raw)).astype(np.float64)
    group = codec_of(codec_name).group
    if group:
        groups = weights.reshape(len(weights), -1, group)
        weights = 2 * np.broadcast_to(groups.max(axis=2, keepdims=True), groups.shape).reshape(weights.shape)
    return 2 * UNIT * np.abs(x) @ weights.T


def rounding_error(weights: np.ndarray) -> np.ndarray:
    """Return how far the bf16 of a weight may be from the definition's, next to ties."""
    around = [nearest((weights * (1 + side * 4 * UNIT)).astype(np.float32)).astype(np.float64) for side in (-1, 1)]
    return np.abs(around[1] - around[0])


def allowed_error(case: Case, given: Mapping[str, np.ndarray], reference: np.ndarray) -> np.ndarray:
    """Return the bound after activation (|silu'|, |gelu'| < 1.13), bias and residual."""
    x, eps = case.matmul.x_of(given["x"], given.get("x_scales")), case.matmul.rms_eps
    if eps is not None:
        x = rms_normed(x, given["norm"], eps)
    errors = [dot_error(case.matmul.codec, x, raw) for raw in case.weights()]
    if PIECES.get(case.matmul.numerics) == 1:
        errors = [error + np.abs(x) @ rounding_error(w).T for error, w in zip(errors, case.dequantised(), strict=True)]
    added = 2 * UNIT * (np.abs(given.get("bias", 0.0)) + np.abs(given.get("residual", 0.0))) + 4 * UNIT * np.abs(reference)
    if len(errors) == 1:
        return errors[0] + added
    gate, up = (np.abs(x @ w.T) for w in case.dequantised())
    return 1.13 * errors[0] * up + errors[1] * (gate + errors[0]) + 8 * UNIT * gate * up + 2 * added


def in_features(codec_name: str) -> st.SearchStrategy[int]:
    """Return numbers of features: a multiple of the block for quantised codecs, any for floats."""
    block = codec_of(codec_name).block
    return st.integers(1, 150) if block == 1 else st.integers(1, 5 if block < 256 else 2).map(lambda n: n * block)


def cases(
    codec: str, tokens: st.SearchStrategy[int], max_out: int, *fused: str, numerics: str = "f32"
) -> st.SearchStrategy[Case]:
    """Return matmuls of any shape with any of the options named in `fused`."""
    values = {"rms_eps": st.sampled_from([1e-5, 1e-6]), "glu": st.sampled_from(list(ACTIVATIONS))}
    options = st.fixed_dictionaries(
        {"tokens": tokens, "out_features": st.integers(1, max_out), "in_features": in_features(codec)},
        optional={name: values.get(name, st.just(True)) for name in fused},
    )
    return st.builds(Case, options.map(lambda given: Matmul(codec, **given, numerics=numerics)), seed=st.integers(0, 1000))


def check_pairs(rows: list[tuple[Case, dict, np.ndarray, np.ndarray]]) -> None:
    """Check every pair as `check` does, with its expert's weight."""
    for case, operands, y, want in rows:
        per_row, x = case.matmul.per_row, case.matmul.x_of(operands["x"], operands.get("x_scales"))
        real = per_row * int(operands["length"]) if "length" in operands else len(y)
        assert real and not y[real:].any() and not want[real:].any(), f"{case}: padding is not zero"
        for pair in range(real):
            single = case.of(operands["chosen"][pair])
            limit = allowed_error(single, {"x": x[pair // per_row][None]}, want[pair][None])[0]
            assert (np.abs(y[pair].astype(np.float64) - want[pair]) <= limit).all(), f"{case}, pair {pair}"


@cache
def _compiled(cases: tuple[Case, ...], target: str, directory) -> tuple[dict[Case, Kernel], Path]:
    kernels = {case: case.kernel(ISAS[resolve(target).isa]) for case in cases}
    plain = {case: case.kernel(ISAS[resolve(target).isa].plain) for case in cases}
    unique, plainly = (list({k.name: k for k in made.values()}.values()) for made in (kernels, plain))
    return kernels, runnable(unique, target, directory, plainly)


def run_all(cases: Sequence[Case], target: str, threads: int, directory) -> list[tuple[Case, dict, np.ndarray, np.ndarray]]:
    """Compile cases as one module; return (case, operands, y, y of the definition) for each."""
    kernels, module = _compiled(tuple(cases), target, directory)
    runner = Runner(module, threads)
    rows = []
    for case, kernel in kernels.items():
        given = case.arguments()
        rows.append((case, given, runner(kernel, **given)["y"], kernel.reference(**given)["y"]))
    return rows


def check(rows: list[tuple[Case, dict, np.ndarray, np.ndarray]]) -> None:
    """Check that results are within their bounds, and rows from `length` on are zero."""
    for case, operands, y, want in rows:
        real = int(operands.get("length", len(want)))
        assert not y[real:].any(), f"{case}: padding is not zero"
        error = np.abs(y.astype(np.float64) - want)[:real]
        limit = allowed_error(case, operands, want)[:real]
        assert (error <= limit).all(), f"{case}: {np.max(error / limit):.1f} times the bound"
