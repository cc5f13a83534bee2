"""The time of each dispatch of a call, measured by the profiler of the IREE runtime's tools."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from castiron.emitter.abi import Function
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.bundle.manifest import WEIGHTS, BundleError, Manifest
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.device.cpu_device import task_flags
from castiron.vmfb.device.program import SCOPE

WARM_SECONDS = 0.1


@dataclass(frozen=True)
class Dispatch:
    """A unit of work that IREE runs, in a call of a function.

    name: `{kernel}_fn` for a kernel of castiron; `{function}_dispatch_{n}_…` for IREE's own code.
    calls: runs in one call of the function. seconds: of all of them. workgroups: of each.
    """

    name: str
    calls: int
    seconds: float
    workgroups: int


@dataclass(frozen=True)
class Profile:
    """The seconds of a call of `function`, and its dispatches, longest first.

    position: number of tokens in the states before the call.
    """

    function: str
    position: int
    threads: int
    seconds: float
    dispatches: tuple[Dispatch, ...]


def profile(bundle: Bundle, function: Function, *, position: int = 0, threads: int | None = None, repeats: int = 20) -> Profile:
    """Measure a call of a function and its dispatches, on average over `repeats` calls.

    position: number of tokens in the states, for every sequence of a batch. All states are zeros,
    which does not change times. threads: None for one per physical core.
    """
    files = bundle.file(bundle.manifest.module_of(function)), bundle.file(WEIGHTS)
    options = *files, bundle.manifest, function, position, threads or physical_cores(), repeats
    # The first call reads the mapped weights from disk.
    warm = f"--benchmark_min_warmup_time={WARM_SECONDS}"
    timed = json.loads(_tool("iree-benchmark-module", *_command(*options), warm))["benchmarks"][0]
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[timed["time_unit"]]
    return Profile(function.name, position, options[5], timed["real_time"] * scale, dispatches(*options))


def median_of(rounds: Sequence[Profile]) -> Profile:
    """Merge several profiles of the same function; each time becomes the median of its times."""
    times: dict[str, list[float]] = {first.name: [] for first in rounds[0].dispatches}
    for dispatch in (dispatch for found in rounds for dispatch in found.dispatches):
        times[dispatch.name].append(dispatch.seconds)
    typical = (replace(first, seconds=median(times[first.name])) for first in rounds[0].dispatches)
    longest_first = tuple(sorted(typical, key=lambda dispatch: -dispatch.seconds))
    return replace(rounds[0], seconds=median(found.seconds for found in rounds), dispatches=longest_first)


def dispatches(
    model: Path, weights: Path, manifest: Manifest, function: Function, position: int, threads: int, repeats: int
) -> tuple[Dispatch, ...]:
    """Measure the dispatches of a call, longest first, with arguments as of `profile`.

    model: the .vmfb file. weights: the .irpa file. They need not be in a bundle.
    """
    command = _command(model, weights, manifest, function, position, threads, repeats)
    with TemporaryDirectory(prefix="castiron-") as directory:
        trace = f"{directory}/trace.ireeprof"
        profiling = ("--device_profiling_mode=host-execution", f"--device_profiling_output={trace}")
        _tool("iree-benchmark-module", *command, *profiling)
        rows = [json.loads(line) for line in _tool("iree-profile", "dispatch", "--format=jsonl", trace).splitlines()]
    found = (
        Dispatch(row["key"], row["count"] // repeats, row["total_ns"] / repeats * 1e-9, prod(row["last_workgroup_count"]))
        for row in rows
        if row["type"] == "host_dispatch_group"
    )
    return tuple(sorted(found, key=lambda dispatch: -dispatch.seconds))


def _command(
    model: Path, weights: Path, manifest: Manifest, function: Function, position: int, threads: int, repeats: int
) -> list[str]:
    # Tokens, position, length of the chunk if there is one; then the states.
    values = ["0", str(position), *[str(function.width)] * (function.role in ("prefill", "embed", "encode"))]
    operands = manifest.signature(function).operands
    values += ["0"] * (len(operands) - len(values))
    inputs = [f"--input={operand}={value}" for operand, value in zip(operands, values, strict=True)]
    devices = ("--device=local-sync",) if threads == 1 else ("--device=local-task", *task_flags(threads))
    return [
        *devices,
        f"--module={model}",
        f"--parameters={SCOPE}={weights}",
        f"--function={function.name}",
        f"--benchmark_min_time={repeats}x",
        "--benchmark_format=json",
        *inputs,
    ]


def _tool(name: str, *arguments: str) -> str:
    import iree._runtime_libs

    path = Path(iree._runtime_libs.__path__[0]) / name
    ended = subprocess.run([path, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode == -signal.SIGILL:
        # IREE's tools do not request AMX tiles from Linux, and a permission ends when a process starts a program.
        raise BundleError(
            "cannot profile the function: it uses AMX tiles, for which IREE's profiler has no permission; "
            "profile decode_step, or a bundle of --target x86-64-v4-bf16"
        )
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines()
        failure = lines[0] if lines else f"exit status {ended.returncode}"
        raise BundleError(f"cannot profile the bundle: {name} failed ({failure}); reinstall iree-base-runtime")
    return ended.stdout
