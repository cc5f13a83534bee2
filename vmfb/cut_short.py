"""A sentence for the end that comes when a mapped file is made shorter while it is read.

The system ends a process without a word that reads a page which its file no longer has (SIGBUS). No handler in Python can say
it: Python runs handlers between instructions of its own, and the one that reads never ends. So the handler is a few
instructions of the machine, on whichever thread it happens: write(2, sentence), then exit_group(1).
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import platform
import signal
import struct
import sys

SENTENCE = (
    b"castiron: a file that is in use, a bundle's or a checkpoint's, was made shorter meanwhile: put it back whole and start "
    b"again\n"
)


def _x86_64(length: int) -> bytes:
    return (
        b"\xbf\x02\0\0\0"  # mov edi, 2
        b"\x48\x8d\x35\x18\0\0\0"  # lea rsi, [rip + 24], the end of these
        + struct.pack("<BI", 0xBA, length)  # mov edx, length
        + b"\xb8\x01\0\0\0\x0f\x05"  # mov eax, 1 (write); syscall
        b"\xbf\x01\0\0\0"  # mov edi, 1
        b"\xb8\xe7\0\0\0\x0f\x05"  # mov eax, 231 (exit_group); syscall
    )


def _aarch64(length: int) -> bytes:
    return struct.pack(
        "<8I",
        0xD2800040,  # mov x0, #2
        0x100000E1,  # adr x1, #28, the end of these
        0xD2800002 | length << 5,  # mov x2, #length
        0xD2800808,  # mov x8, #64 (write)
        0xD4000001,  # svc #0
        0xD2800020,  # mov x0, #1
        0xD2800BC8,  # mov x8, #94 (exit_group)
        0xD4000001,  # svc #0
    )


HANDLERS = {"x86_64": _x86_64, "aarch64": _aarch64}


def say_when_cut_short() -> None:
    """From now on the process ends with `SENTENCE` on stderr and exit status 1 where SIGBUS would end it; on other systems and
    processors with Python's own report of a crash. For programs of one's own only: it is the whole process's."""
    if faulthandler.is_enabled():
        # Somebody wants to see where.
        return
    try:
        place = _instructions()
    except (OSError, AttributeError):
        place = None
    if place is None:
        if sys.stderr is not None:
            faulthandler.enable(all_threads=False)
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGBUS, place)


def _instructions() -> int | None:
    """Where the handler is in memory, for the rest of the process; None where there is none for this machine."""
    if sys.platform != "linux" or platform.machine() not in HANDLERS:
        return None
    # Mapped from a file, so that no memory is ever writable and executable, and the processor's caches know it.
    file = os.memfd_create("castiron", os.MFD_CLOEXEC)
    try:
        os.write(file, HANDLERS[platform.machine()](len(SENTENCE)) + SENTENCE)
        libc = ctypes.CDLL(None)
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        libc.mmap.restype = ctypes.c_void_p
        place = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file, 0)
    finally:
        os.close(file)
    return None if place == ctypes.c_void_p(-1).value else place
