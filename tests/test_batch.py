"""Sequences in a batch get the tokens of single sequences; verified tokens are exact."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Failed, Request
from castiron.pipelines.engine.sampling import logit_rows
from castiron.reference import tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.decode_plan import Cover
from castiron.vmfb.run.session import Batch, Session, SessionError
from tests.test_end_to_end import greedy, prompt

CONTEXT = 64


@pytest.fixture(scope="module", params=["kernels", "portable"])
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    checkpoint = tiny.tiny_model("llama", folder / "llama")
    options = Options(context=CONTEXT, lowering=request.param, batch=(2, 4), verify_widths=(4,))
    return open_bundle(compile_model(checkpoint, folder / "bundle", options).bundle)


# Costs of calls by width, with which the batch uses only calls of one slot, of two or of four.
COSTS = {1: {1: 1, 2: 3, 4: 9}, 2: {1: 9, 2: 1, 4: 9}, 4: {1: 9, 2: 9, 4: 1}}


def decoding_by(width: int, bundle, threads: int = 1) -> Batch:
    """Return a batch that decodes by calls of `width` slots."""
    batch = Batch(bundle, threads)
    assert batch.size == 4
    batch._cover = Cover(4, COSTS[width])
    return batch


@pytest.mark.parametrize("widest", COSTS)
def test_batched_sequences_equal_single_ones(bundle, widest):
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


def test_logits_of_a_slot_stay_while_others_step(bundle):
    batch = Batch(bundle, 1)
    for slot, session in enumerate(batch.slots[:2]):
        session.prefill(prompt(6, seed=slot))
    batch.step({0: 5, 1: 6, 2: 4})
    saved = batch.slots[0].logits()
    # The second step uses the same function as before, the third one another.
    for others in ({1: 7, 2: 8}, {1: 9}):
        batch.step(others)
        assert (batch.slots[0].logits() == saved).all()


def test_rejects_a_full_slot(bundle):
    batch = Batch(bundle, 1)
    batch.slots[0].prefill(prompt(CONTEXT))
    for slot in (1, 2):
        batch.slots[slot].prefill(prompt(8, seed=slot))
    with pytest.raises(SessionError, match=str(CONTEXT)):
        batch.step({0: 5, 1: 5})
    single = Session(bundle, 1)
    single.prefill(prompt(8, seed=1))
    assert batch.step({1: 5, 2: 5})[1] == single.step(5)
    with pytest.raises(SessionError, match="slot 9 does not exist"):
        batch.step({9: 1})


def test_resting_slots_are_unchanged(bundle):
    batch = Batch(bundle, 1)
    for slot, length in enumerate((CONTEXT, 7, 9)):
        batch.slots[slot].prefill(prompt(length, seed=slot))
    states = [state.array for slot in (0, 2) for state in batch.slots[slot]._states]
    before = [array.copy() for array in states]
    batch.step({1: 5, 3: 6})
    assert batch.slots[0].position == CONTEXT
    for was, now in zip(before, states, strict=True):
        assert (was == now).all()
    # Slot 3 begins with this step.
    single = Session(bundle, 1)
    single.step(6)
    np.testing.assert_allclose(batch.slots[3].logits(), single.logits(), atol=2e-5 * np.ptp(single.logits()))


def test_nan_logits_fail_a_single_slot(bundle):
    """NaN logits of a slot do not affect other slots, and verify calls report them too."""
    tokens = prompt(6)
    expected = greedy(Session(bundle, 1), tokens, 4)

    def spoil(session: Session) -> None:
        for state in session.rows(session.position):
            state[:] = np.nan

    for widest in COSTS:
        batch = decoding_by(widest, bundle)
        first = [session.prefill(tokens) for session in batch.slots[:2]]
        spoil(batch.slots[0])
        assert batch.step(dict(enumerate(first))) == {0: -1, 1: expected[1]}
    spoil(session := batch.slots[1])
    assert session.verify(tokens[:4]) == [-1] * 4
    for few in (3, 4):
        with pytest.raises(SessionError, match="logits are NaN"):
            list(logit_rows(session, tokens[:few], 4))

    scheduler, events = Engine(bundle, 1).scheduler, []
    running = [Request(tokens, CONTEXT, max_tokens=4) for _ in range(3)]
    for request in running:
        scheduler.submit(request)
    while not scheduler.idle:
        events += scheduler.turn()
        for slot in [slot for slot, request in scheduler.decoding.items() if request is running[1]]:
            spoil(scheduler.batch.slots[slot])
    assert [request.tokens for request in running[::2]] == [expected] * 2
    (failed,) = [event for _, event in events if isinstance(event, Failed)]
    assert "logits are NaN" in str(failed.error)
