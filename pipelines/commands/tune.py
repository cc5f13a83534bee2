"""Finds better tiles for the matrix products of a model on this machine, and keeps them for castiron compile.

The shipped tiles measured well on AVX2; AVX-512 and NEON have some of their own. Candidates are timed in the model's own
functions, on its weights. One is kept if it is more than 3 % faster than the shipped tiles in two measurements and the
bundle gives the same greedy tokens with it. Products that were tuned before, for this CPU, compiler and number of
threads, are left as they are. What is found is written at the end: an interrupted search keeps nothing.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict

from castiron.pipelines.commands.options import add_compile_arguments, add_model, compile_options
from castiron.pipelines.progress import Progress, say

EXAMPLES = """\
examples:
  castiron tune smollm2-135m-instruct
  castiron tune smollm2-135m-instruct --functions decode_step --threads 1
  castiron tune model.gguf --again --json

Nothing else should run meanwhile. --json prints one object: model, cpu, threads, store (the file, null if it cannot be
written), products (name, function, default_us, gain, tiles or null, known), decode (tokens/s with the shipped tiles and with
those found, and their ratio, null where nothing was found), refused (rounds that did not compile), changed_tokens (products
whose faster tiles changed a token, and were dropped), seconds.
"""
TURNS, STEPS = 6, 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_compile_arguments(parser)
    parser.add_argument("--functions", type=lambda names: names.split(","), default=[], metavar="NAME[,NAME]",
                        help="tune these alone: decode_step, prefill_8, prefill_32, prefill_128 and what --speculate and "
                        "--batch make, verify_4, verify_8, decode_batch_4, decode_batch_8 (default: all)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="search again for products that were tuned before")
    parser.add_argument("--json", action="store_true", help="print one JSON object about what was found")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.compile import build_model, context_of, open_source
    from castiron.pipelines.errors import PipelineError
    from castiron.pipelines.tuning import store
    from castiron.pipelines.tuning.exact import check_room, prompts_of
    from castiron.pipelines.tuning.search import Bench, search
    from castiron.vmfb.aside import scratch

    options, start = compile_options(args), time.monotonic()
    if options.target != "host" or options.lowering != "kernels":
        raise PipelineError("tuning measures this machine's kernels; drop --target and --lowering")
    with scratch("tune") as directory, Progress() as progress:
        # Compiling takes half a minute, and what cannot be tuned is seen before it.
        checkpoint = open_source(args.model, options, progress)
        if checkpoint.encoding:
            raise PipelineError(f"{checkpoint.path} encodes texts, and castiron tune is for models that generate")
        functions = build_model(checkpoint, options).functions
        if unknown := sorted(set(args.functions) - set(functions)):
            raise PipelineError(f"the model has no function {unknown[0]!r}; --functions takes {', '.join(functions)}")
        widths = [function.width for function in functions.values() if function.role == "verify"]
        check_room(context_of(checkpoint.config, options.context), widths)
        bench = Bench(args.model, options, args.functions, directory, progress)
        prompts = prompts_of(bench.bundle)
        key = store.key_of(bench.target, bench.threads)
        known = {} if args.again else store.findings_of(key)
        trials = {name: trial for name, trial in bench.products().items() if name not in known}
        refused = search(bench, trials, progress)
        found = {name: trial.tiles for name, trial in trials.items() if trial.tiles is not None}
        kept, decode = accept(bench, prompts, found, progress)
        findings = [
            store.Finding(
                key, name, asdict(kept[name]) if name in kept else None, round(trial.gain, 3) if name in kept else 1.0
            )
            for name, trial in trials.items()
        ]
        kept_in = str(store.store_path()) if store.keep(findings) else None
        told = known | {finding.product: finding for finding in findings}
        rows = [
            {
                "name": name,
                "function": trial.function,
                "default_us": round(trials[name].default_seconds * 1e6, 2) if name in trials else None,
                "gain": told[name].gain,
                "tiles": told[name].tiles,
                "known": name in known,
            }
            for name, trial in bench.products().items()
        ]
    result = {
        "model": args.model, "cpu": key.cpu, "threads": key.threads, "store": kept_in, "products": rows,
        "decode": decode, "refused": refused, "changed_tokens": sorted(set(found) - set(kept)),
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    print(json.dumps(result) if args.json else "\n".join(table(result)))
    if result["changed_tokens"]:
        say(f"dropped, because they changed a token: {', '.join(result['changed_tokens'])}")
    return 0


def accept(bench, prompts: list[list[int]], found: dict, progress) -> tuple[dict, dict | None]:
    """Those of the tiles that leave the tokens after the prompts as they are, and what they bring to decoding."""
    from castiron.pipelines.tuning.exact import answers, exact_part
    from castiron.vmfb.session import Session

    if not found:
        return {}, None
    wanted = answers(bench.bundle, bench.threads, prompts)
    kept = exact_part(found, lambda tiles: answers(bench.compiled(tiles, "tuned", progress), bench.threads, prompts) == wanted)
    if not kept:
        return {}, None
    # exact_part looked at these last.
    sessions = [Session(bundle, bench.threads) for bundle in (bench.bundle, bench.compiled(kept, "tuned", progress))]
    rates: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for session, times in zip(sessions, rates):
            session.rewind(0)
            token, start = session.prefill(prompts[0][:1]), time.perf_counter()
            for _ in range(min(STEPS, session.context - 1)):
                token = session.step(token)
            times.append(min(STEPS, session.context - 1) / (time.perf_counter() - start))
    default, tuned = (statistics.median(times[1:]) for times in rates)
    return kept, {"default_tok_s": round(default, 1), "tuned_tok_s": round(tuned, 1), "ratio": round(tuned / default, 3)}


def table(result: dict) -> list[str]:
    rows = result["products"]
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{'product':{width}}  {'function':13} {'default':>10} {'gain':>6}  tiles"]
    for row in rows:
        time_ = "known" if row["known"] else f"{row['default_us']:.1f} us"
        tiles = ", ".join(f"{key} {value}" for key, value in row["tiles"].items()) if row["tiles"] else "the shipped ones"
        gain = f"{row['gain'] - 1:+.0%}" if row["tiles"] else ""
        lines.append(f"{row['name']:{width}}  {row['function']:13} {time_:>10} {gain:>6}  {tiles}")
    better = sum(row["tiles"] is not None for row in rows)
    lines += ["", f"{better} of {len(rows)} products have better tiles on {result['threads']} threads of {result['cpu']}"]
    if decode := result["decode"]:
        lines[-1] += f"; decode {decode['default_tok_s']} -> {decode['tuned_tok_s']} tok/s"
    if better and result["store"]:
        lines.append(f"castiron compile uses them from now on: {result['store']}")
    return lines
