"""Count the free positions of a context, and move a session to a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from castiron.vmfb.session import Session
    from castiron.vmfb.states import Snapshot

# Default max tokens of an answer: enough for nearly all answers, and a limit for base models, which
# have no end token.
DEFAULT_MAX_TOKENS = 1024


def free_positions(context: int, prompt_tokens: int) -> int:
    """Return how many tokens can follow a prompt; below 1 if the prompt does not fit.

    `context`: max tokens of prompt and answer together.
    """
    # The last generated token needs no position, because the model never reads it.
    return context - prompt_tokens + 1


def move_to(session: Session, position: int, fed: Sequence[int] = (), source: Session | None = None) -> None:
    """Set `session` to `position`: move it back, or copy the states (KV cache) of `source`.

    `fed`: the tokens before `position`. Recurrent states can return to some positions only. From
    the nearest earlier one, the session reads the last tokens of `fed` again.
    """
    source = source or session
    found = source.reachable(position)
    if source is session:
        session.rewind(found)
    else:
        session.copy_from(source, found)
    if found < position:
        session.prefill(fed[len(fed) - (position - found) :])


def move_after(session: Session, before: Snapshot, tokens: Sequence[int]) -> None:
    """Move `session` back to the position after `tokens`, which it read after `before`."""
    position = before.position + len(tokens)
    if session.reachable(position) == position:
        session.rewind(position)
    else:
        session.restore(before)
        if tokens:
            session.prefill(tokens)


def common_prefix(cached: np.ndarray, prompt: np.ndarray) -> int:
    """Return the length of the common prefix of two token sequences, i32 [n] each.

    It excludes the last token of `prompt`, which the model must read to compute the next logits.
    """
    length = max(0, min(len(cached), len(prompt) - 1))
    differs = cached[:length] != prompt[:length]
    return int(differs.argmax()) if differs.any() else length
