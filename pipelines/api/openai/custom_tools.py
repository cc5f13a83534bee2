"""Custom tools: a model calls them like functions with one argument, `input`."""

import json
from typing import Any

from pydantic_core import from_json


def _input(arguments: str) -> Any:
    """Return the value of the key `input` in a JSON object; None if the key is missing.

    `arguments`: the object as text, whose end may be missing.
    """
    try:
        return from_json(arguments, allow_partial="trailing-strings")["input"]
    except (ValueError, LookupError, TypeError):
        return None


def input_of(arguments: str) -> str:
    """Return the text that a call passes to a custom tool.

    The model calls a custom tool like a function with one argument, `input`. arguments: the
    arguments of the call as JSON text. If this text has no key `input`, it is returned unchanged.
    An input that is not a string is returned as JSON text.
    """
    found = _input(arguments)
    if found is None or isinstance(found, str):
        return arguments if found is None else found
    return json.dumps(found, ensure_ascii=False)


class InputStream:
    """A parser that extracts a custom tool's input while the model generates the call.

    The call's arguments are JSON text, {"input": ...}, which arrives in pieces.
    """

    def __init__(self) -> None:
        self._arguments = self._returned = ""

    def add(self, more: str, is_end: bool = False) -> str:
        """Append `more` to the JSON text; return the part of the input that this adds.

        `is_end`: whether the JSON text is now complete.
        """
        self._arguments += more
        text = input_of(self._arguments) if is_end else _input(self._arguments)
        new = text[len(self._returned) :] if isinstance(text, str) and text.startswith(self._returned) else ""
        self._returned += new
        return new
