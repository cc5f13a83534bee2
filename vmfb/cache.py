"""Where castiron keeps what it can make again.

`$CASTIRON_CACHE`, else `$XDG_CACHE_HOME/castiron`, else `~/.cache/castiron`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


def cache_root() -> Path:
    """The cache directory; it need not exist yet."""
    if own := os.environ.get("CASTIRON_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "castiron"


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `path` whole or not at all, so that a concurrent reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
