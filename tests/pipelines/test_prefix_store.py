"""States of long beginnings on disk: a run that goes on from one is the run without, to the last bit; what is not the state
that was written is never used."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from castiron.pipelines.generation import prefix_store
from castiron.pipelines.generation.prefix_cache import PrefixCache
from castiron.pipelines.generation.prefix_store import PrefixStore
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Sequence
from castiron.vmfb.session import Session
from castiron.vmfb.state_file import read_head
from tests.families.checkpoints import VOCAB, bundle

TOKENS = np.random.default_rng(23).integers(3, VOCAB, 110)
OTHERS = np.random.default_rng(24).integers(3, VOCAB, 110)


@pytest.fixture(scope="module", params=["lfm2", "ring", "decaying_sum"])
def cast(request, tmp_path_factory):
    """Rows of positions and recurrent ones; a ring; a recurrent state alone."""
    return bundle(request.param, "kernels", tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(cast, tmp_path):
    return PrefixStore(tmp_path / "states", cast.manifest)


@pytest.fixture(scope="module")
def program(cast):
    return Session(cast, 1).program


def read(session: Session, store: PrefixStore | None, prompt: np.ndarray) -> int:
    """Reads a prompt as castiron run does; how many of its tokens the store had."""
    known = store.take(session, prompt) if store else 0
    session.prefill(prompt[known:], progress=lambda *_: store and store.offer(session, prompt))
    if store:
        store.finish()
    return known


def says(session: Session, store: PrefixStore | None, prompt: np.ndarray) -> tuple[int, list[bytes]]:
    """How many tokens were known, and the logits after the prompt and after five greedy tokens, to the bit."""
    known, found = read(session, store, prompt), []
    for _ in range(6):
        logits = session.logits()
        found.append(logits.tobytes())
        session.step(int(logits.argmax()))
    return known, found


def test_a_run_from_a_state_is_the_run_without_it_to_the_last_bit(cast, program, store):
    whole = (len(TOKENS) - 1) // store.width * store.width
    assert whole >= prefix_store.CHUNKS * store.width
    _, expected = says(Session(program), None, TOKENS)
    assert says(Session(program), store, TOKENS) == (0, expected)
    # Another process: it knows nothing but the directory.
    again = PrefixStore(store.directory, cast.manifest)
    assert says(Session(program), again, TOKENS) == (whole, expected)
    used = Session(program)
    used.prefill(OTHERS[:50])
    assert says(used, again, TOKENS) == (whole, expected)
    assert len(list(store.folder.iterdir())) == 1
