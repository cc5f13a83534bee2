"""Check that every way to run a bundle with canonical numerics gives the same bits.

`python -m tests.every_way BUNDLE TOKENS OUT` needs only the runtime, for a CPU without a compiler:
TOKENS is a file with a JSON list of ids, and the logits are written to OUT for `numpy.load`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Batch, Session


def decoded(session: Session, tokens: list[int]) -> np.ndarray:
    """Return the logits, [tokens, vocab], of decode steps."""
    rows = []
    for token in tokens:
        session.step(token)
        rows.append(session.logits())
    return np.array(rows)


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return np.asarray(found).tobytes() == wanted.tobytes()


def check_prompts(path: Path, tokens: list[int]) -> np.ndarray:
    """Return the logits of decode steps; fail unless prefill in any chunks gives the same bits."""
    wanted, n = decoded(Session(path, 1), tokens), len(tokens)
    for cuts in ([n], [n // 3, n], [*(cut for cut in (1, 9, 17) if cut < n), n]):
        session, start = Session(path, 2), 0
        for end in cuts:
            session.prefill(tokens[start:end])
            assert same(session.logits(), wanted[end - 1]), f"prefill to {end} of {cuts}"
            start = end
    return wanted


def check_every_way(path: Path, tokens: list[int]) -> np.ndarray:
    """Return the logits of decode steps; fail unless prefill, verify, fork and batches agree."""
    wanted, n = check_prompts(path, tokens), len(tokens)
    session = Session(path, 2)
    for start in range(0, n - 3, 4):
        session.verify(tokens[start : start + 4])
        assert same(session.verified_logits(), wanted[start : start + 4]), f"verify from {start}"
    session.rewind(n // 2)
    assert same(decoded(session.fork(), tokens[n // 2 : n // 2 + 3]), wanted[n // 2 : n // 2 + 3]), "rewind and fork"
    batch = Batch(path, 2)
    positions = {slot: 5 * slot for slot in range(batch.size)}
    for slot, at in positions.items():
        if at:
            batch.slots[slot].prefill(tokens[:at])
    for step in range(9):
        # The second sequence pauses in between.
        here = {slot: at for slot, at in positions.items() if slot != 1 or step % 3}
        batch.step({slot: tokens[at] for slot, at in here.items()})
        for slot, at in here.items():
            assert same(batch.slots[slot].logits(), wanted[at]), f"slot {slot} at {at}"
            positions[slot] += 1
    return wanted


def digest(logits: np.ndarray) -> str:
    return hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()


def main(bundle: str, tokens: str, out: str) -> None:
    """Run `check_every_way`, or `check_prompts` for a bundle without batch functions."""
    check = check_every_way if open_bundle(bundle).manifest.widths("batch") else check_prompts
    np.save(out, check(Path(bundle), json.loads(Path(tokens).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
