"""Count the free positions of a context after a prompt, and move a session to a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.errors import PipelineError

if TYPE_CHECKING:
    from castiron.vmfb.session import Session
    from castiron.vmfb.states import Snapshot

# Default max tokens of an answer: enough for nearly all answers, and a limit for base models, which
# have no end token.
DEFAULT_MAX_TOKENS = 1024


def free_positions(context: int, prompt_tokens: int) -> int:
    """Return how many tokens a model can generate after a prompt; below 1 if it does not fit.

    context: max tokens of prompt and answer together.
    """
    # The last generated token needs no position, because the model never reads it.
    return context - prompt_tokens + 1


def check_free_positions(context: int, prompt_tokens: int, max_tokens: int | None) -> int:
    """Return `free_positions` after checking the sizes of a request.

    Raises PipelineError if the prompt is empty, `max_tokens` is below 1, or the prompt and
    `max_tokens` generated tokens do not fit in the context.
    """
    if prompt_tokens < 1:
        raise PipelineError("the prompt has no tokens; give at least one")
    if max_tokens is not None and max_tokens < 1:
        raise PipelineError(f"max_tokens is {max_tokens}; give at least 1")
    free = free_positions(context, prompt_tokens)
    if free < 1:
        raise PipelineError(
            f"the prompt has {prompt_tokens} tokens and the bundle's context is {context}; shorten the prompt, or give "
            "a larger --context"
        )
    if max_tokens is not None and max_tokens > free:
        raise PipelineError(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, but the bundle's context is {context}; "
            f"ask for at most {free}, or give a larger --context"
        )
    return free


def default_limit(limit: int | None, free: int) -> int | None:
    """Return `limit` as the max tokens of an answer, or None if fewer positions are free.

    None means that only the context limits the answer.
    """
    return limit if limit is not None and limit <= free else None


def move_to(session: Session, position: int, fed: Sequence[int] = (), source: Session | None = None) -> None:
    """Move `session` back to `position`, or copy the states of the session `source` up to it.

    `fed`: the tokens before `position`. Recurrent states may not be able to return to exactly
    `position`; then the session goes back further and reads the last tokens of `fed` again.
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
    """Move `session` back to the position after `tokens`, which it read after snapshot `before`."""
    position = before.position + len(tokens)
    if session.reachable(position) == position:
        session.rewind(position)
    else:
        session.restore(before)
        if tokens:
            session.prefill(tokens)


def common_prefix(cached: np.ndarray, prompt: np.ndarray) -> int:
    """Return the length of the common prefix of two token sequences, i32 [n] each.

    The last token of `prompt` does not count, because the model must read it for its logits.
    """
    length = max(0, min(len(cached), len(prompt) - 1))
    differs = cached[:length] != prompt[:length]
    return int(differs.argmax()) if differs.any() else length
