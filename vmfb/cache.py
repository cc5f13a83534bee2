"""Where castiron keeps what it can make again, and what was typed in chats; and how much of it there is.

`$CASTIRON_CACHE`, else `$XDG_CACHE_HOME/castiron`, else `~/.cache/castiron`. A cache that cannot be written is said once on
stderr and fails nothing: what would have been kept is made again.
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

from castiron.vmfb.aside import ABANDONED_SECONDS, sweep, write_atomically
from castiron.vmfb.disk import files_below, reason

# What there is under the root, and why: a folder of that name, or the file that `_FILES` says.
KINDS = {
    "models": "checkpoints fetched by name",
    "shapes": "random checkpoints of known shapes, for castiron bench",
    "bundles": "bundles of models that were named or loaded",
    "fetched": "bundles that nodes of a cluster fetched",
    "compile": "what iree-compile made of modules",
    "unpacked": "files of packed bundles, for IREE's tools",
    "verified": "which bundles were found whole",
    "calibrated": "how large activations were, for compile --calibrate",
    "tuned": "tiles that castiron tune found",
    "chat": "what was typed in chats",
}
# Nobody can make these again, so they go when they are named only.
PRECIOUS = ("chat",)
_FILES = {"tuned": "tuned.json"}


@dataclass(frozen=True)
class Held:
    """What there is of one of `KINDS`: files, their bytes, and when the newest was written or used last (s since 1970)."""

    kind: str
    files: int
    bytes: int
    newest: float | None


def cache_root() -> Path:
    """The cache directory; it need not exist yet."""
    try:
        if own := os.environ.get("CASTIRON_CACHE"):
            return Path(own).expanduser().absolute()
        shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # By the rules of XDG a relative path counts as none.
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "castiron"
    except RuntimeError as error:
        # A user without a home, as in some containers.
        unwritable("~/.cache/castiron", str(error))
        return _temporary()


def cache_place(kind: str) -> Path:
    """The folder or file of one of `KINDS`; it need not exist."""
    return cache_root() / _FILES.get(kind, kind)


def cache_folder(kind: str) -> Path:
    """A folder to write `kind` in: under the root, or where that cannot be written one that goes with the process."""
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
    """Writes a file of the cache whole; False if it could not, which is then said."""
    try:
        write_atomically(path, data)
        return True
    except OSError as error:
        unwritable(cache_root(), reason(error))
        return False


# What was said in this process; once is enough.
_told: list[str] = []


def unwritable(place: Path | str, why: str) -> None:
    """Says on stderr, once in a process, that nothing is kept."""
    if not _told:
        _told.append(why)
        print(
            f"castiron: the cache in {place} cannot be written ({why}), so nothing is kept for the next time; "
            "CASTIRON_CACHE names another folder",
            file=sys.stderr,
        )


@functools.cache
def _temporary() -> Path:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="castiron-"))

    def remove() -> None:
        # An error has named these as the place of its log.
        if not any(folder.glob("*/failed/*")):
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def held() -> tuple[Held, ...]:
    """What there is of each kind, in the order of `KINDS`."""
    return tuple(_held(kind, [stat for _, stat in files_below(cache_place(kind))]) for kind in KINDS)


def _held(kind: str, stats: Sequence[os.stat_result]) -> Held:
    newest = max((stat.st_mtime for stat in stats), default=None)
    return Held(kind, len(stats), sum(stat.st_size for stat in stats), newest)


def clear(kinds: Sequence[str] = tuple(KINDS), older_than_days: float = 0.0) -> tuple[Held, ...]:
    """Removes what was neither written nor used for so many days, and says what that was; other entries of the root stay.

    What a process is writing now is left alone, and what killed ones left goes. OSError if something cannot be removed.
    """
    now, removed = time.time(), []
    for kind in kinds:
        gone, place = [], cache_place(kind)
        for folder, _, _ in os.walk(place):
            sweep(Path(folder))
        for path, stat in list(files_below(place)):
            least = older_than_days * 86400
            # What belongs to a process at work, which may be a lock only.
            if _is_hidden(path):
                least = max(least, ABANDONED_SECONDS)
            if now - stat.st_mtime >= least:
                path.unlink(missing_ok=True)
                _remove_empty(path.parent)
                gone.append(stat)
        removed.append(_held(kind, gone))
    return tuple(removed)


def _remove_empty(folder: Path) -> None:
    """The folder and those above it that are empty, up to the root."""
    with contextlib.suppress(OSError):
        while folder != cache_root():
            folder.rmdir()
            folder = folder.parent


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(cache_root()).parts)
