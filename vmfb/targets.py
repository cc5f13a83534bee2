"""The CPUs and GPUs that castiron compiles for: compiler flags, and the features they need."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from castiron.vmfb.cpu_features import can_use_tiles, host_arch, host_cpu, host_features

COMMON_FLAGS = (
    "--iree-input-type=stablehlo",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-opt-level=O3",
    # Debug symbols would be a third of the file and contain the path of a temporary file.
    "--iree-llvmcpu-debug-symbols=false",
    # IREE's default is 32 KB. The stacks of `device` have 1 MB.
    "--iree-llvmcpu-stack-allocation-limit=524288",
)

_V2 = ("cx16", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
TILES = "amx-tile"
_ARM = ("crc", "dotprod", "fullfp16", "lse", "neon", "rdm")


class TargetError(Exception):
    """Raised for a target that castiron cannot compile for."""


# Storage of 8 and 16 bits, and arithmetic on it. IREE's default target lacks them, and then reads f16 wrongly without an error.
_SPIRV_FEATURES = (
    "spirv:v1.3", "cap:Shader", "cap:Int8", "cap:Int16", "cap:Float16", "cap:StorageBuffer16BitAccess", "cap:StorageUniform16",
    "cap:StorageBuffer8BitAccess", "cap:UniformAndStorageBuffer8BitAccess", "ext:SPV_KHR_16bit_storage",
    "ext:SPV_KHR_8bit_storage", "ext:SPV_KHR_storage_buffer_storage_class",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A CPU, a class of CPUs or a GPU, for which castiron compiles.

    name: the value of `--target`. isa: the instruction set of castiron's kernels; empty for none.
    cpu: LLVM's name; for `host`, the name that the CPU reports; for a GPU, its architecture.
    features: LLVM's names of what the code needs; for Vulkan, SPIR-V's.
    driver: the IREE runtime's driver for a GPU; empty for a CPU.
    """

    name: str
    arch: str
    isa: str
    cpu: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    driver: str = ""


def isa_of(arch: str, features: Collection[str]) -> str:
    """Return the best instruction set of castiron's kernels for a CPU's features; "" for none."""
    if arch == "x86_64":
        needs = {
            "amx": {*_V4, "avx512vbmi", "avx512vnni", "avx512bf16", TILES, "amx-bf16"},
            "avx512bf16": {*_V4, "avx512vnni", "avx512bf16"},
            "avx512vnni": {*_V4, "avx512vnni"},
            "avx512": {*_V4},
            "avxvnni": {"avx2", "fma", "f16c", "avxvnni"},
            "avx2": {"avx2", "fma", "f16c"},
        }
        return next((isa for isa, needed in needs.items() if needed <= set(features)), "")
    if arch == "aarch64":
        return "neoni8mm" if {"i8mm", "bf16"} <= set(features) else "neon"
    return ""


def _target(name: str, arch: str, cpu: str, features: Collection[str], *flags: str) -> Target:
    return Target(name, arch, isa_of(arch, features), cpu, tuple(sorted(features)), COMMON_FLAGS + flags)


def _x86(level: str, features: Collection[str], *more: str, name: str = "") -> Target:
    # `level`: a level of the x86-64 psABI, with these features. `more`: additional features.
    flags = ["--iree-llvmcpu-target-triple=x86_64-unknown-linux-gnu", f"--iree-llvmcpu-target-cpu={level}"]
    if more:
        flags.append("--iree-llvmcpu-target-cpu-features=" + ",".join(f"+{feature}" for feature in more))
    return _target(name or level, "x86_64", name or level, [*features, *more], *flags)


def _arm(*more: str, name: str = "aarch64") -> Target:
    # The triple names Linux on every system, because IREE links ELF files everywhere.
    flags = ["--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu", "--iree-llvmcpu-target-cpu=generic"]
    on = ("v8.2a", "neon", "fullfp16", "dotprod", *more)
    flags.append("--iree-llvmcpu-target-cpu-features=" + ",".join(f"+{feature}" for feature in on))
    return _target(name, "aarch64", "generic", [*_ARM, *more], *flags)


def _usable_features() -> frozenset[str]:
    features = host_features()
    return features if TILES not in features or can_use_tiles() else frozenset(f for f in features if not f.startswith("amx-"))


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target("host", host_arch(), host_cpu(), _usable_features(), "--iree-llvmcpu-target-cpu=host"),
        _x86("x86-64-v3", _V3),
        _x86("x86-64-v3", _V3, "avxvnni", name="x86-64-v3-vnni"),
        _x86("x86-64-v4", _V4),
        _x86("x86-64-v4", _V4, "avx512vnni", name="x86-64-v4-vnni"),
        _x86("x86-64-v4", _V4, "avx512vnni", "avx512bf16", name="x86-64-v4-bf16"),
        _x86("x86-64-v4", _V4, "avx512vbmi", "avx512vnni", "avx512bf16", TILES, "amx-bf16", name="sapphirerapids"),
        # Runs on Apple M1, Graviton 2 and Raspberry Pi 5.
        _arm(),
        # Runs on Apple M2, Graviton 3 and others with the matrix instructions of Armv8.6-A.
        _arm("i8mm", "bf16", name="aarch64-i8mm"),
    )
}


# By name of a target: driver of the runtime, flag that selects the architecture, its default and its pattern.
_GPUS = {
    "vulkan": ("vulkan", "--iree-vulkan-target", "", r"[a-z0-9_]+"),
    # PTX of sm_80 runs on newer GPUs too.
    "cuda": ("cuda", "--iree-cuda-target", "sm_80", r"sm_\d{2,3}a?"),
    "rocm": ("hip", "--iree-rocm-target", "gfx942", r"gfx[0-9a-f]{3,5}"),
    "metal": ("metal", "", "", "(?!)"),
}
GPUS = tuple(_GPUS)
# Driver of the runtime -> the target whose bundles it runs.
TARGET_OF_DRIVER = {driver: name for name, (driver, *_) in _GPUS.items()}


def resolve(name: str) -> Target:
    """Return the target called `name`, such as "host"; raise TargetError if it is not supported."""
    if is_gpu(name):
        return _gpu(name)
    if name not in TARGETS:
        raise TargetError(f"unknown target: {name!r}; choose one of {', '.join((*TARGETS, *GPUS))}")
    target = TARGETS[name]
    if not target.isa:
        raise TargetError(
            f"this CPU ({target.cpu}, {target.arch}) has neither AVX2 with FMA and F16C nor NEON; "
            "compile with --target for the machine that will run the bundle"
        )
    return target


def is_gpu(name: str) -> bool:
    return name.partition(":")[0] in _GPUS


def _gpu(name: str) -> Target:
    # `name`: "cuda", or with an architecture "cuda:sm_90".
    kind, colon, architecture = name.partition(":")
    driver, flag, default, pattern = _GPUS[kind]
    if colon and not re.fullmatch(pattern, architecture):
        raise TargetError(f"unknown architecture of {kind}: {architecture!r}; use {':'.join(filter(None, (kind, default)))}")
    architecture = architecture or default
    flags = ["--iree-input-type=stablehlo", f"--iree-hal-target-device={driver}", "--iree-opt-level=O3"]
    features = _SPIRV_FEATURES if kind == "vulkan" else ()
    if features:
        flags.append(f"--iree-vulkan-target-features={','.join(features)}")
    if architecture:
        flags.append(f"{flag}={architecture}")
    return Target(name, kind, "", architecture, features, tuple(flags), driver)


def missing_features(target: Target) -> tuple[str, ...]:
    """Return what this machine lacks to run code for `target`: CPU features, or the architecture.

    For a GPU it is always the driver; this function does not look for a GPU.
    """
    if target.driver or target.arch != host_arch():
        return (target.driver or target.arch,)
    return tuple(sorted(set(target.features) - host_features()))
