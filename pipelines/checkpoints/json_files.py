"""The text and the JSON beside a model's tensors."""

import json
import re
from pathlib import Path
from typing import Any

from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.ordinary_files import has_too_many_values, ordinary_bytes

_LARGE, _DEEPEST = 1_000_000, 50
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def text_of(path: Path) -> str | None:
    """What a file of text holds, None where there is no such file; CheckpointError for one that is no file of UTF-8 or too
    large."""
    try:
        return ordinary_bytes(path).decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; fetch it again") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text: fetch it again") from None


def json_value(path: Path) -> Any:
    """What a file of JSON holds, None where there is no such file; CheckpointError for anything else.

    Numbers of more than 4,300 digits, and strings with half of a surrogate pair, are no JSON here.
    """
    text = text_of(path)
    if text is None:
        return None
    if has_too_many_values(text):
        raise CheckpointError(f"{path} holds more values than any file of a model does: fetch it again")
    try:
        content = json.loads(text)
        # Such strings could be written nowhere.
        if _HALF_OF_A_PAIR.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON: fetch it again") from None
    # What is large is no config, and what reads it nests nothing by itself.
    if len(text) < _LARGE and _deeper(content, _DEEPEST):
        raise CheckpointError(f"{path} is not JSON: it nests values deeper than {_DEEPEST} times; fetch it again")
    if content is None:
        raise CheckpointError(f"{path} is null: fetch it again")
    return content


def _deeper(value: Any, most: int) -> bool:
    """Whether lists and objects stand in one another more than `most` times."""
    level = [value]
    for _ in range(most + 1):
        nested = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [child for children in nested for child in children]
    return bool(level)


def json_object(path: Path) -> dict | None:
    """The object in a file of JSON, None where there is no such file; CheckpointError for anything else."""
    content = json_value(path)
    if content is not None and not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return content
