"""Shows where a call's time goes: each kernel with its module in the model, its work and its share of the limit."""

import argparse
import json
import statistics
import time

EXAMPLES = """\
examples:
  castiron explain build/smollm2-135m-instruct
  castiron explain build/smollm2-135m-instruct --position 4096 --threads 1
  castiron explain build/smollm2-135m-instruct --function prefill_128 --json

The limit of a dispatch is the longer of its bytes over the read bandwidth and its FLOP over the f32 peak, both measured
in the same run; the last column is how near the dispatch comes to it. Times are those of IREE's profiler, which slows
short dispatches down a little; the whole call is timed without it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="a bundle")
    parser.add_argument("--position", type=int, default=64, metavar="N", help="tokens in the cache (default: 64)")
    parser.add_argument(
        "--function", default="decode_step", metavar="NAME", help="decode_step (default), prefill_128, verify_8, ..."
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per physical core")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.errors import PipelineError
    from castiron.pipelines.measuring.machine import Machine
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.profile import profile

    bundle = open_bundle(args.bundle)
    functions = {function.name: function for function in bundle.manifest.functions}
    if args.function not in functions:
        raise PipelineError(f"the bundle has no function {args.function}: use one of {', '.join(functions)}")
    function = functions[args.function]
    most = bundle.manifest.context - (1 if function.role == "batch" else function.width)
    if not 0 <= args.position <= most:
        raise PipelineError(f"--position is {args.position}; in a context of {bundle.manifest.context} it can be 0 to {most}")
    measured = profile(bundle, function, position=args.position, threads=args.threads)
    machine = Machine(measured.threads)
    limits = {"read_gb_s": machine.read_gb_s(), "peak_gflop_s": machine.peak_gflop_s()}
    result = {
        "function": measured.function,
        "position": args.position,
        "threads": measured.threads,
        "machine": limits,
        "call_ms": measured.seconds * 1e3,
        "python_us": python_microseconds(bundle, measured.threads) if function.role == "decode" else None,
        "dispatches": [row(d, bundle.manifest.compile.get("work", {}), measured, limits) for d in measured.dispatches],
    }
    print(json.dumps(result) if args.json else "\n".join(table(result)))
    return 0


def row(dispatch, work: dict, measured, limits: dict) -> dict:
    """One kernel: where it stands in the model, its time, and its work over all calls of it."""
    from castiron.pipelines.measuring.workload import amount

    kernel = work.get(measured.function, {}).get(dispatch.name.removesuffix("_fn"), {})

    nbytes, flops = (
        amount(kernel, unit, measured.position) * kernel["calls"] if kernel else None for unit in ("bytes", "flops")
    )
    found = {
        "kernel": dispatch.name,
        "paths": kernel.get("paths", []),
        "calls": dispatch.calls,
        "ms": dispatch.seconds * 1e3,
        "bytes": nbytes,
        "flops": flops,
        "limit_share": None,
    }
    if nbytes is not None:
        limit = max(nbytes / limits["read_gb_s"], flops / limits["peak_gflop_s"]) / 1e9
        found["limit_share"] = limit / dispatch.seconds if dispatch.seconds else None
    return found


def python_microseconds(bundle, threads: int, steps: int = 200) -> float:
    """Microseconds that `Session.step` spends outside the runtime, the median of some steps."""
    from castiron.vmfb.session import Session

    session = Session(bundle, threads)
    inside = session.count_runtime()
    outside, token = [], 0
    for _ in range(min(steps, session.context)):
        start, before = time.perf_counter(), inside()
        token = session.step(token)
        outside.append(time.perf_counter() - start - (inside() - before))
    return statistics.median(outside) * 1e6


def table(result: dict) -> list[str]:
    """The result for a person."""
    total = sum(d["ms"] for d in result["dispatches"])
    machine, python = result["machine"], result["python_us"]
    lines = [
        f"{result['function']} at position {result['position']} on {result['threads']} threads: {result['call_ms']:.2f} ms"
        + (f", of which Python {python:.0f} us" if python is not None else ""),
        f"this machine reads {machine['read_gb_s']:.1f} GB/s and computes {machine['peak_gflop_s']:.0f} GFLOP/s (f32)",
        "",
        f"{'ms':>8} {'share':>6} {'calls':>5} {'us/call':>8} {'MB':>8} {'MFLOP':>8} {'of limit':>8}  where, kernel",
    ]
    for d in result["dispatches"]:
        known = d["bytes"] is not None
        work = f"{d['bytes'] / 1e6:8.1f} {d['flops'] / 1e6:8.1f}" if known else f"{'?':>8} {'?':>8}"
        share = f"{d['limit_share']:8.0%}" if d["limit_share"] is not None else f"{'?':>8}"
        paths = " ".join(d["paths"]) or "(made by IREE)"
        each = d["ms"] * 1e3 / d["calls"]
        lines.append(f"{d['ms']:8.3f} {d['ms'] / total:6.1%} {d['calls']:5} {each:8.1f} {work} {share}  {paths}  {d['kernel']}")
    return lines
