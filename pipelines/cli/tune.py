"""Search for faster tiles of a model's matmuls on this machine, for castiron compile.

Candidates are timed in the model's own functions, on its weights. One is used if it is over 3 %
faster than the shipped tiles twice and gives the same greedy tokens. Results are written at the
end. Nothing else should run meanwhile.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from castiron.pipelines.cli.options import add_checkpoint, add_compile_options, add_options, compile_options
from castiron.pipelines.terminal import Progress, print_message

EXAMPLES = """\
examples:
  castiron tune smollm2-135m-instruct
  castiron tune smollm2-135m-instruct --functions decode_step --threads 1
  castiron tune model.gguf --again --json

--json prints one object: model, cpu, threads, store (the file, or null), matmuls (name, function,
default_us, gain, tiles or null, cached: found earlier), decode (tokens/s with the shipped tiles and
with the tuned ones, and their ratio; or null), failed_rounds (that did not compile), changed_tokens
(matmuls whose faster tiles changed a token), seconds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--functions", type=lambda names: names.split(","), default=[], metavar="NAME[,NAME]",
                        help="tune these functions: decode_step, prefill_128, ... (default: all)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="search again for matmuls that were tuned before")
    add_options(parser, "--json")
    add_compile_options(parser)


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.compile import tile_store as store
    from castiron.pipelines.compile.build_model import build_model, open_source
    from castiron.pipelines.compile.options import context_of
    from castiron.pipelines.errors import PipelineError
    from castiron.pipelines.evaluate.tune import Bench, accept, max_prompt, prompts_of, search

    options, start = compile_options(args), time.monotonic()
    if options.target != "host" or options.lowering != "kernels":
        raise PipelineError("castiron tune measures kernels on this machine; remove --target and --lowering")
    with TemporaryDirectory(prefix="castiron-") as directory, Progress() as progress:
        # Check everything before the first compilation, which takes half a minute.
        checkpoint = open_source(args.model, options, progress)
        if checkpoint.encoding:
            raise PipelineError(f"{checkpoint.path} is an embedding model, which castiron tune does not support")
        functions = build_model(checkpoint, options).functions
        if unknown := sorted(set(args.functions) - set(functions)):
            raise PipelineError(f"unknown function: {unknown[0]!r}; --functions takes {', '.join(functions)}")
        widths = [graph.entry.width for graph in functions.values() if graph.entry.role == "verify"]
        max_prompt(context_of(checkpoint.config, options), widths)
        bench = Bench(args.model, options, args.functions, Path(directory), progress)
        prompts = prompts_of(bench.bundle)
        key = store.key_of(bench.target, bench.threads)
        known = {} if args.again else store.findings_of(key)
        searches = {name: each for name, each in bench.matmuls().items() if name not in known}
        failed = search(bench, searches, progress)
        found = {name: each.tiles for name, each in searches.items() if each.tiles is not None}
        accepted, decode = accept(bench, prompts, found, progress)
        findings = [
            store.Finding(key, name, asdict(accepted[name]), round(each.gain, 3))
            if name in accepted
            else store.Finding(key, name, None, 1.0)
            for name, each in searches.items()
        ]
        path = str(store.store_path()) if store.add_findings(findings) else None
        found_or_cached = known | {finding.product: finding for finding in findings}
        rows = [
            {
                "name": name,
                "function": each.function,
                "default_us": round(searches[name].default_seconds * 1e6, 2) if name in searches else None,
                "gain": found_or_cached[name].gain,
                "tiles": found_or_cached[name].tiles,
                "cached": name in known,
            }
            for name, each in bench.matmuls().items()
        ]
    result = {
        "model": args.model, "cpu": key.cpu, "threads": key.threads, "store": path, "matmuls": rows,
        "decode": decode, "failed_rounds": failed, "changed_tokens": sorted(set(found) - set(accepted)),
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    print(json.dumps(result) if args.json else "\n".join(table(result)))
    if result["changed_tokens"]:
        print_message(f"dropped because tokens changed: {', '.join(result['changed_tokens'])}")
    return 0


def table(result: dict) -> list[str]:
    rows = result["matmuls"]
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{'matmul':{width}}  {'function':13} {'default':>10} {'gain':>6}  tiles"]
    for row in rows:
        time_ = "cached" if row["cached"] else f"{row['default_us']:.1f} us"
        tiles = ", ".join(f"{key} {value}" for key, value in row["tiles"].items()) if row["tiles"] else "the shipped ones"
        gain = f"{row['gain'] - 1:+.0%}" if row["tiles"] else ""
        lines.append(f"{row['name']:{width}}  {row['function']:13} {time_:>10} {gain:>6}  {tiles}")
    better = sum(row["tiles"] is not None for row in rows)
    lines += ["", f"{better} of {len(rows)} matmuls have better tiles on {result['threads']} threads of {result['cpu']}"]
    if decode := result["decode"]:
        lines[-1] += f"; decode {decode['default_tok_s']} -> {decode['tuned_tok_s']} tok/s"
    if better and result["store"]:
        lines.append(f"castiron compile now uses them: {result['store']}")
    return lines
