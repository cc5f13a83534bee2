"""Shorten values from files to one line of limited length, for error messages."""

import re
import reprlib
from collections.abc import Iterable
from typing import Any

MAX_LENGTH = 100

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_LENGTH - 20
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxdict = 6
_repr.maxlevel = 3


def shorten(value: Any, max_length: int = MAX_LENGTH) -> str:
    """Return the repr of `value` on one line, cut in the middle to `max_length` characters."""
    return _cut(re.sub(r"\s*\n\s*", " ", _repr.repr(value)), max_length)


def shorten_text(text: str, max_length: int = MAX_LENGTH) -> str:
    """Return `text` with unprintable characters escaped, cut in the middle to `max_length`."""
    cut = _cut(text, 2 * max_length)
    return _cut("".join(c if c.isprintable() else repr(c)[1:-1] for c in cut), max_length)


def shorten_list(values: Iterable[str], separator: str = ", ", max_length: int = 200) -> str:
    """Join values to one line such as `a, b and 3 more`; the first value is always included."""
    texts = [shorten_text(value) for value in values]
    fit, length = 0, 0
    for text in texts:
        length += len(text) + len(separator)
        if fit and length > max_length:
            break
        fit += 1
    return separator.join(texts[:fit]) + f" and {len(texts) - fit} more" * (fit < len(texts))


def _cut(text: str, max_length: int) -> str:
    half = (max_length - 3) // 2
    return text if len(text) <= max_length else f"{text[:half]}...{text[-half:]}"
