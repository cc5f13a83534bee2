"""Measure a bundle's perplexity on a text, and its KL divergence from a base model.

The default text is four chapters of a novel. The text is split into chunks of --context tokens, and
the second half of each chunk is scored, as in llama.cpp's perplexity tool. The base model is
another bundle, HF transformers in f32, or llama.cpp. If the base is more exact, the divergence
shows the error that quantisation or --numerics fast causes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from castiron.emitter.abi import QUANTISED
from castiron.pipelines.cli.options import add_options
from castiron.pipelines.compile.open_model import require_generation
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.perplexity import (
    PERCENTILES,
    LogitsFunction,
    bundle_logits,
    chunks_of,
    compare,
    likelihoods,
    llama_cpp_logits,
    perplexity,
    statistics,
    text_name,
    tokens_of,
)
from castiron.pipelines.evaluate.verify import (
    adapter_of,
    checkpoint_of,
    load_reference,
)
from castiron.pipelines.terminal import Progress
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.run.session import Session

EXAMPLES = """\
examples:
  castiron evaluate build/model
  castiron evaluate build/fast --against build/exact
  castiron evaluate build/model --against llama.cpp --text wiki.test.raw -c 2048

Names and formulas are those of llama-perplexity --kl-divergence: Q is the bundle; KLD the
divergence of the base's next-token distribution from the bundle's; Δp the probability of the text's
next token by the bundle, minus that by the base; same top p the share of positions where both have
the same most probable token. ± is one standard error.

--json prints one object: model, numerics, kv_cache_type, text, context, chunks, tokens (scored), ppl (mean,
error), and base, which is null without --against: name, ppl, ppl_ratio, rms_delta_p and same_top_p
(mean, error), and kld (mean, error, maximum, 99.0%, 90.0%, median). Probabilities are from 0 to 1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    parser.add_argument("--against", metavar="BASE", help="the base: another bundle, hf or llama.cpp")
    parser.add_argument("--text", metavar="FILE", help="the text, in UTF-8 (default: one that comes with castiron)")
    parser.add_argument("-c", "--context", type=int, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    parser.add_argument("--chunks", type=int, metavar="N", help="maximum number of chunks (default: the complete text)")
    add_options(parser, "--json", "--checkpoint", "--threads")


def main(args: argparse.Namespace) -> int:
    bundle = require_generation(open_bundle(args.bundle))
    bundle, manifest = bundle.with_context(max(args.context, bundle.manifest.max_context)), bundle.manifest
    chunks = chunks_of(tokens_of(bundle, args.text), args.context, args.chunks, manifest.tokens.bos)
    session = Session(bundle, threads=args.threads)
    rows, base = bundle_logits(session), None
    with Progress() as progress:
        evaluating = lambda done, total: progress("evaluating", done / total)
        if args.against is None:
            ppl = perplexity(likelihoods(rows, chunks, evaluating))
        else:
            progress("loading the base", 0.0)
            name, other = base_of(bundle, args.against, args.context, session.threads, args.checkpoint)
            found = statistics(compare(rows, other, chunks, evaluating))
            ppl = found.pop("ppl")
            base = {"name": name, "ppl": found.pop("ppl_base"), **found}
    facts = {
        "model": manifest.name, "numerics": manifest.numerics, "kv_cache_type": manifest.cache,
        "text": text_name(bundle, args.text), "context": args.context,
        "chunks": len(chunks), "tokens": sum(len(chunk.targets) for chunk in chunks), "ppl": ppl, "base": base,
    }  # fmt: skip
    print(json.dumps(facts, ensure_ascii=False) if args.json else "\n".join(report(facts)))
    return 0


def report(facts: dict) -> list[str]:
    """Return the lines to print; `facts` has the results, and is also what --json prints."""
    base = facts["base"]
    head = (
        f"{facts['model']} ({arithmetic(facts['numerics'], facts['kv_cache_type'])}), {facts['text']}: "
        f"{facts['chunks']} chunks of {facts['context']} tokens, {facts['tokens']} count"
    )
    if base is None:
        return [head, f"Final estimate: PPL = {facts['ppl']['mean']:.4f} +/- {facts['ppl']['error']:.5f}"]
    kld = base["kld"]
    return [
        head,
        f"base: {base['name']}",
        "",
        f"Mean PPL(Q)          : {plus_minus(facts['ppl'])}",
        f"Mean PPL(base)       : {plus_minus(base['ppl'])}",
        f"Mean PPL(Q)/PPL(base): {plus_minus(base['ppl_ratio'])}",
        f"Mean    KLD: {plus_minus(kld)}",
        *(f"{name.capitalize():7} KLD: {kld[name]:10.6f}" for name in PERCENTILES),
        f"RMS Δp    : {percent(base['rms_delta_p'])}",
        f"Same top p: {percent(base['same_top_p'])}",
    ]


def plus_minus(value: dict[str, float]) -> str:
    """Return "mean ± error" as text for a `value` {"mean": ..., "error": ...}."""
    return f"{value['mean']:10.6f} ± {value['error']:10.6f}"


def percent(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:6.3f} ± {100 * value['error']:5.3f} %"


def arithmetic(numerics: str, cache: str) -> str:
    """Return the numerics and the type of the KV cache, if not f32, as text."""
    return numerics + f", cache of {cache}" * (cache != "f32")


def hf_logits(checkpoint: Path, weights: str, threads: int, adapter: Path | None) -> LogitsFunction:
    """Return a function of (token ids, first position) that yields HF's logits, f32 [vocab]."""
    model = load_reference(checkpoint, weights, threads, adapter)

    def rows(tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            found = model(ids, use_cache=False, logits_to_keep=len(tokens) - first).logits[0].numpy()
        yield from found

    return rows


def base_of(
    bundle: Bundle, named: str, context: int, threads: int, checkpoint: str | None = None
) -> tuple[str, LogitsFunction]:
    """Return (name, function that yields logits) of the model that --against names."""
    if named == "hf":
        # HF's weights are not quantised, so that the divergence shows the cost of quantisation. A float type is applied.
        weights = "native" if bundle.manifest.weights in QUANTISED else bundle.manifest.weights
        return "HF transformers", hf_logits(checkpoint_of(bundle, checkpoint), weights, threads, adapter_of(bundle))
    if named == "llama.cpp":
        import llama_cpp  # noqa: F401  A missing package is reported first.

        if adapter_of(bundle):
            raise PipelineError("llama.cpp cannot merge the bundle's adapter; compare with hf or a bundle")
        source = checkpoint_of(bundle, checkpoint, any_format=True)
        if source.is_dir():
            raise PipelineError(
                f"llama.cpp reads only GGUF files, but the checkpoint is a directory: {source}; give a GGUF "
                "file with --checkpoint"
            )
        return named, llama_cpp_logits(source, context, threads)
    other = open_bundle(named)
    tokenizers = [load_tokenizer(each).backend.to_str() for each in (bundle, other) if each.tokenizer]
    if other.manifest.vocab != bundle.manifest.vocab or len(set(tokenizers)) > 1:
        raise PipelineError(f"{other.path} and {bundle.path} have different vocabularies; compare bundles of the same model")
    other = other.with_context(max(context, other.manifest.max_context))
    name = f"{other.path} ({arithmetic(other.manifest.numerics, other.manifest.cache)})"
    return name, bundle_logits(Session(other, threads))
