"""Search for tile sizes that make a model's matmuls faster on this machine, for castiron compile.

Candidate tile sizes are timed in the compiled model, with its weights. castiron compile uses a
candidate if two measurements found it over 3 % faster than the default tile sizes, and if the model
with all faster tile sizes generates the same greedy tokens. The results are stored when the search
ends. The next run skips matmuls that have a result; castiron cache clear tuned deletes all results.
Run no other programs during the search.
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
  castiron tune model.gguf --json

--json prints one object: model, cpu, threads, store (the file, or null), matmuls (name, function,
default_us, gain, tiles or null, cached: found earlier), failed_rounds (that did not compile),
changed_tokens (matmuls with faster tiles, if these changed a token; then none is used), seconds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--functions", type=lambda names: names.split(","), default=[], metavar="NAME[,NAME]",
                        help="tune these functions: decode_step, prefill_128, ... (default: all)")  # fmt: skip
    add_options(parser, "--json")
    add_compile_options(parser)


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.compile import tile_store as store
    from castiron.pipelines.errors import PipelineError
    from castiron.pipelines.evaluate.tune import Bench, answers, prompts_of, search

    options, start = compile_options(args), time.monotonic()
    if options.target != "host" or options.lowering != "kernels":
        raise PipelineError("castiron tune does not support --target and --lowering, because it measures this CPU; remove them")
    with TemporaryDirectory(prefix="castiron-") as directory, Progress() as progress:
        bench = Bench(args.model, options, args.functions, Path(directory), progress)
        prompts, matmuls = prompts_of(bench.bundle), bench.matmuls()
        key = store.key_of(bench.target, bench.threads)
        known = store.findings_of(key)
        searches = {name: each for name, each in matmuls.items() if name not in known}
        failed = search(bench, searches, progress)
        found = {name: each.tiles for name, each in searches.items() if each.tiles is not None}
        changed = False
        if found:
            bundles = bench.bundle, bench.compiled(found, "tuned", progress)
            default, tuned = (answers(bundle, bench.threads, prompts) for bundle in bundles)
            changed = default != tuned
    for name, each in searches.items():
        tiles = None if changed or each.tiles is None else asdict(each.tiles)
        known[name] = store.Finding(key, name, tiles, round(each.gain, 3) if tiles else 1.0)
    path = str(store.store_path()) if store.add_findings(known[name] for name in searches) else None
    rows = [
        {
            "name": name,
            "function": each.function,
            "default_us": round(searches[name].default_seconds * 1e6, 2) if name in searches else None,
            "gain": known[name].gain,
            "tiles": known[name].tiles,
            "cached": name not in searches,
        }
        for name, each in matmuls.items()
    ]
    result = {
        "model": args.model, "cpu": key.cpu, "threads": key.threads, "store": path, "matmuls": rows,
        "failed_rounds": failed, "changed_tokens": sorted(found) if changed else [],
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    print(json.dumps(result) if args.json else "\n".join(table(result)))
    if changed:
        print_message(
            f"faster tiles are not used, because the model's tokens change with them: {', '.join(result['changed_tokens'])}"
        )
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
    if better and result["store"]:
        lines.append(f"castiron compile now uses them: {result['store']}")
    return lines
