"""States of every kind: logits do not depend on which calls read the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.pipelines.engine.prefix_cache import Paused
from castiron.reference import hf
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.run.session import MAX_SNAPSHOTS, Batch, Session, SessionError, move_to
from tests.families.checkpoints import FAMILIES, HYBRIDS, VOCAB, bundle

TOKENS = np.random.default_rng(11).integers(0, VOCAB, 60).tolist()
CASES = [*((f, l) for f in FAMILIES for l in ("kernels", "portable")), *((f, "kernels") for f in HYBRIDS)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def compiled(request, tmp_path_factory):
    return bundle(*request.param, tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def expected(compiled):
    """Return HF's logits after each of TOKENS."""
    return list(hf.logits(hf.load(compiled.path.parent / "checkpoint", threads=1), TOKENS))


def agrees(session: Session, expected: list[np.ndarray]) -> None:
    """Assert that the session, which has read the first of TOKENS, has their logits."""
    wanted = expected[session.position - 1]
    np.testing.assert_allclose(session.logits(), wanted, atol=3e-5 * np.abs(wanted).max())


def test_the_manifest_has_the_kinds_of_states(compiled):
    kinds = {"mamba": {"recurrent"}, "ring": {"window"}}
    name = compiled.path.parent.parent.name
    assert {state.kind for state in compiled.manifest.states} == kinds.get(name, {"positional", "recurrent"})


@pytest.mark.parametrize("pieces", [[1] * 20, [60], [5, 1, 9, 32, 3, 10], [8, 33], [3, 3, 3, 7], [31, 1, 1, 5]])
def test_a_prompt_in_pieces_equals_token_by_token(compiled, expected, pieces):
    session, done = Session(compiled, 1), 0
    for size in pieces:
        session.prefill(TOKENS[done : done + size])
        done += size
        agrees(session, expected)


def test_logits_of_every_verified_token(compiled, expected):
    session = Session(compiled, 1)
    for start in (0, 1, 7, 20):
        session.rewind(0)
        if start:
            session.prefill(TOKENS[:start])
        assert session.verify(TOKENS[start : start + 4]) == [int(e.argmax()) for e in expected[start : start + 4]]
        agrees(session, expected)
        session.step(TOKENS[start + 4])
        agrees(session, expected)
    with pytest.raises(SessionError, match="verify got 5 tokens; the verify functions of this bundle take"):
        session.verify(TOKENS[:5])


def test_rewinding_needs_a_retained_position(compiled, expected):
    session = Session(compiled, 1)
    for start, end in ((0, 11), (11, 20)):
        session.prefill(TOKENS[start:end])
        session.keep()
    session.prefill(TOKENS[20:])
    assert [session.reachable(p) for p in (60, 25, 20, 19, 0)] == [60, 20, 20, 11, 0]
    with pytest.raises(SessionError, match="cannot rewind to position 25: its state is overwritten; rewind to 20"):
        session.rewind(25)
    session.rewind(20)
    session.prefill(TOKENS[20:40])
    agrees(session, expected)
    session.rewind(20)
    session.step(TOKENS[20])
    agrees(session, expected)
    session.rewind(0)
    assert session.reachable(0) == 0
    session.prefill(TOKENS[:30])
    agrees(session, expected)
    assert session.reachable(24) == (24 if ringed(compiled) else 0), "older snapshots are dropped"


def test_lost_positions_are_prefilled_again(compiled, expected):
    session = Session(compiled, 1)
    session.prefill(TOKENS[:9])
    session.keep()
    session.prefill(TOKENS[9:50])
    for position in (13, 7):
        move_to(session, position, TOKENS[:position])
        assert session.position == position
        session.step(TOKENS[position])
        agrees(session, expected)


def test_a_ring_rewinds_as_far_as_its_rows_reach(compiled, expected):
    """Windows of 6, chunks of 32 tokens: rows 38 positions before the furthest are gone."""
    if not ringed(compiled):
        return
    session = Session(compiled, 1)
    assert {(state.shape[1], state.window) for state in compiled.manifest.states} == {(38, 6)}
    session.prefill(TOKENS[:38])
    assert [session.reachable(p) for p in (38, 37, 1, 0)] == [38, 37, 1, 0]
    session.prefill(TOKENS[38:55])
    assert [session.reachable(p) for p in (54, 22, 21, 1)] == [54, 22, 0, 0]
    session.rewind(22)
    assert session.reachable(21) == 0 and session.snapshot(4).nbytes == 0
    session.prefill(TOKENS[22:40])
    agrees(session, expected)
    assert [session.reachable(p) for p in (39, 22, 21)] == [39, 22, 0]
    other = session.fork()
    other.rewind(30)
    other.prefill(TOKENS[30:])
    agrees(other, expected)
    assert [other.reachable(p) for p in (27, 26)] == [27, 0]
    other.copy_from(session, 24)
    assert [other.reachable(p) for p in (22, 21)] == [22, 0]
    other.step(TOKENS[24])
    agrees(other, expected)
    session.rewind(0)
    session.prefill(TOKENS[:9])
    assert session.reachable(1) == 1
    # Padding takes no row; the last call has two tokens of it.
    session.prefill(TOKENS[9:38])
    session.prefill(TOKENS[38:52])
    assert [session.reachable(p) for p in (19, 18)] == [19, 0]
    session.rewind(19)
    session.step(TOKENS[19])
    agrees(session, expected)


def ringed(compiled: Bundle) -> bool:
    return compiled.manifest.states[0].kind == "window"


def test_the_last_snapshots_are_retained_and_only_one_of_large_ones(compiled, monkeypatch):
    session = Session(compiled, 1)
    for count, position in ((MAX_SNAPSHOTS + 3, 8 * 4), (2, 8 * 2)):
        session.rewind(0)
        for _ in range(count):
            session.prefill(TOKENS[:8])
            session.keep()
        session.prefill(TOKENS)
        assert session.reachable(position - 1) == 0 and session.reachable(position + 7) == position
        monkeypatch.setattr("castiron.vmfb.run.session.MAX_SNAPSHOT_BYTES", 0)


def test_a_snapshot_is_stale_after_an_earlier_rewind(compiled, expected):
    session = Session(compiled, 1)
    session.prefill(TOKENS[:12])
    early = session.snapshot()
    session.prefill(TOKENS[12:18])
    late = session.snapshot()
    session.prefill(TOKENS[18:25])
    session.restore(late)
    session.restore(early)
    with pytest.raises(SessionError, match="snapshot of position 18: the session was later rewound to"):
        session.restore(late)
    session.prefill(TOKENS[12:30])
    agrees(session, expected)
    with pytest.raises(SessionError, match="snapshot of position 12: it is from another session"):
        Session(session.program).restore(early)


def test_a_fork_is_independent(compiled, expected):
    session = Session(compiled, 1)
    session.prefill(TOKENS[:13])
    other = session.fork()
    session.prefill(TOKENS[5:20])
    other.prefill(TOKENS[13:22])
    agrees(other, expected)
    session = other.fork()
    other.rewind(0)
    session.step(TOKENS[22])
    agrees(session, expected)


def test_a_prefix_is_copied_from_reachable_positions(compiled, expected):
    batch = Batch(compiled, 1)
    first, second = batch.slots[:2]
    first.prefill(TOKENS[:10])
    first.keep()
    first.prefill(TOKENS[10:55])
    second.prefill(TOKENS[30:50])
    for position in (55, 10, 0, *[40] * ringed(compiled)):
        second.copy_from(first, position)
        second.prefill(TOKENS[position : position + 12])
        agrees(second, expected)
    with pytest.raises(SessionError, match="cannot copy position 17 of a session at 55"):
        second.copy_from(first, 17)
    first.step(TOKENS[55])
    agrees(first, expected)


def test_slots_of_a_batch_are_independent(compiled, expected):
    """Slots have their own positions; the state of a slot without a step keeps its bits."""
    batch = Batch(compiled, 1)
    for slot, length in enumerate((3, 17, 8)):
        batch.slots[slot].prefill(TOKENS[:length])
    resting = [state.array.copy() for state in batch.slots[1]._states]
    for active in ((0, 2), (0,), (2, 0), (0, 2)):
        batch.step({slot: TOKENS[batch.slots[slot].position] for slot in active})
        for slot in active:
            agrees(batch.slots[slot], expected)
    for before, state in zip(resting, batch.slots[1]._states, strict=True):
        np.testing.assert_array_equal(before, state.array)
    batch.step({slot: TOKENS[batch.slots[slot].position] for slot in (0, 1, 2)})
    for slot in (0, 1, 2):
        agrees(batch.slots[slot], expected)


@pytest.mark.parametrize("position", [3, 50])
def test_a_paused_sequence_continues_with_the_same_bits(compiled, position):
    session, other = Session(compiled, 1), Session(compiled, 1)
    session.prefill(TOKENS[:position])
    paused = Paused.of(session, False, 1 << 30)
    wanted = [(session.step(token), session.logits().tobytes()) for token in TOKENS[position:]]
    for again in (other, session):
        again.rewind(0)
        again.prefill(TOKENS[20:45])
        again.take(paused.rows, TOKENS[:position], paused.chunked_tokens, paused.is_long)
        assert again.position == position
        assert [(again.step(token), again.logits().tobytes()) for token in TOKENS[position:]] == wanted
