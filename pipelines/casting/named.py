"""The bundle that a command is given: one that stands somewhere, or that of a model, cast when it is first named."""

from __future__ import annotations

import shutil
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import say
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.manifest import BundleError


def bundle_of(place: str) -> Bundle:
    """The bundle at `place`; or that of the checkpoint at `place`, or of the catalogue's model of this name.

    What is cast lies in the cache and is cast again when the checkpoint, the compiler or castiron are others. Besides what
    `open_bundle` and `compile_model` raise, PipelineError for a name that is nothing.
    """
    path = Path(place)
    if path.exists():
        return _cast(path) if is_checkpoint(path) else open_bundle(path)
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE

    if place in CATALOGUE:
        return _cast(place)
    raise PipelineError(
        f"{place} is neither a bundle, as castiron compile makes them, nor a GGUF file, nor an HF directory, nor a name of "
        f"the catalogue, which has {', '.join(CATALOGUE)}"
    )


def is_checkpoint(path: Path) -> bool:
    """By the first bytes of a file, by what a directory holds."""
    if path.is_dir():
        return not (path / "manifest.json").exists() and ((path / "config.json").exists() or path.name.startswith("models--"))
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def _cast(model: str | Path) -> Bundle:
    """The bundle of a model in the cache, with the options that `castiron compile` has by default; said when it is made."""
    from castiron.pipelines.casting.cast import cached_place, cast
    from castiron.pipelines.casting.compile import Options

    out = cached_place(model, Options())
    if not _opens(out):
        # What is left of a bundle that was not wholly cleared away would not be written over.
        shutil.rmtree(out, ignore_errors=True)
        say(f"casting {model}, once; castiron compile {model} does it with options of your own")
    return cast(model)


def _opens(place: Path) -> bool:
    try:
        open_bundle(place, run=False)
    except BundleError:
        return False
    return True
