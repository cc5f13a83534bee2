"""The bundle that a command is given: one that stands somewhere, or that of a model, cast when it is first named."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import Progress, say
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.cache import cache_root
from castiron.vmfb.manifest import BundleError

FOLDER = "bundles"


def bundle_of(place: str) -> Bundle:
    """The bundle at `place`; or that of the checkpoint at `place`, or of the catalogue's model of this name.

    What is cast lies in the cache and is cast again when the checkpoint, the compiler or castiron are others. Besides what
    `open_bundle` and `compile_model` raise, PipelineError for a name that is nothing.
    """
    path = Path(place)
    if path.exists():
        return cast(place, path) if is_checkpoint(path) else open_bundle(path)
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE

    if place in CATALOGUE:
        return cast(place, None)
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


def cast(model: str, path: Path | None) -> Bundle:
    """Casts a model into the cache, with the options that `castiron compile` has by default, or finds it there."""
    from castiron.pipelines.casting.compile import compile_model

    out = cast_place(model, path)
    if not _opens(out):
        # What is left of a bundle that was not wholly cleared away would not be written over.
        shutil.rmtree(out, ignore_errors=True)
        say(f"casting {model}, once; castiron compile {model} does it with options of your own")
    with Progress() as progress:
        report = compile_model(model, out, progress=progress)
    return open_bundle(report.bundle)


def cast_place(model: str, path: Path | None) -> Path:
    """Where in the cache a model's bundle lies: checkpoints of one name in several folders have several places."""
    if path is None:
        return cache_root() / FOLDER / model
    whole = path.resolve()
    return cache_root() / FOLDER / f"{whole.name.removesuffix('.gguf')}-{hashlib.sha256(bytes(whole)).hexdigest()[:8]}"


def _opens(place: Path) -> bool:
    try:
        open_bundle(place, run=False)
    except BundleError:
        return False
    return True
