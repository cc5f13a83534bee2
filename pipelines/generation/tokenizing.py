"""Texts as ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.record import short

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Characters from which on a text is encoded without holding up other threads.
LONG = 20_000
# Characters of a text whose tokens are counted in any case.
COUNTED = 100_000


def utf8(text: str, name: str = "the prompt") -> str:
    """The text; PipelineError, which calls it by this `name`, for one that is none: Python hands on what a terminal sends in
    another encoding as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PipelineError(f"{name} is not valid UTF-8") from None
    return text


@contextmanager
def by_the_library() -> Iterator[None]:
    """PipelineError where the tokenizers library gives up on a text, as on one that an expression takes too long for: what it
    raises then is an Exception without a class, or a panic, which is none."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise PipelineError(f"the model's tokenizer does not take this text ({short(str(error))})") from None


def encoding_of(tokenizer: Tokenizer, text: str, other: str | None = None, add_special_tokens: bool = True) -> Encoding:
    """What the library makes of a text, or of two together; a long one does not hold up other threads. PipelineError for what
    it does not take."""
    with by_the_library():
        if len(text) > LONG and other is None:
            # Of one text alone the library keeps Python's lock until it is done.
            return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return tokenizer.encode(text, other, add_special_tokens=add_special_tokens)


def encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of a text, as `encoding_of` has them."""
    return encoding_of(tokenizer, text, add_special_tokens=add_special_tokens).ids
