"""Read small files, check free disk space, and hash castiron's source files.

A path from a user or a checkpoint may be a pipe, a device or a file as large as the disk. So only
regular files of limited size are read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import megabytes
from castiron.vmfb.atomic_write import remove_abandoned

# Max size of a file. A tokenizer of 260,000 tokens takes 35 MB, an index of 100,000 tensors 10 MB.
MAX_BYTES = 100_000_000
# Max JSON values in a file, counted by separators; a tokenizer of 260,000 tokens has 1.8 million.
MAX_VALUES = 4_000_000
ROOT = Path(__file__).parents[1]
# Sources that decide the content of a bundle, and those that decide which tiles are fastest.
BUNDLE_SOURCES = ("emitter", "vmfb", "pipelines/checkpoints", "pipelines/compile", "pipelines/text")
KERNEL_SOURCES = ("emitter/kernels", "emitter/codecs", "emitter/graph/types.py")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file of at most `MAX_BYTES`; OSError for any other path."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError:  # a NUL in the name
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"the file is larger than the limit of {MAX_BYTES // 10**6} MB", str(path))
    return data


def read_text(path: Path | Traversable) -> str:
    """Return the text of a file that a user gives; PipelineError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path} is not UTF-8 text: invalid byte at offset {error.start}; convert the file") from None


def has_too_many_values(text: str | bytes, limit: int = MAX_VALUES) -> bool:
    """Estimate, before a JSON text is parsed, whether it has more than `limit` values."""
    marks = ",[{" if isinstance(text, str) else (b",", b"[", b"{")
    return sum(map(text.count, marks)) > limit


def require_free_space(path: Path | str, needed: int, what: str) -> None:
    """Raise PipelineError if the disk of `path` has less than `needed` bytes free for `what`.

    First deletes temporary files that killed processes left in the folder of `path`.
    """
    path = Path(path).absolute()
    remove_abandoned(path.parent)
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PipelineError(f"{what} needs {megabytes(needed)}, but {folder} has {megabytes(free)} free; delete files there")


@cache
def sources_hash(*paths: str) -> str:
    """Return a hash of castiron's source files; a folder means all its Python files."""
    digest = hashlib.sha256()
    for path in (ROOT / path for path in paths):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(ROOT)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
