"""Time a single kernel on random operands, and compare its speed with the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.quantise_x import quantised
from castiron.emitter.kernels.weights.packing import LANES, pack
from castiron.emitter.layers.kv_cache import CACHES
from castiron.pipelines.compile.named_kernel import KINDS, named_kernel
from castiron.pipelines.evaluate.machine import (
    ATTEMPTS,
    LOAD_SECONDS,
    PEAKS,
    TimedKernel,
    bound_of,
    busy_signs,
    describe,
    of_limit,
    peak_of,
    spread,
)
from castiron.pipelines.evaluate.random_checkpoint import tiled_rows
from castiron.pipelines.terminal import counted, megabytes

# Kind and shape of a kernel with almost no work, which measures the overhead of a call.
EMPTY = ("argmax", "16")

Progress = Callable[[str, float], None]


def operands(kernel: Kernel, codec: str, sizes: Sequence[int], tokens: int, position: int) -> dict[str, np.ndarray]:
    """Return values for the operands of a kernel, by name: random, except ids, position and length.

    sizes: the numbers in --shape.
    """
    rng = np.random.default_rng(0)
    full = {"length": tokens, "start": position, "position": position, "counters": 0}
    found, quantised_x = {}, {}
    if (matmul := kernel.matmul) and matmul.digits and not matmul.quantises_x:
        x = np.resize(rng.standard_normal(1 << 20) * 0.5, (matmul.tokens // matmul.per_row, matmul.in_features))
        quantised_x = quantised(x, matmul.format, matmul.digits)
    for name, type_ in kernel.tensors.items():
        kind = type_.dtype.name
        if name == "weight" and kind == "i8":
            rows, inner = type_.shape[0] * LANES, sizes[-1]
            value = pack(codec, tiled_rows(codec, rows, inner)).view(np.int8).reshape(type_.shape)
        elif name in full:
            value = np.full(type_.shape, full[name])
        elif name in ("chosen", "ids"):
            value = np.arange(type_.shape[0]) % sizes[0]
        elif kind == "i8" and name in ("k_cache", "v_cache"):
            rows = np.resize(rng.standard_normal(1 << 20) * 0.5, (*type_.shape[:3], sizes[-1]))
            value = CACHES["q8_0"].stored(rows)
        elif name in quantised_x:
            value = quantised_x[name]
        elif name == "x" and kernel.matmul and kernel.matmul.numerics.startswith("bf16"):
            # Pairs of bf16: the upper halves of two f32.
            pairs = np.resize(rng.standard_normal(1 << 20) * 0.5, (*type_.shape, 2)).astype(np.float32)
            value = (pairs.view(np.uint32) >> 16).astype(np.uint16).view(np.int32)[..., 0]
        elif kind in ("i8", "i32"):
            bits = 8 if kind == "i8" else 32
            value = rng.integers(-(1 << bits - 1), 1 << bits - 1, type_.shape, np.int8 if kind == "i8" else np.int32)
        else:
            value = np.resize(rng.standard_normal(1 << 20) * 0.5, type_.shape).astype(np.float32)
            # The decay rates of a recurrent state are negative in a model.
            value = -np.abs(value) if name == "rate" else value
            # NumPy has no bf16, so the array has the upper 16 bits of each f32.
            value = (value.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else value
        found[name] = value
    return found


@dataclass(frozen=True)
class KernelRun:
    """A kernel to time. settings: its options, as --json prints them.

    position: KV cache position of the first token of each call.
    """

    kernel: Kernel
    settings: Mapping[str, Any]
    position: int


def kernel_run(
    kind: str, shape: str, tokens: int | None, codec: str, numerics: str, threads: int, context: int, cache: str = "f32"
) -> KernelRun:
    """Build the kernel that the options of `castiron bench --kernel` describe, for this machine.

    It is timed at the last position of the context at which the tokens of a call fit.
    """
    from castiron.vmfb.targets import resolve

    isa = resolve("host").isa
    of_machine = {"isa": isa, "threads": threads}
    kernel = named_kernel(
        kind, shape, tokens=tokens, codec=codec, context=context, numerics=numerics, kv_cache_type=cache, **of_machine
    )
    tokens = KINDS[kind].tokens[0] if tokens is None else tokens
    context = max(context, tokens)
    settings = {
        "kernel": kind, "shape": shape, "tokens": tokens, "codec": codec, "numerics": numerics, **of_machine,
        "context": context, "kv_cache_type": cache,
    }  # fmt: skip
    return KernelRun(kernel, settings, context - (1 if kind == "attention_decode" else tokens))


def measure(run: KernelRun, rounds: int, machine: Any, progress: Progress) -> dict[str, Any]:
    """Time a kernel and measure the machine's limits; return the object that --json prints."""
    kernel, settings, position = run.kernel, run.settings, run.position
    threads, codec = settings["threads"], settings["codec"]
    progress("compiling the kernel", 0.0)
    sizes = [int(word) for word in settings["shape"].split("x")]
    timed = TimedKernel(kernel, operands(kernel, codec, sizes, settings["tokens"], position), threads)
    empty_kernel = named_kernel(*EMPTY, isa=settings["isa"], threads=threads)
    empty = TimedKernel(empty_kernel, operands(empty_kernel, "f32", [16], 1, 0), threads)
    flops, nbytes = kernel.work(position)
    for _ in range(ATTEMPTS):
        limits: dict[str, list[float]] = {"read_gb_s": [], peak_of(kernel.name): []}
        calls, overheads, count = [], [], 0
        for done in range(rounds + 1):
            progress(f"timing {kernel.name}", done / (rounds + 1))
            call, number = timed.seconds(LOAD_SECONDS)
            overheads += [empty.seconds(LOAD_SECONDS / 100)[0] for _ in range(10)]
            if done:
                calls.append(call)
                count += number
                for name, values in limits.items():
                    values.append(machine.measure(name))
        # The minimum, because longer times include waits for other processes.
        overhead = min(overheads)
        own = [max(call - overhead, call / 2) for call in calls]
        medians = {name: statistics.median(values) for name, values in limits.items()}
        seconds = statistics.median(own)
        bound, share = bound_of(kernel.name, nbytes, flops, seconds, medians)
        if not (signs := busy_signs(limits | {"us": [value * 1e6 for value in own]}, {"of the limit": share})):
            break
    return {
        "kernel": kernel.name,
        "us": round(seconds * 1e6, 2),
        "overhead_us": round(overhead * 1e6, 2),
        "calls": count,
        "bytes": nbytes,
        "flops": flops,
        "gb_s": round(nbytes / seconds / 1e9, 2),
        "gflop_s": round(flops / seconds / 1e9, 2),
        "bound": bound,
        "limit_share": share and round(share, 4),
        "runs": {"us": spread([value * 1e6 for value in own])},
        "busy": signs,
        "machine": describe(limits),
        "settings": {**settings, "rounds": rounds},
    }


def table(result: Mapping[str, Any]) -> str:
    settings, machine, runs = result["settings"], result["machine"], result["runs"]["us"]
    bound = {"memory": "memory bound", "compute": "compute bound", "cache": "in cache"}[result["bound"]]
    peak, of = next((machine[name], of) for name, of in PEAKS.items() if name in machine)
    share = "" if result["bound"] == "cache" else f", {of_limit(result)} of the limit"
    return "\n".join(
        [
            f"{result['kernel']} on {counted(settings['threads'], 'thread')}, {counted(settings['tokens'], 'token')}, "
            f"{settings['isa']}",
            f"{machine['cpu']}: reads {machine['read_gb_s']:.1f} GB/s, {of} peak {peak:.0f} GFLOP/s",
            "",
            f"{result['us']:.1f} us a call ({runs['min']:.1f} to {runs['max']:.1f}), overhead {result['overhead_us']:.1f} us",
            f"{megabytes(result['bytes'])} at {result['gb_s']:.1f} GB/s, {result['flops'] / 1e6:,.1f} MFLOP at "
            f"{result['gflop_s']:.1f} GFLOP/s: {bound}{share}",
        ]
    )
