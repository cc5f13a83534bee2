"""Classify a path or model name from a user: a bundle, a checkpoint, a hub name or a mistake."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from castiron.pipelines.errors import CheckpointError, PipelineError
from castiron.pipelines.files import has_too_many_values, read_regular
from castiron.vmfb.record import short

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER = "adapter_config.json"
PARTS = (".safetensors", ".json", ".bin", ".pt", ".pth")
MAX_LISTED = 5
# Prefix of models' folders in the hub's cache: models--org--name.
FOLDER = "models--"
MAIN = "main"
_NAME = re.compile(
    r"(?P<hub>hf\.co/|(?:https?:/+)?huggingface\.co/)?"
    r"(?P<repository>[A-Za-z0-9][\w.-]*/(?!models--)[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>(?!.*\.\.)\w[\w./-]*))?(?::(?P<wanted>[^:]+))?/?"
)


class HubName(NamedTuple):
    """A model name on Hugging Face's hub: `[hf.co/]ORG/NAME[@REVISION][:WANTED]`.

    revision: a branch, tag or commit. wanted: a GGUF file, by its path or, as in llama.cpp, by the
    end of its name before .gguf, such as Q4_K_M.
    """

    repository: str
    revision: str = MAIN
    wanted: str | None = None

    @staticmethod
    def read(text: str) -> HubName | None:
        """Parse a hub name; return None for other text, such as a path into an existing folder."""
        found = _NAME.fullmatch(text)
        if found is None or (not found["wanted"] and found["repository"].endswith(".gguf")):
            return None
        if not found["hub"] and Path(found["repository"]).parent.is_dir():
            return None
        return HubName(found["repository"], found["revision"] or MAIN, found["wanted"])

    @property
    def short(self) -> str:
        """The model's local name: NAME, NAME-WANTED, or the name of the GGUF file without .gguf."""
        name = self.repository.partition("/")[2]
        if self.wanted is None:
            return name
        file = self.wanted.rpartition("/")[2]
        return file.removesuffix(".gguf") if file.endswith(".gguf") else f"{name}-{file}"

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return self.repository + revision + (f":{self.wanted}" if self.wanted else "")


def with_options(model: str | None, file: str | None, revision: str | None) -> str | None:
    """Return a hub name with the values of --file and --revision; PipelineError for a path."""
    if file is None and revision is None:
        return model
    name = None if model is None or Path(model).exists() else HubName.read(model)
    if name is None:
        raise PipelineError(f"--file and --revision need a hub name, org/name: {model or 'no MODEL'}; remove them")
    return f"hf.co/{name._replace(wanted=file or name.wanted, revision=revision or name.revision)}"


def cache_folder() -> Path:
    """Return huggingface_hub's cache folder."""
    try:
        if own := os.environ.get("HF_HUB_CACHE"):
            return Path(own).expanduser().absolute()
        home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        return Path(home).expanduser().absolute() / "hub"
    except RuntimeError:  # a user without a home, as in some containers
        raise PipelineError("no home directory for the hub's cache; set HF_HOME to a folder") from None


def folder_of(repository: str) -> Path:
    """Return a repository's folder in the hub's cache."""
    return cache_folder() / (FOLDER + repository.replace("/", "--"))


def source_of(path: Path) -> dict[str, str] | None:
    """Return the origin of a path in the hub's cache; None for a path elsewhere.

    The keys are `repository`, `revision` (a commit) and, except for a snapshot folder, `file`.
    """
    path = Path(os.path.abspath(path))
    for snapshot in (path, *path.parents):
        repository = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and repository.startswith(FOLDER):
            found = {"repository": repository.removeprefix(FOLDER).replace("--", "/", 1), "revision": snapshot.name}
            return found if snapshot == path else found | {"file": path.relative_to(snapshot).as_posix()}
    return None


def is_bundle(path: Path) -> bool:
    """Return whether `path` is a packed bundle, or a directory with a bundle's manifest."""
    if path.is_file():
        return is_archive(path)
    manifest_path = path / "manifest.json"
    if not manifest_path.is_file():
        return False
    manifest = _json(manifest_path)
    return (path / "model.vmfb").exists() if manifest is None else isinstance(manifest, dict) and "schema" in manifest


def is_archive(path: Path) -> bool:
    """Return whether a file starts like a zip file, which is the format of packed bundles."""
    return _head(path) == b"PK\3\4"


def checkpoint_path(path: Path) -> Path:
    """Return `path`, or its snapshot if it is a model's folder in the hub's cache.

    Raises CheckpointError for a bundle, an adapter, a file of a checkpoint or a folder of models.
    """
    if path.is_file() and path.name.endswith(PARTS) and _head(path) != b"GGUF":
        raise CheckpointError(f"{path} is one file of a checkpoint; give its directory, {path.absolute().parent}")
    if is_bundle(path):
        raise CheckpointError(f"{path} is a bundle; give the checkpoint that it was compiled from")
    if (path / ADAPTER).is_file() and not any((path / name).exists() for name in WEIGHTS):
        raise _adapter_error(path)
    if path.name.startswith(FOLDER) and path.is_dir() or path.name == "snapshots" and path.parent.name.startswith(FOLDER):
        return _snapshot(path.parent if path.name == "snapshots" else path)
    if _has_no_config(path) and (models := sorted(path.glob(FOLDER + "*"))):
        raise CheckpointError(f"{path} is the hub's cache; give a model's folder in it: {_names(models)}")
    if _has_no_config(path) and (files := sorted(path.glob("*.gguf"))):
        raise CheckpointError(f"{path} has no config.json but GGUF files; give one of {_names(files)}")
    return path


def model_name(path: Path) -> str:
    """Return the name of the model at `path`.

    In the hub's cache it is the repository's name, elsewhere the last part of `path` without .gguf.
    """
    path = Path(os.path.abspath(path))
    repository = next((part for part in (path, *path.parents[:2]) if part.name.startswith(FOLDER)), None)
    if repository is None:
        return as_text(path.name.removesuffix(".gguf"))
    owner, _, name = repository.name.removeprefix(FOLDER).partition("--")
    return as_text(name or owner)


def as_text(name: str | os.PathLike) -> str:
    """Return a file name as text for a manifest, with bytes that are not UTF-8 escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _json(path: Path) -> Any:
    """Return the value of a JSON file; None if it is missing or invalid."""
    try:
        data = read_regular(path)
        return None if has_too_many_values(data) else json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None


def _head(path: Path) -> bytes:
    """Return the first four bytes of a file; no bytes if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4)
    except OSError:
        return b""


def _has_no_config(path: Path) -> bool:
    return path.is_dir() and not (path / "config.json").exists()


def _adapter_error(path: Path) -> CheckpointError:
    config = _json(path / ADAPTER)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    of = f" of {short(base)}" if isinstance(base, str) and base else ""
    return CheckpointError(f"{path} is an adapter{of}, not a model; give its base, and this with --adapter")


def _snapshot(path: Path) -> Path:
    """Return the snapshot that refs/main names in a cache folder, or else the only snapshot."""
    try:
        named = read_regular(path / "refs" / "main").decode(errors="replace").strip()
        # Accept a plain folder name only: a path in refs/main could lead out of the cache.
        if named and Path(named).name == named != ".." and (found := path / "snapshots" / named).is_dir():
            return _model_in(found)
    except OSError:
        pass
    snapshots = sorted(entry for entry in path.glob("snapshots/*") if entry.is_dir())
    if len(snapshots) == 1:
        return _model_in(snapshots[0])
    if not snapshots:
        raise CheckpointError(f"{path} has no snapshot; fetch the model again")
    raise CheckpointError(f"{path} has several snapshots; give one of {_names(snapshots)}")


def _model_in(snapshot: Path) -> Path:
    """Return the path of the snapshot, or of its GGUF file if it has exactly one and no config."""
    files = sorted(snapshot.glob("*.gguf")) if _has_no_config(snapshot) else []
    return files[0] if len(files) == 1 else checkpoint_path(snapshot)


def _names(paths: list[Path]) -> str:
    more = f" and {len(paths) - MAX_LISTED} more" if len(paths) > MAX_LISTED else ""
    return ", ".join(path.name for path in paths[:MAX_LISTED]) + more
