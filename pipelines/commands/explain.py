"""Shows where a call's time goes: each kernel with its module in the model, its work and its share of the limit."""

import argparse
import json
import statistics
import time

from castiron.pipelines.harmless import harmless
from castiron.vmfb.disk import write_text

EXAMPLES = """\
examples:
  castiron explain build/smollm2-135m-instruct
  castiron explain build/smollm2-135m-instruct --position 4096 --threads 1
  castiron explain build/smollm2-135m-instruct --function prefill_128 --html prefill.html --json

The limit of a kernel is the longer of its bytes over the read bandwidth and its FLOP over the peak of what multiplies them
(f32, or for rounded x bytes, bf16 or matrix tiles; exact products on tiles are of three pieces or more and reach a third of
it), measured in turn with the call and as long, as castiron bench does; "of limit" is how near the kernel comes to it, and
"in cache" where it reads faster than memory does, because what it reads stays in the CPU's caches. Times are those of IREE's
profiler, which slows short kernels down a little; the whole call is timed without it, and what the kernels do not account
for is the row "no kernel".

--json prints one object: function, position, threads, machine (read_gb_s, peak_gflop_s and the other peaks that kernels
have), call_ms, peak_share (of the f32 peak, that all of the call's arithmetic takes), python_us, rest_ms and dispatches
(kernel, paths, calls, ms, bytes, flops, bound: memory, compute or cache, and limit_share, null in cache).
"""
# Turns of the call and of the machine's limits.
ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="a bundle")
    parser.add_argument("--position", type=int, default=64, metavar="N", help="tokens in the cache (default: 64)")
    parser.add_argument(
        "--function", default="decode_step", metavar="NAME", help="decode_step (default), prefill_128, verify_8, ..."
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per physical core")
    parser.add_argument("--html", metavar="FILE", help="write one page as well: the time by module, the graph by layer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.errors import PipelineError
    from castiron.pipelines.measuring.kernel_page import page
    from castiron.pipelines.measuring.kernel_times import kernel_row, peak_of, peak_share, rest_ms, table
    from castiron.pipelines.measuring.machine import Machine
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.cpu import physical_cores
    from castiron.vmfb.profile import median_of, profile

    bundle = open_bundle(args.bundle)
    functions = {function.name: function for function in bundle.manifest.functions}
    if args.function not in functions:
        raise PipelineError(f"the bundle has no function {args.function}: use one of {', '.join(functions)}")
    function = functions[args.function]
    most = bundle.manifest.context - (1 if function.role == "batch" else function.width)
    if not 0 <= args.position <= most:
        raise PipelineError(f"--position is {args.position}; in a context of {bundle.manifest.context} it can be 0 to {most}")
    machine, work = Machine(args.threads or physical_cores()), bundle.manifest.compile.get("work", {}).get(function.name, {})
    rounds, values = [], []
    for _ in range(ROUNDS):
        rounds.append(profile(bundle, function, position=args.position, threads=args.threads))
        names = {"read_gb_s", "peak_gflop_s", *(peak_of(dispatch.name) for dispatch in rounds[0].dispatches)}
        values.append({name: getattr(machine, name)() for name in sorted(names, reverse=True)})
    measured = median_of(rounds)
    limits = {name: statistics.median(value[name] for value in values) for name in values[0]}
    result = {
        "function": measured.function,
        "position": args.position,
        "threads": measured.threads,
        "machine": limits,
        "call_ms": measured.seconds * 1e3,
        "python_us": python_microseconds(bundle, measured.threads) if function.role == "decode" else None,
        "dispatches": [kernel_row(dispatch, work, measured, limits) for dispatch in measured.dispatches],
    }
    result["rest_ms"] = rest_ms(result)
    result["peak_share"] = peak_share(result)
    if args.html:
        write_text(args.html, page(result, bundle.manifest.name, list(work)))
    print(json.dumps(result) if args.json else harmless("\n".join(table(result))))
    return 0


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
