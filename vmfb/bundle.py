"""Bundles on disk: written whole or not at all, and trusted only after their files' hashes hold."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from castiron.vmfb.archive import MANIFEST, Part, other_bytes, parts_of, unpacked, write_archive
from castiron.vmfb.aside import folder_aside, restore, scratch, swap
from castiron.vmfb.cache import cache_root, keep
from castiron.vmfb.cpu import host_arch, host_cpu, tiles_given
from castiron.vmfb.disk import naming, reason
from castiron.vmfb.manifest import FILES, TEMPLATE, TOKENIZER, BundleError, File, Manifest, check, dump, parse
from castiron.vmfb.open_file import OpenFile
from castiron.vmfb.record import RecordError
from castiron.vmfb.signature import SIGNATURE, SIGNATURE_BYTES, check_signature, sign
from castiron.vmfb.targets import TILES, missing_features

# A bundle that is replaced while it is opened is opened again; nobody replaces it this often.
TRIES = 9
# The manifest of a hundred layers has 200 KB.
_LARGEST_MANIFEST = 16_000_000


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its directory or, if it is `packed`, its archive, and its manifest, found to be in order.

    parts: its files as they were opened, which stay open, so that all are of one bundle even if another takes its place.
    """

    path: Path
    manifest: Manifest
    parts: Mapping[str, Part] | None = field(default=None, compare=False, repr=False)
    packed: bool = False

    def part(self, name: str) -> Part:
        """Where the file `name` of the manifest's lies; KeyError if this bundle has none."""
        return self.parts[name] if self.parts else Part(self.path / name, 0, self.manifest.files[name].size)

    def file(self, name: str) -> Path:
        """The same as a path, for tools that take one; out of an archive it is copied into the cache, once."""
        return unpacked(self.part(name), name, self.manifest.files[name]) if self.packed else self.path / name

    @property
    def tokenizer(self) -> Part | None:
        """The tokenizer.json; None in a bundle that takes token ids only."""
        return self.part(TOKENIZER) if TOKENIZER in self.manifest.files else None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, if the model has one; BundleError if it is not UTF-8."""
        if TEMPLATE not in self.manifest.files:
            return None
        try:
            return self.part(TEMPLATE).read_bytes().decode()
        except UnicodeDecodeError:
            raise BundleError(f"{self.path / TEMPLATE} is not UTF-8; compile the bundle again") from None


def open_bundle(
    place: Path | str | Bundle, *, full_check: bool = False, run: bool = True, verify_key: Path | str | None = None
) -> Bundle:
    """Opens the bundle at `place`, a directory or an archive; BundleError, one sentence, for anything that does not hold.
    A Bundle is taken as it is, unless one of the checks is asked for.

    Every file is hashed when a bundle is first opened. Then a stamp under `cache_root()/verified` remembers each
    file's size, inode and the times of its last change (which nobody sets at will) for this manifest, and later openings
    compare those alone; `full_check` hashes again. The bundle itself may be read-only. With `run` False the CPU's features
    and the runtime's version are not asked for: enough to inspect a bundle made for another machine. `verify_key`: a file with
    the public key of who must have signed it.
    """
    if isinstance(place, Bundle):
        if not full_check and verify_key is None:
            return place
        place = place.path
    path = Path(place)
    for _ in range(TRIES):
        before = _identity(path)
        try:
            return _opened(path, full_check, run, verify_key)
        except BundleError:
            if _identity(path) == before:
                raise
    raise BundleError(f"{path} is replaced again and again while it is opened: wait for those who do that")


def manifest_at(path: Path) -> Manifest:
    """What the manifest of the bundle at a path says, whatever its files are; BundleError if there is none."""
    parts = parts_of(path) if path.is_file() else _parts_in(path)
    return parse(_manifest_bytes(path, parts), str(path))


def _manifest_bytes(path: Path, parts: Mapping[str, Part]) -> bytes:
    if (size := parts[MANIFEST].size) > _LARGEST_MANIFEST:
        raise BundleError(f"{path} has a manifest of {size} bytes, as none has; compile the bundle again")
    return parts[MANIFEST].read_bytes()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which directory or file is at a path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _opened(path: Path, full_check: bool, run: bool, verify_key: Path | str | None) -> Bundle:
    packed = path.is_file()
    parts = parts_of(path) if packed else _parts_in(path)
    data = _manifest_bytes(path, parts)
    manifest = parse(data, f"{path}: {MANIFEST}" if packed else str(path / MANIFEST))
    if verify_key is not None:
        check_signature(path, data, _signature(parts), verify_key)
    if run:
        _check_machine(path, manifest)
    _check_files(path, manifest, data, parts, full_check)
    return Bundle(path, manifest, parts, packed)


def pack_bundle(
    bundle: Bundle, out: Path | str, progress: Callable[[int, int], None] | None = None, key: Path | str | None = None
) -> None:
    """Writes `bundle` as one archive, its files' sha256 checked on the way; see `castiron.vmfb.archive.write_archive`. It is
    signed by the private key in the file `key`, or as it was."""
    place, out = bundle.path, Path(out)
    if out.exists() and place.exists() and out.samefile(place):
        raise BundleError(f"{out} is the bundle itself; give another file")
    found = bundle.parts or _parts_in(place)
    files = bundle.manifest.files
    signature = _signature(found) if key is None else sign(found[MANIFEST].read_bytes(), key)
    with scratch("sign") as folder:
        parts = {MANIFEST: found[MANIFEST]}
        if signature:
            (signed := folder / SIGNATURE).write_bytes(signature)
            parts[SIGNATURE] = Part.of(signed)
        parts |= {name: bundle.part(name) for name in files}
        write_archive(parts, {n: f.sha256 for n, f in files.items()}, out, progress)


def _signature(parts: Mapping[str, Part]) -> bytes | None:
    """That of a bundle's manifest; None if nobody signed it."""
    if SIGNATURE not in parts:
        return None
    # A longer one is none, however long it is.
    return replace(parts[SIGNATURE], size=min(parts[SIGNATURE].size, SIGNATURE_BYTES + 1)).read_bytes()


def _parts_in(path: Path) -> dict[str, Part]:
    """The files of the bundle in a directory, opened, as far as they are there and can be."""
    parts, problem = dict[str, Part](), "has no manifest.json"
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path} is not a directory: it is not a bundle; make one with castiron compile") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {reason(error)}") from None
    try:
        for name in (MANIFEST, SIGNATURE, *FILES):
            try:
                parts[name] = _part_in(folder, path / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                if name == MANIFEST:
                    problem = f"has a manifest.json that cannot be read ({error.strerror})"
    finally:
        os.close(folder)
    if MANIFEST not in parts:
        raise BundleError(f"{path} {problem}: it is not a bundle; make one with castiron compile")
    return parts


def _part_in(folder: int, place: Path) -> Part:
    file = OpenFile(place, folder)
    # Another may have no end.
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(place))
    return Part.open(file)


def _check_machine(path: Path, manifest: Manifest) -> None:
    target = manifest.target
    if target.arch != host_arch():
        raise BundleError(
            f"{path} is compiled for {target.arch} and this machine is {host_arch()}; "
            "compile it again with --target for this machine"
        )
    if missing := missing_features(target):
        choices = "host here, or x86-64-v3" if target.arch == "x86_64" else "host here, or aarch64"
        raise BundleError(
            f"{path} is compiled for {target.name} ({target.cpu}) and this CPU ({host_cpu()}) lacks "
            f"{', '.join(missing)}; compile it again with --target {choices}"
        )
    if TILES in target.features and not tiles_given():
        raise BundleError(
            f"{path} is compiled for {target.name} and uses the matrix tiles of AMX, which this system does not give the "
            "process; compile it again with --target x86-64-v4-bf16"
        )
    try:
        from iree.runtime.version import VERSION as runtime
    except ModuleNotFoundError:
        raise BundleError(f"running {path} needs the IREE runtime: pip install iree-base-runtime") from None
    # IREE promises no bytecode compatibility between its minor versions.
    wanted = manifest.versions.iree.split(".")[:2]
    if runtime.split(".")[:2] != wanted:
        raise BundleError(
            f"{path} is compiled by IREE {manifest.versions.iree} and the runtime here is {runtime}; "
            f"pip install 'iree-base-runtime=={'.'.join(wanted)}.*' or compile it again"
        )


def _check_files(path: Path, manifest: Manifest, data: bytes, parts: Mapping[str, Part], full_check: bool) -> None:
    for name, required in FILES.items():
        if required and name not in manifest.files:
            raise BundleError(f"{path / MANIFEST} does not list {name}; compile the bundle again")
    marks = {}
    for name, file in manifest.files.items():
        if name not in parts:
            raise BundleError(f"{path / name} is missing or cannot be read; compile the bundle again")
        if parts[name].size != file.size:
            raise BundleError(
                f"{path / name} has {parts[name].size} bytes where the manifest says {file.size}; compile the bundle again"
            )
        status = parts[name].stat()
        marks[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, parts[name].offset]
    stamp = cache_root() / "verified" / f"{hashlib.sha256(data + os.fsencode(path.resolve())).hexdigest()}.json"
    if not full_check:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(stamp.read_bytes()) == marks:
                return
    for name, file in manifest.files.items():
        try:
            digest = parts[name].sha256()
        except OSError as error:
            raise BundleError(f"{path / name} cannot be read: {reason(error)}") from None
        if digest != file.sha256:
            raise other_bytes(path / name)
    keep(stamp, json.dumps(marks).encode())


class BundleWriter:
    """Writes a bundle beside its place and moves it there on `commit`; without a commit nothing remains.

        with BundleWriter(directory) as writer:
            writer.write("tokenizer.json", data)
            compile_mlir(text, target, writer.path("model.vmfb"))
            sha256 = write_irpa(writer.path("weights.irpa"), entries)
            writer.commit(manifest, {"weights.irpa": sha256})

    An existing bundle at `directory` is replaced; anything else there, an empty directory excepted, is a BundleError
    on entering.
    """

    directory: Path

    def __init__(self, directory: Path | str):
        self.target = Path(directory).resolve()
        self._aside = contextlib.ExitStack()

    def __enter__(self) -> BundleWriter:
        try:
            restore(self.target)
            self._check_replaceable()
            self.directory = self._aside.enter_context(folder_aside(self.target))
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._aside.close()
        # Of the folder aside nobody knows.
        if isinstance(error, OSError) and str(error.filename).startswith(str(self.directory)):
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> BundleError:
        return BundleError(f"{self.target} cannot be written: {reason(error)}")

    def path(self, name: str) -> Path:
        """Where to write the file `name`, one of `manifest.FILES`."""
        if name not in FILES:
            raise ValueError(f"{name} is not a file of a bundle")
        return self.directory / name

    def write(self, name: str, data: bytes | str) -> None:
        """Writes the file `name`; text as UTF-8."""
        with naming(self.path(name)):
            self.path(name).write_bytes(data.encode() if isinstance(data, str) else data)

    def staged(self, manifest: Manifest, hashes: Mapping[str, str] | None = None) -> Bundle:
        """The bundle as `commit` would make it, to be run where it is written."""
        return Bundle(self.directory, replace(manifest, files=self._files(hashes or {})))

    def _files(self, known: Mapping[str, str]) -> dict[str, File]:
        """Every file written, hashed unless its hash is known."""
        parts = {name: Part.of(path) for name in FILES if (path := self.directory / name).is_file()}
        return {name: File(part.size, known.get(name) or part.sha256()) for name, part in parts.items()}

    def commit(self, manifest: Manifest, hashes: Mapping[str, str] | None = None) -> Bundle:
        """Completes `manifest` with every file written, hashing those not in `hashes`, and moves all into place."""
        files = self._files(hashes or {})
        if absent := [name for name, required in FILES.items() if required and name not in files]:
            raise BundleError(f"{self.target} would lack {absent[0]}")
        manifest = replace(manifest, files=files)
        try:
            check(manifest)
        except RecordError as error:
            raise BundleError(f"the manifest for {self.target} does not hold together: {error}") from None
        with naming(self.directory):
            (self.directory / MANIFEST).write_bytes(dump(manifest))
            self._check_replaceable()
            swap(self.directory, self.target)
        return Bundle(self.target, manifest)

    def _check_replaceable(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise BundleError(f"{self.target} is a file; choose another place for the bundle")
        try:
            entries = {entry.name for entry in self.target.iterdir()}
            value = json.loads(_manifest_bytes(self.target, _parts_in(self.target))) if entries else {"schema": 0}
        except (OSError, ValueError, RecursionError, BundleError):
            value = None
        # A directory of another kind is never deleted, even if it happens to have a manifest.json.
        if not isinstance(value, dict) or "schema" not in value or entries - set(FILES) - {MANIFEST, SIGNATURE}:
            raise BundleError(f"{self.target} holds other things than a bundle; choose another place or empty it")
