"""Several sequences decoded at once get the tokens that each gets alone; proposed tokens are checked exactly."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.pipelines.casting.compile import Options, compile_model
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.scores import rows
from castiron.pipelines.generation.sequence import Failed, Sequence
from castiron.reference import tiny
from castiron.vmfb.batch import Batch
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.cover import Cover
from castiron.vmfb.session import Session, SessionError
from tests.test_end_to_end import greedy, prompt

CONTEXT = 64


@pytest.fixture(scope="module", params=["kernels", "portable"])
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    checkpoint = tiny.tiny_model("llama", folder / "llama")
    options = Options(context=CONTEXT, lowering=request.param, batch=(2, 4), speculate=(4,))
    return open_bundle(compile_model(checkpoint, folder / "bundle", options).bundle)


# What calls of one token, two and four cost, so that slots are stepped one by one, in pairs, and all together.
COSTS = {1: {1: 1, 2: 3, 4: 9}, 2: {1: 9, 2: 1, 4: 9}, 4: {1: 9, 2: 9, 4: 1}}


def decoding_by(costs: int, bundle, threads: int) -> Batch:
    batch = Batch(bundle, threads)
    assert batch.size == 4
    batch._cover = Cover(4, COSTS[costs])
    return batch


@pytest.mark.parametrize("widest", COSTS)
def test_sequences_come_and_go_and_get_what_they_get_alone(bundle, widest):
    """By whichever calls."""
    batch = decoding_by(widest, bundle, 2)
    prompts = {0: prompt(5), 1: prompt(17), 3: prompt(9)}
    expected = {slot: greedy(Session(bundle, 1), tokens, 12) for slot, tokens in prompts.items()}
    found = {slot: [batch.slots[slot].prefill(tokens)] for slot, tokens in prompts.items()}
    for step in range(11):
        # Slot 3 joins late, slot 0 pauses in between.
        active = [s for s in found if not (s == 3 and step < 3) and not (s == 0 and 4 <= step < 6)]
        for slot, token in batch.step({s: found[s][-1] for s in active}).items():
            found[slot].append(token)
            assert batch.slots[slot].logits().argmax() == token
    for slot, tokens in found.items():
        assert tokens == expected[slot][: len(tokens)] and len(tokens) >= 9


def test_logits_of_a_slot_stay_while_others_go_on(bundle):
    batch = Batch(bundle, 1)
    for slot, session in enumerate(batch.slots[:2]):
        session.prefill(prompt(6, seed=slot))
    batch.step({0: 5, 1: 6, 2: 4})
    kept = batch.slots[0].logits()
    # By the same function as before, and by another.
    for others in ({1: 7, 2: 8}, {1: 9}):
        batch.step(others)
        assert (batch.slots[0].logits() == kept).all()


def test_a_full_slot_is_refused_and_disturbs_nobody(bundle):
    batch = Batch(bundle, 1)
    batch.slots[0].prefill(prompt(CONTEXT))
    for slot in (1, 2):
        batch.slots[slot].prefill(prompt(8, seed=slot))
    with pytest.raises(SessionError, match=str(CONTEXT)):
        batch.step({0: 5, 1: 5})
    alone = Session(bundle, 1)
    alone.prefill(prompt(8, seed=1))
    assert batch.step({1: 5, 2: 5})[1] == alone.step(5)
    with pytest.raises(SessionError, match="no slot 9"):
        batch.step({9: 1})


def test_slots_that_are_not_stepped_keep_every_position(bundle):
    batch = Batch(bundle, 1)
    for slot, length in enumerate((CONTEXT, 7, 9)):
        batch.slots[slot].prefill(prompt(length, seed=slot))
    states = [state.array for slot in (0, 2) for state in batch.slots[slot]._states]
    before = [array.copy() for array in states]
    batch.step({1: 5, 3: 6})
    assert batch.slots[0].position == CONTEXT
    for was, now in zip(before, states, strict=True):
        assert (was == now).all()
    # One that began with this step was no slot at rest.
    alone = Session(bundle, 1)
    alone.step(6)
    np.testing.assert_allclose(batch.slots[3].logits(), alone.logits(), atol=2e-5 * np.ptp(alone.logits()))


def test_a_copied_prefix_goes_on_as_its_origin(bundle):
    batch = Batch(bundle, 1)
    batch.slots[0].prefill(prompt(20))
    batch.slots[1].copy_from(batch.slots[0], 13)
    assert batch.slots[1].prefill(prompt(20)[13:]) == greedy(Session(bundle, 1), prompt(20), 1)[0]


def test_verify_gives_the_token_after_each_position(bundle):
    session, alone = Session(bundle, 1), Session(bundle, 1)
    session.prefill(prompt(10))
    alone.prefill(prompt(10))
    tokens = prompt(4, seed=5)
    assert session.verify(tokens) == [alone.step(token) for token in tokens]
    session.rewind(11)
    alone.rewind(11)
    assert session.step(9) == alone.step(9)
    with pytest.raises(SessionError, match="5 tokens cannot be verified"):
        session.verify(prompt(5))


def test_a_slot_without_numbers_fails_alone(bundle):
    """Whatever brought it there; the others get what they get alone, and what is checked at once is told too."""
    tokens = prompt(6)
    expected = greedy(Session(bundle, 1), tokens, 4)

    def spoil(session: Session) -> None:
        for state in session.rows(session.position):
            state[:] = np.nan

    for widest in COSTS:
        batch = decoding_by(widest, bundle, 1)
        first = [session.prefill(tokens) for session in batch.slots[:2]]
        spoil(batch.slots[0])
        assert batch.step(dict(enumerate(first))) == {0: -1, 1: expected[1]}
    spoil(session := batch.slots[1])
    assert session.verify(tokens[:4]) == [-1] * 4
    for few in (3, 4):
        with pytest.raises(SessionError, match="logits are not numbers"):
            list(rows(session, tokens[:few], 4))

    scheduler = Scheduler(bundle, 1)
    running = [Sequence(tokens, CONTEXT, max_tokens=4) for _ in range(3)]
    for sequence in running:
        scheduler.submit(sequence)
    told = []
    while not scheduler.idle:
        told += scheduler.turn()
        for slot, sequence in scheduler.decoding.items():
            if sequence is running[1]:
                spoil(scheduler.batch.slots[slot])
    assert [sequence.tokens for sequence in running[::2]] == [expected] * 2
    (failed,) = [event for sequence, event in told if isinstance(event, Failed)]
    assert "logits are not numbers" in str(failed.error)
