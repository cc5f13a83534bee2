"""States of every kind: what a model says does not depend on the way by which its tokens came in."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.pipelines.generation.pausing import Paused
from castiron.pipelines.generation.positions import stand
from castiron.vmfb.batch import Batch
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.session import KEPT, Session, SessionError
from tests.families.checkpoints import FAMILIES, HYBRIDS, VOCAB, bundle, logits_of

TOKENS = np.random.default_rng(11).integers(0, VOCAB, 60).tolist()


CASES = [*((f, l) for f in FAMILIES for l in ("kernels", "portable")), *((f, "kernels") for f in HYBRIDS)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def cast(request, tmp_path_factory):
    return bundle(*request.param, tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def expected(cast):
    """Logits after each of TOKENS."""
    return logits_of(cast.manifest.config["model_type"], cast.path.parent / "checkpoint", TOKENS)


def agrees(session: Session, expected: list[np.ndarray]) -> None:
    """The session's logits are those after as many of TOKENS as it has taken in."""
    wanted = expected[session.position - 1]
    np.testing.assert_allclose(session.logits(), wanted, atol=3e-5 * np.abs(wanted).max())


def test_the_manifest_says_what_the_states_are(cast):
    kinds = {"decaying_sum": {"recurrent"}, "ring": {"window"}}
    family = cast.manifest.config["model_type"]
    assert {state.kind for state in cast.manifest.states} == kinds.get(family, {"positional", "recurrent"})


@pytest.mark.parametrize("pieces", [[1] * 20, [60], [5, 1, 9, 32, 3, 10], [8, 33], [3, 3, 3, 7], [31, 1, 1, 5]])
def test_a_prompt_in_pieces_equals_token_by_token(cast, expected, pieces):
    session, done = Session(cast, 1), 0
    for size in pieces:
        session.prefill(TOKENS[done : done + size])
        done += size
        agrees(session, expected)


def test_logits_of_every_proposed_token(cast, expected):
    session = Session(cast, 1)
    for start in (0, 1, 7, 20):
        session.rewind(0)
        if start:
            session.prefill(TOKENS[:start])
        assert session.verify(TOKENS[start : start + 4]) == [int(e.argmax()) for e in expected[start : start + 4]]
        agrees(session, expected)
        session.step(TOKENS[start + 4])
        agrees(session, expected)


def test_a_session_goes_back_where_it_remembers_and_nowhere_else(cast, expected):
    session = Session(cast, 1)
    for start, end in ((0, 11), (11, 20)):
        session.prefill(TOKENS[start:end])
        session.keep()
    session.prefill(TOKENS[20:])
    assert [session.reachable(p) for p in (60, 25, 20, 19, 0)] == [60, 20, 20, 11, 0]
    with pytest.raises(SessionError, match="does not remember its state at position 25: it can go back to 20"):
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
    assert session.reachable(24) == (24 if ringed(cast) else 0), "what was kept of the tokens before is forgotten"


def test_what_no_state_remembers_is_read_again(cast, expected):
    session = Session(cast, 1)
    session.prefill(TOKENS[:9])
    session.keep()
    session.prefill(TOKENS[9:50])
    for position in (13, 7):
        stand(session, position, TOKENS[:position])
        assert session.position == position
        session.step(TOKENS[position])
        agrees(session, expected)


def test_a_ring_goes_back_as_far_as_its_rows_reach(cast, expected):
    """Windows of 6 and chunks of 32 tokens: what stood 38 positions before the furthest one is gone."""
    if not ringed(cast):
        return
    session = Session(cast, 1)
    assert {(state.shape[1], state.window) for state in cast.manifest.states} == {(38, 6)}
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
    # Padding of a call takes no row: the last one here has two tokens of it.
    session.prefill(TOKENS[9:38])
    session.prefill(TOKENS[38:52])
    assert [session.reachable(p) for p in (19, 18)] == [19, 0]
    session.rewind(19)
    session.step(TOKENS[19])
    agrees(session, expected)


def ringed(cast: Bundle) -> bool:
    return cast.manifest.states[0].kind == "window"


def test_few_places_are_kept_the_last_ones(cast):
    session = Session(cast, 1)
    for _ in range(KEPT + 3):
        session.prefill(TOKENS[:8])
        session.keep()
    session.prefill(TOKENS)
    assert session.reachable(8 * 3) == 0 and session.reachable(8 * 4 + 7) == 8 * 4


def test_of_large_ones_the_last_alone_is_kept(cast, monkeypatch):
    monkeypatch.setattr("castiron.vmfb.session.KEPT_BYTES", 0)
    session = Session(cast, 1)
    for _ in range(2):
        session.prefill(TOKENS[:8])
        session.keep()
    session.prefill(TOKENS)
    assert [session.reachable(p) for p in (15, 17)] == [0, 16]


def test_a_snapshot_holds_until_other_tokens_stand_before_it(cast, expected):
    session = Session(cast, 1)
    session.prefill(TOKENS[:12])
    early = session.snapshot()
    session.prefill(TOKENS[12:18])
    late = session.snapshot()
    session.prefill(TOKENS[18:25])
    session.restore(late)
    session.restore(early)
    with pytest.raises(SessionError, match="snapshot of position 18 is not of this session's present tokens"):
        session.restore(late)
    session.prefill(TOKENS[12:30])
    agrees(session, expected)
    with pytest.raises(SessionError, match="snapshot of position 12"):
        Session(session.program).restore(early)


def test_a_fork_goes_its_own_way(cast, expected):
    session = Session(cast, 1)
    session.prefill(TOKENS[:13])
    other = session.fork()
    session.prefill(TOKENS[5:20])
    other.prefill(TOKENS[13:22])
    agrees(other, expected)
    session = other.fork()
    other.rewind(0)
    session.step(TOKENS[22])
    agrees(session, expected)


def test_a_beginning_is_copied_where_the_origin_remembers_it(cast, expected):
    batch = Batch(cast, 1)
    first, second = batch.slots[:2]
    first.prefill(TOKENS[:10])
    first.keep()
    first.prefill(TOKENS[10:55])
    second.prefill(TOKENS[30:50])
    for position in (55, 10, 0, *[40] * ringed(cast)):
        second.copy_from(first, position)
        second.prefill(TOKENS[position : position + 12])
        agrees(second, expected)
    with pytest.raises(SessionError, match="position 17 cannot be copied from a session at 55"):
        second.copy_from(first, 17)
    first.step(TOKENS[55])
    agrees(first, expected)


def test_sequences_of_a_batch_rest_and_go_on(cast, expected):
    """Slots at positions of their own; one that is not stepped keeps its state to the last bit."""
    batch = Batch(cast, 1)
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
def test_a_sequence_that_pauses_goes_on_with_the_same_bits(cast, position):
    session, other = Session(cast, 1), Session(cast, 1)
    session.prefill(TOKENS[:position])
    paused = Paused.of(session, False)
    wanted = [(session.step(token), session.logits().tobytes()) for token in TOKENS[position:]]
    for again in (other, session):
        again.rewind(0)
        again.prefill(TOKENS[20:45])
        paused.resume(again)
        assert again.position == position
        assert [(again.step(token), again.logits().tobytes()) for token in TOKENS[position:]] == wanted
