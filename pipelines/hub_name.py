"""Names of models on Hugging Face's hub, and what of them a folder of the hub's cache says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from castiron.pipelines.errors import PipelineError

# What folders of models in the hub's cache are called: models--org--name.
FOLDER = "models--"
MAIN = "main"
_NAME = re.compile(
    r"(?P<hub>hf\.co/|(?:https?:/+)?huggingface\.co/)?"
    r"(?P<repository>[A-Za-z0-9][\w.-]*/(?!models--)[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>(?!.*\.\.)\w[\w./-]*))?(?::(?P<wanted>[^:]+))?/?"
)


class HubName(NamedTuple):
    """`ORG/NAME[@REVISION][:WANTED]`, in front of which hf.co/ may stand.

    revision is a branch, a tag or a commit; wanted a GGUF file of the repository, by its path in it, or what its name ends with
    before .gguf, as llama.cpp and Ollama write it: Q4_K_M.
    """

    repository: str
    revision: str = MAIN
    wanted: str | None = None

    @staticmethod
    def read(text: str) -> HubName | None:
        """The name that `text` is. None for what is no such name, and for a path: one that begins with a folder that is
        here, or ends with .gguf."""
        found = _NAME.fullmatch(text)
        if found is None or (not found["wanted"] and found["repository"].endswith(".gguf")):
            return None
        if not found["hub"] and Path(found["repository"]).parent.is_dir():
            return None
        return HubName(found["repository"], found["revision"] or MAIN, found["wanted"])

    @property
    def short(self) -> str:
        """What to call the model here: NAME, or NAME-Q4_K_M, or the name of its file."""
        name = self.repository.partition("/")[2]
        if self.wanted is None:
            return name
        file = self.wanted.rpartition("/")[2]
        return file.removesuffix(".gguf") if file.endswith(".gguf") else f"{name}-{file}"

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return self.repository + revision + (f":{self.wanted}" if self.wanted else "")


def with_options(model: str | None, file: str | None, revision: str | None) -> str | None:
    """`model` with what --file and --revision say of it; PipelineError if it is no name on the hub and one of them is given."""
    if file is None and revision is None:
        return model
    name = None if model is None or Path(model).exists() else HubName.read(model)
    if name is None:
        given = "there is no MODEL" if model is None else f"{model} is none"
        raise PipelineError(f"--file and --revision choose from a repository on the hub, org/name, and {given}")
    return f"hf.co/{name._replace(wanted=file or name.wanted, revision=revision or name.revision)}"


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetches."""
    try:
        if own := os.environ.get("HF_HUB_CACHE"):
            return Path(own).expanduser().absolute()
        home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        return Path(home).expanduser().absolute() / "hub"
    except RuntimeError:  # a user without a home, as in some containers
        raise PipelineError("there is no home directory for the hub's cache: set HF_HOME to a folder") from None


def folder_of(repository: str) -> Path:
    """A repository's folder in the hub's cache."""
    return cache_folder() / (FOLDER + repository.replace("/", "--"))


def source_of(path: Path) -> dict[str, str] | None:
    """Of a snapshot in a cache of the hub, or a file in one: repository, revision (the commit) and, of a file, file. None
    for any other path."""
    path = Path(os.path.abspath(path))
    for snapshot in (path, *path.parents):
        repository = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and repository.startswith(FOLDER):
            found = {"repository": repository.removeprefix(FOLDER).replace("--", "/", 1), "revision": snapshot.name}
            return found if snapshot == path else found | {"file": path.relative_to(snapshot).as_posix()}
    return None
