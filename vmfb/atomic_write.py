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
    """Yield a file that replaces `path` when the `with` block ends.

    If the block raises an error, `path` is unchanged. A folder, a device or a pipe, such as
    /dev/null, is not replaced but an OSError. private: whether only the owner may read it.
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
    """Yield a temporary folder beside `path`, which is removed when the `with` block ends.

    To keep a file of the folder, or the folder itself, rename it before the block ends.
    """
    with _staging(path) as staging:
        (staging / _NEW).mkdir()
        yield staging / _NEW


def replace_folder(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`, and remove the old folder at `path`, if there is one.

    new: a folder that `staging_folder` yielded. Between moving the old folder away and renaming the
    new one, `path` does not exist, so readers lock `path.parent`. If the process is killed in
    between, `remove_abandoned` moves the old folder back.
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
    """Return whether `name` is that of a writer's hidden folder."""
    return _STAGING.fullmatch(name) is not None


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files that killed processes left in `folder`.

    If a killed process was replacing a folder, the old folder is moved back to its path.
    """
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
    """Lock the file or folder `path` during the `with` body; yield whether that succeeded.

    The value is True if `path` is locked or does not exist, False if another process has the lock,
    and None if the system cannot lock `path`. wait: wait for the other process instead of yielding
    False.
    """
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
