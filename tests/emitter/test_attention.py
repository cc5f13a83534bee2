"""Attention kernels against their NumPy definitions, with garbage in unused rows."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from castiron.emitter.kernels.attention.decode import attention_decode
from castiron.emitter.kernels.attention.heads import HeadLayout, prepared_heads
from castiron.emitter.kernels.attention.prefill import attention_prefill
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import Scores
from castiron.emitter.kernels.mlir.isa import AVX2, AVX512, ISAS, NEON
from castiron.emitter.layers.kv_cache import CACHES
from castiron.vmfb.targets import resolve
from tests.emitter.attention_cases import (
    BATCH,
    CASES,
    CONTEXT,
    LAYER,
    LAYERS,
    REAL,
    UNIT,
    Case,
    check_append,
    close,
    close_keys,
    fill,
    output_error,
    rounding_of,
    running,
    stored_as,
    turned,
)
from tests.emitter.kernel_runner import Runner, runnable, texts_by_name

# Complete texts, and windows of one tile and of several.
BIDIRECTIONAL = [
    Case(4, 2, 20, None),
    Case(3, 1, 64, None, scores={"window": 5}),
    Case(8, 1, 32, None, scores={"window": 60, "softcap": 30.0}),
    Case(2, 2, 48, None, scores={"window": 1}),
]
# Around borders of blocks of rows, tiles of 48 and parts of 32, the first split position, windows, and the last position.
POSITIONS = [0, 1, 7, 8, 16, 23, 24, 25, 33, 41, 47, 48, 49, 64, 97, 144, CONTEXT - 1]
STARTS = [0, 1, 47, 130]


# The quick suite runs half of f16. q8_0 compiles longest; half of the cases cover what its groups change.
PARTS = {"f16": CASES[::2], "f16 rest": CASES[1::2], "f32": CASES, "q8_0": CASES[1::2]}


@pytest.fixture(scope="module", params=PARTS)
def cases(request):
    return stored_as(request.param.removesuffix(" rest"), PARTS[request.param])


def check_decode(runner, case: Case, kernel, position: int) -> None:
    operands = fill(np.random.default_rng(case.seed + position), kernel, position, position=position)
    got, want = runner(kernel, **operands), kernel.reference(**operands)
    name = f"{kernel.name} at {position}"
    q, k, _ = prepared_heads(case.layout, operands["qkv"], np.array([position]), operands)
    limit = 8 * UNIT * float(np.abs(k).max())
    seen = (case.rows.values(want[cache][LAYER, : position + 1]) for cache in ("k_cache", "v_cache"))
    close(name, got["out"], want["out"], output_error(case, q, *seen, rounding_of(case, k, limit)))
    close_keys(name, case, got["k_cache"][LAYER, position], k[0], limit)
    got["k_cache"][LAYER, position] = want["k_cache"][LAYER, position]
    close(f"{name}, other keys", got["k_cache"], want["k_cache"], 0.0)
    close(f"{name}, values", got["v_cache"], want["v_cache"], 0.0)
    assert not got["counters"].any(), f"{name}: the counters are not zero again"


def check_prefill(runner, case: Case, kernel, start: int, length: int) -> None:
    rng = np.random.default_rng(case.seed + start + length)
    operands = fill(rng, kernel, start + length, start=start, length=length)
    got, want = runner(kernel, **operands)["out"], kernel.reference(**operands)["out"]
    name = f"{kernel.name} from {start}, {length} tokens"
    q = operands["q"][:length].reshape(length, case.heads, -1)
    k, v = (case.rows.values(operands[cache][LAYER, : start + length]) for cache in ("k_cache", "v_cache"))
    assert not got[length:].any(), f"{name}: padding is not zero"
    close(name, got, want, output_error(case, q, k, v))


@pytest.mark.parametrize("threads", [1, 2])
def test_decode_matches_the_definition(directory, threads, cases):
    runner, kernels = running(cases, "host", threads, directory)
    for case, (decode, _, _) in kernels:
        for position in POSITIONS:
            check_decode(runner, case, decode, position)


@pytest.mark.parametrize("threads", [1, 2])
def test_prefill_and_append_match_the_definition(directory, threads, cases):
    runner, kernels = running(cases, "host", threads, directory)
    for case, (_, append, prefill) in kernels:
        for length in {1, case.tokens // 2, case.tokens}:
            for start in STARTS:
                check_prefill(runner, case, prefill, start, length)
            for start in (0, 47, CONTEXT - case.tokens):
                check_append(runner, case, append, start, length)


def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(directory, cases):
    """Tokens in one chunk of keys, in two, and in blocks that a window masks."""
    runner, kernels = running(cases, "host", 2, directory)
    for case, (decode, append, prefill) in kernels:
        for start in (0, 20, 130, CONTEXT - case.tokens):
            rng = np.random.default_rng(case.seed + start)
            chunk = {"start": np.int32(start), "length": np.int32(case.tokens)}
            operands = fill(rng, append, start, **chunk)
            made = runner(append, **operands)
            given = {name: operands[name] for name in decode.operands if name in operands}
            sinks = {"sinks": rng.standard_normal(case.heads).astype(np.float32)} if case.how.sinks else {}
            together = runner(prefill, **{**chunk, **sinks, **made, "layer": LAYER})["out"]
            caches = {name: operands[name] for name in ("k_cache", "v_cache")}
            counters = np.zeros(decode.tensors["counters"].shape, np.int32)
            for t in range(case.tokens):
                own = {"qkv": operands["qkv"][t : t + 1], "position": np.int32(start + t), "counters": counters, **caches}
                one = runner(decode, **{**given, **sinks, **own})
                caches = {name: one[name] for name in caches}
                assert np.array_equal(one["out"][0], together[t]), f"{prefill.name} at {start + t}"
            for name, rows in caches.items():
                assert np.array_equal(rows, made[name], equal_nan=rows.dtype.kind == "f"), f"{append.name}: {name}"


@pytest.mark.parametrize("threads", [1, 2])
def test_bidirectional_attention_matches_the_definition(directory, threads):
    """It reads keys up to the end of the text or of the window, from the first block of keys on."""
    found = [replace(case, tokens=112, scores=case.scores | {"bidirectional": True}) for case in BIDIRECTIONAL]
    kernels = {case: case.prefill(ISAS[resolve("host").isa]) for case in found}
    folder = directory / "bidirectional"
    folder.mkdir(exist_ok=True)
    runner = Runner(runnable(list(kernels.values()), "host", folder), threads)
    for case, kernel in kernels.items():
        for length in (1, 16, 49, 111, 112):
            check_prefill(runner, case, kernel, 0, length)


def test_split_parts_are_joined_by_any_thread(directory, cases):
    """Many calls on two threads, which pass the counters on, give the result of one thread."""
    one, kernels = running(cases, "host", 1, directory)
    two, _ = running(cases, "host", 2, directory)
    for case, (decode, _, _) in kernels:
        # Short sequences come after long ones, and their parts finish first.
        for kernel, position in (decode, CONTEXT - 1), (case.decode(ISAS[resolve("host").isa], BATCH), [199, 33, 199, 33, 100]):
            operands = fill(np.random.default_rng(case.seed), kernel, CONTEXT, position=position)
            want = one(kernel, **operands)["out"]
            for _ in range(50):
                got = two(kernel, **operands)
                assert np.array_equal(got["out"], want), kernel.name
                operands["counters"] = got["counters"]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_gives_every_sequence_the_bits_of_its_own_call(directory, threads, cases):
    """Sequences have different positions, split and not; idle ones get zeros and unchanged caches."""
    runner, kernels = running(cases, "host", threads, directory)
    positions = [CONTEXT - 1, 33, -1, 0, 144]
    for case, (decode, _, _) in kernels:
        batch = case.decode(ISAS[resolve("host").isa], BATCH)
        operands = fill(np.random.default_rng(case.seed), batch, CONTEXT, position=positions)
        together, defined = runner(batch, **operands), batch.reference(**operands)
        for i, position in enumerate(positions):
            mine = {"out": slice(i, i + 1)} | dict.fromkeys(("k_cache", "v_cache"), slice(i * LAYERS, (i + 1) * LAYERS))
            before = {cache: operands[cache][mine[cache]] for cache in ("k_cache", "v_cache")}
            if position < 0:
                want = {"out": np.zeros_like(together["out"][:1]), **before}
            else:
                counters = np.zeros(decode.tensors["counters"].shape, np.int32)
                own = {"qkv": operands["qkv"][i : i + 1], "position": np.int32(position), "counters": counters, **before}
                want = runner(decode, **{**operands, **own})
                single = decode.reference(**{**operands, **own})
                close(batch.name, defined["out"][mine["out"]], single["out"], 0.0)
            for name, part in mine.items():
                assert np.array_equal(together[name][part], want[name]), f"{batch.name}, sequence {i} at {position}: {name}"
        assert not together["counters"].any(), f"{batch.name}: the counters are not zero again"


@pytest.mark.parametrize("cache", CACHES)
def test_a_ring_gives_the_bits_of_a_cache_of_every_position(directory, cache):
    """Decode, a batch, append and prefill, for any number of turns, with NaN in unused rows."""
    slides = [replace(REAL[2], cache=cache), Case(6, 2, 32, 16, {}, {"window": 40, "sinks": True}, 5, splits=2, cache=cache)]
    rings = [replace(case, ring=case.scores["window"] + case.tokens) for case in slides]
    (folder := directory / "rings").mkdir(exist_ok=True)
    runner, found = running(slides + rings, "host", 2, folder)
    kernels, isa = dict(found), ISAS[resolve("host").isa]

    def same(plain, ringed, operands: dict, ends: list[tuple[int, int]], ring: int) -> None:
        """ends: of each sequence, its length before and after the call."""
        cached = [name for name in ("k_cache", "v_cache") if name in operands]

        def taken(caches: np.ndarray, after: bool) -> np.ndarray:
            return np.concatenate([turned(x, end[after], ring) for x, end in zip(np.split(caches, len(ends)), ends)])

        before = {name: taken(operands[name], False) for name in cached}
        want, got = runner(plain, **operands), runner(ringed, **{**operands, **before})
        for name in set(cached) & set(want):
            own = np.arange(len(before[name])) % LAYERS == LAYER
            want[name] = np.where(own.reshape(-1, *[1] * (before[name].ndim - 1)), taken(want[name], True), before[name])
        for name in set(want) - {"parts"}:
            assert np.array_equal(want[name], got[name], equal_nan=name in cached), f"{ringed.name} to {ends}: {name}"

    for case, ring in zip(slides, rings, strict=True):
        for position in POSITIONS:
            operands = fill(np.random.default_rng(position), kernels[case][0], position, position=position)
            same(kernels[case][0], kernels[ring][0], operands, [(position, position + 1)], ring.ring)
        positions = [CONTEXT - 1, 33, -1, 0, 144]
        batches = [each.decode(isa, BATCH) for each in (case, ring)]
        operands = fill(np.random.default_rng(1), batches[0], CONTEXT, position=positions)
        same(*batches, operands, [(max(p, 0), p + 1) for p in positions], ring.ring)
        for start, length in [(0, case.tokens), (47, 3), (CONTEXT - case.tokens, case.tokens), (150, 1)]:
            for i, before in ((1, start), (2, start + length)):
                operands = fill(np.random.default_rng(i), kernels[case][i], before, start=start, length=length)
                same(kernels[case][i], kernels[ring][i], operands, [(before, start + length)], ring.ring)


def test_scores_that_grow_and_weights_that_vanish_stay_finite(directory, cases):
    """Scores rise by more than 88, where e^x of their difference overflows f32."""
    runner, kernels = running(cases, "host", 2, directory)
    for case, (decode, _, prefill) in kernels:
        if case.scores or case.rope or case.options.get("qk_norm"):
            continue
        # In one part, in which the token itself comes before the rising scores, and in several parts.
        for position in (20, 100):
            operands = fill(np.random.default_rng(1), decode, position, position=position)
            operands["qkv"][:] = 1.0
            ramp = np.linspace(-40, 40, position)[:, None, None] * np.ones((case.kv_heads, case.head_dim)) * case.scale
            operands["k_cache"][LAYER, :position] = case.rows.stored(ramp)
            close(decode.name, runner(decode, **operands)["out"], decode.reference(**operands)["out"], 1e-4)
            chunk = fill(np.random.default_rng(1), prefill, position, start=position - 5, length=5)
            chunk |= {"q": np.ones_like(chunk["q"]), "k_cache": operands["k_cache"], "v_cache": operands["v_cache"]}
            close(prefill.name, runner(prefill, **chunk)["out"], prefill.reference(**chunk)["out"], 1e-4)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_kernels_match_the_definition(directory, target, cache):
    runner, kernels = running(stored_as(cache, [REAL[0], REAL[2], REAL[-1]]), target, 2, directory)
    for case, (decode, append, prefill) in kernels:
        check_decode(runner, case, decode, 100)
        # Past the window, and with padding.
        check_prefill(runner, case, prefill, 130, case.tokens - 3)
        check_append(runner, case, append, 3, case.tokens - 3)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_chunk_has_fewer_than_8_workgroups_for_each_thread(threads):
    """With more, IREE gives 8 at a time to a thread, and one thread would get all of the longest tiles."""
    for tokens in (8, 32, 128, 512):
        kernel = attention_prefill(Caches(1, 512), tokens, HeadLayout(9, 3, 64, 64), Scores(0.125), isa=AVX512, threads=threads)
        (workgroups,) = re.findall(r"workgroups\(\).*?constant (\d+) : index", kernel.text, re.DOTALL)
        assert 0 < int(workgroups) < 8 * threads, kernel.name


def test_work_follows_the_position():
    layout = HeadLayout(9, 3, 64, 64)
    kernel = attention_decode(Caches(LAYERS, 4096), layout, Scores(0.125), isa=AVX2)
    assert kernel.work(2047)[0] == 2 * kernel.work(1023)[0] == 4 * 9 * 64 * 2048
    windowed = attention_decode(Caches(LAYERS, 4096), layout, Scores(0.125, window=100), isa=AVX2)
    assert windowed.work(4000) == windowed.work(99)


def test_bytes_of_a_call_follow_the_storage_of_the_cache():
    per_position = []
    for cache in CACHES:
        for kernel in (case.decode(AVX2) for case in stored_as(cache, REAL[:1])):
            assert kernel.work(9)[0] == REAL[0].decode(AVX2).work(9)[0]
            per_position.append(kernel.work(9)[1] - kernel.work(8)[1])
    assert per_position == [2 * 3 * 64 * 4, 2 * 3 * 64 * 2, 2 * 3 * (64 + 2 * 4)]


def test_text_differs_where_names_differ():
    cases = [case for cache in CACHES for case in stored_as(cache, CASES)]
    uses = product(cases, (AVX2, AVX512, NEON))
    kernels = (kernel for case, isa in uses for kernel in (case.decode(isa), case.append(isa), case.prefill(isa)))
    texts = texts_by_name(kernels)
    assert len(set(texts.values())) == len(texts)


def test_rejects_heads_that_exceed_the_stack():
    with pytest.raises(
        ValueError, match="exceeds the stack limit of .* bytes for 71 query heads per kv head and head_dim 64; use a model"
    ):
        attention_decode(Caches(1, 64), HeadLayout(71, 1, 64, 64), Scores(1.0), isa=AVX2)
