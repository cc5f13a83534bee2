"""Texts as ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from castiron.pipelines.errors import PipelineError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


def encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The ids of a text, which may be long without holding up other threads."""
    if len(text) > LONG:
        # Of one text alone the library keeps Python's lock until it is done.
        return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
