"""Packed bundles: a model's files in one zip archive, uncompressed and aligned to pages.

`unzip` restores the bundle's directory. The runtime memory-maps the weights in the archive. The
layout follows PKWARE's APPNOTE 6.3 with ZIP64. Extra fields align the entries, as Android's
zipalign does.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import stat
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from castiron.vmfb.atomic_write import replace_file
from castiron.vmfb.bundle.json_record import short
from castiron.vmfb.bundle.manifest import MANIFEST, BundleError, is_bundle_file
from castiron.vmfb.file_errors import naming, reason

# Alignment in bytes of entries: one page, so that they can be mapped. IREE itself needs 64.
ALIGNMENT = 4096
_LOCAL = struct.Struct("<4s22xHH")
_ZIP64_EXTRA = 20
# An extra field that zip readers skip: its id (Android's alignment field) and size, then zeros.
_PADDING = struct.Struct("<HH")
_PADDING_ID = 0xD935
# Copies in large parts let Linux cache most of a file in pages of 2 MB (see `LargePageWriter`).
_CHUNK = 16 << 20
# Limit in bytes for the zip directory, which includes each entry's padding.
_MAX_DIRECTORY = 1_000_000


@dataclass(frozen=True)
class Part:
    """A file of a bundle: `size` bytes from byte `offset` on of the open file `file`.

    The parts of an archive share one open file: acquire `lock` to move its position. A part stays
    readable if another file replaces the one at `path`.
    """

    path: Path
    file: io.FileIO
    offset: int
    size: int
    lock: threading.Lock

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def of(cls, path: Path) -> Part:
        """Open the file at `path` as one part; raise OSError if it is not a regular file."""
        # A pipe has no end, and a device has no size.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        file = io.FileIO(path)
        return cls(path, file, 0, os.fstat(file.fileno()).st_size, threading.Lock())

    def stat(self) -> os.stat_result:
        return os.fstat(self.file.fileno())

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes of the part from offset `start`, or fewer at the end of the part."""
        with self.lock, naming(self.path):
            self.file.seek(self.offset + start)
            return self.file.read(max(0, min(size, self.size - start)))

    def read_bytes(self) -> bytes:
        return b"".join(self._chunks())

    def map(self) -> memoryview:
        """Return the bytes of the part, mapped read-only without a copy."""
        mapped = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(mapped)[self.offset : self.offset + self.size]

    def sha256(self, write: Callable[[bytes], object] = lambda chunk: None) -> str:
        """Return the sha256 in hex, and call `write` with every chunk of the bytes, in order."""
        digest = hashlib.sha256()
        for chunk in self._chunks():
            digest.update(chunk)
            write(chunk)
        return digest.hexdigest()

    def _chunks(self) -> Iterator[bytes]:
        start = 0
        while chunk := self.read(start, _CHUNK):
            yield chunk
            start += len(chunk)


def changed_file(path: Part | Path) -> BundleError:
    return BundleError(f"sha256 differs from the manifest: {path}; compile the bundle again")


class _Reader(io.BufferedReader):
    """A file reader for zipfile, which would read a central directory of any size into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"its zip directory is {size} bytes; the limit is {_MAX_DIRECTORY}")
        return super().read(size)


def open_archive(path: Path) -> dict[str, Part]:
    """Return the files of the packed bundle at `path`, by name; raise BundleError if invalid."""

    def invalid(why: object) -> BundleError:
        return BundleError(f"not a packed bundle: {path} ({why}); make one with `castiron pack`")

    archive_file, found = Part.of(path), dict[str, Part]()
    try:
        with _Reader(io.FileIO(os.dup(archive_file.file.fileno()))) as file:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
            for entry in entries:
                if not is_bundle_file(entry.filename) or entry.filename in found:
                    raise invalid(f"unexpected entry {short(entry.filename)}")
                file.seek(entry.header_offset)
                magic, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
                offset, size = entry.header_offset + _LOCAL.size + name + extra, entry.file_size
                stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == size
                for is_wrong, problem in (
                    (magic != b"PK\3\4", "has a damaged header"),
                    (not stored, "is compressed"),
                    (offset + size > archive_file.size, "is cut off"),
                    (offset % ALIGNMENT, f"is not aligned to {ALIGNMENT} bytes"),
                ):
                    if is_wrong:
                        raise invalid(f"{entry.filename} {problem}")
                found[entry.filename] = Part(path, archive_file.file, offset, size, archive_file.lock)
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError) as error:
        # zipfile raises NotImplementedError for features of later versions of the format.
        raise invalid("an entry is cut off" if isinstance(error, struct.error) else error) from None
    if MANIFEST not in found:
        raise invalid("no manifest.json")
    return found


def write_archive(
    parts: Mapping[str, Part], hashes: Mapping[str, str], out: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write files into a new archive at `out`; the same files give the same bytes.

    hashes: expected sha256 by name. progress: called with (bytes written, total). Raise
    BundleError, and leave no file, if a sha256 differs or `out` cannot be written.
    """
    if out.is_dir():
        raise BundleError(f"output is a directory: {out}; give the name of a file")
    done, total = 0, sum(part.size for part in parts.values())

    def put(chunk: bytes) -> None:
        nonlocal done
        entry.write(chunk)
        done += len(chunk)
        if progress:
            progress(done, total)

    try:
        with replace_file(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, part in parts.items():
                end = done + part.size
                # Always ZIP64, so that the size of the header is known.
                with archive.open(_entry(name, file.tell(), part.size), "w", force_zip64=True) as entry:
                    digest = part.sha256(put)
                if done < end or hashes.get(name, digest) != digest:
                    raise changed_file(part)
    except OSError as error:
        raise BundleError(f"cannot write {out}: {reason(error)}") from None


def _entry(name: str, offset: int, size: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr, entry.file_size = 0o644 << 16, size
    # The header at byte `offset` is padded so that the file's data starts on a page.
    padding = -(offset + _LOCAL.size + len(name.encode()) + _ZIP64_EXTRA + _PADDING.size) % ALIGNMENT
    entry.extra = _PADDING.pack(_PADDING_ID, padding) + bytes(padding)
    return entry
