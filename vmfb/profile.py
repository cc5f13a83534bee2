"""Where a call's time goes, dispatch by dispatch, by the profiler in the IREE runtime's own tools."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median

from castiron.vmfb.aside import scratch
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.cpu import physical_cores
from castiron.vmfb.device import task_flags
from castiron.vmfb.manifest import MODEL, WEIGHTS, BundleError, EntryPoint
from castiron.vmfb.program import SCOPE

WARM_SECONDS = 0.1


@dataclass(frozen=True)
class Dispatch:
    """One executable function within one call: its name, how often it runs, seconds of them all, workgroups of one.

    A kernel's function is called `{kernel}_fn`, one that IREE made `{function}_dispatch_{n}_…`, after the
    first function that needed it.
    """

    name: str
    calls: int
    seconds: float
    workgroups: int


@dataclass(frozen=True)
class Profile:
    """`seconds` is the whole call, as measured without the profiler; dispatches come longest first."""

    function: str
    position: int
    threads: int
    seconds: float
    dispatches: tuple[Dispatch, ...]


def profile(
    bundle: Bundle, function: EntryPoint, *, position: int = 0, threads: int | None = None, repeats: int = 20
) -> Profile:
    """Profiles a function of the bundle at `position` (of every sequence, in a batch), over `repeats` calls.

    The states hold zeros, which cost what anything else costs. BundleError if the tools fail.
    """
    options = bundle.file(MODEL), bundle.file(WEIGHTS), function, position, threads or physical_cores(), repeats
    # Weights are mapped when they are first read: that is not this function's time.
    warm = f"--benchmark_min_warmup_time={WARM_SECONDS}"
    timed = json.loads(_tool("iree-benchmark-module", *_command(*options), warm))["benchmarks"][0]
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[timed["time_unit"]]
    return Profile(function.name, position, options[4], timed["real_time"] * scale, dispatches(*options))


def median_of(rounds: Sequence[Profile]) -> Profile:
    """One profile of several of the same call: of the whole and of each dispatch the median time."""
    times: dict[str, list[float]] = {first.name: [] for first in rounds[0].dispatches}
    for dispatch in (dispatch for found in rounds for dispatch in found.dispatches):
        times[dispatch.name].append(dispatch.seconds)
    typical = (replace(first, seconds=median(times[first.name])) for first in rounds[0].dispatches)
    longest_first = tuple(sorted(typical, key=lambda dispatch: -dispatch.seconds))
    return replace(rounds[0], seconds=median(found.seconds for found in rounds), dispatches=longest_first)


def dispatches(
    model: Path, weights: Path, function: EntryPoint, position: int, threads: int, repeats: int
) -> tuple[Dispatch, ...]:
    """Those of `profile`, for a vmfb and parameters that need not be in one bundle."""
    command = _command(model, weights, function, position, threads, repeats)
    with scratch("profile") as directory:
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


def _command(model: Path, weights: Path, function: EntryPoint, position: int, threads: int, repeats: int) -> list[str]:
    # Tokens, positions, and a chunk's length; the states are zeros.
    values = ["0", str(position), *[str(function.width)] * (function.role in ("prefill", "embed", "encode"))]
    values += ["0"] * (len(function.inputs) - len(values))
    inputs = [f"--input={type_}={value}" for type_, value in zip(function.inputs, values, strict=True)]
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
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines()
        raise BundleError(f"{name} failed: {lines[0] if lines else f'exit status {ended.returncode}'}")
    return ended.stdout
