"""A bundle's perplexity on a text, and what separates it from a base, in the statistics of llama.cpp's perplexity tool.

The text (by default four chapters of a novel that come with castiron) goes through the model in chunks of --context tokens;
the first half of a chunk conditions, the second half counts. With --against every distribution is compared with that of the
base: the exact bundle of the same checkpoint, HF transformers in f32, or llama.cpp on the same GGUF file. So what --numerics
fast costs is seen, or what a quantised checkpoint costs against another.
"""

import argparse
import json

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import Progress

EXAMPLES = """\
examples:
  castiron evaluate build/model
  castiron evaluate build/fast --against build/exact
  castiron evaluate build/model --against hf --chunks 4 --json
  castiron evaluate build/model --against llama.cpp --text wiki.test.raw -c 2048

The names and formulas are those of llama-perplexity --kl-divergence: Q is the bundle, base is what it is compared with, KLD the
Kullback-Leibler divergence of the base's next-token distribution from the bundle's, Δp how much more probable than to the base
the text's next token is to the bundle, and same top p how often both hold the same token most probable. ± is one standard
error. On the same text with the same -c the numbers can be laid beside llama.cpp's.

--json prints one object: model, numerics, cache, text, context, chunks, tokens (that count), ppl (mean, error), and base,
which is null without --against, or an object: name, ppl, correlation, ln_ppl_ratio, ppl_ratio, ppl_difference, kld and
delta_p (each with mean, error, maximum, percentiles, median, minimum; delta_p with rms and rms_error), same_top_p, and
greedy: tokens (for each prompt), equal (prompts), prompts (name, first_difference: the position among the generated tokens,
or null).
Probabilities are shares of 1.
"""
STAGES = ("evaluating", "comparing greedy texts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    parser.add_argument("--against", metavar="BASE", help="what to compare with: another bundle, hf or llama.cpp")
    parser.add_argument("--text", metavar="FILE", help="the text, in UTF-8 (default: one that comes with castiron)")
    parser.add_argument("-c", "--context", type=int, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    parser.add_argument("--chunks", type=int, metavar="N", help="how many chunks at most (default: all of the text)")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="greedy tokens to compare for each of "
                        "8 prompts (default: 64; 0 leaves them out)")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="PATH", help="where the checkpoint is that the bundle was made from, for hf "
                        "and llama.cpp (default: where it was then)")  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads, for both sides")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.named import generating
    from castiron.pipelines.checking.distances import perplexity, statistics
    from castiron.pipelines.checking.evaluate import base_of, greedy_texts, prompts_of
    from castiron.pipelines.checking.likelihood import BundleRows, chunks_of, compare, likelihoods, text_name, tokens_of
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.session import Session

    if args.max_tokens < 0:
        raise PipelineError(f"-n is {args.max_tokens}; it must be at least 0")
    bundle = generating(open_bundle(args.bundle))
    manifest = bundle.manifest
    if args.context > manifest.context:
        raise PipelineError(
            f"--context is {args.context} and the bundle's is {manifest.context}: give less, or compile with a larger --context"
        )
    chunks = chunks_of(tokens_of(bundle, args.text), args.context, args.chunks, manifest.tokens.bos)
    session = Session(bundle, threads=args.threads)
    rows, base = BundleRows(session), None
    with Progress() as progress:
        evaluating, writing = (lambda done, total, stage=stage: progress(stage, done / total) for stage in STAGES)
        if args.against is None:
            ppl = perplexity(likelihoods(rows, chunks, evaluating))
        else:
            prompts = prompts_of(bundle, args.max_tokens)
            needed = max([args.context, *(len(tokens) + args.max_tokens for _, tokens in prompts)])
            progress("loading the base", 0.0)
            other = base_of(bundle, args.against, needed, session.threads, args.checkpoint)
            found = statistics(compare(rows, other, chunks, evaluating))
            ppl = found.pop("ppl")
            base = {"name": other.name, "ppl": found.pop("ppl_base"), **found}
            base["greedy"] = greedy_texts(session, other, prompts, args.max_tokens, writing)
    facts = {
        "model": manifest.name, "numerics": manifest.numerics, "cache": manifest.cache,
        "text": text_name(bundle, args.text), "context": args.context,
        "chunks": len(chunks), "tokens": sum(len(chunk.wanted) for chunk in chunks), "ppl": ppl, "base": base,
    }  # fmt: skip
    print(json.dumps(facts, ensure_ascii=False) if args.json else "\n".join(report(facts)))
    return 0


def report(facts: dict) -> list[str]:
    """The result for a person, in the layout of llama.cpp's perplexity tool."""
    from castiron.pipelines.checking.evaluate import arithmetic

    base = facts["base"]
    head = (
        f"{facts['model']} ({arithmetic(facts['numerics'], facts['cache'])}), {facts['text']}: {facts['chunks']} chunks of "
        f"{facts['context']} tokens, {facts['tokens']} count"
    )
    if base is None:
        return [head, f"Final estimate: PPL = {facts['ppl']['mean']:.4f} +/- {facts['ppl']['error']:.5f}"]
    correlation = "?" if base["correlation"] is None else f"{100 * base['correlation']:6.2f}%"
    kld, delta_p, greedy = base["kld"], base["delta_p"], base["greedy"]
    return [
        head,
        f"base: {base['name']}",
        "",
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {plus_minus(facts['ppl'])}",
        f"Mean PPL(base)                : {plus_minus(base['ppl'])}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {correlation}",
        f"Mean ln(PPL(Q)/PPL(base))     : {plus_minus(base['ln_ppl_ratio'])}",
        f"Mean PPL(Q)/PPL(base)         : {plus_minus(base['ppl_ratio'])}",
        f"Mean PPL(Q)-PPL(base)         : {plus_minus(base['ppl_difference'])}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {plus_minus(kld)}",
        *(f"{name} KLD: {value:10.6f}" for name, value in ordered(kld)),
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {percent(delta_p['mean'], delta_p['error'])}",
        *(f"{name} Δp: {100 * value:6.3f}%" for name, value in ordered(delta_p)),
        f"RMS Δp    : {percent(delta_p['rms'], delta_p['rms_error'])}",
        f"Same top p: {percent(base['same_top_p']['mean'], base['same_top_p']['error'])}",
        *greedy_lines(greedy),
    ]


def plus_minus(value: dict[str, float]) -> str:
    return f"{value['mean']:10.6f} ± {value['error']:10.6f}"


def percent(value: float, error: float) -> str:
    return f"{100 * value:6.3f} ± {100 * error:5.3f} %"


def ordered(values: dict[str, float]) -> list[tuple[str, float]]:
    """Maximum, percentiles, median and minimum, by names of one length."""
    return [
        (f"{f'{name:>5}' if '%' in name else name.capitalize():<7}", value)
        for name, value in values.items()
        if "%" in name or name in ("maximum", "median", "minimum")
    ]


def greedy_lines(greedy: dict) -> list[str]:
    if not greedy["prompts"]:
        return []
    equal = f"Equal: {greedy['equal']} of {len(greedy['prompts'])} prompts, {greedy['tokens']} tokens each"
    different = [each for each in greedy["prompts"] if each["first_difference"] is not None]
    first = (f"{each['name']}: differs from token {each['first_difference']} on" for each in different)
    return ["", "====== Greedy texts ======", equal, *first]
