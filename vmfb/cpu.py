"""What the CPU of this machine can do, under LLVM's names of the features, without third-party packages."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

# Only features that change the instructions LLVM chooses for our code; those for cryptography or the kernel do not
# make a bundle less portable. Left the name in /proc/cpuinfo, right LLVM's.
X86_CPUINFO = {
    "pni": "sse3", "ssse3": "ssse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "sse4a": "sse4a", "cx16": "cx16",
    "popcnt": "popcnt", "movbe": "movbe", "abm": "lzcnt", "bmi1": "bmi", "bmi2": "bmi2", "gfni": "gfni",
    "avx": "avx", "f16c": "f16c", "fma": "fma", "fma4": "fma4", "xop": "xop", "tbm": "tbm", "avx2": "avx2",
    "avx_vnni": "avxvnni", "avx_vnni_int8": "avxvnniint8", "avx_vnni_int16": "avxvnniint16", "avx_ifma": "avxifma",
    "avx_ne_convert": "avxneconvert", "avx512f": "avx512f", "avx512cd": "avx512cd", "avx512bw": "avx512bw",
    "avx512dq": "avx512dq", "avx512vl": "avx512vl", "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi",
    "avx512_vbmi2": "avx512vbmi2", "avx512_vnni": "avx512vnni", "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq", "avx512_bf16": "avx512bf16", "avx512_fp16": "avx512fp16",
    "avx512_vp2intersect": "avx512vp2intersect", "amx_tile": "amx-tile", "amx_int8": "amx-int8", "amx_bf16": "amx-bf16",
    "apx": "apxf",
}  # fmt: skip
ARM_CPUINFO = {
    "asimd": "neon", "crc32": "crc", "atomics": "lse", "asimdrdm": "rdm", "asimdhp": "fullfp16", "asimddp": "dotprod",
    "asimdfhm": "fp16fml", "fcma": "complxnum", "lrcpc": "rcpc", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve",
    "sve2": "sve2", "svei8mm": "sve-i8mm", "svebf16": "sve-bf16", "sme": "sme", "sme2": "sme2",
}  # fmt: skip
# macOS: a sysctl that reads 1 where the CPU has the feature.
ARM_SYSCTL = {
    "hw.optional.AdvSIMD": "neon", "hw.optional.armv8_crc32": "crc", "hw.optional.arm.FEAT_LSE": "lse",
    "hw.optional.arm.FEAT_RDM": "rdm", "hw.optional.arm.FEAT_FP16": "fullfp16",
    "hw.optional.arm.FEAT_DotProd": "dotprod", "hw.optional.arm.FEAT_FHM": "fp16fml",
    "hw.optional.arm.FEAT_FCMA": "complxnum", "hw.optional.arm.FEAT_LRCPC": "rcpc",
    "hw.optional.arm.FEAT_I8MM": "i8mm", "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.arm.FEAT_SME2": "sme2",
}  # fmt: skip
X86_SYSCTL = {
    "SSE3": "sse3", "SSSE3": "ssse3", "SSE4.1": "sse4.1", "SSE4.2": "sse4.2", "CX16": "cx16", "POPCNT": "popcnt",
    "MOVBE": "movbe", "LZCNT": "lzcnt", "BMI1": "bmi", "BMI2": "bmi2", "AVX1.0": "avx", "F16C": "f16c", "FMA": "fma",
    "AVX2": "avx2", "AVX512F": "avx512f", "AVX512CD": "avx512cd", "AVX512BW": "avx512bw", "AVX512DQ": "avx512dq",
    "AVX512VL": "avx512vl", "AVX512IFMA": "avx512ifma", "AVX512VBMI": "avx512vbmi", "AVX512VNNI": "avx512vnni",
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
    return cpuinfo_features(_cpuinfo(), host_arch())


@functools.cache
def host_cpu() -> str:
    """The CPU's own name, as `AMD EPYC 9B14`; the architecture where there is none."""
    if platform.system() == "Darwin":
        return _sysctl_text("machdep.cpu.brand_string") or host_arch()
    fields = _fields(_cpuinfo())
    if "model name" in fields:
        return fields["model name"]
    if "CPU part" in fields:
        return f"arm implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return host_arch()


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


def cpuinfo_features(text: str, arch: str) -> frozenset[str]:
    """The features in the text of a /proc/cpuinfo."""
    fields = _fields(text)
    if arch == "x86_64":
        return frozenset(X86_CPUINFO[flag] for flag in fields.get("flags", "").split() if flag in X86_CPUINFO)
    return frozenset(ARM_CPUINFO[flag] for flag in fields.get("Features", "").split() if flag in ARM_CPUINFO)


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
    words = " ".join(_sysctl_text(group) for group in groups).split()
    return frozenset(X86_SYSCTL[word] for word in words if word in X86_SYSCTL)


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
