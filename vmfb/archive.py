"""A bundle as one file: a zip archive whose entries are stored as they are, each at the start of a page.

So `unzip` gives the directory back, and the weights are mapped where they lie. The layout is APPNOTE 6.3 of PKWARE,
with ZIP64 for large parts; alignment is by padding in the entries' extra fields, as Android's zipalign does it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from castiron.vmfb.aside import replacing
from castiron.vmfb.cache import cache_folder, clear
from castiron.vmfb.disk import naming, reason
from castiron.vmfb.manifest import FILES, BundleError, File
from castiron.vmfb.open_file import OpenFile
from castiron.vmfb.record import short
from castiron.vmfb.signature import SIGNATURE

MANIFEST = "manifest.json"
# The largest page of common systems is 16 KB (arm64 macOS); mapping needs no page, vmfb and tensors need 64 bytes.
ALIGNMENT = 4096
_LOCAL = struct.Struct("<4s22xHH")
_ZIP64_EXTRA = 20
# An extra field that readers skip: id (Android's alignment) and size, then zeros.
_PADDING = struct.Struct("<HH")
_PADDING_ID = 0xD935
_CHUNK = 1 << 20
KEPT_DAYS = 7.0
# Of an archive's directory, in which each entry has its padding too.
_LARGEST_DIRECTORY = 1_000_000


@dataclass(frozen=True)
class Part:
    """`size` bytes of a file from `offset` on: a file of a bundle, or its place in an archive. They are read from the file that
    was `opened`, if one was, and else from that which lies at the path by then."""

    path: Path
    offset: int
    size: int
    opened: OpenFile | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def of(cls, path: Path) -> Part:
        """All of a file."""
        return cls(path, 0, path.stat().st_size)

    @classmethod
    def open(cls, file: OpenFile) -> Part:
        """All of a file that is open."""
        return cls(file.path, 0, file.stat().st_size, file)

    def kept_open(self) -> Part:
        """The same, of a file that stays open."""
        return self if self.opened else replace(self, opened=OpenFile(self.path))

    def stat(self) -> os.stat_result:
        """Of the file, which of an archive's part is all of it."""
        return self.opened.stat() if self.opened else self.path.stat()

    def read_bytes(self) -> bytes:
        return b"".join(self._pieces())

    def map(self) -> memoryview:
        """The bytes where they lie, read-only; pages of the file, not a copy."""
        with self._open() as file:
            mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        return memoryview(mapped)[self.offset : self.offset + self.size]

    def sha256(self, write: Callable[[bytes], object] = lambda piece: None) -> str:
        """In hex; `write` gets every piece of the bytes on the way, which are fewer than `size` if the file ends before."""
        digest = hashlib.sha256()
        for piece in self._pieces():
            digest.update(piece)
            write(piece)
        return digest.hexdigest()

    def _pieces(self) -> Iterator[bytes]:
        at, end = self.offset, self.offset + self.size
        with self._open() as file:
            while at < end:
                with naming(self.path):
                    piece = os.pread(file, min(end - at, _CHUNK), at)
                if not piece:
                    return
                yield piece
                at += len(piece)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        file = self.opened or OpenFile(self.path)
        try:
            yield file.number
        finally:
            if file is not self.opened:
                file.close()


def other_bytes(place: Part | Path) -> BundleError:
    """For a file whose sha256 is not that of the manifest."""
    return BundleError(f"{place} is not the file that was written (sha256); compile the bundle again")


class _Reader(io.BufferedReader):
    """Of an archive whose directory may say that it is as large as the disk: zipfile reads all of it."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _LARGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory has {size} bytes")
        return super().read(size)


def parts_of(path: Path) -> dict[str, Part]:
    """Where the files of a bundle lie in the archive at `path`; BundleError if it is not an archive that `pack` wrote."""
    wrong = f"{path} is not a packed bundle"
    remedy = "make one with castiron compile and castiron pack"
    opened, found = OpenFile(path), dict[str, Part]()
    try:
        with _Reader(io.FileIO(os.dup(opened.number))) as file:
            with zipfile.ZipFile(file) as archive:
                entries, end = archive.infolist(), opened.stat().st_size
            for entry in entries:
                if entry.filename not in (MANIFEST, SIGNATURE, *FILES) or entry.filename in found:
                    raise BundleError(f"{wrong} (it holds {short(entry.filename)}); {remedy}")
                file.seek(entry.header_offset)
                magic, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
                part = Part(path, entry.header_offset + _LOCAL.size + name + extra, entry.file_size, opened)
                stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                if magic != b"PK\3\4" or not stored or part.offset % ALIGNMENT or part.offset + part.size > end:
                    raise BundleError(f"{wrong} ({entry.filename} is not stored on a page of its own); {remedy}")
                found[entry.filename] = part
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError) as error:
        raise BundleError(f"{wrong} ({error}); {remedy}") from None
    if MANIFEST not in found:
        raise BundleError(f"{wrong} (it has no manifest.json); {remedy}")
    return found


def unpacked(part: Part, name: str, file: File) -> Path:
    """A copy of an archive's `part` under its own name in the cache, known by its sha256 and made once; BundleError if it is
    not the `file` of the manifest or there is no room for it.

    What was not used for `KEPT_DAYS` makes room for it.
    """
    place = cache_folder("unpacked") / file.sha256[:16] / name
    with contextlib.suppress(OSError):
        if Part.of(place).sha256() == file.sha256:
            os.utime(place)
            return place
    clear(("unpacked",), KEPT_DAYS)
    try:
        with replacing(place) as copy:
            if part.sha256(copy.write) != file.sha256:
                raise other_bytes(part)
    except OSError as error:
        raise BundleError(f"{part} cannot be unpacked into {place.parent}: {reason(error)}, or give it unzipped") from None
    return place


def write_archive(
    parts: Mapping[str, Part], hashes: Mapping[str, str], out: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes `parts` by name as one archive at `out`, complete or not at all; the same parts give the same bytes.

    BundleError for a part whose sha256 is not the one in `hashes`, or if `out` cannot be written. `progress` gets
    (bytes written, bytes in all).
    """
    if out.is_dir():
        raise BundleError(f"{out} is a directory; give the name of a file")
    done, total = 0, sum(part.size for part in parts.values())

    def put(piece: bytes) -> None:
        nonlocal done
        entry.write(piece)
        done += len(piece)
        if progress:
            progress(done, total)

    try:
        with replacing(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, part in parts.items():
                end = done + part.size
                # Always ZIP64: the size of the header is then known before.
                with archive.open(_entry(name, file.tell(), part.size), "w", force_zip64=True) as entry:
                    digest = part.sha256(put)
                if done < end or hashes.get(name, digest) != digest:
                    raise other_bytes(part)
    except OSError as error:
        raise BundleError(f"{out} cannot be written: {reason(error)}") from None


def _entry(name: str, at: int, size: int) -> zipfile.ZipInfo:
    """An entry whose data begins on a page, if its header is written at `at`."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr, entry.file_size = 0o644 << 16, size
    padding = -(at + _LOCAL.size + len(name.encode()) + _ZIP64_EXTRA + _PADDING.size) % ALIGNMENT
    entry.extra = _PADDING.pack(_PADDING_ID, padding) + bytes(padding)
    return entry
