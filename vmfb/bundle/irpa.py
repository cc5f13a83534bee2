"""Parameter archives (.irpa) of IREE, written with at most two tensors in memory.

The format is IREE's runtime/src/iree/schemas/parameter_archive.h, version 0.0: a header, a table of
entries, their names, then the tensors. Tensors start at multiples of 64 bytes, so that a mapped
file can be used without copies.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from castiron.vmfb.file_errors import LargePageWriter, naming

ALIGNMENT = 64
# One page, so that the data can be mapped.
DATA_START = 4096
_HEADER = struct.Struct("<4sHHQQQ QQQQQQQ")
_ENTRY = struct.Struct("<QIQQQQQQ QQ")
_ENTRY_SIZE = (_ENTRY.size + 15) // 16 * 16
_DATA_ENTRY = 2


class WeightsError(Exception):
    """Raised for tensors that cannot be written, or for an invalid archive."""


def write_irpa(
    path: Path,
    entries: Iterable[tuple[str, np.ndarray | Callable[[], np.ndarray], tuple[tuple[int, ...], np.dtype]]],
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Write tensors to an .irpa file; return the file's sha256 in hex.

    entries: (name, array or function that returns it, (shape, dtype)), in the order of the file. An
        array of another dtype needs the same item size, such as uint16 for bf16. A function is
        called when its tensor is next, while the previous array is being written.
    progress: called with (bytes of the tensors so far, bytes of all tensors).

    WeightsError, and no file, for a duplicate name or an array of another shape.
    """
    plan = [(name, data, tuple(shape), np.dtype(dtype)) for name, data, (shape, dtype) in entries]
    sizes = [prod(shape) * dtype.itemsize for _, _, shape, dtype in plan]
    names = [name.encode() for name, *_ in plan]
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise WeightsError(f"duplicate parameter: {duplicates[0].decode()!r}; give each tensor a name of its own")
    head, offsets, start = _head(names, sizes)

    digest, total = hashlib.sha256(), sum(sizes)
    path = Path(path)
    try:
        # Writing and hashing release the GIL, so the next tensor is made in the meantime.
        with naming(path), open(path, "wb") as file, ThreadPoolExecutor(1) as pool:
            out, end = LargePageWriter(file), 0

            def put(data: bytes | memoryview, position: int) -> None:
                nonlocal end
                for part in (bytes(position - end), data):
                    digest.update(part)
                    out.write(part)
                end = position + len(data)

            writing = pool.submit(put, head, 0)
            for (name, data, shape, dtype), offset, done in zip(plan, offsets, accumulate(sizes), strict=True):
                array = data() if callable(data) else data
                if array.shape != shape or array.dtype.itemsize != dtype.itemsize:
                    found, wanted = f"{array.dtype}{list(array.shape)}", f"{dtype}{list(shape)}"
                    raise WeightsError(
                        f"wrong type of parameter {name!r} in {path}: {found}, not {wanted}; compile again, and do "
                        "not change the checkpoint meanwhile"
                    )
                writing.result()
                writing = pool.submit(put, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, start + offset)
                del array
                if progress:
                    progress(done, total)
            writing.result()
            out.flush()
            return digest.hexdigest()
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_irpa(data: memoryview) -> dict[str, memoryview]:
    """Return the bytes of each tensor by name; raise WeightsError if `data` is invalid."""
    try:
        fields = _HEADER.unpack_from(data)
        count, table, text = fields[6], fields[7], fields[9]
        # A damaged count may be huge, so the number of rows read is limited.
        rows = [_ENTRY.unpack_from(data, table + index * _ENTRY_SIZE) for index in range(min(count, len(data)))]
        spans = [(row[3], row[4]) for row in rows]
        names = [bytes(data[text + at : text + at + length]) for at, length in spans]
        sizes = [row[-1] for row in rows]
        head, offsets, start = _head(names, sizes)
        end = start + (offsets[-1] + sizes[-1] if sizes else 0)
        if count == len(rows) and len(set(names)) == count and end == len(data) and data[:start] == head:
            return {name.decode(): data[start + at : start + at + size] for name, at, size in zip(names, offsets, sizes)}
    except (struct.error, OverflowError, MemoryError, UnicodeDecodeError):
        pass
    raise WeightsError("the weights file has a damaged table of tensors")


def _head(names: list[bytes], sizes: list[int]) -> tuple[bytes, list[int], int]:
    """Return (bytes before the data, offset of each tensor in the data, offset of the data)."""
    table = _HEADER.size + -_HEADER.size % 16
    text = table + len(names) * _ENTRY_SIZE
    start = text + sum(map(len, names))
    start += -start % DATA_START

    offsets, end = [], 0
    for size in sizes:
        offsets.append(end + -end % ALIGNMENT)
        end = offsets[-1] + size
    header = _HEADER.pack(
        b"IRPA", 0, 0, _HEADER.size, 0, 0,
        len(names), table, len(names) * _ENTRY_SIZE, text, start - text, start, end,
    )  # fmt: skip
    rows, at = [], 0
    for name, size, offset in zip(names, sizes, offsets, strict=True):
        row = _ENTRY.pack(_ENTRY.size, _DATA_ENTRY, 0, at, len(name), 0, 0, ALIGNMENT, offset, size)
        rows.append(row.ljust(_ENTRY_SIZE, b"\0"))
        at += len(name)
    head = header.ljust(table, b"\0") + b"".join(rows) + b"".join(names)
    return head.ljust(start, b"\0"), offsets, start
