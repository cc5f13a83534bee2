"""Atomic writes: files and folders are written beside their target and renamed when complete.

Each writer has a hidden folder `.NAME.castiron-XXXXXXXX` beside its target and locks a file in it.
The lock ends with the process. The next writer in the same parent folder removes hidden folders
that killed processes left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from castiron.vmfb.file_errors import naming

try:
    import fcntl
except ImportError:
    # Windows has no fcntl, so writers take no locks there: two of them may write the same bundle, and
    # files of a killed one stay for ABANDONED_SECONDS.
    fcntl = None  # type: ignore[assignment]

_STAGING = re.compile(r"\..*\.castiron-[0-9a-f]{8}", re.DOTALL)
_LOCK, _NEW, _PREVIOUS = "lock", "new", "previous"
# Modes of files and folders that only their owner may read.
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
# Without locks, a staging folder of this age counts as left by a killed writer.
ABANDONED_SECONDS = 86400.0


def write_file(path: Path, data: bytes) -> None:
    """Write `path` completely or not at all, so that no reader sees a part of it."""
    with replace_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def replace_file(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` at the end of the `with` block, unless the block raises.

    OSError if `path` is a folder, a device or a pipe. private: only the owner may read the file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file; give the path of a file", os.fspath(path))
    with naming(path), _staging(path) as staging:
        with open(staging / _NEW, "wb") as file:
            if private:
                os.chmod(staging / _NEW, PRIVATE_FILE)
            yield file
        os.replace(staging / _NEW, path)


@contextlib.contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; rename what must stay before the block ends."""
    with _staging(path) as staging:
        (staging / _NEW).mkdir()
        yield staging / _NEW


def replace_folder(new: Path, path: Path) -> None:
    """Rename the folder `new`, which `staging_folder` yielded, to `path`, and remove the old one.

    `path` does not exist for a moment, so readers lock `path.parent`. If the process is killed
    then, `remove_abandoned` moves the old folder back.
    """
    previous = new.parent / _PREVIOUS / path.name
    previous.parent.mkdir()
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, previous)
    try:
        os.rename(new, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(previous, path)
        raise


def locked(folder: Path) -> contextlib.AbstractContextManager:
    """Lock `folder`, so that no other process renames files or folders in it; not reentrant."""
    return _lock(folder, wait=True)


def is_staging(name: str) -> bool:
    return _STAGING.fullmatch(name) is not None


def remove_abandoned(folder: Path) -> None:
    """Remove what killed writers left in `folder`; move back a folder that one was replacing."""
    with locked(folder):
        _remove_abandoned(folder)


@contextlib.contextmanager
def _staging(path: Path) -> Iterator[Path]:
    """Yield a new, locked, hidden folder beside `path`; remove it when the `with` block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name[:40]}.castiron-{os.urandom(4).hex()}")
    with contextlib.ExitStack() as lock:
        try:
            with locked(path.parent):
                _remove_abandoned(path.parent)
                # Private, because the file that is written in it may be.
                staging.mkdir(mode=PRIVATE_FOLDER)
                (staging / _LOCK).touch()
                lock.enter_context(_lock(staging / _LOCK))
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for staging in [Path(entry.path) for entry in entries if _STAGING.fullmatch(entry.name)]:
            with contextlib.suppress(OSError), _lock(staging / _LOCK) as free:
                if free is None:
                    free = time.time() - staging.stat().st_mtime > ABANDONED_SECONDS
                if free:
                    for previous in (staging / _PREVIOUS).glob("*"):
                        if not (folder / previous.name).exists():
                            os.rename(previous, folder / previous.name)
                    shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, wait: bool = False) -> Iterator[bool | None]:
    """Lock `path`; yield True (also if it is absent), False (another has it) or None (no locks)."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        # The writer was killed before it created its lock file.
        yield True
        return
    except OSError:
        yield None
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        is_locked: bool | None = True
    except BlockingIOError:
        is_locked = False
    except (AttributeError, OSError):
        is_locked = None
    try:
        yield is_locked
    finally:
        os.close(file)
