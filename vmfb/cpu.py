"""What the CPU of this machine can do, under LLVM's names of the features, without third-party packages."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

# Only features that change the instructions LLVM chooses for our code; those for cryptography or the kernel do not
# make a bundle less portable. LLVM's names, which /proc/cpuinfo and macOS spell otherwise only in case and punctuation.
X86 = """
    sse3 ssse3 sse4.1 sse4.2 sse4a cx16 popcnt movbe lzcnt bmi bmi2 gfni avx f16c fma fma4 xop tbm avx2
    avxvnni avxvnniint8 avxvnniint16 avxifma avxneconvert avx512f avx512cd avx512bw avx512dq avx512vl avx512ifma
    avx512vbmi avx512vbmi2 avx512vnni avx512bitalg avx512vpopcntdq avx512bf16 avx512fp16 avx512vp2intersect
    amx-tile amx-int8 amx-bf16 apxf
""".split()
# What has another name there.
X86_OTHERWISE = {"pni": "sse3", "abm": "lzcnt", "bmi1": "bmi", "apx": "apxf", "avx1.0": "avx"}
# Linux: bits of the two words that the kernel gives every process (uapi/asm/hwcap.h). An emulated CPU has its own, where
# /proc/cpuinfo is the machine's.
ARM_HWCAP = {
    1: "neon", 7: "crc", 8: "lse", 10: "fullfp16", 12: "rdm", 14: "complxnum", 15: "rcpc", 20: "dotprod", 22: "sve",
    23: "fp16fml",
}  # fmt: skip
ARM_HWCAP2 = {1: "sve2", 9: "sve-i8mm", 12: "sve-bf16", 13: "i8mm", 14: "bf16", 23: "sme", 37: "sme2"}
# macOS: a sysctl that reads 1 where the CPU has the feature.
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
    """`x86_64` or `aarch64`, else the machine's own word for itself."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


@functools.cache
def host_features() -> frozenset[str]:
    """The features of this CPU that matter for generated code; empty where the system cannot be asked."""
    if platform.system() == "Darwin":
        return _darwin_features(host_arch())
    if host_arch() == "aarch64":
        return hwcap_features(*_hwcaps())
    return cpuinfo_features(_cpuinfo())


@functools.cache
def tiles_given() -> bool:
    """Whether this process may use the matrix tiles of Intel's AMX: Linux gives them, to all of its threads, when asked."""
    if platform.system() != "Linux" or host_arch() != "x86_64":
        return False
    arch_prctl, require_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, require_xcomp_perm, xtiledata) == 0


@functools.cache
def host_cpu() -> str:
    """The CPU's own name, as `AMD EPYC 9B14`; the architecture where there is none."""
    if platform.system() == "Darwin":
        return _sysctl_text("machdep.cpu.brand_string") or host_arch()
    fields, arch = _fields(_cpuinfo()), host_arch()
    if arch != "aarch64":
        return fields.get("model name", arch)
    # An emulated CPU is shown the machine's own /proc/cpuinfo, where no part stands.
    part = fields.get("CPU part")
    return f"arm implementer {fields.get('CPU implementer', '?')} part {part}" if part else arch


@functools.cache
def physical_cores() -> int:
    """Physical cores that this process may run on, at least 1; hyperthreads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return _sysctl_int("hw.perflevel0.physicalcpu") or _sysctl_int("hw.physicalcpu") or os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return max(1, len(cores))


def cpuinfo_features(text: str) -> frozenset[str]:
    """The features of an x86 CPU in the text of its /proc/cpuinfo."""
    return _x86(_fields(text).get("flags", "").split())


def hwcap_features(hwcap: int, hwcap2: int) -> frozenset[str]:
    """The features of an ARM CPU in the two words that Linux describes it with."""
    words = ((ARM_HWCAP, hwcap), (ARM_HWCAP2, hwcap2))
    return frozenset(name for names, word in words for bit, name in names.items() if word >> bit & 1)


def _hwcaps() -> tuple[int, int]:
    """Those words; zeros where the C library does not give them."""
    hwcap, hwcap2 = 16, 26
    try:
        ask = ctypes.CDLL(None).getauxval
    except (AttributeError, OSError):
        return 0, 0
    ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return ask(hwcap), ask(hwcap2)


def _x86(words: Iterable[str]) -> frozenset[str]:
    plain = lambda name: re.sub("[._-]", "", name.lower())
    known = {plain(name): name for name in X86} | {plain(other): name for other, name in X86_OTHERWISE.items()}
    return frozenset(known[plain(word)] for word in words if plain(word) in known)


def _cpuinfo() -> str:
    """The first processor's block of /proc/cpuinfo; the others would only cost time on a large machine."""
    lines: list[str] = []
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip() and lines:
                    break
                lines.append(line)
    except OSError:
        return ""
    return "".join(lines)


def _fields(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _darwin_features(arch: str) -> frozenset[str]:
    if arch == "aarch64":
        return frozenset(name for key, name in ARM_SYSCTL.items() if _sysctl_int(key))
    groups = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
    return _x86(" ".join(_sysctl_text(group) for group in groups).split())


def _sysctl(name: str) -> bytes:
    try:
        call = ctypes.CDLL(None).sysctlbyname
    except (AttributeError, OSError):
        return b""
    size = ctypes.c_size_t(0)
    if call(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) or not size.value:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    if call(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return b""
    return buffer.raw[: size.value]


def _sysctl_text(name: str) -> str:
    return _sysctl(name).rstrip(b"\0").decode("utf-8", "replace")


def _sysctl_int(name: str) -> int:
    raw = _sysctl(name)
    return int.from_bytes(raw, "little") if len(raw) in (4, 8) else 0
