"""Checkpoints by their names on Hugging Face's hub: of a repository what is needed, fetched into the hub's own cache.

The cache is that of huggingface_hub (`models--org--name` with refs, snapshots and blobs), so that its other users find what
castiron fetched, and castiron what they did. huggingface_hub talks to the hub; that a file which broke off goes on from there
the next time, and that every file has the hash that it is named by, is done here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from castiron.emitter.shown import shown_list
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.hf_directory import CONFIG, INDEX, SINGLE, shards_of
from castiron.pipelines.hub_name import HubName, cache_folder, folder_of
from castiron.pipelines.installing import remedy
from castiron.pipelines.progress import say
from castiron.pipelines.sizes import megabytes
from castiron.pipelines.space import need_room
from castiron.vmfb.aside import write_atomically
from castiron.vmfb.disk import reason

# What is read of a directory besides its weights.
_BESIDE = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_COMMIT, _ETAG = re.compile("[0-9a-f]{40}"), re.compile(r"\w[\w.-]*")
# Files of a GGUF repository that are no language model.
_NO_MODEL = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
_PIECE = 1 << 20
# For the hub's first answer, before the cache is taken.
_SECONDS = 10.0

Progress = Callable[[str, float], None]


class Unreachable(CheckpointError):
    """The hub could not be asked; what its cache holds can still be used."""


def fetch(name: HubName, progress: Progress | None = None) -> Path:
    """Where the checkpoint `name` lies in the hub's cache, a snapshot or a GGUF file in one, after what was missing of it was
    fetched. `progress` gets ("fetch", share done).

    Where the hub cannot be asked, what the cache holds of that revision is taken. CheckpointError, one sentence, for what there
    is not, may not be had, does not fit on the disk or is not what the hub says it is; PipelineError without room for it.
    """
    try:
        commit, sizes = _ask(name)
        return _fetched(name, commit, sizes, progress or (lambda stage, done: None))
    except Unreachable as error:
        kept = cached(name)
        if kept is None:
            raise CheckpointError(f"{name} is no path here, {error}, and {cache_folder()} does not hold it whole") from None
        say(f"{error}: taking {name} as it lies in {cache_folder()}")
        return kept


def cached(name: HubName) -> Path | None:
    """The checkpoint `name` in the hub's cache; None where it is not there whole."""
    folder = folder_of(name.repository)
    try:
        commit = (folder / "refs" / name.revision).read_text(errors="replace").strip() or name.revision
    except OSError:
        commit = name.revision
    snapshot = folder / "snapshots" / commit
    sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in snapshot.rglob("*") if path.is_file()}
    if not sizes:
        return None
    file = chosen(name, sizes, f"what {cache_folder()} holds of {name.repository}")
    if file is not None:
        return snapshot / file
    return snapshot if all(shard in sizes for shard in shards_of(snapshot)) else None


def chosen(name: HubName, sizes: Mapping[str, int], where: str) -> str | None:
    """The GGUF file that `name` means among files with these sizes; None for a directory of safetensors. CheckpointError, which
    begins with `where`, for a repository that has neither and for a name that does not say which of several."""
    files = {file: size for file, size in sizes.items() if file.endswith(".gguf") and not _NO_MODEL.search(file)}
    by_size = sorted(files.items(), key=lambda item: item[1])
    listed = shown_list([f"{file} ({megabytes(size)})" for file, size in by_size], most=500)
    if name.wanted is None:
        if CONFIG in sizes and not {SINGLE, INDEX}.isdisjoint(sizes):
            return None
        if len(files) == 1:
            return next(iter(files))
        if files:
            raise CheckpointError(f"{where} has several GGUF files: choose one with --file, or as {name}:Q4_K_M: {listed}")
        if "adapter_config.json" in sizes:
            raise CheckpointError(f"{where} is an adapter, not a model: fetch it, and give its base with --adapter DIR")
        raise CheckpointError(
            f"{where} has neither {CONFIG} with {SINGLE} or {INDEX}, nor a GGUF file: castiron reads only these"
        )
    matching = [file for file in files if _is_meant(file, name.wanted)]
    if len(matching) == 1:
        return matching[0]
    several = "no GGUF file" if not matching else "several GGUF files"
    raise CheckpointError(f"{where} has {several} {name.wanted}" + (f": it has {listed}" if files else ", nor any other"))


def _is_meant(file: str, wanted: str) -> bool:
    if wanted.endswith(".gguf"):
        return wanted in (file, PurePosixPath(file).name)
    ending = PurePosixPath(file).stem.lower().removesuffix(wanted.lower())
    return ending != PurePosixPath(file).stem.lower() and (not ending or ending[-1] in "-._")


def _ask(name: HubName) -> tuple[str, dict[str, int]]:
    """The commit that the name's revision is, and the sizes in bytes of the repository's files."""
    with _asking(name):
        from huggingface_hub import HfApi

        found = HfApi(_endpoint()).model_info(name.repository, revision=name.revision, files_metadata=True, timeout=_SECONDS)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    inside = (not path.is_absolute() and ".." not in path.parts for path in map(PurePosixPath, sizes))
    if not _COMMIT.fullmatch(found.sha or "") or not all(inside):
        raise CheckpointError(f"{_endpoint()} says of {name} what no hub says: check HF_ENDPOINT")
    return found.sha, sizes


def _fetched(name: HubName, commit: str, sizes: dict[str, int], progress: Progress) -> Path:
    snapshot = folder_of(name.repository) / "snapshots" / commit
    file = chosen(name, sizes, name.repository)
    if file is None:
        small = [*(beside for beside in _BESIDE if beside in sizes), *((INDEX,) if SINGLE not in sizes else ())]
        _fetch_files(name, commit, {file: sizes[file] for file in small}, lambda stage, done: None)
        weights = list(shards_of(snapshot)) if SINGLE not in sizes else [SINGLE]
        if absent := [shard for shard in weights if shard not in sizes]:
            raise CheckpointError(f"{name} lacks {absent[0]}, which its {INDEX} names")
    else:
        weights = [file]
    _fetch_files(name, commit, {file: sizes[file] for file in weights}, progress)
    if name.revision != commit:
        with _storing(name):
            ref = folder_of(name.repository) / "refs" / name.revision
            # A cache that is whole may be one that can only be read.
            if not ref.is_file() or ref.read_bytes() != commit.encode():
                write_atomically(ref, commit.encode())
    return snapshot if file is None else snapshot / file


def _fetch_files(name: HubName, commit: str, sizes: dict[str, int], progress: Progress) -> None:
    """What is missing of the files with these sizes in bytes."""
    snapshot = folder_of(name.repository) / "snapshots" / commit
    missing = {file: size for file, size in sizes.items() if not (snapshot / file).exists()}
    total, before = sum(missing.values()), 0
    need_room(cache_folder(), total, f"fetching {name}")
    for file, size in missing.items():
        share = lambda done, before=before: min((before + done) / max(total, 1), 0.999)
        _fetch_file(name, snapshot, file, lambda done: progress("fetch", share(done)))
        before += size
    if missing:
        progress("fetch", 1.0)


def _fetch_file(name: HubName, snapshot: Path, file: str, told: Callable[[int], None]) -> None:
    """One file of a snapshot; `told` gets how many of its bytes are there."""
    with _asking(name):
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import WeakFileLock

        url = hf_hub_url(name.repository, file, revision=snapshot.name, endpoint=_endpoint())
        known = get_hf_file_metadata(url, endpoint=_endpoint())
    if not _ETAG.fullmatch(known.etag or ""):
        raise CheckpointError(f"{_endpoint()} gives no hash of {file} of {name}: check HF_ENDPOINT")
    folder = folder_of(name.repository)
    blob, place = folder / "blobs" / known.etag, snapshot / file
    lock = cache_folder() / ".locks" / folder.name / f"{known.etag}.lock"
    with _storing(name):
        for directory in (blob.parent, place.parent, lock.parent):
            directory.mkdir(parents=True, exist_ok=True)
        # Another process may be fetching it; then this one waits, and finds it.
        with WeakFileLock(lock):
            if not blob.exists():
                _fetch_blob(name, file, url, blob, known.size, told)
            if not place.exists():
                place.unlink(missing_ok=True)
                place.symlink_to(os.path.relpath(blob, place.parent))


def _fetch_blob(name: HubName, file: str, url: str, blob: Path, size: int | None, told: Callable[[int], None]) -> None:
    """A file's bytes under the name of their hash, going on with what an earlier try left; only whole and right ones stay."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial = blob.with_name(f"{blob.name}.incomplete")
    with open(partial, "ab") as out:
        if size is None or out.tell() > size:
            out.truncate(0)
            out.seek(0)
        try:
            with _asking(name), _quiet():
                bar = lambda *_, initial=0, **__: _Bar(initial, told)
                http_get(url, out, resume_size=out.tell(), headers=build_hf_headers(), expected_size=size, tqdm_class=bar)
        except Unreachable as error:
            raise CheckpointError(
                f"{file} of {name} broke off after {megabytes(out.tell())} of {megabytes(size or 0)} ({error}): the same "
                "command goes on from there"
            ) from None
    if (found := _hash_of(partial, blob.name)) != blob.name:
        partial.unlink()
        raise CheckpointError(
            f"the hub gave {file} of {name} with the hash {found} instead of {blob.name}; it was removed: try again later"
        )
    os.replace(partial, blob)


def _hash_of(path: Path, like: str) -> str:
    """In hex, as the hub names blobs: sha256 of large files, git's sha1 of others; of a name that is neither, the name."""
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", like):
        return like
    digest = hashlib.sha256() if len(like) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


class _Bar:
    """What http_get takes for a bar of tqdm's: it tells how many bytes there are."""

    def __init__(self, initial: int, told: Callable[[int], None]):
        self._done, self._told = initial, told

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_) -> None:
        pass

    def update(self, more: int) -> None:
        self._done += more
        self._told(self._done)


@contextmanager
def _quiet() -> Iterator[None]:
    """huggingface_hub's warnings of transfers that it goes on with would break into our bar."""
    logger = logging.getLogger("huggingface_hub.file_download")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@contextmanager
def _asking(name: HubName) -> Iterator[None]:
    """What goes wrong between castiron and the hub, as a CheckpointError; an Unreachable where it lies in the way there."""
    page = f"{_endpoint()}/{name.repository}"
    try:
        from huggingface_hub import errors
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise Unreachable(f"names on the hub need huggingface_hub, which is not installed ({remedy(error.name)})") from None
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{name.repository} is gated: accept its licence at {page}, and set HF_TOKEN to a token of that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(
            f"{name.repository} has no revision {name.revision}: {page}/tree/main shows those it has"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{name.repository} is no path here, and no model of {_endpoint()} that may be had without a token: check the "
            "name, or set HF_TOKEN if it is private"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable("HF_HUB_OFFLINE is set, so the hub is not asked") from None
    except errors.HfHubHTTPError as error:
        raise Unreachable(f"{_endpoint()} answered {error.response.status_code}") from None
    except errors.HTTPError as error:
        raise Unreachable(f"{_endpoint()} cannot be reached ({_first_line(error)})") from None
    except ValueError as error:
        # A name that no repository can have, or a file that the hub gives no plain HTTP for.
        raise CheckpointError(f"{name} cannot be fetched: {_first_line(error)}") from None
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError):
            raise
        raise Unreachable(f"{_endpoint()} cannot be reached ({_first_line(error)})") from None


@contextmanager
def _storing(name: HubName) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be stored in {cache_folder()}, which HF_HUB_CACHE names: {reason(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120] or type(error).__name__
