"""How errors quote what stands in a file: on one line, and short, whatever it is."""

import reprlib
from collections.abc import Iterable
from typing import Any

MOST = 100

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MOST - 20
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxdict = 6
_repr.maxlevel = 3


def shown(value: Any, most: int = MOST) -> str:
    """The repr of `value`, cut in the middle to `most` characters."""
    return _cut(_repr.repr(value), most)


def shown_text(text: str, most: int = MOST) -> str:
    """`text` without quotes, characters that do not print as in a repr, cut in the middle to `most`."""
    cut = _cut(text, 2 * most)
    return _cut("".join(c if c.isprintable() else repr(c)[1:-1] for c in cut), most)


def shown_list(values: Iterable[str], separator: str = ", ", most: int = 200) -> str:
    """As many `values` as fit in `most` characters, at least one, and how many more there are."""
    texts = [shown_text(value) for value in values]
    fit, length = 0, 0
    for text in texts:
        length += len(text) + len(separator)
        if fit and length > most:
            break
        fit += 1
    return separator.join(texts[:fit]) + f" and {len(texts) - fit} more" * (fit < len(texts))


def _cut(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
