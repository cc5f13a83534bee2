"""Caches that round: less memory, and whatever way tokens come in, the same model."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from castiron.emitter.caches import CACHES
from castiron.emitter.states import State, stored_as
from castiron.emitter.types import F16, F32, I8, EmitError
from castiron.pipelines import cli
from castiron.pipelines.casting.cast import cached_place
from castiron.pipelines.casting.compile import Options, compile_model
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Sequence
from castiron.pipelines.measuring.memory import needed
from castiron.reference import tiny
from castiron.vmfb.batch import Batch
from castiron.vmfb.bundle import Bundle, open_bundle, pack_bundle
from castiron.vmfb.session import Session
from tests.test_end_to_end import greedy, prompt

# Of Gemma with rings of 40 rows: a window of 8, and chunks of 32 tokens.
CONTEXT = {"llama": 160, "gemma3_text": 100}
WINDOWS = {"llama": {}, "gemma3_text": {"sliding_window": 8}}
TOKENS = prompt(60, seed=4)
# A number beside the middle of two that a cache holds is rounded to either, and a few such move logits, as parts of their range,
# by less than this.
NEAR = {"f16": 2.0**-11, "q8_0": 2.0**-6}
# What rounding itself does to logits.
MOVED = {"f16": (2.0**-18, 2.0**-6), "q8_0": (2.0**-12, 2.0**-3)}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """`bundles(family, cache, lowering)`, compiled once."""
    folder, made = tmp_path_factory.mktemp("caches"), {}

    def bundle(family: str, cache: str, lowering: str = "kernels") -> Bundle:
        if (family, cache, lowering) not in made:
            checkpoint = folder / family
            if not checkpoint.exists():
                tiny.tiny_model(family, checkpoint, **WINDOWS[family])
            options = Options(context=CONTEXT[family], lowering=lowering, cache=cache, batch=(4,), speculate=(4,))
            place = folder / f"{family}-{lowering}-{cache}"
            made[family, cache, lowering] = open_bundle(compile_model(checkpoint, place, options).bundle)
        return made[family, cache, lowering]

    return bundle


@pytest.fixture(scope="module", params=NEAR)
def cache(request):
    return request.param


# Full attention and windows, by both lowerings.
CAST = {
    "f16": [("llama", "kernels"), ("gemma3_text", "kernels"), ("llama", "portable")],
    "q8_0": [("llama", "kernels"), ("gemma3_text", "kernels"), ("gemma3_text", "portable")],
}


@pytest.fixture(scope="module", params=[(f, c, how) for c, casts in CAST.items() for f, how in casts], ids="-".join)
def cast(request, bundles):
    return bundles(*request.param)


@pytest.fixture(scope="module")
def exact(bundles, cast):
    """The same with caches of f32."""
    return bundles(cast.manifest.config["model_type"], "f32")


@pytest.fixture(scope="module")
def expected(cast):
    """Logits after each of TOKENS, taken in one by one."""
    session, found = Session(cast, 1), []
    for token in TOKENS:
        session.step(token)
        found.append(session.logits())
    return found


def near(found: np.ndarray, wanted: np.ndarray, cache: str) -> None:
    assert np.abs(found - wanted).max() < NEAR[cache] * np.ptp(wanted)


def agrees(session: Session, expected: list[np.ndarray]) -> None:
    near(session.logits(), expected[session.position - 1], session.manifest.cache)


def test_the_manifest_and_the_memory_say_what_is_stored(cast, exact, capsys):
    cache, family = cast.manifest.cache, cast.manifest.config["model_type"]
    assert cache in cast.path.name and exact.manifest.cache == "f32"
    assert {state.dtype for state in cast.manifest.states} == {CACHES[cache].dtype.name}
    assert all(state.type() in function.inputs for function in cast.manifest.functions for state in cast.manifest.states[:1]
               if function.role != "batch")  # fmt: skip
    # Heads of 16 or 24 elements: of q8_0 16 or 8 share a scale of 4 bytes.
    parts = {"f16": 1 / 2, "q8_0": {"llama": 20 / 64, "gemma3_text": 12 / 32}[family]}
    assert needed(cast.manifest).state == parts[cache] * needed(exact.manifest).state
    session = Session(cast, 1)
    assert {state.array.dtype for state in session._states} == {CACHES[cache].dtype.numpy}
    assert sum(s.array.nbytes for s in session._states) == needed(cast.manifest).state
    assert cli.main(["inspect", str(cast.path)]) == 0
    shown = capsys.readouterr().out
    assert f"{cache} cache" in shown and str(needed(cast.manifest)) in shown
    kinds = {"positional", "window"} if family == "gemma3_text" else {"positional"}
    assert {state.kind for state in cast.manifest.states} == kinds
    assert all(f"x{CACHES[cache].dtype.name} {kind}" in shown for kind in kinds)


def test_it_rounds_and_no_more_than_that(cast, exact):
    exact, rounded = (Session(bundle, 1) for bundle in (exact, cast))
    for session in (exact, rounded):
        session.prefill(TOKENS)
    distance = np.abs(exact.logits() - rounded.logits()).max() / np.ptp(exact.logits())
    low, high = MOVED[cast.manifest.cache]
    assert low < distance < high


def test_both_lowerings_are_one_model(bundles, cache):
    family = CAST[cache][-1][0]
    sessions = [Session(bundles(family, cache, lowering), 1) for lowering in ("kernels", "portable")]
    for size in (17, 1, 30, 1):
        for session in sessions:
            session.prefill(TOKENS[session.position : session.position + size])
        near(*(session.logits() for session in sessions), cache)


@pytest.mark.parametrize("pieces", [[60], [5, 1, 9, 32, 3, 10], [8, 33], [31, 1, 1, 5]])
def test_a_prompt_in_pieces_equals_token_by_token(cast, expected, pieces):
    session, done = Session(cast, 1), 0
    for size in pieces:
        session.prefill(TOKENS[done : done + size])
        done += size
        agrees(session, expected)


def test_proposed_tokens_a_rewind_and_a_fork(cast, expected):
    session = Session(cast, 1)
    session.prefill(TOKENS[:20])
    assert session.verify(TOKENS[20:24]) == [int(e.argmax()) for e in expected[20:24]]
    agrees(session, expected)
    fork = session.fork()
    # The same rows by the same functions: the same bits.
    assert fork.step(TOKENS[24]) == session.step(TOKENS[24])
    np.testing.assert_array_equal(fork.logits(), session.logits())
    session.prefill(TOKENS[40:50])
    session.rewind(24)
    session.step(TOKENS[24])
    np.testing.assert_array_equal(fork.logits(), session.logits())
    snapshot = session.snapshot()
    session.step(7)
    session.restore(snapshot)
    for each in (session, fork):
        each.step(TOKENS[25])
        agrees(each, expected)


def test_sequences_of_a_batch_go_their_own_ways(cast, expected):
    batch = Batch(cast, 1)
    for slot, length in enumerate((3, 17, 8)):
        batch.slots[slot].prefill(TOKENS[:length])
    batch.slots[3].copy_from(batch.slots[1], 11)
    resting = [state.array.copy() for state in batch.slots[1]._states]
    for active in ((0, 2, 3), (0, 3), (2, 0), (0, 2, 3)):
        batch.step({slot: TOKENS[batch.slots[slot].position] for slot in active})
        for slot in active:
            agrees(batch.slots[slot], expected)
    for before, state in zip(resting, batch.slots[1]._states, strict=True):
        np.testing.assert_array_equal(before, state.array)
    batch.step({slot: TOKENS[batch.slots[slot].position] for slot in range(4)})
    for slot in range(4):
        agrees(batch.slots[slot], expected)


def test_what_prompts_share_is_read_once(cast):
    scheduler = Scheduler(cast, 1)
    base, cached = tuple(TOKENS[:40]), []
    for tokens in (base, (*base, 5, 6), (*base[:20], 9, 9, 9)):
        sequence = Sequence(tokens, scheduler.context, max_tokens=8, stop_tokens=())
        scheduler.submit(sequence)
        while not scheduler.idle:
            scheduler.turn()
        cached.append(sequence.cached)
        assert sequence.tokens == greedy(Session(cast, 1), list(tokens), 8)
    assert cached == [0, 40, 20]


def test_a_packed_bundle_and_the_commands_take_it(bundles, cache, tmp_path, capsys):
    bundle = bundles("llama", cache)
    pack_bundle(bundle, tmp_path / "one.castiron")
    packed = open_bundle(tmp_path / "one.castiron")
    assert greedy(Session(packed, 1), TOKENS, 8) == greedy(Session(bundle, 1), TOKENS, 8)
    assert cli.main(["explain", str(bundle.path), "--position", "40", "--threads", "1"]) == 0
    assert "attention_decode" in capsys.readouterr().out
    out = str(tmp_path / "bundle")
    argv = ["compile", str(bundle.manifest.source["path"]), "-o", out, "--context", "32", "--cache", cache, "--batch", "none"]
    assert cli.main(argv) == 0
    assert re.search(rf"MB, {cache} cache \(emit", capsys.readouterr().out)
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"] == cache


def test_verify_tells_where_it_differs(bundles, tmp_path, capsys):
    """As any bundle: there are prompts that it answers as HF does, and one whose answer parts from HF's at some token."""
    path, prompts = tmp_path / "prompts", [prompt(40, seed=seed) for seed in range(2)]
    path.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in prompts))
    answers = [[greedy(Session(bundles("llama", cache), 1), tokens, 90) for tokens in prompts] for cache in ("f32", "f16")]
    first = [next((i for i, pair in enumerate(zip(*pair)) if len(set(pair)) > 1), None) for pair in zip(*answers)]
    assert first[0] is None and first[1] is not None
    assert cli.main(["verify", str(bundles("llama", "f16").path), "--prompts", str(path), "-n", "90", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["exact"] and [found["first_difference"] for found in result["prompts"]] == first


def test_another_cache_is_another_bundle(bundles, tmp_path):
    checkpoint, out = bundles("llama", "f16").path.parent / "llama", tmp_path / "bundle"
    told = {cache: Options(context=32, cache=cache, batch=(), speculate=()) for cache in CACHES}
    reports = [compile_model(checkpoint, out, told[cache]) for cache in ("f32", "f16", "f16", "f32")]
    assert [(report.cache, report.up_to_date) for report in reports] == [
        ("f32", False), ("f16", False), ("f16", True), ("f32", False),
    ]  # fmt: skip
    assert len({cached_place(checkpoint, options) for options in told.values()}) == len(CACHES)


def test_what_is_no_row_of_a_position_stays_f32():
    windows = {"positional": 0, "window": 6, "recurrent": 0}
    states = [State(kind, (2, 8, 48), kind=kind, window=window) for kind, window in windows.items()]
    assert [state.dtype for state in stored_as(states, "f16")] == [F16, F16, F32]
    assert [state.dtype for state in stored_as(states, "q8_0")] == [I8, I8, F32]
    assert [state.shape for state in stored_as(states, "q8_0")] == [(2, 8, 3, 20), (2, 8, 3, 20), (2, 8, 48)]
    assert stored_as(states, "f32") == tuple(states)
    for refusing in (lambda: stored_as(states, "f8"), lambda: Options(cache="f8")):
        with pytest.raises(EmitError, match="cache 'f8' is not one of f32, f16, q8_0"):
            refusing()


@pytest.mark.parametrize("head_dim, group", [(64, 32), (128, 32), (80, 16), (24, 8)])
def test_bytes_are_off_by_half_a_step_of_their_group(head_dim, group):
    how, rng = CACHES["q8_0"], np.random.default_rng(head_dim)
    x = (rng.standard_normal((50, 3, head_dim)) * 10.0 ** rng.integers(-20, 20, (50, 3, 1))).astype(np.float32)
    x[0], x[1, 0, 0] = 0.0, 1e-31
    rows = how.stored(x)
    assert rows.shape == (50, 3, *how.row(head_dim)) and rows.shape[-1] == group + 4 and rows.dtype == np.int8
    step = np.abs(x.reshape(50, 3, -1, group)).max(axis=-1, keepdims=True) / np.float64(127)
    off = np.abs(how.values(rows).astype(np.float64) - x).reshape(50, 3, -1, group)
    assert (off <= step * (0.5 + 1e-4)).all() and (off > 0.45 * step).any()
    assert not how.values(rows)[0].any()
    # Where every group ends in as many bytes the largest is 127 or -127.
    assert (np.abs(rows[2:, ..., 4:].astype(int)).max(axis=-1) == 127).all()


def test_heads_without_groups_are_refused_in_a_sentence():
    with pytest.raises(EmitError, match="^a cache of q8_0 cannot cut heads of 20 elements into groups of 8 or more"):
        CACHES["q8_0"].row(20)
    assert CACHES["f16"].row(20) == (20,)
