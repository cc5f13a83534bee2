"""Find out what a path or model name is: a bundle, a checkpoint, a hub name or a mistake."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from castiron.pipelines.errors import CheckpointError, PipelineError
from castiron.pipelines.files import has_too_many_values, read_regular
from castiron.vmfb.bundle.json_record import short

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER = "adapter_config.json"
PARTS = (".safetensors", ".json", ".bin", ".pt", ".pth")
# Prefix of models' folders in the hub's cache: models--org--name.
FOLDER = "models--"
MAIN = "main"
# The end of the name of a part of a GGUF file: its number and the number of parts, from 1.
GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NAME = re.compile(
    r"(?P<hub>hf\.co/|(?:https?:/+)?huggingface\.co/)?"
    r"(?P<repository>[A-Za-z0-9][\w.-]*/(?!models--)[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>(?!.*\.\.)\w[\w./-]*))?(?::(?P<wanted>[^:]+))?/?"
)


class HubName(NamedTuple):
    """A model name on Hugging Face's hub: `[hf.co/]ORG/NAME[@REVISION][:WANTED]`.

    wanted: path of a GGUF file or, as in llama.cpp, the end of its name without .gguf: Q4_K_M.
    """

    repository: str
    revision: str = MAIN
    wanted: str | None = None

    @staticmethod
    def read(text: str) -> HubName | None:
        """Parse a hub name; None for other text, such as a path into an existing folder."""
        found = _NAME.fullmatch(text)
        if found is None or (not found["wanted"] and found["repository"].endswith(".gguf")):
            return None
        if not found["hub"] and Path(found["repository"]).parent.is_dir():
            return None
        return HubName(found["repository"], found["revision"] or MAIN, found["wanted"])

    @property
    def short(self) -> str:
        name = self.repository.partition("/")[2]
        if self.wanted is None:
            return name
        file = self.wanted.rpartition("/")[2]
        return file.removesuffix(".gguf") if file.endswith(".gguf") else f"{name}-{file}"

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return self.repository + revision + (f":{self.wanted}" if self.wanted else "")


def cache_folder() -> Path:
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
    """Return `repository`, `revision` (a commit) and `file` of a path in the hub's cache.

    A snapshot folder has no `file`. Returns None for a path outside the cache.
    """
    path = Path(os.path.abspath(path))
    for snapshot in (path, *path.parents):
        repository = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and repository.startswith(FOLDER):
            found = {"repository": repository.removeprefix(FOLDER).replace("--", "/", 1), "revision": snapshot.name}
            return found if snapshot == path else found | {"file": path.relative_to(snapshot).as_posix()}
    return None


def is_bundle(path: Path) -> bool:
    """Return whether `path` is a packed bundle, or a directory with the manifest of a bundle."""
    if path.is_file():
        return is_archive(path)
    manifest_path = path / "manifest.json"
    if not manifest_path.is_file():
        return False
    manifest = _json(manifest_path)
    return (path / "model.vmfb").exists() if manifest is None else isinstance(manifest, dict) and "schema" in manifest


def is_archive(path: Path) -> bool:
    """Return whether a file begins like a zip file, which is the format of a packed bundle."""
    return _head(path) == b"PK\3\4"


def checkpoint_path(path: Path) -> Path:
    """Return `path` if it may be a checkpoint; else raise CheckpointError that explains why."""
    if path.is_file() and path.name.endswith(PARTS) and _head(path) != b"GGUF":
        raise CheckpointError(f"{path} is one file of a checkpoint; give its directory, {path.absolute().parent}")
    if is_bundle(path):
        raise CheckpointError(f"{path} is a bundle; give the checkpoint that it was compiled from")
    if (path / ADAPTER).is_file() and not any((path / name).exists() for name in WEIGHTS):
        config = _json(path / ADAPTER)
        base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
        of = f" of {short(base)}" if isinstance(base, str) and base else ""
        raise CheckpointError(f"{path} is an adapter{of}, not a model; give its base model, and the adapter with --adapter")
    if path.is_dir() and not (path / "config.json").exists():
        if path.name.startswith(FOLDER):
            name = path.name.removeprefix(FOLDER).replace("--", "/", 1)
            raise CheckpointError(f"{path} is a folder of the hub's cache; give the model's name, {name}")
        if files := sorted(path.glob("*.gguf")):
            names = short(", ".join(file.name for file in files))
            raise CheckpointError(f"{path} has GGUF files and no config.json; give one of the files: {names}")
    return path


def model_name(path: Path) -> str:
    """Return a model's name: of a snapshot's repository, or of the file or folder."""
    path = Path(os.path.abspath(path))
    source = source_of(path)
    if source and "file" not in source:
        return as_text(source["repository"].rpartition("/")[2])
    return as_text(GGUF_PART.sub(".gguf", path.name).removesuffix(".gguf"))


def parts_of(file: str) -> list[str]:
    """Return the names of all parts of a GGUF file whose first part is `file`, or [file]."""
    found = GGUF_PART.search(file)
    if not found or int(found[1]) != 1:
        return [file]
    return [f"{file[: found.start()]}-{part:05d}-of-{found[2]}.gguf" for part in range(1, int(found[2]) + 1)]


def as_text(name: str | os.PathLike) -> str:
    """Return a file name as valid Unicode; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _json(path: Path) -> Any:
    try:
        data = read_regular(path)
        return None if has_too_many_values(data) else json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(4)
    except OSError:
        return b""
