"""What a checkpoint is known by, wherever it lies."""

import hashlib
from pathlib import Path

from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.hf_directory import CONFIG, shards_of
from castiron.pipelines.checkpoints.sentence_files import MODULES
from castiron.vmfb.archive import Part


def checkpoint_sha256(path: Path) -> str:
    """In hex: of a GGUF file that of its bytes; of an HF directory one over the names and hashes of config.json and of the
    safetensors files, which decide every logit, those of an encoder's layers after pooling among them. CheckpointError for
    one that cannot be read."""
    try:
        if path.is_file():
            return Part.of(path).sha256()
        beside = (file.relative_to(path) for file in path.glob("*_Dense/*") if (path / MODULES).exists())
        names = sorted([CONFIG, *shards_of(path), *map(str, beside)])
        lines = [f"{name} {Part.of(path / name).sha256()}\n" for name in names]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    return hashlib.sha256("".join(lines).encode()).hexdigest()
