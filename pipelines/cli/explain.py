"""Show the time of each kernel in a call of a model function, and how near it is to its limit.

The output also shows which layers use the kernel. A kernel's limit is the time to read its bytes at
the machine's memory bandwidth, or to compute its FLOP at the machine's peak, whichever is longer.
"in cache" means that the kernel reads faster than memory can. The bandwidth, the peak and the call
are measured three times each, alternately, and again if the figures contradict each other because
other programs run. The times of kernels come from IREE's profiler, which
slows short kernels down a little. "no kernel" is the rest of the call's time, which is measured
without the profiler.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from typing import Any

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.compile.open_model import require_cpu
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.machine import (
    ATTEMPTS,
    PEAKS,
    Machine,
    amount,
    bound_of,
    busy_message,
    busy_signs,
    of_limit,
    peak_of,
)
from castiron.pipelines.terminal import counted, print_message, sanitised
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.device.profile import Dispatch, Profile, median_of, profile

EXAMPLES = """\
examples:
  castiron explain build/smollm2-135m-instruct --position 4096 --threads 1
  castiron explain build/smollm2-135m-instruct --function prefill_128 --json

--json prints one object: function, position, threads, machine (read_gb_s, peak_gflop_s and other
peaks), call_ms, peak_share (of the f32 peak), rest_ms, busy (what shows that other programs ran
meanwhile, a list of texts) and dispatches (kernel, paths, calls, ms,
bytes, flops, bound: memory, compute or cache, and limit_share, null in cache).
"""
# Columns of a line.
WIDTH = 100
REST = "no kernel"
# How many times the call and the limits are measured, in turns.
ROUNDS = 3
# Up to this factor, the times of short kernels are longer with the profiler.
PROFILED = 1.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    parser.add_argument("--function", default="decode_step", metavar="NAME",
                        help="decode_step (default), prefill_128, verify_8, ...")  # fmt: skip
    parser.add_argument("--position", type=int, default=64, metavar="N", help="tokens in the KV cache (default: 64)")
    add_options(parser, "--threads", "--json")


def main(args: argparse.Namespace) -> int:
    bundle = require_cpu(open_bundle(args.bundle), "explain")
    bundle = bundle.with_context(bundle.manifest.max_context)
    result = explain(bundle, args.function, args.position, args.threads)
    print(json.dumps(result) if args.json else sanitised("\n".join(table(result))))
    if result["busy"]:
        print_message(busy_message(result["busy"]))
    return 0


def explain(bundle: Bundle, function_name: str, position: int, threads: int | None) -> dict[str, Any]:
    functions = {function.name: function for function in bundle.manifest.functions}
    if function_name not in functions:
        raise PipelineError(f"unknown function: {function_name}; this bundle has {', '.join(functions)}")
    function = functions[function_name]
    last = bundle.manifest.context - (1 if function.role == "batch" else function.width)
    if not 0 <= position <= last:
        raise PipelineError(f"--position is {position}; in a context of {bundle.manifest.context} it can be 0 to {last}")
    machine = Machine(threads or physical_cores())
    work = bundle.manifest.compile.get("work", {}).get(function.name, {})
    for _ in range(ATTEMPTS):
        rounds, values = [], []
        for _ in range(ROUNDS):
            rounds.append(profile(bundle, function, position=position, threads=threads))
            names = {"read_gb_s", "peak_gflop_s", *(peak_of(dispatch.name) for dispatch in rounds[0].dispatches)}
            values.append({name: machine.measure(name) for name in sorted(names, reverse=True)})
        measured = median_of(rounds)
        limits = {name: statistics.median(value[name] for value in values) for name in values[0]}
        rows = [kernel_row(dispatch, work, position, limits) for dispatch in measured.dispatches]
        at_peaks = sum((row["flops"] or 0) / limits[peak_of(row["kernel"])] / 1e9 for row in rows) / measured.seconds
        kernels = sum(row["ms"] for row in rows) / 1e3 / measured.seconds
        series = {name: [value[name] for value in values] for name in limits} | {"call ms": [r.seconds * 1e3 for r in rounds]}
        shares = {"kernels of the call": kernels if kernels > PROFILED else None, "arithmetic of the peak": at_peaks}
        signs = busy_signs(series, shares)
        if not signs:
            break
    return described(measured, rows, limits) | {"busy": signs}


def described(measured: Profile, rows: list[dict], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the object that --json prints; `limits` are in GB/s and GFLOP/s."""
    flops = sum(row["flops"] or 0 for row in rows)
    return {
        "function": measured.function,
        "position": measured.position,
        "threads": measured.threads,
        "machine": limits,
        "call_ms": measured.seconds * 1e3,
        "dispatches": rows,
        # At least 0: the kernels are timed in other calls than `measured.seconds`, so their sum can be larger.
        "rest_ms": max(0.0, measured.seconds * 1e3 - sum(row["ms"] for row in rows)),
        "peak_share": flops / measured.seconds / (limits["peak_gflop_s"] * 1e9),
    }


def kernel_row(dispatch: Dispatch, work: Mapping[str, Mapping], position: int, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return a kernel's part of the object; times, bytes and FLOP are sums over its runs."""
    kernel = work.get(dispatch.name.removesuffix("_fn"), {})
    nbytes, flops = (amount(kernel, unit, position) * kernel["calls"] if kernel else None for unit in ("bytes", "flops"))
    bound, share = (
        bound_of(dispatch.name, nbytes, flops, dispatch.seconds, limits) if kernel and dispatch.seconds else (None, None)
    )
    return {
        "kernel": dispatch.name,
        "paths": list(kernel.get("paths", [])),
        "calls": dispatch.calls,
        "ms": dispatch.seconds * 1e3,
        "bytes": nbytes,
        "flops": flops,
        "bound": bound,
        "limit_share": None if share is None else min(1.0, share),
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the result of `explain` as lines of text, each at most WIDTH characters long."""
    machine, rows, rest = result["machine"], result["dispatches"], result["rest_ms"]
    total = sum(row["ms"] for row in rows) + rest
    threads = result["threads"]
    higher = " (other arithmetic has a higher one)" * (result["peak_share"] > 1 and len(machine) > 2)
    lines = [
        f"{result['function']} at position {result['position']} on {counted(threads, 'thread')}: {result['call_ms']:.2f} ms",
        f"the call takes {result['peak_share']:.0%} of the f32 peak{higher}; "
        f"this machine reads {machine['read_gb_s']:.1f} GB/s and computes",
        f"{machine['peak_gflop_s']:.0f} GFLOP/s (f32)"
        + "".join(f", {machine[name]:.0f} ({of})" for name, of in list(PEAKS.items())[1:] if name in machine),
        "",
        f"{'ms':>8} {'share':>6} {'calls':>5} {'us/call':>8} {'MB':>7} {'MFLOP':>8} {'of limit':>8}  where",
    ]
    for row in rows:
        known = row["bytes"] is not None
        work = f"{row['bytes'] / 1e6:7.1f} {row['flops'] / 1e6:8.1f}" if known else f"{'?':>7} {'?':>8}"
        where = " ".join(path.removeprefix("model.") for path in row["paths"]) or "(made by IREE)"
        lines.append(
            f"{row['ms']:8.3f} {row['ms'] / total:6.1%} {row['calls']:5} "
            f"{row['ms'] * 1e3 / row['calls']:8.1f} {work} {of_limit(row):>8}  {where}"
        )
        lines.append(f"{'':16}{row['kernel']}")
    lines.append(f"{rest:8.3f} {rest / total:6.1%} {'':40}  {REST}")
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines]
