"""Open bundles on the nodes of a cluster: from a path, from a URL, or from Ray's object store.

Each node downloads a bundle once into its cache, under a lock, and checks its hashes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.atomic_write import locked, staging_folder
from castiron.vmfb.bundle.bundle import Bundle, open_bundle, pack_bundle
from castiron.vmfb.bundle.manifest import BundleError, dump
from castiron.vmfb.cache_folder import cache_folder, claim

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class Stored:
    """A packed bundle in Ray's object store; data: reference to the file, u8 [size]."""

    name: str
    key: str
    data: ray.ObjectRef


# A path that exists on every node, an fsspec URL of a packed bundle, or the result of `store`.
BundleSource = str | os.PathLike[str] | Stored


def store(bundle: Bundle | Path | str) -> Stored:
    """Put a local bundle into Ray's object store, and return a `Stored` for the nodes."""
    import numpy as np
    import ray

    bundle = open_bundle(bundle)
    key = hashlib.sha256(dump(bundle.manifest)).hexdigest()
    with TemporaryDirectory(prefix="castiron-") as folder:
        packed = bundle.path
        if not bundle.packed:
            packed = Path(folder) / "packed"
            pack_bundle(bundle, packed)
        # Memory-map the file, so that this process needs no second copy in memory.
        return Stored(bundle.manifest.name, key, ray.put(np.memmap(packed, np.uint8, "r")))


def bundle_at(source: BundleSource) -> Bundle:
    """Open a bundle, which is fetched first if it is not on this node."""
    if isinstance(source, Stored):
        import ray

        return _fetched(source.key, source.name, lambda out: out.write_bytes(ray.get(source.data).data))
    if "://" not in (url := os.fspath(source)):
        return open_bundle(url)
    try:
        import fsspec
    except ModuleNotFoundError:
        raise PipelineError(f"cannot fetch {url}: fsspec is not installed; pip install fsspec") from None
    try:
        files, path = fsspec.core.url_to_fs(url)
        if "file" in files.protocol:
            return open_bundle(path)
        # `ukey` changes with the contents, on file systems that report a checksum or a time.
        key = hashlib.sha256(f"{url} {files.ukey(path)}".encode()).hexdigest()
        return _fetched(key, url, lambda out: files.get_file(path, str(out)))
    except (BundleError, PipelineError):
        raise
    except FileNotFoundError:
        raise PipelineError(f"cannot fetch {url}: no such file or directory; check the URL") from None
    except Exception as error:
        # Each fsspec file system has its own exception types.
        why = " ".join(str(error).split()) or type(error).__name__
        raise PipelineError(f"cannot fetch {url}: {why:.300}; check the URL") from error


def _fetched(key: str, source: str, fetch: Callable[[Path], Any]) -> Bundle:
    path = cache_folder("fetched") / key
    lock = path.with_name(f".{key}.lock")
    claim(path)
    claim(lock)
    lock.touch()
    with locked(lock):
        if not path.exists():
            with staging_folder(path) as staging:
                fetch(staging / "bundle")
                os.rename(staging / "bundle", path)
        try:
            open_bundle(path, run=False)
        except BundleError as error:
            path.unlink()
            raise BundleError(f"invalid bundle at {source}; replace it with a valid bundle ({error})") from None
    return open_bundle(path)
