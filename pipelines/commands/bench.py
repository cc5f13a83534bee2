"""Measures a bundle: decode, prefill, time to first token and memory, against the limits of the machine and against peers.

With --shape NAME it measures a model of that shape: a random checkpoint is made in the cache, once, without a vocabulary,
and compiled there. With --kernel it times one kernel, without any model, on weights that no cache holds.
Engines run in processes of their own and take turns; one turn each is for warming up, the medians of the others count.
Read bandwidth and f32 peak are measured between the turns.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from castiron.pipelines.casting.named import generating
from castiron.pipelines.casting.named_kernel import KINDS
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring.known_shapes import SHAPES
from castiron.pipelines.progress import Progress, say
from castiron.vmfb.disk import write_text

KERNELS = ", ".join(f"{name} {kind.shape}" for name, kind in KINDS.items())
# Positions of what is measured without a bundle.
CONTEXT = 4096

EXAMPLES = f"""\
examples:
  castiron bench build/model
  castiron bench build/model --threads 2 --prompt 512 --gen 64 --against llama.cpp,hf --json
  castiron bench build/model --depth 4096 --against llama.cpp --output bench.json --chart bench.svg
  castiron bench build/model --speculation --gen 160 --json
  castiron bench build/model --speculation --draft build/smaller-model --gen 160
  castiron bench --shape llama-3.2-1b --codec q4_k --numerics fast --against llama.cpp --save today.json
  castiron bench --shape llama-3.2-1b --codec q4_k --baseline today.json
  castiron bench --kernel gemm --codec q4_k --shape 4096x4096 --tokens 128
  castiron bench --kernel gemv --codec q8_0 --shape 4096x14336 --baseline gemv.json

--shape of a model: {", ".join(SHAPES)}.
--kernel and its --shape: {KERNELS}.
--json prints one object: castiron and peers (by name), each with decode_tok_s, prefill_tok_s, decode_roofline (share of
read bandwidth), prefill_peak_share (of f32 peak), ttft_ms (process start to first token of a 32-token prompt), rss_mb
(peak) and runs (median, min, max, values); machine with read_gb_s and peak_gflop_s; ratios (castiron against each peer:
above 1 is better); settings; missing (peers that could not be measured, and why); notes (by engine, what its numbers need
said: that it crashed and was measured with other settings, that its work is an estimate). A share of unknown work is null.
With --kernel: kernel, us (of a call, less besides_us, what a call with nothing to do takes, but at least half), calls,
bytes, flops, gb_s, gflop_s, bound (memory, compute or cache), limit_share (null in cache; above 1 is possible with bytes),
runs, machine, settings. With --baseline, for both: baseline with file, figures (of, figure, before, now, ratio: above 1 is
better now, verdict) and notes (how machine and settings differ). The exit status is 0 whatever became slower.
With --speculation: repeating_ratio and other_ratio (decode rate with --speculate over that without, medians over
prompts), tokens_equal, answers; with --draft these are of both, and draft_ratio (decode rate with --draft over that with
--speculate alone, median) and least_draft_ratio.
"""
NAMES = ("llama.cpp", "hf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", nargs="?", help="the bundle")
    parser.add_argument("--shape", metavar="NAME", help="instead of a bundle a random model of this shape, as below; of a "
                        "--kernel its sizes")  # fmt: skip
    parser.add_argument("--kernel", metavar="NAME", help="instead of a bundle one kernel: " + ", ".join(KINDS))
    parser.add_argument("--codec", metavar="NAME", help="how weights of --shape are stored (default: q4_k, mixed as in Q4_K_M; "
                        "of a --kernel f32)")  # fmt: skip
    parser.add_argument("--numerics", metavar="NAME", default="exact", help="exact, canonical or fast, of --shape and a "
                        "--kernel (default: exact)")  # fmt: skip
    parser.add_argument("--context", type=int, metavar="N", help="positions of --shape's and a --kernel's cache (default: "
                        "4096)")  # fmt: skip
    parser.add_argument("--cache", metavar="TYPE", help="f32, f16 or q8_0, of the same (default: f32)")
    parser.add_argument("--tokens", type=int, metavar="N", help="how many tokens a --kernel takes at once")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of every engine (default: one per physical core)")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens to prefill (default: 512)")
    parser.add_argument("--gen", type=int, default=64, metavar="N", help="tokens to decode (default: 64)")
    parser.add_argument("--depth", type=int, default=0, metavar="N", help="position to decode from (default: 0)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measured turns (default: 5)")
    parser.add_argument("--against", type=peers, default=(), metavar="NAMES", help="engines to compare with: llama.cpp,hf")
    parser.add_argument("--speculation", action="store_true", help="measure --speculate ngram instead: answers that "
                        "repeat their prompt, and others")  # fmt: skip
    parser.add_argument("--draft", metavar="DIR", help="measure --speculation with this draft too")
    parser.add_argument("--checkpoint", metavar="PATH", help="the checkpoint for peers, which may be another format of the "
                        "model (default: the one that the bundle was made from)")  # fmt: skip
    parser.add_argument("--save", "--output", metavar="FILE", help="write the JSON object to a file too")
    parser.add_argument("--baseline", metavar="FILE", help="say what became faster or slower than in a JSON that --save wrote")
    parser.add_argument("--chart", metavar="FILE", help="draw decode and prefill to a file (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def peers(text: str) -> tuple[str, ...]:
    """ "llama.cpp,hf" as names; argparse's error for one that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; choose from {', '.join(NAMES)}")
    return names


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.measuring.baseline import read_baseline
    from castiron.pipelines.measuring.bench import Settings, measure, ratios, spread, summarise
    from castiron.pipelines.measuring.machine import Machine, describe
    from castiron.pipelines.measuring.workload import Workload
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.cpu import physical_cores

    if args.chart:
        check_chart()
    check_subject(args)
    # Speculation brings prompts of its own.
    prompt, depth = (1, 0) if args.speculation else (args.prompt, args.depth)
    settings = Settings(args.threads or physical_cores(), prompt, args.gen, depth, args.rounds)
    check(settings)
    baseline = read_baseline(args.baseline) if args.baseline else None
    if args.kernel:
        return kernel(settings, baseline, args)
    bundle = shaped(settings, args) if args.shape else generating(open_bundle(args.bundle))
    check_context(settings, bundle)
    if args.speculation:
        return speculation(bundle, settings, args)
    workload = Workload.of(bundle)
    engines, measured = contestants(args, bundle, workload)
    told = warn(engines.missing | engines.notes, {})
    with Progress() as progress:
        progress("compiling the probes of the machine", 0.0)
        machine = Machine(settings.threads)
        rounds = measure(engines, measured, settings, sample_tokens(settings, bundle), machine, progress)
    limits = {name: statistics.median(values) for name, values in rounds.items()}
    results = {name: summarise(measured[name], settings, workload, limits) for name in engines.models}
    ours = results.pop("castiron")
    result = {
        "castiron": ours,
        "peers": results,
        "machine": {
            **describe(),
            **{name: round(value, 2) for name, value in limits.items()},
            "runs": {name: spread(values) for name, values in rounds.items()},
        },
        "ratios": {name: ratios(ours, peer) for name, peer in results.items()},
        "settings": {
            "model": bundle.manifest.name, "weights": bundle.manifest.weights, "numerics": bundle.manifest.numerics,
            "cache": bundle.manifest.cache, **asdict(settings),
        },
        "missing": engines.missing,
        "notes": engines.notes,
    }  # fmt: skip
    warn(engines.missing | engines.notes, told)
    publish(result, table, baseline, args)
    return 0


def check_subject(args: argparse.Namespace) -> None:
    """PipelineError unless exactly one thing is to be measured, with options that are its own."""
    if args.kernel and not args.shape:
        raise PipelineError(f"--kernel {args.kernel} needs its --shape, as castiron bench --help says")
    if args.bundle is None and not args.shape:
        raise PipelineError("there is nothing to measure: give a bundle DIR, --shape NAME, or --kernel with its --shape")
    if args.bundle is not None and args.shape:
        raise PipelineError("--shape and --kernel stand in the place of a bundle: leave DIR out, or them")
    made = (("--codec", args.codec), ("--context", args.context), ("--cache", args.cache),
            ("--numerics", args.numerics != "exact"))  # fmt: skip
    of_model = (("--against", args.against), ("--speculation", args.speculation), ("--chart", args.chart),
                ("--checkpoint", args.checkpoint))  # fmt: skip
    for subject, options in (
        (f"{args.bundle} is compiled already", () if args.shape else made),
        ("--tokens are those of a --kernel", () if args.kernel else (("--tokens", args.tokens is not None),)),
        ("a --kernel is no model", of_model if args.kernel else ()),
        ("--shape makes a checkpoint of its own", (("--checkpoint", args.checkpoint),) if args.shape else ()),
        ("a random model has no text", (("--speculation", args.speculation),) if args.shape else ()),
        ("--draft is for --speculation", () if args.speculation else (("--draft", args.draft),)),
        ("--baseline compares no --speculation", (("--baseline", args.baseline),) if args.speculation else ()),
    ):
        if given := [name for name, value in options if value]:
            raise PipelineError(f"{subject}: leave {given[0]} out")
    if args.context is not None and args.context < 1:
        raise PipelineError(f"--context is {args.context}; it must be at least 1")


def shaped(settings, args: argparse.Namespace):
    """The bundle of a random checkpoint of a known shape; both are made unless the cache has them."""
    from castiron.pipelines.casting.cast import cast
    from castiron.pipelines.casting.compile import Options
    from castiron.pipelines.measuring.random_checkpoint import DEFAULT_CODEC, random_checkpoint

    # What is not measured would be compiled for nothing.
    context = args.context or max(CONTEXT, settings.context)
    with Progress() as progress:
        checkpoint, weights = random_checkpoint(args.shape, args.codec or DEFAULT_CODEC, progress)
    kept = {"numerics": args.numerics, "cache": args.cache or "f32", "threads": args.threads}
    return cast(checkpoint, Options(context, weights, batch=(), speculate=(), **kept), tells=True)


def kernel(settings, baseline: dict | None, args: argparse.Namespace) -> int:
    """The bench of --kernel."""
    from castiron.pipelines.measuring import bench_kernel
    from castiron.pipelines.measuring.machine import Machine

    codec, context = args.codec or "f32", args.context or CONTEXT
    asked = bench_kernel.ask(
        args.kernel, args.shape, args.tokens, codec, args.numerics, settings.threads, context, args.cache or "f32"
    )
    with Progress() as progress:
        progress("compiling the probes of the machine", 0.0)
        result = bench_kernel.measure(asked, settings.rounds, Machine(settings.threads), progress)
    publish(result, bench_kernel.table, baseline, args)
    return 0


def speculation(bundle, settings, args: argparse.Namespace) -> int:
    """The bench of --speculation; exit status 1 if a token differs."""
    from castiron.pipelines.generation.draft import open_draft
    from castiron.pipelines.generation.text import load_text
    from castiron.pipelines.measuring.bench_speculation import measure, summarise, table
    from castiron.vmfb.session import Session

    session = Session(bundle, threads=settings.threads)
    draft = open_draft(args.draft, bundle, settings.threads) if args.draft else None
    with Progress() as progress:
        result = summarise(measure(session, load_text(bundle), settings.gen, settings.rounds, progress, draft))
    if args.save:
        write_text(args.save, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if args.json else table(result))
    return 0 if result["tokens_equal"] else 1


def check(settings) -> None:
    """PipelineError, before anything runs, for numbers that are not positive."""
    for name, least in (("threads", 1), ("prompt", 1), ("gen", 1), ("depth", 0), ("rounds", 1)):
        if getattr(settings, name) < least:
            raise PipelineError(f"--{name} is {getattr(settings, name)}; it must be at least {least}")


def check_context(settings, bundle) -> None:
    """PipelineError for numbers that do not fit in the bundle's context."""
    if settings.context > bundle.manifest.context:
        raise PipelineError(
            f"this needs {settings.context} positions and the bundle's context is {bundle.manifest.context}: lower "
            "--prompt, --gen or --depth, or compile with a larger --context"
        )


def check_chart() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise PipelineError("--chart needs matplotlib: pip install matplotlib")


def contestants(args: argparse.Namespace, bundle, workload) -> tuple:
    """Who takes part, with the peers that cannot and why, and what will hold the measurements of each."""
    from castiron.pipelines.checking.verify import checkpoint_of
    from castiron.pipelines.measuring.bench import Engines, Measured
    from castiron.pipelines.measuring.workload import gguf_bytes
    from castiron.reference.peers import PEERS

    found = Engines({"castiron": str(bundle.path)})
    measured = {"castiron": Measured("castiron", workload.weight_bytes, workload.cache_item_bytes)}
    if not workload.known:
        found.notes["castiron"] = (
            "it does not say what its functions read: decode_roofline is an estimate, all weights and no cache"
        )
    source = checkpoint_of(bundle, args.checkpoint, any_format=True) if args.against else Path()
    for name in args.against:
        module, install = PEERS[name]
        if importlib.util.find_spec(module) is None:
            found.missing[name] = f"it is not installed; {install}"
        elif name == "llama.cpp" and source.is_dir():
            found.missing[name] = f"it reads GGUF files and {source} is a directory; give a file with --checkpoint"
        elif name == "llama.cpp":
            found.models[name], measured[name] = str(source), Measured(name, gguf_bytes(source), 2)
        else:
            elements = workload.elements
            found.models[name], measured[name] = str(source), Measured(name, elements and elements * 4, 4)
    return found, measured


def warn(remarks: dict[str, str], told: dict[str, str]) -> dict[str, str]:
    """Says of each engine what was not said yet; returns all that was."""
    for name, remark in remarks.items():
        if told.get(name) != remark:
            say(f"{name}: {remark}")
    return told | remarks


def sample_tokens(settings, bundle) -> list[int]:
    """As many ids, drawn with a fixed seed, as the longest measurement needs."""
    import numpy as np

    return [int(t) for t in np.random.default_rng(0).integers(bundle.manifest.vocab, size=settings.context)]


def publish(result: dict, words: Callable[[dict], str], baseline: dict | None, args: argparse.Namespace) -> None:
    """To the file, the chart and stdout, as asked; `words` are the result for a person."""
    from castiron.pipelines.measuring.baseline import compare
    from castiron.pipelines.measuring.baseline import table as compared

    if args.save:
        write_text(args.save, json.dumps(result, indent=2) + "\n")
    if args.chart:
        from castiron.pipelines.measuring.chart import draw

        draw(result, args.chart)
    shown = words(result)
    if baseline is not None:
        result = {**result, "baseline": {"file": args.baseline, **compare(baseline, result)}}
        shown += "\n\n" + compared(result["baseline"], args.baseline)
    print(json.dumps(result) if args.json else shown)


def table(result: dict) -> str:
    """The result for a person."""
    from castiron.pipelines.measuring.bench import count
    from castiron.pipelines.measuring.chart import text_chart

    settings, machine = result["settings"], result["machine"]
    lines = [
        f"{settings['model']}, {count(settings['threads'], 'thread')}, decode {settings['gen']} from position "
        f"{settings['depth']}, prefill {settings['prompt']}",
        f"{machine['cpu']}: reads {machine['read_gb_s']:.1f} GB/s, f32 peak {machine['peak_gflop_s']:.0f} GFLOP/s",
        "",
        f"{'':<12}{'decode tok/s':>14}{'of limit':>10}{'prefill tok/s':>15}{'of peak':>9}{'first ms':>10}{'RSS MB':>8}",
    ]
    for name, engine in {"castiron": result["castiron"], **result["peers"]}.items():
        lines.append(
            f"{name:<12}{engine['decode_tok_s']:>14.1f}{percent(engine['decode_roofline']):>10}"
            f"{engine['prefill_tok_s']:>15.1f}{percent(engine['prefill_peak_share']):>9}"
            f"{engine['ttft_ms']:>10.0f}{engine['rss_mb']:>8.0f}"
        )
    for name, ratio in result["ratios"].items():
        lines.append(f"against {name}: decode {ratio['decode']:.2f}x, prefill {ratio['prefill']:.2f}x, first token "
                     f"{ratio['ttft']:.2f}x, memory {ratio['rss']:.2f}x")  # fmt: skip
    return "\n".join([*lines, *text_chart(result)])


def percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.0%}"
