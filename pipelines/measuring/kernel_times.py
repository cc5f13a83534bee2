"""Where the time of a call goes: each kernel's time beside its work and the machine's limits, and what is no kernel's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castiron.pipelines.measuring.workload import amount
from castiron.vmfb.profile import Dispatch, Profile

# Columns of a line, and of them what a bar has.
WIDTH, BAR = 100, 8
REST = "no kernel"
# The machine's limit of arithmetic, in its words, by a part of a kernel's name; f32 for others.
PEAKS = {"peak_gflop_s": "f32", "peak_bytes_gop_s": "bytes", "peak_pairs_gflop_s": "bf16", "peak_matrix_gflop_s": "tiles"}
_OF_NAME = {
    "_bytes_": "peak_bytes_gop_s",
    "_pairs_": "peak_pairs_gflop_s",
    "_matrix_": "peak_matrix_gflop_s",
    "_pieces_": "peak_matrix_gflop_s",
}


def kernel_row(
    dispatch: Dispatch, work: Mapping[str, Mapping], measured: Profile, limits: Mapping[str, float]
) -> dict[str, Any]:
    """One kernel: where it stands in the model, its time, and its work over all calls of it.

    bound: what holds it back at most, "memory" or "compute", by which of the two takes longer at the machine's limits;
    limit_share: how near it comes to that, at most 1. A kernel that reads faster than memory does has what it reads in the
    CPU's caches: its bound is "cache" and its share of a limit unknown (None).
    """
    kernel = work.get(dispatch.name.removesuffix("_fn"), {})
    nbytes, flops = (
        amount(kernel, unit, measured.position) * kernel["calls"] if kernel else None for unit in ("bytes", "flops")
    )
    row = {
        "kernel": dispatch.name,
        "paths": list(kernel.get("paths", [])),
        "calls": dispatch.calls,
        "ms": dispatch.seconds * 1e3,
        "bytes": nbytes,
        "flops": flops,
        "bound": None,
        "limit_share": None,
    }
    if nbytes is not None and flops is not None and dispatch.seconds:
        row["bound"], share = bound_of(dispatch.name, nbytes, flops, dispatch.seconds, limits)
        row["limit_share"] = None if share is None else min(1.0, share)
    return row


def peak_of(kernel: str) -> str:
    """By which of the machine's limits a kernel computes. Exact products on tiles are of three pieces of x, or more: their
    share of a limit is a third at most."""
    return next((peak for part, peak in _OF_NAME.items() if part in kernel), "peak_gflop_s")


def bound_of(kernel: str, nbytes: float, flops: float, seconds: float, limits: Mapping[str, float]) -> tuple[str, float | None]:
    """What holds back work that took so many seconds, and its share of that limit: None in cache."""
    reading, computing = nbytes / limits["read_gb_s"] / 1e9, flops / limits[peak_of(kernel)] / 1e9
    bound = "compute" if computing >= reading else "memory" if reading <= seconds else "cache"
    return bound, None if bound == "cache" else max(reading, computing) / seconds


def rest_ms(result: Mapping[str, Any]) -> float:
    """Milliseconds of the call that are no kernel's: the runtime's, threads that wait for each other, the way in and out.

    Kernels are timed by the profiler, in other calls: where they add up to more than the call, nothing is left.
    """
    return max(0.0, result["call_ms"] - sum(row["ms"] for row in result["dispatches"]))


def peak_share(result: Mapping[str, Any]) -> float:
    """The share of the f32 peak that all arithmetic of the call takes, as far as it is known; bytes may take more than 1."""
    flops = sum(row["flops"] or 0 for row in result["dispatches"])
    return flops / (result["call_ms"] * 1e-3) / (result["machine"]["peak_gflop_s"] * 1e9)


def table(result: Mapping[str, Any]) -> list[str]:
    """The result for a person, in WIDTH columns."""
    machine, python, rows = result["machine"], result["python_us"], result["dispatches"]
    rest = rest_ms(result)
    total = sum(row["ms"] for row in rows) + rest
    threads = result["threads"]
    lines = [
        f"{result['function']} at position {result['position']} on {threads} thread{'s' * (threads != 1)}: "
        f"{result['call_ms']:.2f} ms" + (f", of which Python {python:.0f} us" if python is not None else ""),
        f"the call takes {peak_share(result):.0%} of the f32 peak; this machine reads {machine['read_gb_s']:.1f} GB/s "
        "and computes",
        f"{machine['peak_gflop_s']:.0f} GFLOP/s (f32)"
        + "".join(f", {machine[name]:.0f} ({of})" for name, of in list(PEAKS.items())[1:] if name in machine),
        "",
        f"{'ms':>8} {'share':>6} {'':{BAR}} {'calls':>5} {'us/call':>8} {'MB':>7} {'MFLOP':>8} {'of limit':>8}  where",
    ]
    for row in rows:
        known = row["bytes"] is not None
        work = f"{row['bytes'] / 1e6:7.1f} {row['flops'] / 1e6:8.1f}" if known else f"{'?':>7} {'?':>8}"
        lines.append(
            f"{row['ms']:8.3f} {row['ms'] / total:6.1%} {bar(row['ms'] / total, BAR):{BAR}} {row['calls']:5} "
            f"{row['ms'] * 1e3 / row['calls']:8.1f} {work} {of_limit(row):>8}  {where(row)}"
        )
        lines.append(f"{'':16}{row['kernel']}")
    lines.append(f"{rest:8.3f} {rest / total:6.1%} {bar(rest / total, BAR):{BAR}} {'':40}  {REST}")
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines]


def of_limit(row: Mapping[str, Any]) -> str:
    """The share of the limit in words."""
    if row["bound"] == "cache":
        return "in cache"
    return "?" if row["limit_share"] is None else f"{row['limit_share']:.0%}"


def where(row: Mapping[str, Any]) -> str:
    """Modules of the model, without the word that all begin with."""
    return " ".join(path.removeprefix("model.") for path in row["paths"]) or "(made by IREE)"


def bar(share: float, width: int) -> str:
    """`share` of `width` columns, in eighths of one."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
