"""Reading checkpoints: a GGUF file or an HF directory, in one form."""

from collections.abc import Callable, Sequence
from pathlib import Path

from castiron.pipelines.checkpoints.audit import missing_and_left_over
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from castiron.pipelines.hub_name import HubName
from castiron.pipelines.places import checkpoint_path

__all__ = ["Checkpoint", "CheckpointError", "Tensor", "find_checkpoint", "missing_and_left_over", "open_checkpoint"]


def open_checkpoint(
    model: str | Path, progress: Callable[[str, float], None] | None = None, ignore_keys: Sequence[str] = ()
) -> Checkpoint:
    """The checkpoint at the path `model`: a directory is read as an HF directory, a file as GGUF; of a folder of the hub's
    cache the snapshot in use is taken.

    `model` may also be a name of the catalogue, whose file is then fetched into the cache, or one on the hub (`HubName`), of
    which what is missing is fetched into the hub's cache. Weights are not read:
    the tensors are views of the mapped files. `progress` gets ("fetch", share done). `ignore_keys` are left out of the
    config or the GGUF metadata. CheckpointError (one sentence) if there is nothing sound there, or not such a key.
    """
    # The catalogue can be listed without the packages that read checkpoints.
    from castiron.pipelines.checkpoints.gguf_checkpoint import open_gguf
    from castiron.pipelines.checkpoints.hf_directory import open_hf_directory

    path = find_checkpoint(model, progress)
    return open_hf_directory(path, ignore_keys) if path.is_dir() else open_gguf(path, ignore_keys)


def find_checkpoint(model: str | Path, progress: Callable[[str, float], None] | None = None) -> Path:
    """The file or directory that `open_checkpoint` reads for `model`; CheckpointError if there is none."""
    from castiron.pipelines.checkpoints import hub
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE, fetch

    path = Path(model)
    # A pipe is neither, and reading its first bytes would take them away.
    if path.is_file() or path.is_dir():
        return checkpoint_path(path)
    if str(model) in CATALOGUE:
        return fetch(str(model), progress=progress)
    if (name := HubName.read(str(model))) is not None:
        return hub.fetch(name, progress)
    known = ", ".join(CATALOGUE)
    raise CheckpointError(
        f"{model} is neither a file nor a directory: give a GGUF file, an HF directory, org/name on the hub, or one of {known}"
    )
