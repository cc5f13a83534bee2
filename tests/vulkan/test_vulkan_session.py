"""Sessions, batches and states on a Vulkan device compute what they compute on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.vmfb.device.program import NanLogitsError
from castiron.vmfb.run.session import Batch, Session
from castiron.vmfb.run.state_file import StateFile, identity, read_head, read_rows, write_state

# A KV cache, a ring buffer, and recurrent states.
FAMILIES = ("llama", "gemma3_text", "lfm2")
OPTIONS = {"context": 64, "prefill": (8,), "batch": (4,), "verify_widths": (4,)}
TOKENS = np.random.default_rng(3).integers(3, 200, 64).tolist()


@pytest.fixture(params=FAMILIES)
def bundles(request, compiled):
    return compiled(request.param, **OPTIONS)


@pytest.fixture
def sessions(bundles) -> tuple[Session, Session]:
    return Session(bundles.cpu, 1), Session(bundles.gpu)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Assert that logits differ by rounding only."""
    assert np.abs(found - wanted).max() < 3e-5 * np.abs(wanted).max()


def agree(sessions: tuple[Session, Session]) -> None:
    """Assert that both sessions have the same position, logits and states."""
    cpu, gpu = sessions
    assert cpu.position == gpu.position
    same(gpu.logits(), cpu.logits())
    for wanted, found in zip(cpu.rows(cpu.position), gpu.rows(gpu.position), strict=True):
        same(found.copy(), wanted)


def test_prompts_of_any_length_and_steps(sessions):
    for end in (1, 7, 8, 9, 30, 41):
        for session in sessions:
            session.rewind(0)
            session.prefill(TOKENS[:end])
        agree(sessions)
        assert len({session.step(TOKENS[end]) for session in sessions}) == 1
        agree(sessions)


def test_forks_are_independent(sessions):
    for session in sessions:
        session.prefill(TOKENS[:12])
    forks = tuple(session.fork() for session in sessions)
    agree(forks)
    for session, fork in zip(sessions, forks, strict=True):
        session.step(TOKENS[12])
        fork.prefill(TOKENS[20:31])
    agree(sessions)
    agree(forks)


def test_rewinding_and_snapshots(sessions):
    for session in sessions:
        session.prefill(TOKENS[:10])
        session.keep()
        taken = session.snapshot()
        session.prefill(TOKENS[10:20])
        session.rewind(10)
        session.step(TOKENS[30])
        session.restore(taken)
        session.prefill(TOKENS[40:45])
    agree(sessions)
    for session in sessions:
        session.rewind(0)
        session.prefill(TOKENS[5:9])
    agree(sessions)


def test_verify_gives_every_token(sessions):
    found = []
    for session in sessions:
        session.prefill(TOKENS[:9])
        found.append(session.verify(TOKENS[9:13]))
    assert found[0] == found[1]
    same(sessions[1].verified_logits(), sessions[0].verified_logits())
    agree(sessions)
    assert len({session.verify_fewer(TOKENS[13:15], 4) for session in sessions}) == 1
    agree(sessions)


def test_a_state_file_continues_on_the_other_device(sessions, tmp_path):
    cpu, gpu = sessions
    gpu.prefill(TOKENS[:16])
    path = tmp_path / "state"
    tokens = np.array(TOKENS[:16], np.int32)
    write_state(path, identity(gpu.manifest), tokens, gpu.rows(16))
    head = read_head(path)
    assert isinstance(head, StateFile)
    for session in (cpu, Session(gpu.program)):
        session.take(read_rows(head, session.rows(16)), TOKENS[:16], gpu.chunked_tokens)
        session.step(TOKENS[16])
        gpu.rewind(16) if gpu.position > 16 and gpu.reachable(16) == 16 else None
        same(session.logits(), reference(cpu, TOKENS[:17]))


def reference(session: Session, tokens: list[int]) -> np.ndarray:
    """Return the logits of a new session of the same program after `tokens`."""
    fresh = Session(session.program)
    fresh.prefill(tokens)
    return fresh.logits()


def test_slots_decode_together_and_share_prefixes(bundles):
    batches = Batch(bundles.cpu, 1), Batch(bundles.gpu)
    for batch in batches:
        batch.slots[1].prefill(TOKENS[:8])
        batch.slots[2].copy_from(batch.slots[1], 8)
        batch.slots[2].prefill(TOKENS[20:25])
        batch.slots[3].prefill(TOKENS[30:39])
    for step in range(6):
        # A slot may be empty, and one pauses.
        tokens = {slot: TOKENS[step + slot] for slot in range(4) if slot != 2 or step % 3}
        first, second = (batch.step(tokens) for batch in batches)
        assert first == second
    for slot in range(4):
        agree((batches[0].slots[slot], batches[1].slots[slot]))


def test_nan_logits_are_reported(compiled):
    batch = Batch(compiled("llama", **OPTIONS).gpu)
    slot = batch.slots[1]
    slot.prefill(TOKENS[:8])
    for state in slot._states:
        state.array[:] = np.full(state.array.shape, np.nan, np.float32)
    found = batch.step({0: 3, 1: 4})
    assert found[1] == -1 and found[0] >= 0
    with pytest.raises(NanLogitsError):
        slot.step(5)
