"""Open a checkpoint by path, catalogue name or hub name."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from castiron.pipelines.checkpoints import hub
from castiron.pipelines.checkpoints.catalogue import CATALOGUE, canonical_name, fetch, not_found
from castiron.pipelines.checkpoints.checkpoint import Checkpoint
from castiron.pipelines.checkpoints.gguf.open_gguf import open_gguf
from castiron.pipelines.checkpoints.hf.encoding_files import MODULES
from castiron.pipelines.checkpoints.hf.open_directory import CONFIG, open_hf_directory, shards_of
from castiron.pipelines.locate import HubName, checkpoint_path, parts_of
from castiron.vmfb.bundle.archive import Part


def open_checkpoint(
    model: str | Path, progress: Callable[[str, float], None] | None = None, ignore_keys: Sequence[str] = ()
) -> Checkpoint:
    """Open a checkpoint, downloaded if necessary; leave out some keys of config or metadata."""
    path = find_checkpoint(model, progress)
    return open_hf_directory(path, ignore_keys) if path.is_dir() else open_gguf(path, ignore_keys)


def find_checkpoint(model: str | Path, progress: Callable[[str, float], None] | None = None) -> Path:
    """Return the path of a checkpoint; a model given by name is downloaded if necessary."""
    path = Path(model)
    # A pipe is neither a file nor a directory; opening it could block.
    if path.is_file() or path.is_dir():
        return checkpoint_path(path)
    if (known := canonical_name(model)) in CATALOGUE:
        return fetch(known, progress)
    if name := HubName.read(str(model)):
        return hub.fetch(name, progress)
    raise not_found(model)


def checkpoint_sha256(path: Path) -> str:
    """Return a SHA-256 (hex) of all files of a checkpoint that influence the logits."""
    if path.is_file() and len(parts := parts_of(path.name)) == 1:
        return Part.of(path).sha256()
    if path.is_file():
        return _sha256_of(path.parent, parts)
    # The layers after an embedding model's pooling are in separate folders.
    dense = (file.relative_to(path) for file in path.glob("*_Dense/*") if (path / MODULES).exists())
    return _sha256_of(path, sorted([CONFIG, *shards_of(path), *map(str, dense)]))


def _sha256_of(folder: Path, names: Sequence[str]) -> str:
    lines = [f"{name} {Part.of(folder / name).sha256()}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
