"""Generated weights, arguments and error bounds for the kernels that read packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.choosing import kernel_of
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS
from castiron.emitter.kernels.products.frame import Tiles
from castiron.emitter.kernels.products.product import PIECES, Product
from castiron.emitter.kernels.split_x import split_x
from castiron.emitter.kernels.weights.packing import interleave_rows, pack
from castiron.emitter.kernels.weights.x_bytes import rounded
from castiron.emitter.kernels.weights.x_pieces import nearest
from castiron.emitter.kernels.writing.isa import AVX2, ISAS, Isa
from castiron.emitter.kernels.writing.rms import rms_normed
from castiron.pipelines.measuring.random_rows import raw_rows
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable

# One of every way that weights are stored: floats, widths of codes, offsets and minima, sizes of groups, tables, exponents.
EVERY_WAY = ("f32", "bf16", "q4_1", "q5_0", "q6_k", "q8_0", "q2_k", "iq4_xs", "mxfp4")
UNIT = 2.0**-24  # half a last place of f32 at 1


@dataclass(frozen=True)
class Case:
    """One use of a product's kernel, with tiles of its own or the default ones; bytes and numbers are drawn from `seed`."""

    product: Product
    tiles: Tiles | None = None
    seed: int = 0

    def kernel(self, isa: Isa) -> Kernel:
        return kernel_of(self.product, isa, 2, self.tiles)

    def __str__(self) -> str:
        return self.product.name

    def weights(self) -> list[np.ndarray]:
        """Raw rows: one matrix, or gate and up."""
        p = self.product
        return [raw_rows(p.codec, p.out_features, p.in_features, self.seed + i) for i in range(2 if p.glu else 1)]

    def dequantised(self) -> list[np.ndarray]:
        return [dequantise(self.product.codec, raw).astype(np.float64) for raw in self.weights()]

    def packed(self) -> np.ndarray:
        weights = self.weights()
        return pack(self.product.codec, interleave_rows(*weights) if len(weights) == 2 else weights[0]).view(np.int8)

    def arguments(self) -> dict[str, np.ndarray]:
        """Every operand by name; `length` is half of the tokens."""
        rng, special = np.random.default_rng(self.seed + 7), {"weight": self.packed()}
        if self.product.length:
            special["length"] = np.int32((self.product.tokens + 1) // 2)
        types = self.product.operands()
        if self.product.numerics != "exact":
            special |= self._made_of(rng.standard_normal((self.product.tokens, self.product.in_features)).astype(np.float32))
        return {n: special[n] if n in special else rng.standard_normal(t.shape).astype(np.float32) for n, t in types.items()}

    def _made_of(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The operands that are made of x."""
        product = self.product
        if product.numerics == "bytes":
            made = rounded(x, product.format)
            return {"x": made["y"], "x_scales": made["scales"], "x_sums": made["sums"]}
        made = split_x(*x.shape, PIECES[product.numerics], product.summed_groups, isa=AVX2).reference(x=x)
        return {"x": made["y"], **({"x_sums": made["sums"]} if product.summed_groups else {})}


class Experts(Case):
    """A product with experts, of which every second pair chose the first, every fourth the second, and few or none the last."""

    def of(self, expert: int) -> Case:
        """The product with one expert's weight."""
        alone = replace(self.product, tokens=1, experts=0, per_row=1, length=False, numerics="exact")
        return Case(alone, seed=self.seed + 10 * expert)

    def arguments(self) -> dict[str, np.ndarray]:
        rng, product = np.random.default_rng(self.seed + 7), self.product
        x = rng.standard_normal((product.tokens // product.per_row, product.in_features)).astype(np.float32)
        packed = np.concatenate([self.of(e).packed() for e in range(product.experts)])
        chosen = np.minimum(rng.geometric(0.5, product.tokens), product.experts).astype(np.int32) - 1
        chosen[0] = product.experts - 1
        given = {"x": x, "weight": packed, "chosen": chosen}
        if product.numerics != "exact":
            given |= self._made_of(x)
        return given | ({"length": np.int32((len(x) + 1) // 2)} if product.length else {})


def expert_cases(codec: str, experts: st.SearchStrategy[int], tokens: list[int], **given: str) -> st.SearchStrategy[Case]:
    """So many pairs of so many experts, with `given` of the product."""
    options = st.fixed_dictionaries(
        {
            "experts": experts,
            "tokens": st.sampled_from(tokens),
            "out_features": st.integers(1, 70),
            "in_features": in_features(codec),
        },
        optional={"glu": st.sampled_from(list(ACTIVATIONS)), "length": st.just(True), "per_row": st.sampled_from([1, 2, 3])},
    )
    return st.builds(Experts, options.map(lambda drawn: Product(codec, **drawn, **given)), seed=st.integers(0, 1000))


def product_error(codec_name: str, x: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """How far x W^T in f32 may be from the exact product: 4 * 2^-24 * sum |x| |w|, for groups 8 * 2^-24 * sum |x| max |w|.

    One sum of n normal terms, term by term, has an error of 0.41 * 2^-24 * n * their deviation, while the sum of
    absolute values is 0.64 * n times it: the bound is six of these deviations, whatever n is. The kernels sum x * code
    and x apart, each up to a few times larger than x * w when codes have an offset or a minimum, hence the largest
    weight of the group.
    """
    weights = 2 * np.abs(dequantise(codec_name, raw)).astype(np.float64)
    group = CODECS[codec_name].group
    if group:
        groups = weights.reshape(len(weights), -1, group)
        weights = 2 * np.broadcast_to(groups.max(axis=2, keepdims=True), groups.shape).reshape(weights.shape)
    return 2 * UNIT * np.abs(x) @ weights.T


def rounding_error(weights: np.ndarray) -> np.ndarray:
    """What the nearest bf16 of a weight may be off that of its definition: f32 rounds it in the last places, and next to a
    tie that decides.
    """
    around = [nearest((weights * (1 + side * 4 * UNIT)).astype(np.float32)).astype(np.float64) for side in (-1, 1)]
    return np.abs(around[1] - around[0])


def allowed_error(case: Case, given: Mapping[str, np.ndarray], reference: np.ndarray) -> np.ndarray:
    """The bound of the products, carried through the activation, and of adding bias and residual; |silu'|, |gelu'| < 1.13."""
    x, eps = case.product.x_of(given["x"], given.get("x_scales")), case.product.rms_eps
    if eps is not None:
        x = rms_normed(x, given["norm"], eps)
    errors = [product_error(case.product.codec, x, raw) for raw in case.weights()]
    if case.product.numerics == "matrix":
        errors = [error + np.abs(x) @ rounding_error(w).T for error, w in zip(errors, case.dequantised(), strict=True)]
    added = 2 * UNIT * (np.abs(given.get("bias", 0.0)) + np.abs(given.get("residual", 0.0))) + 4 * UNIT * np.abs(reference)
    if len(errors) == 1:
        return errors[0] + added
    gate, up = (np.abs(x @ w.T) for w in case.dequantised())
    return 1.13 * errors[0] * up + errors[1] * (gate + errors[0]) + 8 * UNIT * gate * up + 2 * added


def draw(strategy: st.SearchStrategy[Case], count: int) -> list[Case]:
    """`count` cases, the same ones every time, so that one compilation serves all of them."""
    found: list[Case] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def in_features(codec_name: str) -> st.SearchStrategy[int]:
    """Whole blocks for blocked codecs, anything for floats."""
    block = CODECS[codec_name].block
    return st.integers(1, 150) if block == 1 else st.integers(1, 5 if block == 32 else 2).map(lambda n: n * block)


def cases(codec: str, tokens: st.SearchStrategy[int], most_out: int, *fused: str) -> st.SearchStrategy[Case]:
    """Products of any shape with any of the options named in `fused`."""
    values = {"rms_eps": st.sampled_from([1e-5, 1e-6]), "glu": st.sampled_from(list(ACTIVATIONS))}
    options = st.fixed_dictionaries(
        {"tokens": tokens, "out_features": st.integers(1, most_out), "in_features": in_features(codec)},
        optional={name: values.get(name, st.just(True)) for name in fused},
    )
    return st.builds(Case, options.map(lambda given: Product(codec, **given)), seed=st.integers(0, 1000))


def check_pairs(rows: list[tuple[Case, dict, np.ndarray, np.ndarray]]) -> None:
    """As `check`, of pairs, each by its expert's weight."""
    for case, operands, y, want in rows:
        per_row, x = case.product.per_row, case.product.x_of(operands["x"], operands.get("x_scales"))
        real = per_row * int(operands["length"]) if "length" in operands else len(y)
        assert real and not y[real:].any() and not want[real:].any(), f"{case}: padding is not zero"
        for pair in range(real):
            alone = case.of(operands["chosen"][pair])
            limit = allowed_error(alone, {"x": x[pair // per_row][None]}, want[pair][None])[0]
            assert (np.abs(y[pair].astype(np.float64) - want[pair]) <= limit).all(), f"{case}, pair {pair}"


@cache
def _compiled(cases: tuple[Case, ...], target: str, directory) -> tuple[dict[Case, Kernel], Path]:
    kernels = {case: case.kernel(ISAS[resolve(target).isa]) for case in cases}
    plain = {case: case.kernel(ISAS[resolve(target).isa].plain) for case in cases}
    unique, plainly = (list({k.name: k for k in made.values()}.values()) for made in (kernels, plain))
    return kernels, runnable(unique, target, directory, plainly)


def run_all(cases: Sequence[Case], target: str, threads: int, directory) -> list[tuple[Case, dict, np.ndarray, np.ndarray]]:
    """(case, operands, y, y of the definition) of every case, compiled as one module; see `runnable` for other CPUs."""
    kernels, module = _compiled(tuple(cases), target, directory)
    runner = Runner(module, threads)
    rows = []
    for case, kernel in kernels.items():
        given = case.arguments()
        rows.append((case, given, runner(kernel, **given)["y"], kernel.reference(**given)["y"]))
    return rows


def check(rows: list[tuple[Case, dict, np.ndarray, np.ndarray]]) -> None:
    """Every result within its bound; rows from `length` on exactly zero."""
    for case, operands, y, want in rows:
        real = int(operands.get("length", len(want)))
        assert not y[real:].any(), f"{case}: padding is not zero"
        error = np.abs(y.astype(np.float64) - want)[:real]
        limit = allowed_error(case, operands, want)[:real]
        assert (error <= limit).all(), f"{case}: {np.max(error / limit):.1f} times the bound"
