"""The CPUs that castiron compiles for: a table of compiler flags and of the features that running the result needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from castiron.vmfb.cpu import host_arch, host_cpu, host_features, tiles_given

COMMON_FLAGS = (
    "--iree-input-type=stablehlo",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-opt-level=O3",
    # DWARF would be a third of the file and hold the path of a temporary file; locations stay in the IR all the same.
    "--iree-llvmcpu-debug-symbols=false",
)

_V2 = ("cx16", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
TILES = "amx-tile"
_ARM = ("crc", "dotprod", "fullfp16", "lse", "neon", "rdm")


class TargetError(Exception):
    """A target that cannot be compiled for; one sentence."""


@dataclass(frozen=True)
class Target:
    """A CPU level.

    `isa` names the vector registers that kernels are shaped for (a row of the kernels' ISAS, such as `avx2`; empty where
    castiron has no kernels), `cpu` is the CPU's own name for `host` and LLVM's otherwise, `features` are what a machine
    must have, sorted, `flags` are iree-compile's.
    """

    name: str
    arch: str
    isa: str
    cpu: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


def isa_of(arch: str, features: Collection[str]) -> str:
    """The widest of the instruction sets that castiron's kernels know, or the empty string."""
    if arch == "x86_64":
        needs = {
            "amx": {*_V4, "avx512vnni", "avx512bf16", TILES, "amx-bf16"},
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
    """A level of the x86-64 psABI, or that with more features and a name of its own."""
    flags = ["--iree-llvmcpu-target-triple=x86_64-unknown-linux-gnu", f"--iree-llvmcpu-target-cpu={level}"]
    if more:
        flags.append("--iree-llvmcpu-target-cpu-features=" + ",".join(f"+{feature}" for feature in more))
    return _target(name or level, "x86_64", name or level, [*features, *more], *flags)


def _arm(*more: str, name: str = "aarch64") -> Target:
    """Armv8.2-A with dot products, or that with more features and a name of its own; IREE links ELF for every system alike."""
    flags = ["--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu", "--iree-llvmcpu-target-cpu=generic"]
    on = ("v8.2a", "neon", "fullfp16", "dotprod", *more)
    flags.append("--iree-llvmcpu-target-cpu-features=" + ",".join(f"+{feature}" for feature in on))
    return _target(name, "aarch64", "generic", [*_ARM, *more], *flags)


def _given_features() -> frozenset[str]:
    """This CPU's features but for tiles that the system keeps from the process."""
    features = host_features()
    return features if TILES not in features or tiles_given() else frozenset(f for f in features if not f.startswith("amx-"))


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target("host", host_arch(), host_cpu(), _given_features(), "--iree-llvmcpu-target-cpu=host"),
        _x86("x86-64-v3", _V3),
        _x86("x86-64-v3", _V3, "avxvnni", name="x86-64-v3-vnni"),
        _x86("x86-64-v4", _V4),
        _x86("x86-64-v4", _V4, "avx512vnni", name="x86-64-v4-vnni"),
        _x86("x86-64-v4", _V4, "avx512vnni", "avx512bf16", name="x86-64-v4-bf16"),
        _x86("x86-64-v4", _V4, "avx512vnni", "avx512bf16", TILES, "amx-bf16", name="sapphirerapids"),
        # The level that Apple M1, Graviton 2 and Raspberry Pi 5 share.
        _arm(),
        # Apple M2, Graviton 3 and what else has the products of matrices that Armv8.6-A demands.
        _arm("i8mm", "bf16", name="aarch64-i8mm"),
    )
}


def resolve(name: str) -> Target:
    """The target called `name`; TargetError for a name not in the table or a host without the vectors needed."""
    if name not in TARGETS:
        raise TargetError(f"target {name!r} is not known; choose one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    if not target.isa:
        raise TargetError(
            f"this CPU ({target.cpu}, {target.arch}) has neither AVX2 with FMA and F16C nor NEON, which castiron's"
            " kernels need; compile with --target for the machine that will run the bundle"
        )
    return target


def missing_features(target: Target) -> tuple[str, ...]:
    """What `target` needs and this machine lacks, sorted; the architecture itself where that differs."""
    if target.arch != host_arch():
        return (target.arch,)
    return tuple(sorted(set(target.features) - host_features()))
