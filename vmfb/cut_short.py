"""A sentence for the end that comes when a mapped file is made shorter while it is read.

The system ends a process without a word that reads a page which its file no longer has (SIGBUS). No handler in Python can say
it: Python runs handlers between instructions of its own, and the one that reads never ends. So the handler is a few
instructions of the machine, on whichever thread it happens first: write(2, sentence), then exit_group(1). Other threads wait.
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
        b"\xf0\x0f\xba\x2d" + struct.pack("<iB", mmap.PAGESIZE - 9, 0)  # lock bts dword [rip + ...], 0, in the next page
        + b"\x73\x09"  # jnc 9 further
        b"\xb8\x22\0\0\0\x0f\x05"  # mov eax, 34 (pause); syscall
        b"\xeb\xf7"  # jmp to the pause
        b"\xbf\x02\0\0\0"  # mov edi, 2
        b"\x48\x8d\x35\x18\0\0\0"  # lea rsi, [rip + 24], the end of these
        + struct.pack("<BI", 0xBA, length)  # mov edx, length
        + b"\xb8\x01\0\0\0\x0f\x05"  # mov eax, 1 (write); syscall
        b"\xbf\x01\0\0\0"  # mov edi, 1
        b"\xb8\xe7\0\0\0\x0f\x05"  # mov eax, 231 (exit_group); syscall
    )  # fmt: skip


def _aarch64(length: int) -> bytes:
    return struct.pack(
        "<21I",
        0x10000003 | mmap.PAGESIZE // 4 << 5,  # adr x3, the next page
        0x52800024,  # mov w4, #1
        0x885F7C65,  # ldxr w5, [x3]
        0x88067C64,  # stxr w6, w4, [x3]
        0x35FFFFC6,  # cbnz w6, the ldxr
        0x34000105,  # cbz w5, 8 further
        0xD2800000,  # mov x0, #0
        0xD2800001,  # mov x1, #0
        0xD2800002,  # mov x2, #0
        0xD2800003,  # mov x3, #0
        0xD2800928,  # mov x8, #73 (ppoll, of nothing, for ever)
        0xD4000001,  # svc #0
        0x17FFFFFA,  # b to mov x0, #0
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
    # In the second page, which may be written, is whether a thread has come.
    file = os.memfd_create("castiron", os.MFD_CLOEXEC)
    try:
        os.write(file, HANDLERS[platform.machine()](len(SENTENCE)) + SENTENCE)
        os.truncate(file, 2 * mmap.PAGESIZE)
        libc = ctypes.CDLL(None)
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        libc.mmap.restype = ctypes.c_void_p
        place = libc.mmap(None, 2 * mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file, 0)
    finally:
        os.close(file)
    if place == ctypes.c_void_p(-1).value:
        return None
    flag = ctypes.c_void_p(place + mmap.PAGESIZE)
    return None if libc.mprotect(flag, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE) else place
