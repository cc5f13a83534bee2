"""The cache folder: files that castiron can make again, and the input history of chats.

Its path is `$CASTIRON_CACHE`, else `$XDG_CACHE_HOME/castiron`, else `~/.cache/castiron`. If the
cache cannot be written, one message is printed on stderr and nothing fails.

The folder may also have files of somebody else. Before castiron writes an entry, it adds the
entry's name to the file `.written-by-castiron` in the folder. `clear` removes only such entries.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from castiron.vmfb.atomic_write import ABANDONED_SECONDS, is_staging, locked, remove_abandoned, write_file
from castiron.vmfb.file_errors import reason

# The entries of the cache with their descriptions: folders, except those in `_FILES`.
KINDS = {
    "models": "checkpoints fetched by name",
    "shapes": "random checkpoints of known shapes, for castiron bench",
    "bundles": "bundles of models that were named or loaded",
    "fetched": "bundles fetched by nodes of a cluster",
    "compile": "modules that iree-compile compiled",
    "verified": "which bundles passed the hash check",
    "devices": "which GPUs gave the known answer of a bundle",
    "calibrated": "activation statistics, for compile --calibrate",
    "tuned": "tiles that castiron tune found",
    "prefixes": "states of long prompts that servers read",
    "chat": "input history of chats",
}
# Kinds that castiron cannot make again; `castiron cache clear` removes them only by name.
PRECIOUS = ("chat",)
_FILES = {"tuned": "tuned.json"}
_WRITTEN = ".written-by-castiron"


@dataclass(frozen=True)
class Usage:
    """The cached files of one kind.

    newest: Unix time at which one of the files was last used; None if there are no files.
    others: paths that castiron did not write, or that are links.
    """

    kind: str
    files: int
    bytes: int
    newest: float | None
    others: tuple[Path, ...] = ()


def cache_root() -> Path:
    """Return the cache directory, which need not exist yet."""
    try:
        if own := os.environ.get("CASTIRON_CACHE"):
            return Path(own).expanduser().absolute()
        shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # XDG ignores a relative path.
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "castiron"
    except RuntimeError as error:
        # The user has no home directory, as in some containers.
        unwritable("~/.cache/castiron", str(error))
        return _temporary()


def cache_path(kind: str) -> Path:
    """Return the path in the cache for a kind of `KINDS`; it need not exist yet."""
    return cache_root() / _FILES.get(kind, kind)


def cache_folder(kind: str) -> Path:
    """Create and return the cache's folder for a kind of `KINDS`.

    If the cache is not writable, print a message and create a temporary folder instead.
    """
    folder = cache_root() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = "no permission to write"
    except OSError as error:
        why = reason(error)
    unwritable(cache_root(), why)
    folder = _temporary() / kind
    folder.mkdir(exist_ok=True)
    return folder


def claim(path: Path) -> None:
    """Record that castiron writes the entry of the cache that `path` is or is in; call it before.

    An entry that exists already may be somebody else's, and is not recorded.
    """
    if (entry := _entry(path)) is None or os.path.lexists(entry):
        return
    # A cache that cannot be written is reported by the function that writes the entry.
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with locked(entry.parent), open(entry.parent / _WRITTEN, "a", encoding="ascii") as file:
            if entry.name not in _written(entry.parent):
                file.write(json.dumps(entry.name) + "\n")


def is_own(path: Path) -> bool:
    """Return whether castiron wrote the entry of the cache that `path` is or is in."""
    entry = _entry(path)
    return entry is not None and not entry.is_symlink() and entry.name in _written(entry.parent)


def _entry(path: Path) -> Path | None:
    with contextlib.suppress(ValueError):
        kind, *rest = path.relative_to(cache_root()).parts
        if rest or kind in _FILES.values():
            return cache_root() / kind / rest[0] if rest else path
    return None


def _written(folder: Path) -> set[str]:
    try:
        lines = (folder / _WRITTEN).read_text("ascii").splitlines()
    except (OSError, ValueError):
        return set()
    names = set()
    for line in lines:
        # A process may have been killed while it wrote the last line.
        with contextlib.suppress(ValueError):
            names.add(str(json.loads(line)))
    return names


def keep(path: Path, data: bytes) -> bool:
    """Write a file of the cache; return whether that succeeded, and report the first failure."""
    claim(path)
    try:
        write_file(path, data)
        return True
    except OSError as error:
        unwritable(cache_root(), reason(error))
        return False


_reported: list[str] = []


def unwritable(path: Path | str, why: str) -> None:
    """Print on stderr, once per process, that the cache cannot be written."""
    if not _reported:
        _reported.append(why)
        print(
            f"castiron: the cache in {path} cannot be written ({why}), so nothing is stored; "
            "set CASTIRON_CACHE to another folder",
            file=sys.stderr,
        )


@functools.cache
def _temporary() -> Path:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="castiron-"))

    def remove() -> None:
        # Error messages name the logs of failed compilations, so these stay.
        if not any(folder.glob("*/failed/*")):
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def usage() -> tuple[Usage, ...]:
    """Return the number and size of the cached files, for each kind of data in `KINDS`."""
    return tuple(_usage_of(kind, [stat for _, stat in _files(kind)]) for kind in KINDS)


def _usage_of(kind: str, stats: Sequence[os.stat_result]) -> Usage:
    newest = max((stat.st_mtime for stat in stats), default=None)
    own, others = _entries(kind)
    return Usage(kind, len(stats), sum(stat.st_size for stat in stats), newest, tuple(others))


def _entries(kind: str) -> tuple[list[Path], list[Path]]:
    """Return the entries of one kind that castiron wrote, and the others; links are others."""
    path = cache_path(kind)
    if path.is_symlink():
        return [], [path]
    if kind in _FILES:
        found = [path] if path.exists() else []
    else:
        with contextlib.suppress(OSError):
            found = [Path(entry.path) for entry in os.scandir(path)]
            found = sorted(entry for entry in found if entry.name != _WRITTEN and not is_staging(entry.name))
            written = _written(path)
            own = [entry for entry in found if entry.name in written and not entry.is_symlink()]
            return own, [entry for entry in found if entry not in own]
        return [], []
    return [entry for entry in found if is_own(entry)], [entry for entry in found if not is_own(entry)]


def _files(kind: str) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in _entries(kind)[0]:
        below = (Path(folder, name) for folder, _, names in os.walk(entry) for name in names)
        for file in below if entry.is_dir() else (entry,):
            # Another process may remove files meanwhile.
            with contextlib.suppress(OSError):
                yield file, file.lstat()


def clear(kinds: Sequence[str] = tuple(KINDS), older_than_days: float = 0.0) -> tuple[Usage, ...]:
    """Remove cached files that castiron wrote; return what was removed, by kind.

    older_than_days: remove only files that were not used for so many days.

    No link is followed, and no file that a process is writing is removed.
    """
    now, removed = time.time(), []
    for kind in kinds:
        removed_files: list[os.stat_result] = []
        own, _ = _entries(kind)
        if not cache_path(kind).is_symlink():
            remove_abandoned(cache_path(kind))
        for folder in (folder for entry in own for folder, _, _ in os.walk(entry)):
            remove_abandoned(Path(folder))
        for path, stat in list(_files(kind)):
            min_age = older_than_days * 86400
            # A hidden file may be the lock of a running process.
            if any(part.startswith(".") for part in path.relative_to(cache_root()).parts):
                min_age = max(min_age, ABANDONED_SECONDS)
            if now - stat.st_mtime >= min_age:
                path.unlink(missing_ok=True)
                _remove_empty(path.parent)
                removed_files.append(stat)
        _forget(own)
        removed.append(_usage_of(kind, removed_files))
    return tuple(removed)


def _forget(entries: Sequence[Path]) -> None:
    gone = {entry.name for entry in entries if not os.path.lexists(entry)}
    if not gone:
        return
    folder = entries[0].parent
    with contextlib.suppress(OSError), locked(folder):
        names = sorted(_written(folder) - gone)
        if names:
            (folder / _WRITTEN).write_text("".join(json.dumps(name) + "\n" for name in names), "ascii")
        else:
            (folder / _WRITTEN).unlink()
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    # Ends at the first parent that is not empty.
    with contextlib.suppress(OSError):
        while folder != cache_root():
            folder.rmdir()
            folder = folder.parent
