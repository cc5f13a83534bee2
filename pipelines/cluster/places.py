"""How a bundle comes to a node of a cluster: by a path that is there, from a URL, or out of Ray's object store.

What is fetched lies in the cache of the node, once for all processes there: a lock keeps them from fetching it twice, a
rename makes it whole or absent, and the manifest's hashes are held against its bytes before anybody runs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.archive import MANIFEST
from castiron.vmfb.aside import folder_aside, scratch
from castiron.vmfb.bundle import Bundle, open_bundle, pack_bundle
from castiron.vmfb.cache import cache_folder
from castiron.vmfb.manifest import FILES, BundleError, dump, parse

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class Stored:
    """A packed bundle in Ray's object store, for as long as whoever stored it lives; `key` names its contents."""

    name: str
    key: str
    data: ray.ObjectRef


# A path on every node, a URL of fsspec's, or what `store` made.
Place = str | os.PathLike[str] | Stored


def store(bundle: Bundle | Path | str) -> Stored:
    """Puts a bundle of this machine into Ray's object store, from where every node takes it once."""
    import numpy as np
    import ray

    bundle = open_bundle(bundle)
    key = hashlib.sha256(dump(bundle.manifest)).hexdigest()
    with scratch("packed") as folder:
        packed = bundle.path
        if not bundle.packed:
            packed = folder / "packed"
            pack_bundle(bundle, packed)
        # Mapped, so that it is in memory once: in the store.
        return Stored(bundle.manifest.name, key, ray.put(np.memmap(packed, np.uint8, "r")))


def bundle_at(place: Place) -> Bundle:
    """The bundle at `place`, on this node; BundleError for one that is none, PipelineError for a URL that cannot be read."""
    if isinstance(place, Stored):
        return _once(place.key, place.name, lambda out: _write(place, out))
    if "://" not in (url := os.fspath(place)):
        return open_bundle(url)
    try:
        import fsspec
    except ModuleNotFoundError:
        raise PipelineError(f"fetching {url} needs fsspec, which is not installed: pip install fsspec") from None
    try:
        files, path = fsspec.core.url_to_fs(url)
        if "file" in files.protocol:
            return open_bundle(path)
        directory = files.exists(f"{path}/{MANIFEST}")
        # What changes with the contents, as far as this kind of store tells.
        mark = files.ukey(f"{path}/{MANIFEST}" if directory else path)
        key = hashlib.sha256(f"{url} {mark}".encode()).hexdigest()
        fetch = _fetch_directory if directory else lambda files, path, out: files.get_file(path, str(out))
        return _once(key, url, lambda out: fetch(files, path, out))
    except (BundleError, PipelineError):
        raise
    except FileNotFoundError:
        raise PipelineError(f"{url} cannot be fetched: there is nothing of that name") from None
    except Exception as error:
        # Each kind of store has errors of its own.
        why = " ".join(str(error).split()) or type(error).__name__
        raise PipelineError(f"{url} cannot be fetched: {why:.300}") from error


def _write(stored: Stored, out: Path) -> None:
    import ray

    with open(out, "wb") as file:
        file.write(ray.get(stored.data).data)


def _fetch_directory(files, path: str, out: Path) -> None:
    """What its manifest names, and nothing else that may lie there."""
    out.mkdir()
    manifest = out / MANIFEST
    files.get_file(f"{path}/{MANIFEST}", str(manifest))
    for name in parse(manifest.read_bytes(), f"{path}/{MANIFEST}").files:
        if name in FILES:
            files.get_file(f"{path}/{name}", str(out / name))


def _once(key: str, source: str, fetch: Callable[[Path], None]) -> Bundle:
    """The bundle that `fetch(path)` writes, or that of whoever did so before; BundleError where its bytes do not hold."""
    place = cache_folder("fetched") / key
    with _locked(place.with_name(f".{key}.lock")):
        if not place.exists():
            with folder_aside(place) as aside:
                fetch(aside / "bundle")
                os.rename(aside / "bundle", place)
        try:
            open_bundle(place, run=False)
        except BundleError as error:
            _remove(place)
            raise BundleError(f"{source} is no whole bundle, and was fetched to no avail: {error}") from None
    return open_bundle(place)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes of this node; a process that dies lets go."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
