"""Bundles on disk: written whole or not at all, and trusted only after their files' hashes hold."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from castiron.vmfb.archive import MANIFEST, Part, other_bytes, parts_of, unpacked, write_archive
from castiron.vmfb.cache import cache_root, keep
from castiron.vmfb.cpu import host_arch, host_cpu, tiles_given
from castiron.vmfb.manifest import FILES, TEMPLATE, TOKENIZER, BundleError, File, Manifest, check, dump, parse
from castiron.vmfb.record import RecordError
from castiron.vmfb.signature import SIGNATURE, check_signature, sign
from castiron.vmfb.targets import TILES, missing_features


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its directory, or its archive with where its parts lie, and its manifest, found to be in order."""

    path: Path
    manifest: Manifest
    packed: Mapping[str, Part] | None = None

    def part(self, name: str) -> Part:
        """Where the file `name` of the manifest's lies; KeyError if this bundle has none."""
        return self.packed[name] if self.packed else Part(self.path / name, 0, self.manifest.files[name].size)

    def file(self, name: str) -> Path:
        """The same as a path, for tools that take one; out of an archive it is copied into the cache, once."""
        return unpacked(self.packed[name], name, self.manifest.files[name]) if self.packed else self.path / name

    @property
    def tokenizer(self) -> Path | Part | None:
        """The tokenizer.json, with `read_bytes`; None in a bundle that takes token ids only."""
        if TOKENIZER not in self.manifest.files:
            return None
        return self.part(TOKENIZER) if self.packed else self.part(TOKENIZER).path

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
    path, packed = Path(place), None
    if path.is_file():
        packed = parts_of(path)
        data = packed[MANIFEST].read_bytes()
        manifest = parse(data, f"{path}: {MANIFEST}")
    else:
        data = _manifest_data(path)
        manifest = parse(data, str(path / MANIFEST))
    if verify_key is not None:
        check_signature(path, data, _signature(path, packed), verify_key)
    if run:
        _check_machine(path, manifest)
    _check_files(path, manifest, data, packed, full_check)
    return Bundle(path, manifest, packed)


def pack_bundle(
    bundle: Bundle, out: Path | str, progress: Callable[[int, int], None] | None = None, key: Path | str | None = None
) -> None:
    """Writes `bundle` as one archive, its files' sha256 checked on the way; see `castiron.vmfb.archive.write_archive`. It is
    signed by the private key in the file `key`, or as it was."""
    import tempfile

    place, out = bundle.path, Path(out)
    if out.exists() and place.exists() and out.samefile(place):
        raise BundleError(f"{out} is the bundle itself; give another file")
    head = bundle.packed[MANIFEST] if bundle.packed else Part.of(place / MANIFEST)
    files = bundle.manifest.files
    signature = _signature(place, bundle.packed) if key is None else sign(head.read_bytes(), key)
    with tempfile.TemporaryDirectory() as folder:
        parts = {MANIFEST: head}
        if signature:
            (signed := Path(folder) / SIGNATURE).write_bytes(signature)
            parts[SIGNATURE] = Part.of(signed)
        parts |= {name: bundle.part(name) for name in files}
        write_archive(parts, {n: f.sha256 for n, f in files.items()}, out, progress)


def _signature(path: Path, packed: Mapping[str, Part] | None) -> bytes | None:
    """That of a bundle's manifest; None if nobody signed it."""
    try:
        return (packed[SIGNATURE] if packed else Part(_regular(path / SIGNATURE), 0, 64)).read_bytes()
    except (OSError, KeyError):
        return None


def _manifest_data(path: Path) -> bytes:
    try:
        return _regular(path / MANIFEST).read_bytes()
    except OSError as error:
        what = "has no manifest.json" if path.is_dir() else "is not a directory"
        if path.is_dir() and not isinstance(error, FileNotFoundError):
            what = f"has a manifest.json that cannot be read ({error.strerror})"
        raise BundleError(f"{path} {what}: it is not a bundle; make one with castiron compile") from None


def _regular(path: Path) -> Path:
    """A path where an ordinary file lies, which ends; OSError for another."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    return path


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


def _check_files(path: Path, manifest: Manifest, data: bytes, packed: Mapping[str, Part] | None, full_check: bool) -> None:
    for name, required in FILES.items():
        if required and name not in manifest.files:
            raise BundleError(f"{path / MANIFEST} does not list {name}; compile the bundle again")
    parts, marks = {}, {}
    for name, file in manifest.files.items():
        try:
            # Of a directory the sizes are what the files have, not what the manifest says.
            parts[name] = packed[name] if packed else Part.of(_regular(path / name))
            stat = parts[name].path.stat()
        except (OSError, KeyError):
            raise BundleError(f"{path / name} is missing or cannot be read; compile the bundle again") from None
        if parts[name].size != file.size:
            raise BundleError(
                f"{path / name} has {parts[name].size} bytes where the manifest says {file.size}; compile the bundle again"
            )
        marks[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, parts[name].offset]
    stamp = cache_root() / "verified" / f"{hashlib.sha256(data + os.fsencode(path.resolve())).hexdigest()}.json"
    if not full_check:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(stamp.read_bytes()) == marks:
                return
    for name, file in manifest.files.items():
        try:
            digest = parts[name].sha256()
        except OSError as error:
            raise BundleError(f"{path / name} cannot be read: {error.strerror}") from None
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

    def __init__(self, directory: Path | str):
        self.target = Path(directory).resolve()
        self.directory = self.target.with_name(f".{self.target.name}.partial-{os.getpid()}")

    def __enter__(self) -> BundleWriter:
        self._check_replaceable()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self.directory.mkdir()
        except OSError as error:
            raise BundleError(f"{self.target} cannot be written: {error.strerror} ({error.filename})") from None
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Where to write the file `name`, one of `manifest.FILES`."""
        if name not in FILES:
            raise ValueError(f"{name} is not a file of a bundle")
        return self.directory / name

    def write(self, name: str, data: bytes | str) -> None:
        """Writes the file `name`; text as UTF-8."""
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
        (self.directory / MANIFEST).write_bytes(dump(manifest))
        self._check_replaceable()
        self._swap()
        return Bundle(self.target, manifest)

    def _check_replaceable(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise BundleError(f"{self.target} is a file; choose another place for the bundle")
        try:
            entries = {entry.name for entry in self.target.iterdir()}
            value = json.loads((self.target / MANIFEST).read_bytes()) if entries else {"schema": 0}
        except (OSError, ValueError):
            value = None
        # A directory of another kind is never deleted, even if it happens to have a manifest.json.
        if not isinstance(value, dict) or "schema" not in value or entries - set(FILES) - {MANIFEST, SIGNATURE}:
            raise BundleError(f"{self.target} holds other things than a bundle; choose another place or empty it")

    def _swap(self) -> None:
        """The old bundle steps aside until the new one stands, and comes back if that fails."""
        aside = self.target.with_name(f".{self.target.name}.replaced-{os.getpid()}")
        had = self.target.exists()
        if had:
            os.rename(self.target, aside)
        try:
            os.rename(self.directory, self.target)
        except BaseException:
            if had:
                os.rename(aside, self.target)
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def _sweep(self) -> None:
        """Puts right what a writer that was killed outright left beside this place."""
        for path in self.target.parent.glob(f".{self.target.name}.*-*"):
            kind, _, pid = path.name[len(self.target.name) + 2 :].rpartition("-")
            if kind not in ("partial", "replaced") or not pid.isdigit() or _alive(int(pid)):
                continue
            if kind == "replaced" and not self.target.exists():
                os.rename(path, self.target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
