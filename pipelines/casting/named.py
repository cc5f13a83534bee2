"""The bundle that a command is given: one that stands somewhere, or that of a model, cast when it is first named."""

from __future__ import annotations

from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.hub_name import HubName
from castiron.pipelines.places import is_gguf
from castiron.vmfb.bundle import Bundle, open_bundle


def bundle_of(place: str, *, full_check: bool = False, verify_key: str | None = None) -> Bundle:
    """The bundle at `place`; or that of the checkpoint at `place`, or of the model of this name, in the catalogue or on
    the hub.

    `full_check` and `verify_key` are as in `open_bundle`. What is cast lies in the cache and is cast again when the checkpoint,
    the compiler or castiron are others. Besides what `open_bundle` and `compile_model` raise, PipelineError for a name that is
    nothing.
    """
    path = Path(place)
    if path.exists() and not is_checkpoint(path):
        return open_bundle(path, full_check=full_check, verify_key=verify_key)
    if verify_key is not None:
        raise PipelineError(f"--verify-key is for bundles that somebody signed, and {place} is none")
    from castiron.pipelines.casting.cast import cast
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE

    if path.exists() or place in CATALOGUE or HubName.read(place):
        return open_bundle(cast(place, tells=True), full_check=full_check)
    raise PipelineError(
        f"{place} is neither a bundle, as castiron compile makes them, nor a GGUF file, nor an HF directory, nor org/name "
        f"on the hub, nor a name of the catalogue, which has {', '.join(CATALOGUE)}"
    )


def generating(bundle: Bundle) -> Bundle:
    """The bundle itself; PipelineError for one that encodes texts and generates none."""
    if bundle.manifest.encoder:
        raise PipelineError(f"{bundle.path} encodes texts and generates none: castiron embed gives their vectors")
    return bundle


def is_checkpoint(path: Path) -> bool:
    """By the first bytes of a file, by what a directory holds."""
    if path.is_dir():
        return not (path / "manifest.json").exists() and ((path / "config.json").exists() or path.name.startswith("models--"))
    return is_gguf(path)
