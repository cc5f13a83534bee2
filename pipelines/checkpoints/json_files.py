"""The text and the JSON beside a model's tensors."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from castiron.pipelines.checkpoints.checkpoint import CheckpointError

# Tokenizers of 260,000 tokens take 35 MB, an index of 100,000 tensors 10 MB.
MOST_BYTES = 100_000_000
_LARGE, _DEEPEST = 1_000_000, 50
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def text_of(path: Path) -> str | None:
    """What a file of text holds, None where there is no such file; CheckpointError for one that is no file of UTF-8 or has more
    than `MOST_BYTES`."""
    try:
        # Opening a pipe waits for a writer, and a device has no end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is not a file: fetch it again")
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{path} is larger than {MOST_BYTES // 10**6} MB, as no such file is: fetch it again")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text: fetch it again") from None


def json_value(path: Path) -> Any:
    """What a file of JSON holds, None where there is no such file; CheckpointError for anything else.

    Numbers of more than 4,300 digits, and strings with half of a surrogate pair, are no JSON here.
    """
    text = text_of(path)
    if text is None:
        return None
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
