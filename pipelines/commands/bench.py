"""Measures a bundle: decode, prefill, time to first token and memory, against the limits of the machine and against peers.

Engines run in processes of their own and take turns; one turn each is for warming up, the medians of the others count.
Read bandwidth and f32 peak are measured between the turns.
"""

import argparse
import importlib.util
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import Progress, say

EXAMPLES = """\
examples:
  castiron bench build/model
  castiron bench build/model --threads 2 --prompt 512 --gen 64 --against llama.cpp,hf --json
  castiron bench build/model --depth 4096 --against llama.cpp --output bench.json --chart bench.svg
  castiron bench build/model --speculation --gen 160 --json

--json prints one object: castiron and peers (by name), each with decode_tok_s, prefill_tok_s, decode_roofline (share of
read bandwidth), prefill_peak_share (of f32 peak), ttft_ms (process start to first token of a 32-token prompt), rss_mb
(peak) and runs (median, min, max, values); machine with read_gb_s and peak_gflop_s; ratios (castiron against each peer:
above 1 is better); settings; missing (peers that could not be measured, and why); notes (by engine, what its numbers need
said: that it crashed and was measured with other settings, that its work is an estimate). A share of unknown work is null.
With --speculation: repeating_ratio and other_ratio (decode rate with --speculate over that without, medians over
prompts), tokens_equal, answers.
"""
NAMES = ("llama.cpp", "hf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of every engine (default: one per physical core)")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens to prefill (default: 512)")
    parser.add_argument("--gen", type=int, default=64, metavar="N", help="tokens to decode (default: 64)")
    parser.add_argument("--depth", type=int, default=0, metavar="N", help="position to decode from (default: 0)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measured turns (default: 5)")
    parser.add_argument("--against", type=peers, default=(), metavar="NAMES", help="engines to compare with: llama.cpp,hf")
    parser.add_argument("--speculation", action="store_true", help="measure --speculate ngram instead: answers that "
                        "repeat their prompt, and others")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="PATH", help="the checkpoint for peers, which may be another format of the "
                        "model (default: the one that the bundle was made from)")  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write the JSON object to a file too")
    parser.add_argument("--chart", metavar="FILE", help="draw decode and prefill to a file (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def peers(text: str) -> tuple[str, ...]:
    """ "llama.cpp,hf" as names; argparse's error for one that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; choose from {', '.join(NAMES)}")
    return names


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.measuring.bench import Settings, measure, ratios, spread, summarise
    from castiron.pipelines.measuring.machine import Machine, describe
    from castiron.pipelines.measuring.workload import Workload
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.cpu import physical_cores

    if args.chart:
        check_chart()
    bundle = open_bundle(args.bundle)
    # Speculation brings prompts of its own.
    prompt, depth = (1, 0) if args.speculation else (args.prompt, args.depth)
    settings = Settings(args.threads or physical_cores(), prompt, args.gen, depth, args.rounds)
    check(settings, bundle)
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
    publish(result, args)
    return 0


def speculation(bundle, settings, args: argparse.Namespace) -> int:
    """The bench of --speculation; exit status 1 if a token differs."""
    from castiron.pipelines.generation.text import load_text
    from castiron.pipelines.measuring.bench_speculation import measure, summarise, table
    from castiron.vmfb.session import Session

    session = Session(bundle, threads=settings.threads)
    with Progress() as progress:
        result = summarise(measure(session, load_text(bundle), settings.gen, settings.rounds, progress))
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if args.json else table(result))
    return 0 if result["tokens_equal"] else 1


def check(settings, bundle) -> None:
    """PipelineError, before anything runs, for numbers that are not positive or do not fit in the context."""
    for name, least in (("threads", 1), ("prompt", 1), ("gen", 1), ("depth", 0), ("rounds", 1)):
        if getattr(settings, name) < least:
            raise PipelineError(f"--{name} is {getattr(settings, name)}; it must be at least {least}")
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

    found = Engines({"castiron": str(args.bundle)})
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


def publish(result: dict, args: argparse.Namespace) -> None:
    """To the file, the chart and stdout, as asked."""
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=2) + "\n")
    if args.chart:
        from castiron.pipelines.measuring.chart import draw

        draw(result, args.chart)
    print(json.dumps(result) if args.json else table(result))


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
