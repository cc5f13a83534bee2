"""Scores of tokens that are given: how a session's calls find them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.generation.sampling import Score, log_probabilities
from castiron.vmfb.program import NoNumbers

if TYPE_CHECKING:
    from castiron.pipelines.generation.sequence import Sequence as Generated
    from castiron.vmfb.session import Session


def width_of(widths: Sequence[int], most: int) -> int:
    """How many tokens a call of verify functions of these `widths` scores: the widest of at most so many; 1, a step, without
    them."""
    return max((width for width in widths if width <= most), default=min(widths, default=1))


def rows(session: Session, tokens: Sequence[int], width: int) -> Iterator[np.ndarray]:
    """Appends `tokens` and gives the logits after each, f32 [vocab]: by calls of `width` tokens (`width_of`), or where the rest
    is no whole call and cannot be a part of one, by steps. NoNumbers for logits that are none."""
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        if len(part) == width > 1:
            session.verify(part)
        elif width == 1 or not session.verify_fewer(part, width):
            for token in part:
                session.step(token)
                yield session.logits()
            continue
        for row in session.verified_rows():
            if np.isnan(row.max()):
                raise NoNumbers
            yield row


def score_chunk(session: Session, sequence: Generated, count: int, width: int) -> int:
    """Appends the next `count` tokens of the sequence's prompt at most, adds the scores of the tokens after each to its own and
    returns the most probable token after them."""
    prompt, start, best = sequence.prompt, session.position, 0
    for place, logits in enumerate(rows(session, prompt[start : start + count].tolist(), width), start + 1):
        if place < len(prompt):
            found = log_probabilities(logits, int(prompt[place]), sequence.prompt_logprobs or 0)
            sequence.scores.append(Score(*found))
        else:
            best = int(logits.argmax())
    return best
