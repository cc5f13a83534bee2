"""The features of this machine's CPU, by LLVM's names."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

# Features that change which instructions LLVM chooses for castiron's code. /proc/cpuinfo and macOS
# use the same names with other case and punctuation, except for X86_ALIASES.
X86 = """
    sse3 ssse3 sse4.1 sse4.2 sse4a cx16 popcnt movbe lzcnt bmi bmi2 gfni avx f16c fma fma4 xop tbm avx2
    avxvnni avxvnniint8 avxvnniint16 avxifma avxneconvert avx512f avx512cd avx512bw avx512dq avx512vl avx512ifma
    avx512vbmi avx512vbmi2 avx512vnni avx512bitalg avx512vpopcntdq avx512bf16 avx512fp16 avx512vp2intersect
    amx-tile amx-int8 amx-bf16 apxf
""".split()
# Names of features in /proc/cpuinfo and on macOS that differ from LLVM's.
X86_ALIASES = {"pni": "sse3", "abm": "lzcnt", "bmi1": "bmi", "apx": "apxf", "avx1.0": "avx"}
# Bits of Linux's uapi/asm/hwcap.h. Unlike /proc/cpuinfo they are right for an emulated CPU too.
ARM_HWCAP = {
    1: "neon", 7: "crc", 8: "lse", 10: "fullfp16", 12: "rdm", 14: "complxnum", 15: "rcpc", 20: "dotprod", 22: "sve",
    23: "fp16fml",
}  # fmt: skip
ARM_HWCAP2 = {1: "sve2", 9: "sve-i8mm", 12: "sve-bf16", 13: "i8mm", 14: "bf16", 23: "sme", 37: "sme2"}
# Features by the macOS sysctl that is 1 if the CPU has them.
ARM_SYSCTL = {
    "hw.optional.AdvSIMD": "neon", "hw.optional.armv8_crc32": "crc", "hw.optional.arm.FEAT_LSE": "lse",
    "hw.optional.arm.FEAT_RDM": "rdm", "hw.optional.arm.FEAT_FP16": "fullfp16",
    "hw.optional.arm.FEAT_DotProd": "dotprod", "hw.optional.arm.FEAT_FHM": "fp16fml",
    "hw.optional.arm.FEAT_FCMA": "complxnum", "hw.optional.arm.FEAT_LRCPC": "rcpc",
    "hw.optional.arm.FEAT_I8MM": "i8mm", "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.arm.FEAT_SME2": "sme2",
}  # fmt: skip
_ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def host_arch() -> str:
    """Return the machine's architecture: `x86_64`, `aarch64`, or else Python's name for it."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


@functools.cache
def host_features() -> frozenset[str]:
    """Return the features of this CPU that castiron uses, by LLVM's names; empty if unknown."""
    if platform.system() == "Darwin":
        if host_arch() == "aarch64":
            return frozenset(name for key, name in ARM_SYSCTL.items() if _sysctl().get(key) == "1")
        groups = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
        return _x86(" ".join(_sysctl().get(group, "") for group in groups).split())
    return hwcap_features(*_hwcaps()) if host_arch() == "aarch64" else cpuinfo_features(_cpuinfo())


@functools.cache
def can_use_tiles() -> bool:
    """Ask Linux for permission to use AMX tiles; return whether this process may use them."""
    if platform.system() != "Linux" or host_arch() != "x86_64":
        return False
    arch_prctl, require_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, require_xcomp_perm, xtiledata) == 0


@functools.cache
def host_cpu() -> str:
    """Return the name that the CPU reports, such as `AMD EPYC 9B14`, or else the architecture."""
    if platform.system() == "Darwin":
        return _sysctl().get("machdep.cpu.brand_string", host_arch())
    fields, arch = _fields(_cpuinfo()), host_arch()
    if arch != "aarch64":
        return fields.get("model name", arch)
    # An emulated CPU sees the host's /proc/cpuinfo, which has no "CPU part".
    part = fields.get("CPU part")
    return f"arm implementer {fields.get('CPU implementer', '?')} part {part}" if part else arch


@functools.cache
def physical_cores() -> int:
    """Count the physical cores that this process may use; hyperthreads of a core count as one."""
    if platform.system() == "Darwin":
        return int(_sysctl().get("hw.perflevel0.physicalcpu") or _sysctl().get("hw.physicalcpu") or 1)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return max(1, len(cores))


def cpuinfo_features(text: str) -> frozenset[str]:
    """Return the features of an x86 CPU from the text of its /proc/cpuinfo."""
    return _x86(_fields(text).get("flags", "").split())


def hwcap_features(hwcap: int, hwcap2: int) -> frozenset[str]:
    """Return the features of an ARM CPU from Linux's bit masks AT_HWCAP and AT_HWCAP2."""
    words = ((ARM_HWCAP, hwcap), (ARM_HWCAP2, hwcap2))
    return frozenset(name for names, word in words for bit, name in names.items() if word >> bit & 1)


def _hwcaps() -> tuple[int, int]:
    hwcap, hwcap2 = 16, 26
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (AttributeError, OSError, TypeError):
        return 0, 0
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return getauxval(hwcap), getauxval(hwcap2)


def _x86(words: Iterable[str]) -> frozenset[str]:
    plain = lambda name: re.sub("[._-]", "", name.lower())
    known = {plain(name): name for name in X86} | {plain(other): name for other, name in X86_ALIASES.items()}
    return frozenset(known[plain(word)] for word in words if plain(word) in known)


def _cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return "".join(takewhile(str.strip, file))
    except OSError:
        return ""


@functools.cache
def _sysctl() -> dict[str, str]:
    return _fields(subprocess.run(["/usr/sbin/sysctl", "hw", "machdep.cpu"], capture_output=True, text=True).stdout)


def _fields(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
