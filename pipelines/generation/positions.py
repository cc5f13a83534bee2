"""Positions of a context: how many tokens have room after a prompt, and standing a session at one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.errors import PipelineError

if TYPE_CHECKING:
    from castiron.vmfb.session import Session
    from castiron.vmfb.states import Snapshot


# What an answer may have where nobody says: long enough for nearly all, and an end for a base model, which has none of its
# own.
USUAL_TOKENS = 1024


def room(context: int, position: int, prompt: int) -> int:
    """How many tokens may be generated after `prompt` tokens that begin at `position`; below 1 if those do not fit.

    The last token that is generated needs no position: it is never fed.
    """
    return context - position - prompt + 1


def check_room(context: int, position: int, prompt: int, max_tokens: int | None) -> int:
    """`room`; PipelineError unless the prompt and the `max_tokens` after it fit, or if either is nothing."""
    if prompt < 1:
        raise PipelineError("the prompt has no tokens; give at least one")
    if max_tokens is not None and max_tokens < 1:
        raise PipelineError(f"{max_tokens} tokens were asked for; ask for at least 1")
    free = room(context, position, prompt)
    before = f"{position} tokens are in the cache, " if position else ""
    if free < 1:
        raise PipelineError(
            f"{before}the prompt has {prompt} tokens and the bundle's context is {context}: shorten the prompt, or "
            "compile with a larger --context"
        )
    if max_tokens is not None and max_tokens > free:
        raise PipelineError(
            f"{before}the prompt has {prompt} tokens and {max_tokens} more are asked for, but the bundle's context is "
            f"{context}: ask for at most {free}, or compile with a larger --context"
        )
    return free


def at_most(limit: int | None, free: int) -> int | None:
    """`max_tokens` for a limit that was not asked for and so gives way to a context with room for `free` tokens; None is
    to its end."""
    return limit if limit is not None and limit <= free else None


def stand(session: Session, position: int, fed: Sequence[int] = (), source: Session | None = None) -> None:
    """Puts `session` behind its own first `position` tokens, or behind those of `source`, which are copied.

    `fed`: the last of these tokens. Where the states do not remember the position, the session goes back as far as they do
    and reads again from there.
    """
    source = source or session
    found = source.reachable(position)
    if source is session:
        session.rewind(found)
    else:
        session.copy_from(source, found)
    if found < position:
        session.prefill(fed[len(fed) - (position - found) :])


def stand_after(session: Session, before: Snapshot, tokens: Sequence[int]) -> None:
    """Puts `session` behind `tokens` after `before`, of which it has taken in these and maybe more."""
    position = before.position + len(tokens)
    if session.reachable(position) == position:
        session.rewind(position)
    else:
        session.restore(before)
        if tokens:
            session.prefill(tokens)


def shared(held: np.ndarray, prompt: np.ndarray) -> int:
    """How many tokens at the beginning of `prompt` are those of `held`, both i32 [n]; never the prompt's last, whose
    logits are needed."""
    length = max(0, min(len(held), len(prompt) - 1))
    differs = held[:length] != prompt[:length]
    return int(differs.argmax()) if differs.any() else length
