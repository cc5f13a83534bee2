"""What lies at a path that a user gives: a bundle, a checkpoint, or something that is neither and often taken for one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from castiron.pipelines.errors import CheckpointError
from castiron.pipelines.hub_name import FOLDER as HUB
from castiron.pipelines.ordinary_files import has_too_many_values, ordinary_bytes
from castiron.vmfb.record import short

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER = "adapter_config.json"
PARTS = (".safetensors", ".json", ".bin", ".pt", ".pth")
SHOWN = 5


def is_bundle(path: Path) -> bool:
    """A directory with a bundle's manifest, or an archive."""
    if path.is_file():
        return is_archive(path)
    manifest_path = path / "manifest.json"
    if not manifest_path.is_file():
        return False
    manifest = _json(manifest_path)
    return (path / "model.vmfb").exists() if manifest is None else isinstance(manifest, dict) and "schema" in manifest


def is_archive(path: Path) -> bool:
    """Whether a file begins as a packed bundle does, which is a zip file."""
    return _head(path) == b"PK\3\4"


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    return _head(path) == b"GGUF"


def checkpoint_path(path: Path) -> Path:
    """Where the checkpoint lies that `path` means: itself, or of a folder of the hub's cache the snapshot in use.

    CheckpointError for what is known not to be a checkpoint; a file of another kind and a directory without config.json pass.
    """
    for holds, answer in _KINDS:
        if holds(path):
            return answer(path)
    return path


def model_name(path: Path) -> str:
    """What to call the model at `path`: the last part without .gguf, in the hub's cache the name of the repository."""
    path = Path(os.path.abspath(path))
    repository = next((part for part in (path, *path.parents[:2]) if part.name.startswith(HUB)), None)
    if repository is None:
        return as_text(path.name.removesuffix(".gguf"))
    owner, _, name = repository.name.removeprefix(HUB).partition("--")
    return as_text(name or owner)


def as_text(name: str | os.PathLike) -> str:
    """A name of a file as a manifest has it: its bytes may be no UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _json(path: Path) -> Any:
    """What a file of JSON holds; None for what is none, or cannot be read."""
    try:
        data = ordinary_bytes(path)
        return None if has_too_many_values(data) else json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None


def _head(path: Path) -> bytes:
    """The first four bytes; none of a file that cannot be read, which its reader then says."""
    try:
        with open(path, "rb") as file:
            return file.read(4)
    except OSError:
        return b""


def _has_no_config(path: Path) -> bool:
    return path.is_dir() and not (path / "config.json").exists()


def _is_adapter(path: Path) -> bool:
    return (path / ADAPTER).is_file() and not any((path / name).exists() for name in WEIGHTS)


def _refuse_adapter(path: Path) -> Path:
    config = _json(path / ADAPTER)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    of = f" of {short(base)}" if isinstance(base, str) and base else ""
    raise CheckpointError(f"{path} is an adapter{of}, not a model: give its base, and this with --adapter")


def _refuse_bundle(path: Path) -> Path:
    raise CheckpointError(f"{path} is a bundle, and this needs the checkpoint that it was made from")


def _refuse_part(path: Path) -> Path:
    raise CheckpointError(f"{path} is one file of a checkpoint: give its directory, {path.absolute().parent}")


def _snapshot(path: Path) -> Path:
    """Of `models--org--name` what refs/main names, else the one snapshot there is."""
    path = path.parent if path.name == "snapshots" else path
    try:
        named = ordinary_bytes(path / "refs" / "main").decode(errors="replace").strip()
        # The name of a folder there: a path could lead anywhere, and "." back here.
        if named and Path(named).name == named != ".." and (found := path / "snapshots" / named).is_dir():
            return _model_in(found)
    except OSError:
        pass
    snapshots = sorted(entry for entry in path.glob("snapshots/*") if entry.is_dir())
    if len(snapshots) == 1:
        return _model_in(snapshots[0])
    if not snapshots:
        raise CheckpointError(f"{path} is a folder of the hub's cache without a snapshot: fetch the model again")
    raise CheckpointError(f"{path} has several snapshots: give one of {_names(snapshots)}")


def _model_in(snapshot: Path) -> Path:
    """The snapshot, or of one that holds GGUF files alone the one there is."""
    files = sorted(snapshot.glob("*.gguf")) if _has_no_config(snapshot) else []
    return files[0] if len(files) == 1 else checkpoint_path(snapshot)


def _refuse_hub(path: Path) -> Path:
    raise CheckpointError(f"{path} is the hub's cache: give a model's folder in it: {_names(sorted(path.glob(HUB + '*')))}")


def _refuse_gguf_folder(path: Path) -> Path:
    raise CheckpointError(f"{path} has no config.json and holds GGUF files: give one of {_names(sorted(path.glob('*.gguf')))}")


def _names(paths: list[Path]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(path.name for path in paths[:SHOWN]) + more


# What tells a kind, and where the checkpoint is then, or why there is none; the first that holds counts.
_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Path]], ...] = (
    (lambda path: path.is_file() and path.name.endswith(PARTS) and not is_gguf(path), _refuse_part),
    (is_bundle, _refuse_bundle),
    (_is_adapter, _refuse_adapter),
    (lambda path: path.name.startswith(HUB) and path.is_dir(), _snapshot),
    (lambda path: path.name == "snapshots" and path.parent.name.startswith(HUB), _snapshot),
    (lambda path: _has_no_config(path) and any(path.glob(HUB + "*")), _refuse_hub),
    (lambda path: _has_no_config(path) and any(path.glob("*.gguf")), _refuse_gguf_folder),
)
