"""Bundles on disk: opening checks the hashes of all files, and writing is atomic."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from castiron.vmfb.atomic_write import locked, remove_abandoned, replace_folder, staging_folder
from castiron.vmfb.bundle.archive import Part, changed_file, open_archive, write_archive
from castiron.vmfb.bundle.json_record import RecordError, short
from castiron.vmfb.bundle.manifest import (
    FILES,
    MANIFEST,
    TABLE,
    TEMPLATE,
    TOKENIZER,
    BundleError,
    File,
    Manifest,
    check,
    dump,
    is_bundle_file,
    parse,
)  # fmt: skip
from castiron.vmfb.cache_folder import cache_root, keep
from castiron.vmfb.cpu_features import can_use_tiles, host_arch, host_cpu
from castiron.vmfb.file_errors import naming, reason
from castiron.vmfb.targets import TILES, Target, missing_features

# Limit in bytes; the manifest of a model with a hundred layers has 200 KB.
_MAX_MANIFEST = 16_000_000


@dataclass(frozen=True)
class Bundle:
    """An open bundle: a directory, or an archive if it is `packed`.

    parts: the open files, which stay readable if another bundle replaces this one; None to open a
        file when it is needed.
    device: the GPU that runs the bundle, such as "vulkan:1"; None for the first GPU.
    progress: called with (bytes, total) while weights are uploaded to a GPU.
    """

    path: Path
    manifest: Manifest
    parts: Mapping[str, Part] | None = field(default=None, compare=False, repr=False)
    packed: bool = False
    device: str | None = None
    progress: Callable[[int, int], None] | None = field(default=None, compare=False, repr=False)

    def part(self, name: str) -> Part:
        """Return the file `name`; raise KeyError if this bundle has no such file."""
        return self.parts[name] if self.parts else Part.of(self.path / name)

    def file(self, name: str) -> Path:
        """Return the path of the file `name`; raise BundleError if the bundle is packed."""
        if self.packed:
            raise BundleError(f"IREE's tools cannot read a packed bundle: {self.path}; unzip it into a directory")
        return self.path / name

    def with_context(self, context: int) -> Bundle:
        """Return a copy with another context; BundleError if it exceeds max_context."""
        if not 1 <= context <= self.manifest.max_context:
            limit = self.manifest.max_context
            raise BundleError(f"--context is {context}; {self.manifest.name} supports 1 to {limit} positions")
        return replace(self, manifest=replace(self.manifest, context=context))

    def on_device(self, device: str | None, progress: Callable[[int, int], None] | None = None) -> Bundle:
        """Return a copy that runs on `device` (None: the default); BundleError if it cannot."""
        needed = self.manifest.target.driver or "cpu"
        if device is not None and device.partition(":")[0] != needed:
            raise BundleError(
                f"bundle is compiled for {needed} and cannot run on {device}: {self.path}; "
                "compile the bundle with another --target, or choose another --device"
            )
        return replace(self, device=device, progress=progress)

    @property
    def tokenizer(self) -> Part | None:
        """Return the file tokenizer.json; None if the bundle has none and takes token ids only."""
        return self.part(TOKENIZER) if TOKENIZER in self.manifest.files else None

    @property
    def token_table(self) -> Part | None:
        """Return the file tokenizer.table; None if the bundle has none, as older ones."""
        return self.part(TABLE) if TABLE in self.manifest.files else None

    @property
    def chat_template(self) -> str | None:
        """Return the Jinja source of the chat template; None if the bundle has no template."""
        if TEMPLATE not in self.manifest.files:
            return None
        try:
            return self.part(TEMPLATE).read_bytes().decode()
        except UnicodeDecodeError:
            raise BundleError(f"not UTF-8: {self.path / TEMPLATE}; compile the bundle again") from None


def open_bundle(source: Path | str | Bundle, *, full_check: bool = False, run: bool = True) -> Bundle:
    """Open a bundle; raise BundleError if it is invalid.

    The first opening hashes every file; later ones compare sizes, inodes and times with the cache.

    full_check: hash every file again. run: check that this CPU and runtime can run the bundle.
    """
    if isinstance(source, Bundle):
        if not full_check:
            return source
        source = source.path
    if not isinstance(source, str | os.PathLike):
        raise BundleError(f"invalid bundle: {short(repr(source))}; give the path of a bundle")
    path = Path(source)
    packed = os.path.isfile(path)
    parts, data = _read(path)
    manifest = parse(data, f"{path}: {MANIFEST}" if packed else str(path / MANIFEST))
    if run:
        _check_machine(path, manifest)
    _check_files(path, manifest, data, parts, full_check)
    return Bundle(path, manifest, parts, packed)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the bundle at `path` without checking its files."""
    return parse(_read(path)[1], str(path))


def _read(path: Path) -> tuple[dict[str, Part], bytes]:
    # The files by name, and the bytes of the manifest.
    parts = open_archive(path) if os.path.isfile(path) else _open_directory(path)
    return parts, _manifest_bytes(path, parts)


def _manifest_bytes(path: Path, parts: Mapping[str, Part]) -> bytes:
    if (size := parts[MANIFEST].size) > _MAX_MANIFEST:
        raise BundleError(f"manifest of {path} has {size} bytes, but the limit is {_MAX_MANIFEST}; compile the bundle again")
    return parts[MANIFEST].read_bytes()


def pack_bundle(bundle: Bundle, out: Path | str, progress: Callable[[int, int], None] | None = None) -> None:
    """Write `bundle` as one archive; BundleError if that fails or a file changed.

    progress: called with (bytes written, total).
    """
    path, out = bundle.path, Path(out)
    if out.exists() and path.exists() and out.samefile(path):
        raise BundleError(f"output is the bundle itself: {out}; give another file")
    files = bundle.manifest.files
    parts = {MANIFEST: (bundle.parts or _open_directory(path))[MANIFEST]} | {name: bundle.part(name) for name in files}
    write_archive(parts, {name: file.sha256 for name, file in files.items()}, out, progress)


def _open_directory(path: Path) -> dict[str, Part]:
    real = Path(os.path.realpath(path))
    if not os.path.isdir(path):
        remove_abandoned(real.parent)
    # Writers wait until all files are open.
    with locked(real.parent):
        return _open_files(path)


def _open_files(path: Path) -> dict[str, Part]:
    if not os.path.isdir(path):
        problem = "not a directory" if os.path.lexists(path) else "no such file or directory"
        raise BundleError(f"cannot open bundle {path}: {problem}; run castiron compile to make a bundle")
    parts, problem = dict[str, Part](), "no manifest.json"
    try:
        names = sorted(filter(is_bundle_file, os.listdir(path)))
    except OSError as error:
        raise BundleError(f"cannot read {path}: {reason(error)}") from None
    for name in names:
        try:
            parts[name] = Part.of(path / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            if name == MANIFEST:
                problem = f"cannot read manifest.json: {error.strerror}"
    if MANIFEST not in parts:
        raise BundleError(f"not a bundle: {path} ({problem}); run castiron compile to make a bundle")
    return parts


def _check_machine(path: Path, manifest: Manifest) -> None:
    # A GPU is checked when it is opened.
    if not manifest.target.driver:
        _check_cpu(path, manifest.target)
    try:
        from iree.runtime.version import VERSION as runtime
    except ModuleNotFoundError:
        raise BundleError(f"cannot run {path}: the IREE runtime is not installed; pip install iree-base-runtime") from None
    # IREE promises no bytecode compatibility between its minor versions.
    wanted = manifest.versions.iree.split(".")[:2]
    if runtime.split(".")[:2] != wanted:
        raise BundleError(
            f"bundle was compiled by IREE {manifest.versions.iree}, but the IREE runtime is {runtime}: {path}; "
            f"run pip install 'iree-base-runtime=={'.'.join(wanted)}.*', or compile the bundle again"
        )


def _check_cpu(path: Path, target: Target) -> None:
    if target.arch != host_arch():
        raise BundleError(
            f"bundle is compiled for {target.arch}, but this machine is {host_arch()}: {path}; "
            "compile the bundle again with the --target of this machine"
        )
    if missing := missing_features(target):
        choices = "host here, or x86-64-v3" if target.arch == "x86_64" else "host here, or aarch64"
        raise BundleError(
            f"bundle is compiled for {target.name} ({target.cpu}), but this CPU ({host_cpu()}) lacks "
            f"{', '.join(missing)}: {path}; compile the bundle again with --target {choices}"
        )
    if TILES in target.features and not can_use_tiles():
        raise BundleError(
            f"bundle is compiled for {target.name}, which uses AMX tiles, but this system does not permit AMX: {path}; "
            "compile the bundle again with --target x86-64-v4-bf16"
        )


def _check_files(path: Path, manifest: Manifest, data: bytes, parts: Mapping[str, Part], full_check: bool) -> None:
    for name, required in FILES.items():
        if required and name not in manifest.files:
            raise BundleError(f"{path / MANIFEST} does not list {name}; compile the bundle again")
    for name, file in manifest.files.items():
        if name not in parts:
            problem = "unreadable" if os.path.lexists(path / name) else "missing"
            raise BundleError(f"{problem} file in bundle: {path / name}; check its permissions, or compile the bundle again")
        if parts[name].size != file.size:
            raise BundleError(
                f"{path / name} has {parts[name].size} bytes, but {file.size} in the manifest; compile the bundle again"
            )
    marks, stamp = _marks(parts, manifest), _stamp(path, data)
    if not full_check:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(stamp.read_bytes()) == marks:
                return
    for name, file in manifest.files.items():
        try:
            digest = parts[name].sha256()
        except OSError as error:
            raise BundleError(f"cannot read {path / name}: {reason(error)}") from None
        if digest != file.sha256:
            raise changed_file(path / name)
    keep(stamp, json.dumps(marks).encode())


def _marks(parts: Mapping[str, Part], manifest: Manifest) -> dict[str, list[int]]:
    stats = {name: parts[name].stat() for name in manifest.files}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats.items()}


def _stamp(path: Path, data: bytes) -> Path:
    return cache_root() / "verified" / f"{hashlib.sha256(data + os.fsencode(os.path.realpath(path))).hexdigest()}.json"


class BundleWriter:
    """A bundle in a staging folder, which `commit` renames to the target directory.

        with BundleWriter(directory) as writer:
            writer.write("tokenizer.json", data)
            compile_mlir(text, target, writer.path("model.vmfb"))
            sha256 = write_irpa(writer.path("weights.irpa"), entries)
            writer.commit(manifest, {"weights.irpa": sha256})

    An existing target is replaced only if it is a bundle or an empty directory.
    """

    directory: Path

    def __init__(self, directory: Path | str):
        self.target = Path(directory).resolve()
        self._staging = contextlib.ExitStack()

    def __enter__(self) -> BundleWriter:
        try:
            with locked(self.target.parent):
                self._check_replaceable()
            self.directory = self._staging.enter_context(staging_folder(self.target))
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._staging.close()
        # Name the target in the error: users do not know the staging folder.
        if isinstance(error, OSError) and str(error.filename).startswith(str(self.directory)):
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> BundleError:
        return BundleError(f"cannot write {self.target}: {reason(error)}")

    def path(self, name: str) -> Path:
        """Return the path of the staged file `name`; raise ValueError for an invalid file name."""
        if not is_bundle_file(name):
            raise ValueError(f"a bundle cannot have a file named {name!r}; use one of {', '.join(FILES)}")
        return self.directory / name

    def write(self, name: str, data: bytes | str) -> None:
        with naming(self.path(name)):
            self.path(name).write_bytes(data.encode() if isinstance(data, str) else data)

    def link(self, bundle: Bundle, name: str) -> None:
        """Hard-link the file `name` of another bundle into this one; copy it if that fails."""
        path = self.path(name)
        if not bundle.packed:
            with contextlib.suppress(OSError):
                os.link(bundle.path / name, path)
                return
        with naming(path), open(path, "wb") as file:
            bundle.part(name).sha256(file.write)

    def staged(self, manifest: Manifest, hashes: Mapping[str, str] | None = None) -> Bundle:
        """Return the bundle in the staging folder, so that it can be run before `commit`."""
        return Bundle(self.directory, replace(manifest, files=self._files(hashes or {})))

    def _files(self, known: Mapping[str, str]) -> dict[str, File]:
        parts = {name: Part.of(self.directory / name) for name in sorted(os.listdir(self.directory)) if is_bundle_file(name)}
        return {name: File(part.size, known.get(name) or part.sha256()) for name, part in parts.items()}

    def commit(self, manifest: Manifest, hashes: Mapping[str, str] | None = None) -> Bundle:
        """Write the manifest, rename the staging folder to the target and return the bundle."""
        files = self._files(hashes or {})
        if absent := [name for name, required in FILES.items() if required and name not in files]:
            raise BundleError(f"incomplete bundle: {self.target} lacks {absent[0]}; write that file before the commit")
        manifest = replace(manifest, files=files)
        try:
            check(manifest)
        except RecordError as error:
            raise BundleError(f"invalid manifest for {self.target}: {error}; correct the manifest") from None
        data = dump(manifest)
        with naming(self.directory):
            (self.directory / MANIFEST).write_bytes(data)
            marks = _marks(_open_files(self.directory), manifest)
            with locked(self.target.parent):
                self._check_replaceable()
                replace_folder(self.directory, self.target)
        keep(_stamp(self.target, data), json.dumps(marks).encode())
        return Bundle(self.target, manifest)

    def _check_replaceable(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise BundleError(f"output is a file: {self.target}; choose another path for the bundle")
        try:
            entries = {entry.name for entry in self.target.iterdir()}
            value = json.loads(_manifest_bytes(self.target, _open_files(self.target))) if entries else {"schema": 0}
        except (OSError, ValueError, RecursionError, BundleError):
            value = None
        # Files of another kind are never deleted, even beside a manifest.json.
        if not isinstance(value, dict) or "schema" not in value or not all(map(is_bundle_file, entries)):
            raise BundleError(f"directory contains files that are not from a bundle: {self.target}; choose an empty directory")
