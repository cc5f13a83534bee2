"""Generated calls of attention kernels: caches with NaN in unused rows, and error bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from castiron.emitter.graph.types import I8, TensorType
from castiron.emitter.kernels.attention.decode import DecodeTokens, attention_decode
from castiron.emitter.kernels.attention.heads import HeadLayout, prepared_heads
from castiron.emitter.kernels.attention.prefill import attention_prefill
from castiron.emitter.kernels.attention.rope_append import rope_append
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import Scores
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.isa import ISAS, Isa
from castiron.emitter.layers.kv_cache import CACHES, MIN_GROUP, SCALE_BYTES, Cache
from castiron.vmfb.targets import resolve
from tests.emitter.drawing import draw
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import UNIT

LAYERS, CONTEXT, LAYER = 3, 200, 1
BATCH = 5  # sequences decoded at once


@dataclass(frozen=True)
class Case:
    """The attention of one layer.

    tokens: of a prefill chunk. splits: parts of a long context. cache: the storage of the KV cache.
    ring: rows of a ring, or None for a row of every position.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int | None
    options: dict = field(default_factory=dict, hash=False)  # qk_norm, qk_norm_row
    scores: dict = field(default_factory=dict, hash=False)  # window, softcap, sinks
    tokens: int = 16
    splits: int = 8
    seed: int = 0
    cache: str = "f32"
    ring: int | None = None

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(self.heads, self.kv_heads, self.head_dim, self.rope, **self.options)

    @property
    def rows(self) -> Cache:
        return CACHES[self.cache]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def how(self) -> Scores:
        return Scores(self.scale, **self.scores)

    def decode(self, isa: Isa, batch: int | None = None) -> Kernel:
        tokens = DecodeTokens() if batch is None else DecodeTokens("batch", batch)
        return attention_decode(
            self.caches(batch or 1), self.layout, self.how, tokens, isa=isa, splits=self.splits, split_from=24
        )

    def append(self, isa: Isa) -> Kernel:
        return rope_append(self.caches(), self.tokens, self.layout, isa=isa)

    def prefill(self, isa: Isa) -> Kernel:
        return attention_prefill(self.caches(), self.tokens, self.layout, self.how, isa=isa)

    def caches(self, sequences: int = 1) -> Caches:
        return Caches(LAYERS * sequences, CONTEXT, self.rows, self.ring)


@st.composite
def cases(draw) -> Case:
    """Groups of 1 to 8 heads, every option, and head_dims that are and are not multiples of vectors."""
    head_dim = draw(st.sampled_from([8, 20, 32, 48, 64, 80, 96, 128]))
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    rope = draw(st.sampled_from([None, head_dim, head_dim, head_dim // 4 * 2]))
    flag = st.just(True)
    options = draw(st.fixed_dictionaries({}, optional={"qk_norm": st.just(1e-2), "qk_norm_row": flag}))
    optional = {"window": st.sampled_from([1, 40]), "softcap": st.just(30.0), "sinks": flag}
    scores = draw(st.fixed_dictionaries({}, optional=optional))
    tokens, splits = draw(st.sampled_from([5, 16, 48])), draw(st.sampled_from([2, 4, 8]))
    return Case(kv_heads * group, kv_heads, head_dim, rope, options, scores, tokens, splits, draw(st.integers(0, 99)))


# SmolLM2, Qwen 2.5 0.5B, Gemma 3 270M, a kv head for each head, more heads than registers, long heads, norms of rows.
REAL = [
    Case(9, 3, 64, 64, splits=4),
    Case(14, 2, 64, 64),
    Case(4, 1, 256, 256, {"qk_norm": 1e-3}, {"window": 64}, splits=2),
    Case(4, 4, 80, 20, splits=8),
    Case(16, 1, 32, 32, splits=2),
    Case(4, 1, 512, 128, splits=2),
    Case(16, 8, 128, 128, {"qk_norm": 1e-5, "qk_norm_row": True}, {"softcap": 50.0}, splits=4),
]
CASES = draw(cases(), 8) + REAL


def stored_as(cache: str, found: Sequence[Case]) -> list[Case]:
    """Return the cases whose heads a storage supports, with that storage."""
    is_grouped = CACHES[cache].grouped
    return [replace(case, cache=cache) for case in found if not is_grouped or case.head_dim % MIN_GROUP == 0]


def fill(rng: np.random.Generator, kernel: Kernel, real: int, **given: np.ndarray | int) -> dict[str, np.ndarray | int]:
    """Return all operands: `given` or random; caches are NaN from row `real` on (q8_0: in d)."""
    operands: dict[str, np.ndarray | int] = {"layer": LAYER}
    for name, type_ in kernel.tensors.items():
        if name in given:
            operands[name] = np.asarray(given[name], type_.dtype.numpy)
        elif name == "counters":
            operands[name] = np.zeros(type_.shape, np.int32)
        else:
            operands[name] = random(rng, type_)
            if name.endswith("_cache"):
                operands[name][:, real:] = -1 if type_.dtype is I8 else np.nan
    return operands


def turned(rows: np.ndarray, end: int, ring: int) -> np.ndarray:
    """Return the ring [layers, ring, ...] of rows below `end`; the last row fills the rest."""
    last = end - 1 - (end - 1 - np.arange(ring)) % ring
    return rows[:, np.where(last < 0, CONTEXT - 1, last)]


def random(rng: np.random.Generator, type_: TensorType) -> np.ndarray:
    """Return standard normal numbers as floats or as a q8_0 cache."""
    if type_.dtype is not I8:
        return rng.standard_normal(type_.shape).astype(type_.dtype.numpy)
    *rows, groups, size = type_.shape
    return CACHES["q8_0"].stored(rng.standard_normal((*rows, groups * (size - SCALE_BYTES))))


def keys_stored(case: Case, exact: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest stored keys for keys within `limit` of the exact ones.

    Rounding is monotonic. A byte of q8_0 grows with x and shrinks with the maximum of its group.
    """
    if not case.rows.grouped:
        low, high = (case.rows.stored(bound) for bound in (exact - limit, exact + limit))
        return low.astype(np.float64), high.astype(np.float64)
    groups = exact.reshape(*exact.shape[:-1], -1, case.rows.group(case.head_dim))
    peak, ulps = np.abs(groups).max(axis=-1, keepdims=True), 4 * UNIT
    low, high = peak * (1 - ulps) - limit, peak * (1 + ulps) + limit
    d = [bound / 127 for bound in (low, high)]
    steps = [np.rint(127 * x / bound) for x in (groups - limit, groups + limit) for bound in (low, high)]
    found = np.array([scale * n for scale in d for n in steps]).reshape(-1, *exact.shape)
    return found.min(axis=0), found.max(axis=0)


def rounding_of(case: Case, exact: np.ndarray, limit: float) -> np.ndarray:
    """Return how much rounding adds to the distance of two keys; mostly 0."""
    low, high = keys_stored(case, exact, limit)
    return np.maximum(high - low - 2 * limit, 0.0)


def output_error(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, rounding: np.ndarray | None = None) -> float:
    """Return a bound of a weighted mean's error: relative errors of weights are twice a score's.

    A score's error: dot product and soft cap over keys k, and stored keys' `rounding`.
    """
    group = case.heads // case.kv_heads

    def largest(keys: np.ndarray) -> float:
        sizes = (np.abs(x.astype(np.float64)) for x in (q.reshape(len(q), -1, group, case.head_dim), keys))
        return float(np.einsum("thgd,shd->thgs", *sizes).max()) * case.scale

    own = 0.0 if rounding is None else largest(rounding)
    score_error = UNIT * (4 * largest(k) + 4 * (case.scores.get("softcap") or 0.0) + 8) + own
    return float(np.abs(v).max()) * (2 * score_error + 8 * UNIT)


def close_keys(name: str, case: Case, got: np.ndarray, exact: np.ndarray, limit: float) -> None:
    """Check that each stored key rounds a key within the limit of the exact one."""
    low, high = keys_stored(case, exact, limit)
    got = case.rows.values(got)
    assert (low <= got).all() and (got <= high).all(), f"{name}: a key is more than {limit:.2e} from the exact one"


def check_append(runner: Runner, case: Case, kernel: Kernel, start: int, length: int) -> None:
    """Check the appended rows against the definition, and that no other row is written."""
    operands = fill(np.random.default_rng(case.seed + start), kernel, CONTEXT, start=start, length=length)
    got, want = runner(kernel, **operands), kernel.reference(**operands)
    name = f"{kernel.name} from {start}, {length} tokens"
    q, k, _ = prepared_heads(case.layout, operands["qkv"], start + np.arange(case.tokens), operands)
    # Two multiplications and a sum, after a norm of up to four roundings.
    close(f"{name}, q", got["q"], want["q"], 16 * UNIT * float(np.abs(q).max()))
    rows = slice(start, start + length)
    close_keys(name, case, got["k_cache"][LAYER, rows], k[:length], 16 * UNIT * float(np.abs(k).max()))
    close(f"{name}, values", got["v_cache"], want["v_cache"], 0.0)
    for store in ("k_cache", "v_cache"):
        untouched = np.ones(got[store].shape[:2], bool)
        untouched[LAYER, rows] = False
        assert np.array_equal(got[store][untouched], operands[store][untouched]), f"{name}: another row was written"


def close(name: str, got: np.ndarray, want: np.ndarray, limit: float) -> None:
    """Check that values are within the limit, and NaN in the same elements."""
    assert np.array_equal(np.isnan(got), np.isnan(want)), f"{name}: NaN in other elements"
    error = np.nanmax(np.abs(got.astype(np.float64) - want), initial=0.0)
    assert error <= limit, f"{name}: the error is {error:.2e}; the limit is {limit:.2e}"


@cache
def kernels_of(found: tuple[Case, ...], target: str, directory) -> tuple[dict[Case, tuple[Kernel, Kernel, Kernel]], Path]:
    """Return decode, append and prefill of each case, and one module with all of them."""
    isa = ISAS[resolve(target).isa]
    kernels = {case: (case.decode(isa), case.append(isa), case.prefill(isa)) for case in found}
    unique = {kernel.name: kernel for case, three in kernels.items() for kernel in (*three, case.decode(isa, BATCH))}
    folder = directory / found[0].cache
    folder.mkdir(exist_ok=True)
    return kernels, runnable(list(unique.values()), target, folder)


def running(found: Sequence[Case], target: str, threads: int, directory) -> tuple[Runner, Iterator[tuple[Case, tuple]]]:
    """Return a runner and (case, kernels) for each case; see `runnable` for other CPUs."""
    kernels, module = kernels_of(tuple(found), target, directory)
    return Runner(module, threads), kernels.items()
