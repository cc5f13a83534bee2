"""Custom tools: a model calls them like functions with one argument, `input`."""

import json
from typing import Any

from pydantic_core import from_json


def _input(arguments: str) -> Any:
    try:
        return from_json(arguments, allow_partial="trailing-strings")["input"]
    except (ValueError, LookupError, TypeError):
        return None


def input_of(arguments: str) -> str:
    """Return the field `input` of the arguments, JSON text; without it, the text itself."""
    found = _input(arguments)
    if found is None or isinstance(found, str):
        return arguments if found is None else found
    return json.dumps(found, ensure_ascii=False)


class InputStream:
    """A parser of a call's input, whose arguments arrive in pieces of JSON text."""

    def __init__(self) -> None:
        self._arguments = self._returned = ""

    def add(self, more: str, is_end: bool = False) -> str:
        """Append `more` to the JSON text; return the part of the input that this adds."""
        self._arguments += more
        text = input_of(self._arguments) if is_end else _input(self._arguments)
        new = text[len(self._returned) :] if isinstance(text, str) and text.startswith(self._returned) else ""
        self._returned += new
        return new
