"""The cache folder: files that castiron can make again, and the input history of chats.

Its path is `$CASTIRON_CACHE`, else `$XDG_CACHE_HOME/castiron`, else `~/.cache/castiron`. If the
cache cannot be written, one message is printed on stderr and nothing fails.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from castiron.vmfb.disk import files_below, reason
from castiron.vmfb.staging import ABANDONED_SECONDS, remove_abandoned, write_file

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


@dataclass(frozen=True)
class Usage:
    """The number, total size and last use of the cached files of one kind, such as "bundles".

    kind: what the files contain; a key of `KINDS`.
    bytes: total size of the files.
    newest: Unix time at which one of the files was last used; None if there are no files.
    """

    kind: str
    files: int
    bytes: int
    newest: float | None


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
    """Return the path in the cache for one kind of data; it need not exist yet.

    kind: a key of `KINDS`, such as "bundles".
    """
    return cache_root() / _FILES.get(kind, kind)


def cache_folder(kind: str) -> Path:
    """Create and return the cache's folder for one kind of data.

    If the cache is not writable, print a message and create a temporary folder instead. kind: a key
    of `KINDS`, such as "bundles".
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


def keep(path: Path, data: bytes) -> bool:
    """Write `data` to the file `path` in the cache; return whether that succeeded.

    A failure raises nothing. The first failure in a process prints its reason on stderr.
    """
    try:
        write_file(path, data)
        return True
    except OSError as error:
        unwritable(cache_root(), reason(error))
        return False


_reported: list[str] = []


def unwritable(path: Path | str, why: str) -> None:
    """Print on stderr, once per process, that the cache cannot be written.

    path: folder of the cache. why: the reason, for the message.
    """
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
    return tuple(_usage_of(kind, [stat for _, stat in files_below(cache_path(kind))]) for kind in KINDS)


def _usage_of(kind: str, stats: Sequence[os.stat_result]) -> Usage:
    newest = max((stat.st_mtime for stat in stats), default=None)
    return Usage(kind, len(stats), sum(stat.st_size for stat in stats), newest)


def clear(kinds: Sequence[str] = tuple(KINDS), older_than_days: float = 0.0) -> tuple[Usage, ...]:
    """Remove cached files; return how many were removed, and their size, for each kind of data.

    kinds: which kinds of data to remove, as keys of `KINDS`; by default all.
    older_than_days: remove only files that were not used for this number of days.

    Temporary files that killed processes left are removed too. Files that a process is writing are
    not removed.
    """
    now, removed = time.time(), []
    for kind in kinds:
        removed_files, folder_of_kind = [], cache_path(kind)
        for folder, _, _ in os.walk(folder_of_kind):
            remove_abandoned(Path(folder))
        for path, stat in list(files_below(folder_of_kind)):
            min_age = older_than_days * 86400
            # A hidden file may be the lock of a running process.
            if any(part.startswith(".") for part in path.relative_to(cache_root()).parts):
                min_age = max(min_age, ABANDONED_SECONDS)
            if now - stat.st_mtime >= min_age:
                path.unlink(missing_ok=True)
                _remove_empty(path.parent)
                removed_files.append(stat)
        removed.append(_usage_of(kind, removed_files))
    return tuple(removed)


def _remove_empty(folder: Path) -> None:
    # Ends at the first parent that is not empty.
    with contextlib.suppress(OSError):
        while folder != cache_root():
            folder.rmdir()
            folder = folder.parent
