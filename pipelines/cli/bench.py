"""Measure decode and prefill speed, time to first token and memory, beside the machine's limits.

With --shape, a model with random weights and the sizes of a known model is measured instead of a
bundle. With --kernel, one kernel is timed on weights larger than the CPU's caches. castiron and the
engines to compare with (such as llama.cpp) run in a process each, and take turns. The first turn
warms up; the result is the median of the others. The machine's limits, its read bandwidth and its
f32 peak, are measured between turns.
"""

import argparse
import json

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.compile.named_kernel import KINDS
from castiron.pipelines.compile.open_model import require_cpu, require_generation
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.random_checkpoint import SHAPES
from castiron.pipelines.terminal import Progress, print_message
from castiron.vmfb.file_errors import write_text

KERNELS = "\n".join(f"  {name:<18} {kind.shape}" for name, kind in KINDS.items())
# Positions of the KV cache for --shape and --kernel.
CONTEXT = 4096

EXAMPLES = f"""\
examples:
  castiron bench build/model --against llama.cpp,hf
  castiron bench --shape llama-3.2-1b --codec q4_k --numerics fast --against llama.cpp -o today.json
  castiron bench --kernel gemm --codec q4_k --shape 4096x4096 --tokens 128

--shape of a model: {", ".join(SHAPES)}
--kernel           --shape
{KERNELS}

--json prints one object: castiron and peers (by name), each with decode_tok_s, prefill_tok_s,
ttft_ms (from process start to the first token after a 32-token prompt), rss_mb (peak) and runs
(median, min, max, values); castiron also has decode_roofline (share of the read bandwidth) and
prefill_peak_share (of the f32 peak), null for unknown work; machine with read_gb_s and
peak_gflop_s; ratios (above 1: castiron is better); settings; missing (peers that could not be
measured, and why); busy (what shows that other programs ran meanwhile, a list of texts).
With --kernel: kernel, us (time of a call minus overhead_us, that of an empty call), calls, bytes,
flops, gb_s, gflop_s, bound (memory, compute or cache), limit_share (null in cache), runs, machine,
settings, busy.
"""
NAMES = ("llama.cpp", "hf")
# What is measured -> options that have no effect on it.
NOT_FOR = {
    "a kernel": ("against", "checkpoint"),
    "a random model": ("tokens", "checkpoint"),
    "a compiled bundle": ("tokens", "codec", "numerics", "context", "kv_cache_type"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", nargs="?", help="the bundle")
    parser.add_argument("--against", type=peers, default=(), metavar="NAMES", help="engines to compare with: llama.cpp,hf")
    add_options(parser, "--json")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the JSON object to a file too")
    add_options(parser, "--threads", "--checkpoint")
    group = parser.add_argument_group("work")
    group.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens to prefill (default: 512)")
    group.add_argument("--gen", type=int, default=64, metavar="N", help="tokens to decode (default: 64)")
    group.add_argument("--depth", type=int, default=0, metavar="N", help="position to decode from (default: 0)")
    group.add_argument("--rounds", type=int, default=5, metavar="N", help="measured turns (default: 5)")
    group = parser.add_argument_group("instead of a bundle")
    group.add_argument("--shape", metavar="NAME", help="random model of this shape; with --kernel, its sizes")
    group.add_argument("--kernel", metavar="NAME", help=f"one kernel: {', '.join(list(KINDS)[:4])}, ...")
    group.add_argument(
        "--codec", type=str.lower, metavar="TYPE", help="type of the weights (default: q4_k, mixed as Q4_K_M; of a kernel f32)"
    )
    add_options(group, "--numerics", default=None, help="as in castiron compile (default: exact)")
    add_options(group, "--context", help=f"positions of the KV cache (default: {CONTEXT})")
    add_options(group, "--kv-cache-type", default=None, help="type of the KV cache (default: f32)")
    group.add_argument("--tokens", type=int, metavar="N", help="tokens that a kernel processes at once")


def peers(text: str) -> tuple[str, ...]:
    """Parse the names of engines to compare with, such as "llama.cpp,hf"; reject unknown names."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown engine: {unknown[0]!r}; choose from {', '.join(NAMES)}")
    return names


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.evaluate import bench, bench_kernel, machine
    from castiron.pipelines.evaluate.bench_engines import Settings
    from castiron.pipelines.evaluate.machine import Machine
    from castiron.vmfb.bundle.bundle import open_bundle
    from castiron.vmfb.cpu_features import physical_cores

    check(args)
    settings = Settings(args.threads or physical_cores(), args.prompt, args.gen, args.depth, args.rounds)
    with Progress() as progress:
        if args.kernel:
            run = bench_kernel.kernel_run(
                args.kernel, args.shape, args.tokens, args.codec or "f32", args.numerics or "exact", settings.threads,
                args.context or CONTEXT, args.kv_cache_type or "f32",
            )  # fmt: skip
            progress("compiling the probes of the machine", 0.0)
            result = bench_kernel.measure(run, settings.rounds, Machine(settings.threads), progress)
            table = bench_kernel.table
        else:
            shape = args.shape and compiled_shape(settings, args, progress)
            bundle = shape or require_cpu(require_generation(open_bundle(args.bundle)), "bench")
            result = bench.bench(bundle, settings, args.against, args.checkpoint, progress)
            table = bench.table
    if args.output:
        write_text(args.output, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if args.json else table(result))
    if result["busy"]:
        print_message(machine.busy_message(result["busy"]))
    return 0


def check(args: argparse.Namespace) -> None:
    if args.kernel and not args.shape:
        raise PipelineError(f"--kernel {args.kernel} needs --shape; see castiron bench --help")
    if args.bundle is None and not args.shape:
        raise PipelineError("nothing to measure; give a bundle DIR, --shape NAME, or --kernel with its --shape")
    if args.bundle is not None and args.shape:
        raise PipelineError(f"--shape cannot be combined with a bundle: {args.bundle}; remove --shape or the bundle")
    subject = "a kernel" if args.kernel else "a random model" if args.shape else "a compiled bundle"
    for name in NOT_FOR[subject]:
        if getattr(args, name):
            raise PipelineError(f"--{name.replace('_', '-')} does not apply to {subject}; remove it")
    for name, minimum in (("threads", 1), ("prompt", 1), ("gen", 1), ("depth", 0), ("rounds", 1), ("context", 1)):
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise PipelineError(f"--{name} is {value}; it must be at least {minimum}")


def compiled_shape(settings, args: argparse.Namespace, progress: Progress):
    """Return a bundle of random weights of --shape, whose context fits the benchmark."""
    from castiron.pipelines.compile.compile_options import Options
    from castiron.pipelines.compile.open_model import open_or_compile
    from castiron.pipelines.evaluate.random_checkpoint import DEFAULT_CODEC, random_checkpoint

    checkpoint = random_checkpoint(args.shape, args.codec or DEFAULT_CODEC, progress)
    options = {"numerics": args.numerics or "exact", "kv_cache_type": args.kv_cache_type or "f32", "threads": args.threads}
    # Batch and verify functions are not measured.
    context = args.context or max(CONTEXT, settings.context)
    return open_or_compile(checkpoint, Options(context=context, batch=(), verify_widths=(), **options), announce=True)
