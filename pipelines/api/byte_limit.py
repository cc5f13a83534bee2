"""Memory limits for the requests in flight of one client and of all clients."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.engine.memory import total_bytes
from castiron.pipelines.terminal import megabytes
from castiron.pipelines.text.grammar import Grammar

# Client of the request that the current asyncio task handles.
CLIENT: ContextVar[str] = ContextVar("client", default="")
# Its salt for the prefix cache: prompts with different salts share no prefix.
CACHE_SALT: ContextVar[str] = ContextVar("cache_salt", default="")
# Bytes in memory of a token's log-probability and of each of its top_logprobs, including their JSON.
TOKEN_BYTES, TOP_BYTES = 1_200, 800
# Log-probabilities and grammars of all clients may use 1/PART of the machine's memory; one client may use 1/CLIENT_PART of
# this limit.
PART, CLIENT_PART = 8, 2


class ByteLimit:
    """Two memory limits for requests in flight: one per client, and one for all clients."""

    def __init__(self, content: str, total: int, per_client: int):
        """Set the limits in bytes; content: what the memory contains, for errors."""
        self.content, self.total, self.per_client, self.used = content, total, per_client, 0
        self.clients: Counter[str] = Counter()

    def share(self, client: str) -> ByteShare:
        """Return an object with which one request of `client` reserves bytes; it has none yet."""
        return ByteShare(self, client)


class ByteShare:
    """The bytes that one request has reserved under a `ByteLimit`."""

    def __init__(self, limit: ByteLimit, client: str):
        self.limit, self.client, self.count = limit, client, 0

    def take(self, count: int) -> None:
        """Reserve `count` more bytes; raise ApiError 429 if this would exceed a limit."""
        limit, own = self.limit, self.limit.clients[self.client]
        for whose, used, limit_bytes in (("this client", own, limit.per_client), ("all clients", limit.used, limit.total)):
            if used + count > limit_bytes:
                raise ApiError(
                    429,
                    f"{limit.content} of requests in flight exceed {limit_bytes} bytes for {whose}; retry later",
                    code="too_many_bytes",
                )
        limit.used += count
        limit.clients[self.client] += count
        self.count += count

    def release(self) -> None:
        """Release all bytes of this request; further calls do nothing."""
        limit, count, self.count = self.limit, self.count, 0
        limit.used -= count
        # Counter subtraction also removes a client whose count is 0.
        limit.clients -= Counter({self.client: count})


def answer_limit() -> ByteLimit:
    """Return the limits for log-probabilities and grammars, fractions of the machine's memory."""
    total = total_bytes() // PART
    return ByteLimit("log-probabilities and grammars", total, total // CLIENT_PART)


def reserve_answer(
    share: ByteShare, tokens: int, top: int | None, prompt: int, prompt_top: int | None, grammar: Grammar | None
) -> None:
    """Reserve memory for the log-probabilities and the grammar of one answer.

    tokens: max tokens of the answer; prompt: tokens of the prompt; top, prompt_top: number of their
        top_logprobs, None without log-probabilities.
    Raises ApiError 400 if this request alone exceeds the limit of a client, 429 if all together do.
    """
    count = sum(n * (TOKEN_BYTES + TOP_BYTES * each) for n, each in ((tokens, top), (prompt, prompt_top)) if each is not None)
    count += grammar.nbytes if grammar else 0
    if share.count + count > share.limit.per_client:
        raise ApiError(
            400,
            f"{share.limit.content} of this request need {megabytes(share.count + count)} or more; the limit is "
            f"{megabytes(share.limit.per_client)} for a client; use a smaller max_tokens, n, top_logprobs or grammar",
            "max_tokens",
            "too_many_bytes",
        )
    if count:
        share.take(count)
