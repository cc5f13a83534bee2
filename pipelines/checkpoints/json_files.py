"""The JSON beside a model's tensors."""

import json
from pathlib import Path
from typing import Any

from castiron.pipelines.checkpoints.checkpoint import CheckpointError


def json_value(path: Path) -> Any:
    """What a file of JSON holds, None where there is no such file; CheckpointError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise CheckpointError(f"{path} is not JSON: fetch it again") from None
    if content is None:
        raise CheckpointError(f"{path} is null: fetch it again")
    return content


def json_object(path: Path) -> dict | None:
    """The object in a file of JSON, None where there is no such file; CheckpointError for anything else."""
    content = json_value(path)
    if content is not None and not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return content
