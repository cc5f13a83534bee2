"""Download the files of a model from Hugging Face Hub to huggingface_hub's cache."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from castiron.emitter.shorten import shorten_list
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.hf.encoding_files import MODULES, module_files
from castiron.pipelines.checkpoints.hf.open_directory import CONFIG, INDEX, SINGLE, shards_of, small_files
from castiron.pipelines.errors import install_command
from castiron.pipelines.files import require_free_space
from castiron.pipelines.locate import GGUF_PART, HubName, cache_folder, folder_of, parts_of
from castiron.pipelines.terminal import megabytes, print_message
from castiron.vmfb.atomic_write import write_file
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.file_errors import reason

_COMMIT = re.compile("[0-9a-f]{40}")
# GGUF files that are not language models.
_NOT_A_MODEL = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
# Seconds to wait for the hub's first answer before the cache is used.
_TIMEOUT = 10.0
_MEBIBYTE = 1 << 20

Progress = Callable[[str, float], None]


class Unreachable(CheckpointError):
    """The hub cannot be used, for example offline; the caller then tries the cache."""


class HubFile(NamedTuple):
    """Size in bytes and SHA-256 of a file on the hub, which has no hash for small files."""

    size: int
    sha256: str | None


def fetch(name: HubName, progress: Progress | None = None) -> Path:
    """Return the path of an HF directory or GGUF file, downloaded if the hub can be used."""
    try:
        return _fetch(name, progress or (lambda stage, done: None))
    except Unreachable as error:
        if (path := cached(name)) is None:
            raise CheckpointError(
                f"cannot find {name}: it is not a path on this machine, its download failed ({error}), and "
                f"{cache_folder()} has no complete copy; give the path of a model, or try again"
            ) from None
        print_message(f"{error}; using the files of {name} in {cache_folder()}")
        return path


def cached(name: HubName) -> Path | None:
    """Return the path of a cached model; None if a file is missing in the cache."""
    folder = folder_of(name.repository)
    try:
        commit = (folder / "refs" / name.revision).read_text(errors="replace").strip() or name.revision
    except OSError:
        commit = name.revision
    snapshot = folder / "snapshots" / commit
    sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in snapshot.rglob("*") if path.is_file()}
    if not sizes:
        return None
    file = chosen(name, sizes, f"{name.repository} in {cache_folder()}")
    if file is not None:
        return snapshot / file if all(part in sizes for part in parts_of(file)) else None
    return snapshot if sizes.keys() >= {*shards_of(snapshot), *module_files(snapshot)} else None


def chosen(name: HubName, sizes: Mapping[str, int], repository: str) -> str | None:
    """Return the GGUF file that `name` selects, by its path; None if the model is in safetensors.

    sizes: bytes of each file in the repository. repository: its name for errors.
    """
    files = {file: size for file, size in sizes.items() if file.endswith(".gguf") and not _NOT_A_MODEL.search(file)}
    # A model in parts is its first part, with the size of all.
    parts = {file: parts_of(file) for file in files}
    further = {part for names in parts.values() for part in names[1:]}
    files = {file: sum(sizes.get(part, 0) for part in parts[file]) for file in files if file not in further}
    by_size = sorted(files.items(), key=lambda item: item[1])
    listed = shorten_list([f"{file} ({megabytes(size)})" for file, size in by_size], max_length=500)
    if name.wanted is None:
        if CONFIG in sizes and not {SINGLE, INDEX}.isdisjoint(sizes):
            return None
        if len(files) == 1:
            return next(iter(files))
        if files:
            raise CheckpointError(f"{repository} has several GGUF files, {listed}; choose one as in {name}:Q4_K_M")
        if "adapter_config.json" in sizes:
            raise CheckpointError(f"{repository} is an adapter; give its base model, and the adapter with --adapter DIR")
        raise CheckpointError(f"{repository} has no GGUF file, and no {CONFIG} with {SINGLE} or {INDEX}; give another name")
    matching = [file for file in files if _matches(file, name.wanted)]
    if len(matching) == 1:
        return matching[0]
    count = "several GGUF files" if matching else "no GGUF file"
    raise CheckpointError(
        f"{repository} has {count} {name.wanted}" + (f"; choose one of {listed}" if files else "; choose another repository")
    )


def _matches(file: str, wanted: str) -> bool:
    """Return whether `wanted` is a file's path, name, or end of its name, such as Q4_K_M."""
    if wanted.endswith(".gguf"):
        return wanted in (file, PurePosixPath(file).name)
    stem = PurePosixPath(GGUF_PART.sub(".gguf", file)).stem.lower()
    before = stem.removesuffix(wanted.lower())
    return before != stem and (not before or before[-1] in "-._")


def _fetch(name: HubName, progress: Progress) -> Path:
    commit, files = _repository_files(name)
    snapshot = folder_of(name.repository) / "snapshots" / commit
    file = chosen(name, {path: entry.size for path, entry in files.items()}, name.repository)
    if file is not None:
        weights = parts_of(file)
        if absent := [part for part in weights if part not in files]:
            raise CheckpointError(f"{name} lacks {absent[0]}, one of {len(weights)} parts of the model; choose another file")
    else:
        small = [path for path in small_files(files) if path != INDEX or SINGLE not in files]
        _download(name, snapshot, {path: files[path] for path in small})
        shards, modules = [SINGLE] if SINGLE in files else [*shards_of(snapshot)], module_files(snapshot)
        weights = [*shards, *modules]
        if absent := [path for path in weights if path not in files]:
            source = INDEX if absent[0] in shards else MODULES
            raise CheckpointError(f"{name} lacks {absent[0]}, which its {source} names; choose another revision")
    _download(name, snapshot, {path: files[path] for path in weights}, progress)
    if name.revision != commit:
        ref = folder_of(name.repository) / "refs" / name.revision
        # Do not write an unchanged ref, because a complete cache may be read-only.
        if not ref.is_file() or ref.read_bytes() != commit.encode():
            write_file(ref, commit.encode())
    return snapshot if file is None else snapshot / file


def _repository_files(name: HubName) -> tuple[str, dict[str, HubFile]]:
    with _hub_errors(name):
        from huggingface_hub import HfApi

        api = HfApi(_endpoint())
        try:
            info = api.model_info(name.repository, revision=name.revision, files_metadata=True, timeout=_TIMEOUT)
            files = {file.rfilename: HubFile(file.size, file.lfs and file.lfs.sha256) for file in info.siblings or ()}
            valid = _COMMIT.fullmatch(info.sha or "") and all(_is_valid(path, file.size) for path, file in files.items())
        except (AttributeError, KeyError, TypeError):
            valid = False
    if not valid:
        raise CheckpointError(f"invalid response for {name} from {_endpoint()}; check HF_ENDPOINT")
    return info.sha, files


def _is_valid(path: str, size: int) -> bool:
    parts = PurePosixPath(path)
    return isinstance(size, int) and not parts.is_absolute() and ".." not in parts.parts and path.isprintable()


def _download(name: HubName, snapshot: Path, files: Mapping[str, HubFile], progress: Progress | None = None) -> None:
    missing = {path: file for path, file in files.items() if not (snapshot / path).exists()}
    total, done = max(sum(file.size for file in missing.values()), 1), 0
    require_free_space(cache_folder(), total, f"fetching {name}")
    for path, file in missing.items():

        def report(size: int, done: int = done) -> None:
            if progress:
                progress("fetch", min((done + size) / total, 0.999))

        with _hub_errors(name):
            from huggingface_hub import hf_hub_download

            hf_hub_download(
                name.repository, path, revision=snapshot.name, cache_dir=cache_folder(), endpoint=_endpoint(),
                etag_timeout=_TIMEOUT, tqdm_class=lambda **_: _Bar(path, file.size, report),
            )  # fmt: skip
        fetched = snapshot / path
        if file.sha256 is not None and (digest := Part.of(fetched).sha256()) != file.sha256:
            fetched.resolve().unlink()
            fetched.unlink()
            raise CheckpointError(f"{path} of {name} has sha256 {digest}, but the hub lists {file.sha256}; try again")
        done += file.size
    if missing and progress:
        progress("fetch", 1.0)


class _Bar:
    """Replaces a download's tqdm bar: draws nothing, and calls `report` with the bytes so far."""

    def __init__(self, file: str, size: int, report: Callable[[int], None]):
        self._file, self._size, self._report, self._done = file, size, report, 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # the other methods of tqdm draw

    def update(self, count: float = 1) -> None:
        self._done += int(count)
        # A transfer that is resumed after an error may report a part twice.
        if self._done > 2 * self._size + _MEBIBYTE:
            raise CheckpointError(f"{self._file} is longer than the {self._size} bytes that {_endpoint()} announced; try again")
        self._report(min(self._done, self._size))


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@contextmanager
def _hub_errors(name: HubName) -> Iterator[None]:
    try:
        from huggingface_hub import errors
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        install = install_command(error.name)
        raise Unreachable(f"models on the hub need huggingface_hub, which is not installed ({install})") from None
    # Suppress warnings about retries, which would break the progress bar.
    logging.getLogger("huggingface_hub.file_download").setLevel(logging.ERROR)
    repository, page = name.repository, f"{_endpoint()}/{name.repository}"
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(f"{repository} is gated; accept its licence at {page}, and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repository} has no revision {name.revision}; see {page}/tree/main") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{repository}: no such file or directory, and no public model of {_endpoint()}; "
            "check the name, or set HF_TOKEN if it is private"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable("HF_HUB_OFFLINE is set") from None
    except errors.HfHubHTTPError as error:
        raise Unreachable(f"{_endpoint()} answered {error.response.status_code}") from None
    except ValueError as error:
        # huggingface_hub raises this for an invalid repository name, or an answer that is not JSON.
        raise CheckpointError(f"{name} cannot be fetched: {_first_line(error)}; check the name and HF_ENDPOINT") from None
    except (errors.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise CheckpointError(
                f"cannot store {name} in {cache_folder()}: {reason(error)}; set HF_HUB_CACHE to another folder"
            ) from None
        raise Unreachable(f"{_endpoint()} cannot be reached ({_first_line(error.__cause__ or error)})") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:120] or type(error).__name__
