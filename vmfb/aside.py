"""Files and folders on their way: written aside under a hidden name, and whole when they take their place.

Whoever writes one holds a lock (flock) on it, which ends with the process, however that ends: what lies aside unlocked is
what a killed process left, and goes when something else is written in the same folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from castiron.vmfb.disk import naming

_ASIDE = re.compile(r"\..*\.castiron-[0-9a-f]{8}", re.DOTALL)
# A file system without locks does not say who lives: what is older was left.
ABANDONED_SECONDS = 86400.0
# Neither through a link, nor waiting for a pipe.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
# Of Linux's renameat2 and of macOS's renamex_np.
_HERE, _EXCHANGE, _SWAP = -100, 2, 2


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `path` whole or not at all, so that a concurrent reader never sees half a file."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when it is whole, and leaves nothing if it does not come to that."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        aside, lock = _made(path, lambda place: os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            with os.fdopen(lock, "r+b") as file:
                yield file
                file.flush()
                os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def folder_aside(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """A folder beside `path` for the length of the block; what is to stay is moved out of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)

    def make(place: Path) -> int:
        place.mkdir(mode)
        return os.open(place, _OPEN)

    aside, lock = _made(path, make)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def scratch(what: str) -> Iterator[Path]:
    """A folder under $TMPDIR for the length of the block, for this user alone."""
    with folder_aside(Path(tempfile.gettempdir()) / what, 0o700) as folder:
        yield folder


def sweep(folder: Path) -> None:
    """Removes what killed processes left aside in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for path in [Path(entry.path) for entry in entries if _ASIDE.fullmatch(entry.name)]:
            with _if_left(path) as left:
                if left:
                    _remove(path)


def swap(aside: Path, place: Path) -> None:
    """Puts the folder `aside` at `place`; what stood there is aside then, or gone.

    That is one step where the system can exchange two names, so that who opens `place` finds the one or the other. Elsewhere
    (NFS) it is two, and `restore` puts right what a kill between them left.
    """
    if not (_exchange(aside, place) or _moved(aside, place)):
        before = _before(place)
        with _held(place):
            os.rename(place, before)
            try:
                os.rename(aside, place)
            except BaseException:
                os.rename(before, place)
                raise
            shutil.rmtree(before, ignore_errors=True)


def restore(place: Path) -> None:
    """What stood at `place` before a `swap` that was killed between two steps stands there again, or goes if that was done."""
    with _if_left(before := _before(place)) as left:
        if left and place.exists():
            _remove(before)
        elif left:
            os.rename(before, place)


def _before(place: Path) -> Path:
    return place.with_name(f".{place.name}.before")


def _moved(aside: Path, place: Path) -> bool:
    """Whether the folder `aside` stands at `place` now, where there was none, or an empty one."""
    try:
        os.rename(aside, place)
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Whether the system has exchanged two names of one file system."""
    libc, names = ctypes.CDLL(None), (os.fsencode(one), os.fsencode(other))
    if hasattr(libc, "renameat2"):
        return libc.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0
    return hasattr(libc, "renamex_np") and libc.renamex_np(*names, _SWAP) == 0


def _made(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """What `make` made beside `path`, open and locked. Between the two it may be taken for something that was left: then
    another is made."""
    for _ in range(9):
        aside = path.with_name(f".{path.name[:40]}.castiron-{os.urandom(4).hex()}")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            file = make(aside)
            if _lock(file) is not False and _is_at(file, aside):
                return aside, file
            os.close(file)
    raise FileNotFoundError(2, os.strerror(2), str(path.parent))


@contextlib.contextmanager
def _held(place: Path) -> Iterator[None]:
    file = os.open(place, _OPEN)
    try:
        _lock(file)
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def _if_left(path: Path) -> Iterator[bool]:
    """Whether there is something at `path` that nobody holds; nobody takes it during the block."""
    try:
        file = os.open(path, _OPEN)
    except OSError:
        # It may be another user's.
        yield False
        return
    try:
        free = _lock(file)
        if free is None:
            free = time.time() - os.fstat(file).st_mtime > ABANDONED_SECONDS
        yield free and _is_at(file, path)
    finally:
        os.close(file)


def _lock(file: int) -> bool | None:
    """Whether this process has the lock of an open file now; None where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
