"""Hash castiron's own sources, for the keys of stored results that depend on them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Sources that decide the content of a bundle, and those that decide which tiles are fastest.
BUNDLE_SOURCES = ("emitter", "vmfb", "pipelines/checkpoints", "pipelines/compile", "pipelines/text")
KERNEL_SOURCES = ("emitter/kernels", "emitter/codecs.py", "emitter/types.py")


@cache
def sources_hash(*paths: str) -> str:
    """Return a hash of files, and of the Python files in folders, relative to `ROOT`."""
    digest = hashlib.sha256()
    for path in (ROOT / path for path in paths):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(ROOT)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
