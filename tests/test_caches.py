"""Caches of f16: half the memory, and whatever way tokens come in, the same model."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from castiron.emitter.states import CACHES, State, stored_as
from castiron.emitter.types import F16, F32, EmitError
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

CONTEXT = 160
TOKENS = prompt(60, seed=4)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """`bundles(family, lowering, cache)`, compiled once."""
    folder, made = tmp_path_factory.mktemp("caches"), {}

    def bundle(family: str, lowering: str = "kernels", cache: str = "f16") -> Bundle:
        if (family, lowering, cache) not in made:
            checkpoint = folder / family
            if not checkpoint.exists():
                tiny.tiny_model(family, checkpoint)
            options = Options(context=CONTEXT, lowering=lowering, cache=cache, batch=(4,), speculate=(4,))
            place = folder / f"{family}-{lowering}-{cache}"
            made[family, lowering, cache] = open_bundle(compile_model(checkpoint, place, options).bundle)
        return made[family, lowering, cache]

    return bundle


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def family(request):
    return request.param


@pytest.fixture(scope="module", params=["kernels", "portable"])
def cast(request, bundles, family):
    return bundles(family, request.param)


@pytest.fixture(scope="module")
def expected(cast):
    """Logits after each of TOKENS, taken in one by one."""
    session, found = Session(cast, 1), []
    for token in TOKENS:
        session.step(token)
        found.append(session.logits())
    return found


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    """As near as sums in another order allow: a number of f32 beside the middle of two f16 is rounded to either, and a few
    such move logits by less than f16 has digits."""
    assert np.abs(found - wanted).max() < 2.0**-11 * np.ptp(wanted)


def agrees(session: Session, expected: list[np.ndarray]) -> None:
    near(session.logits(), expected[session.position - 1])


def test_the_manifest_and_the_memory_say_f16(cast, bundles, family, capsys):
    exact = bundles(family, cache="f32")
    assert (cast.manifest.cache, exact.manifest.cache) == ("f16", "f32")
    assert {state.dtype for state in cast.manifest.states} == {"f16"}
    assert all(state.type() in function.inputs for function in cast.manifest.functions for state in cast.manifest.states[:1]
               if function.role != "batch")  # fmt: skip
    assert 2 * needed(cast.manifest).state == needed(exact.manifest).state
    session = Session(cast, 1)
    assert {state.array.dtype for state in session._states} == {np.dtype(np.float16)}
    assert 2 * sum(s.array.nbytes for s in session._states) == sum(s.array.nbytes for s in Session(exact, 1)._states)
    assert cli.main(["inspect", str(cast.path)]) == 0
    shown = capsys.readouterr().out
    assert "f16 cache" in shown and str(needed(cast.manifest)) in shown and "xf16 positional" in shown


def test_it_rounds_and_no_more_than_that(cast, bundles, family):
    """The first token sees a rounded value alone; later ones are off by what rounding to 11 digits makes."""
    exact, rounded = (Session(bundle, 1) for bundle in (bundles(family, cache="f32"), cast))
    for session in (exact, rounded):
        session.prefill(TOKENS)
    distance = np.abs(exact.logits() - rounded.logits()).max() / np.ptp(exact.logits())
    assert 2.0**-18 < distance < 2.0**-6


def test_both_lowerings_are_one_model(bundles, family):
    sessions = [Session(bundles(family, lowering), 1) for lowering in ("kernels", "portable")]
    for size in (17, 1, 30, 1):
        for session in sessions:
            session.prefill(TOKENS[session.position : session.position + size])
        near(*(session.logits() for session in sessions))


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


def test_a_packed_bundle_and_the_commands_take_it(bundles, tmp_path, capsys):
    bundle = bundles("llama")
    pack_bundle(bundle, tmp_path / "one.castiron")
    packed = open_bundle(tmp_path / "one.castiron")
    assert greedy(Session(packed, 1), TOKENS, 8) == greedy(Session(bundle, 1), TOKENS, 8)
    assert cli.main(["explain", str(bundle.path), "--position", "40", "--threads", "1"]) == 0
    assert "attention_decode" in capsys.readouterr().out
    out = str(tmp_path / "bundle")
    argv = ["compile", str(bundle.manifest.source["path"]), "-o", out, "--context", "32", "--cache", "f16", "--batch", "none"]
    assert cli.main(argv) == 0
    assert re.search(r"MB, f16 cache \(emit", capsys.readouterr().out)
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"] == "f16"


def test_verify_tells_where_it_differs(bundles, tmp_path, capsys):
    """As any bundle: there are prompts that it answers as HF does, and one whose answer parts from HF's at some token."""
    path, prompts = tmp_path / "prompts", [prompt(40, seed=seed) for seed in range(2)]
    path.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in prompts))
    answers = [[greedy(Session(bundles("llama", cache=cache), 1), tokens, 90) for tokens in prompts] for cache in CACHES]
    first = [next((i for i, pair in enumerate(zip(*pair)) if len(set(pair)) > 1), None) for pair in zip(*answers)]
    assert first[0] is None and first[1] is not None
    assert cli.main(["verify", str(bundles("llama").path), "--prompts", str(path), "-n", "90", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["exact"] and [found["first_difference"] for found in result["prompts"]] == first


def test_another_cache_is_another_bundle(bundles, tmp_path):
    checkpoint, out = bundles("llama").path.parent / "llama", tmp_path / "bundle"
    told = {cache: Options(context=32, cache=cache, batch=(), speculate=()) for cache in CACHES}
    reports = [compile_model(checkpoint, out, told[cache]) for cache in ("f32", "f16", "f16", "f32")]
    assert [(report.cache, report.up_to_date) for report in reports] == [
        ("f32", False), ("f16", False), ("f16", True), ("f32", False),
    ]  # fmt: skip
    assert len({cached_place(checkpoint, options) for options in told.values()}) == 2


def test_what_is_no_row_of_a_position_stays_f32():
    states = [State(kind, (2, 8, 4), kind=kind) for kind in ("positional", "window", "recurrent")]
    assert [state.dtype for state in stored_as(states, "f16")] == [F16, F32, F32]
    assert stored_as(states, "f32") == tuple(states)
    for refusing in (lambda: stored_as(states, "f8"), lambda: Options(cache="f8")):
        with pytest.raises(EmitError, match="cache 'f8' is not one of f32, f16"):
            refusing()
