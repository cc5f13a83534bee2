"""Reading checkpoints: a GGUF file or an HF directory, in one form."""

from collections.abc import Callable
from pathlib import Path

from castiron.pipelines.checkpoints.audit import missing_and_left_over
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor

__all__ = ["Checkpoint", "CheckpointError", "Tensor", "missing_and_left_over", "open_checkpoint"]


def open_checkpoint(model: str | Path, progress: Callable[[str, float], None] | None = None) -> Checkpoint:
    """The checkpoint at the path `model`: a directory is read as an HF directory, a file as GGUF.

    `model` may also be a name of the catalogue, whose file is then fetched into the cache. Weights are not read:
    the tensors are views of the mapped files. `progress` gets ("fetch", share done). CheckpointError (one sentence) if
    there is nothing sound there.
    """
    # The catalogue can be listed without the packages that read checkpoints.
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE, fetch
    from castiron.pipelines.checkpoints.gguf_checkpoint import open_gguf
    from castiron.pipelines.checkpoints.hf_directory import open_hf_directory

    path = Path(model)
    if path.is_dir():
        return open_hf_directory(path)
    if path.is_file():
        return open_gguf(path)
    if str(model) in CATALOGUE:
        return open_gguf(fetch(str(model), progress=progress))
    known = ", ".join(CATALOGUE)
    raise CheckpointError(f"{model} is neither a file nor a directory: give a GGUF file, an HF directory, or one of {known}")
