"""Bytes that answers keep beside their states until they are sent: log-probabilities, and what holds a text to its grammar.

They are counted before a request is queued, as its answers may become that long, so that no memory is promised twice.
"""

from __future__ import annotations

from castiron.pipelines.generation.grammar import Grammar
from castiron.pipelines.measuring.memory import total_bytes
from castiron.pipelines.serve.clients import Share, Shares
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.sizes import megabytes

# Of one token with its log-probability, and of one of the likeliest in its place, from the model to the JSON of an answer.
TOKEN, LIKELY = 1_200, 800
# The part of the machine's memory that all answers may keep, and of that the part of one client's.
PART, EACH = 8, 2


def shares(most: int | None = None) -> Shares:
    """What all answers of a model may keep: `most` bytes, or a part of the machine's memory."""
    most = total_bytes() // PART if most is None else most
    return Shares("log-probabilities and grammars", most, most // EACH)


def take(share: Share, tokens: int, top: int | None, prompt: int, prompt_top: int | None, grammar: Grammar | None) -> None:
    """Room for what one answer keeps: of so many `tokens` the log-probabilities of the `top` likeliest in each place, of its
    prompt the same, None for none; and its grammar. ApiError 400 if there never is room for the request, TooMuch if there is
    none now."""
    count = sum(n * (TOKEN + LIKELY * each) for n, each in ((tokens, top), (prompt, prompt_top)) if each is not None)
    count += grammar.nbytes if grammar else 0
    if share.count + count > share.shares.each:
        message = (
            f"the {share.shares.what} of this request may take {megabytes(share.count + count)} and more, and there are "
            f"{megabytes(share.shares.each)} for one client: ask for a smaller max_tokens, n, top_logprobs or grammar"
        )
        raise ApiError(400, message, "max_tokens", "too_many_bytes")
    if count:
        share.take(count)
