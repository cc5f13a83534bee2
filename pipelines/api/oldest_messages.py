"""Leave out the oldest messages of a conversation that is too long for the context."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.generation import Message
from castiron.pipelines.engine.request import free_positions
from castiron.pipelines.errors import PipelineError

# Free positions after a prompt that is made to fit, for an answer without a limit of its own.
ANSWER_TOKENS = 256
# Characters that a template writes around a message, about.
MARKS = 16
SYSTEM, RESULTS = ("system", "developer"), ("tool", "function")

Encode = Callable[[Sequence[Message]], Awaitable[list[int]]]


async def without_oldest(messages: Sequence[Message], encode: Encode, context: int, limit: int | None) -> list[int]:
    """Return the token ids of a conversation, without its oldest messages if it is too long.

    System messages and the last message stay, as in Ollama. The rest begins with a user's message
    if such a rest fits, and never with the result of a call. Raises ApiError 400 if nothing fits.
    """
    needed = max(1, min(limit or ANSWER_TOKENS, context // 4))

    async def fitting(start: int) -> list[int] | None:
        try:
            ids = await encode([each for i, each in enumerate(messages) if i >= start or each["role"] in SYSTEM])
        except (ApiError, PipelineError) as error:
            # A template may reject a conversation that begins in the middle.
            if start or getattr(error, "code", None) == "context_length_exceeded":
                return None
            raise
        return ids if free_positions(context, len(ids)) >= needed else None

    if (ids := await fitting(0)) is not None:
        return ids
    for starts in _starts(messages, context):
        # Later starts are shorter, so bisection finds the first one that fits.
        low, high, found = 0, len(starts), None
        while low < high:
            middle = (low + high) // 2
            if (ids := await fitting(starts[middle])) is None:
                low = middle + 1
            else:
                high, found = middle, ids
        if found is not None:
            return found
    return await encode([each for each in messages if each["role"] in SYSTEM or each is messages[-1]])


def _starts(messages: Sequence[Message], context: int) -> tuple[list[int], list[int]]:
    before = accumulate((len(message["content"]) + MARKS for message in messages), initial=0)
    blocks: dict[int, int] = {}
    for index, (message, characters) in enumerate(zip(messages, before)):
        if index and message["role"] == "user":
            blocks.setdefault(2 * characters // context, index)
    every = [index for index, message in enumerate(messages) if index and message["role"] not in (*SYSTEM, *RESULTS)]
    return list(blocks.values()), every
