"""Small files that others made, read whole: what is in their place may be a pipe, a device or as large as the disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Tokenizers of 260,000 tokens take 35 MB, an index of 100,000 tensors 10 MB.
MOST_BYTES = 100_000_000
# Of lists, objects and their entries, by the marks between them: the tokenizer of 260,000 tokens has 1.8 million.
MOST_MARKS = 4_000_000


def ordinary_bytes(path: Path) -> bytes:
    """What a file holds; OSError if there is none, or one of another kind or of more than `MOST_BYTES`."""
    try:
        # Opening a pipe waits for a writer, and a device has no end.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError:  # no file has a zero byte in its name
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES // 10**6} MB, as no such file has", str(path))
    return data


def has_too_many_values(text: str | bytes, most: int = MOST_MARKS) -> bool:
    """Whether JSON would take a gigabyte and more once it is read: a value may take thirty times its own bytes."""
    marks = ",[{" if isinstance(text, str) else (b",", b"[", b"{")
    return sum(map(text.count, marks)) > most
