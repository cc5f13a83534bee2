"""Attention kernels against their NumPy definitions: positions at every border, garbage in unused rows, threads, targets."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.kernels.attention.decode import attention_decode
from castiron.emitter.kernels.attention.prefill import attention_prefill
from castiron.emitter.kernels.attention.rope_append import HeadLayout
from castiron.emitter.kernels.writing.isa import AVX2, AVX512, ISAS, NEON
from castiron.vmfb.targets import resolve
from tests.emitter.attention_cases import (
    BATCH,
    CONTEXT,
    LAYER,
    LAYERS,
    REAL,
    UNIT,
    Case,
    close,
    drawn,
    fill,
    output_error,
    prepared,
    running,
)

CASES = drawn(8) + REAL
# Around blocks of rows, the tiles of 48, parts of 32, where splitting begins, inside and past windows, and the last.
POSITIONS = [0, 1, 7, 8, 16, 23, 24, 25, 33, 41, 47, 48, 49, 64, 97, 144, CONTEXT - 1]
STARTS = [0, 1, 47, 130]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("attention")


def check_decode(runner, case: Case, kernel, position: int) -> None:
    arguments = fill(np.random.default_rng(case.seed + position), kernel, [position], position)
    given = arguments[1 : len(case.layout.operands(CONTEXT)) + 1]
    got, want = runner(kernel, *arguments), kernel.reference(*arguments)
    name = f"{kernel.name} at {position}"
    q, k, _ = prepared(case, arguments[0], np.array([position]), given)
    used = slice(position + 1)
    close(name, got[0], want[0], output_error(case, q, want[1][LAYER, used], want[2][LAYER, used]))
    close(f"{name}, keys", got[1], want[1], 8 * UNIT * float(np.abs(k).max()))
    close(f"{name}, values", got[2], want[2], 0.0)
    if case.splits > 1:
        assert not got[3].any(), f"{name}: the counters are not zero again"


def check_prefill(runner, case: Case, kernel, start: int, length: int) -> None:
    rng = np.random.default_rng(case.seed + start + length)
    arguments = fill(rng, kernel, [start, length], start + length)
    (got,), (want,) = runner(kernel, *arguments), kernel.reference(*arguments)
    name = f"{kernel.name} from {start}, {length} tokens"
    q = arguments[0][:length].reshape(length, case.heads, -1)
    k, v = (cache[LAYER, : start + length] for cache in arguments[3:5])
    assert not got[length:].any(), f"{name}: padding is not zero"
    close(name, got, want, output_error(case, q, k, v))


@pytest.mark.parametrize("threads", [1, 2])
def test_decode_matches_the_definition(directory, threads):
    runner, kernels = running(CASES, "host", threads, directory)
    for case, (decode, _, _) in kernels:
        for position in POSITIONS:
            check_decode(runner, case, decode, position)


@pytest.mark.parametrize("threads", [1, 2])
def test_prefill_matches_the_definition(directory, threads):
    runner, kernels = running(CASES, "host", threads, directory)
    for case, (_, _, prefill) in kernels:
        for start in STARTS:
            for length in {1, case.tokens // 2, case.tokens}:
                check_prefill(runner, case, prefill, start, length)


def test_split_parts_are_joined_whichever_thread_comes_last(directory):
    """Many calls on two threads with the counters handed on: every one gives the same as one thread."""
    one, kernels = running(CASES, "host", 1, directory)
    two, _ = running(CASES, "host", 2, directory)
    for case, (decode, _, _) in kernels:
        if case.splits == 1:
            continue
        # Short sequences after long ones: their parts are done before those are.
        for kernel, position in (decode, CONTEXT - 1), (case.decode(ISAS[resolve("host").isa], BATCH), [199, 33, 199, 33, 100]):
            arguments = fill(np.random.default_rng(case.seed), kernel, [0], CONTEXT)
            arguments[-5] = np.array(position, np.int32)
            want = one(kernel, *arguments)[0]
            for _ in range(50):
                got = two(kernel, *arguments)
                assert np.array_equal(got[0], want), kernel.name
                arguments[-2] = got[3]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_gives_every_sequence_the_bits_it_gets_alone(directory, threads):
    """Sequences at positions of their own, split and not; idle ones leave their caches alone and are zero."""
    runner, kernels = running(CASES, "host", threads, directory)
    positions = [CONTEXT - 1, 33, -1, 0, 144]
    for case, (decode, _, _) in kernels:
        batch, rng = case.decode(ISAS[resolve("host").isa], BATCH), np.random.default_rng(case.seed)
        arguments = fill(rng, batch, [], CONTEXT)
        at = len(arguments) - 4 - (case.splits > 1)
        arguments[at] = np.array(positions, np.int32)
        out, k, v, *rest = runner(batch, *arguments)
        defined = batch.reference(*arguments)
        for i, position in enumerate(positions):
            mine = slice(i * LAYERS, (i + 1) * LAYERS)
            k_before, v_before = (cache[mine] for cache in arguments[at + 1 : at + 3])
            if position < 0:
                want = [np.zeros_like(out[:1]), k_before, v_before]
            else:
                counters = [np.zeros(t.shape, np.int32) for t in decode.results[3:4]]
                alone = (arguments[0][i : i + 1], *arguments[1:at], np.int32(position), k_before, v_before, *counters, LAYER)
                *want, _, parts = runner(decode, *alone) if case.splits > 1 else (*runner(decode, *alone), None, None)
                if parts is not None and min(position, case.scores.get("window") or CONTEXT) > 24:
                    # Scratch of its own, of which the first part is always written.
                    shape = (-1, case.heads, case.splits, case.head_dim)
                    values, first = (x[: x.size // (case.head_dim + 2) * case.head_dim] for x in (rest[1], parts))
                    assert np.array_equal(values.reshape(shape)[i, :, 0], first.reshape(shape)[0, :, 0]), batch.name
                close(batch.name, defined[0][i : i + 1], decode.reference(*alone)[0], 0.0)
            for name, got, wanted in zip(("result", "keys", "values"), (out[i : i + 1], k[mine], v[mine]), want, strict=True):
                assert np.array_equal(got, wanted), f"{batch.name}, sequence {i} at {position}: {name}"
        assert not rest or not rest[0].any(), f"{batch.name}: the counters are not zero again"


def test_every_sequence_of_a_batch_counts_its_own_parts(directory):
    """Parts that are never complete leave counts behind, in the places of their sequence alone."""
    runner, kernels = running(CASES, "host", 1, directory)
    for case, _ in kernels:
        if case.splits == 1 or (case.scores.get("window") or CONTEXT) <= 24:
            continue
        kernel = case.decode(ISAS[resolve("host").isa], BATCH)
        arguments = fill(np.random.default_rng(case.seed), kernel, [0], CONTEXT)
        arguments[-5] = np.full(BATCH, CONTEXT - 1, np.int32)
        arguments[-2] = np.zeros_like(arguments[-2]).reshape(BATCH, -1)
        arguments[-2][3] = -1000
        arguments[-2] = arguments[-2].reshape(-1)
        counts = runner(kernel, *arguments)[3].reshape(BATCH, -1)
        assert (counts[3] > -1000).all() and (counts[3] < 0).all(), kernel.name
        assert not np.delete(counts, 3, axis=0).any(), kernel.name


def test_token_by_token_equals_a_chunk(directory):
    """Decode's chain and append with prefill write the same caches and give the same outputs."""
    runner, kernels = running(CASES, "host", 2, directory)
    for case, (decode, append, prefill) in kernels:
        start, rng = 30, np.random.default_rng(case.seed)
        chunk = fill(rng, append, [start, case.tokens], start)
        given = chunk[1:-5]
        q, k, v = runner(append, *chunk)
        (out,) = runner(prefill, q, np.int32(start), np.int32(case.tokens), k, v, LAYER)
        k_step, v_step = chunk[-3:-1]
        counters = [np.zeros(t.shape, np.int32) for t in decode.results[3:4]]
        for t in range(case.tokens):
            step, k_step, v_step, *_ = runner(
                decode, chunk[0][t : t + 1], *given, np.int32(start + t), k_step, v_step, *counters, LAYER
            )
            heads = prepared(case, chunk[0][t : t + 1], np.array([start + t]), given)[0]
            seen = slice(start + t + 1)
            limit = 2 * output_error(case, heads, k[LAYER, seen], v[LAYER, seen])
            close(f"{decode.name}, token {t}", step, out[t : t + 1], limit)
        close(f"{decode.name}, keys", k_step, k, 16 * UNIT * float(np.nanmax(np.abs(k))))
        assert np.array_equal(v_step, v, equal_nan=True)


def test_scores_far_apart_and_far_from_the_first(directory):
    """References rise: scores that grow past e^88 of the first one, and weights that vanish, are neither inf nor NaN."""
    runner, kernels = running(CASES, "host", 2, directory)
    for case, (decode, _, prefill) in kernels:
        if case.scores or case.rope or case.options.get("qk_norm"):
            continue
        position = 100
        arguments = fill(np.random.default_rng(1), decode, [position], position)
        k_place = len(decode.operands) - 3 - (case.splits > 1)
        arguments[0][:] = 1.0
        ramp = np.linspace(-40, 40, position, dtype=np.float32)[:, None, None]
        arguments[k_place][LAYER, :position] = ramp * case.scale
        got, want = runner(decode, *arguments)[0], decode.reference(*arguments)[0]
        close(decode.name, got, want, 1e-4)
        q = np.ones(prefill.operands[0].shape, np.float32)
        chunk = [q, np.int32(position - 5), np.int32(5), *arguments[k_place : k_place + 2], LAYER]
        close(prefill.name, runner(prefill, *chunk)[0], prefill.reference(*chunk)[0], 1e-4)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    runner, kernels = running([REAL[0], REAL[2], REAL[-1]], target, 2, directory)
    for case, (decode, append, prefill) in kernels:
        check_decode(runner, case, decode, 100)
        check_prefill(runner, case, prefill, 47, case.tokens - 3)
        arguments = fill(np.random.default_rng(case.seed), append, [3, case.tokens], CONTEXT)
        for got, want in zip(runner(append, *arguments), append.reference(*arguments), strict=True):
            close(append.name, got, want, 1e-5)


def test_work_follows_the_position():
    kernel = attention_decode(LAYERS, 4096, 9, 3, 64, isa=AVX2, rope=64, scale=0.125)
    assert kernel.work(2047)[0] == 2 * kernel.work(1023)[0] == 4 * 9 * 64 * 2048
    windowed = attention_decode(LAYERS, 4096, 9, 3, 64, isa=AVX2, rope=64, scale=0.125, window=100)
    assert windowed.work(4000) == windowed.work(99)


def test_text_differs_where_names_differ():
    texts = {}
    for case in CASES:
        for isa in (AVX2, AVX512, NEON):
            for kernel in (case.decode(isa), case.append(isa), case.prefill(isa)):
                assert texts.setdefault(kernel.name, kernel.text) == kernel.text, kernel.name
    assert len(set(texts.values())) == len(texts)


def test_wrong_shapes_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="10 heads cannot share 3 kv heads evenly"):
        HeadLayout(10, 3, 64, 64)
    with pytest.raises(ValueError, match="rotary_dim must be even and within 2..64, got 65"):
        HeadLayout(9, 3, 64, 65)
    with pytest.raises(ValueError, match="power of two as splits, got 3"):
        attention_decode(1, 64, 9, 3, 64, isa=AVX2, rope=64, scale=1.0, splits=3)
    with pytest.raises(ValueError, match="layers .7. that 2 sequences share evenly"):
        attention_decode(7, 64, 9, 3, 64, isa=AVX2, rope=64, scale=1.0, batch=2)
    with pytest.raises(ValueError, match="71 heads of 64 in .* bytes of a workgroup's stack"):
        attention_decode(1, 64, 71, 1, 64, isa=AVX2, rope=64, scale=1.0)
    with pytest.raises(ValueError, match="tiles of a multiple of 8 positions, got 12"):
        attention_decode(1, 64, 9, 3, 64, isa=AVX2, rope=64, scale=1.0, tile=12)
    with pytest.raises(ValueError, match="keys .50. of 48"):
        attention_prefill(1, 64, 16, 9, 3, 64, isa=AVX2, scale=1.0, keys=50)
