"""Measure a bundle's perplexity on a text, and its KL divergence from a base model.

The text (by default four chapters of a novel) is divided into chunks of --context tokens, and the
second half of each chunk is scored, as by llama.cpp's perplexity tool. The base is another bundle,
HF transformers in f32, or llama.cpp: so one measures what --numerics fast or quantisation costs.
"""

from __future__ import annotations

import argparse
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.compile.open_model import require_generation
from castiron.pipelines.compile.weights import QUANTISED
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.perplexity import (
    BundleRows,
    Rows,
    chunks_of,
    compare,
    likelihoods,
    perplexity,
    statistics,
    text_name,
    tokens_of,
)
from castiron.pipelines.evaluate.perplexity import Progress as Report
from castiron.pipelines.evaluate.verify import (
    adapter_of,
    checkpoint_of,
    encoded_prompts,
    expect,
    first_difference,
    greedy,
    load_reference,
)
from castiron.pipelines.terminal import Progress
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.session import Session

EXAMPLES = """\
examples:
  castiron evaluate build/model
  castiron evaluate build/fast --against build/exact
  castiron evaluate build/model --against llama.cpp --text wiki.test.raw -c 2048

Names and formulas are those of llama-perplexity --kl-divergence: Q is the bundle; KLD the
divergence of the base's next-token distribution from the bundle's; Δp the probability of the text's
next token by the bundle, minus that by the base; same top p the share of positions where both have
the same most probable token. ± is one standard error.

--json prints one object: model, numerics, cache, text, context, chunks, tokens (scored), ppl (mean,
error), and base, which is null without --against: name, ppl, correlation, ln_ppl_ratio, ppl_ratio,
ppl_difference, kld and delta_p (mean, error, maximum, percentiles, median, minimum; delta_p also
rms, rms_error), same_top_p, and greedy: tokens (for each prompt), equal (prompts), prompts (name,
first_difference: index of the generated token, or null). Probabilities are from 0 to 1.
"""
STAGES = ("evaluating", "comparing greedy texts")
# Greedy texts are compared for every fourth of verify's prompts.
PROMPT_STEP = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    parser.add_argument("--against", metavar="BASE", help="the base: another bundle, hf or llama.cpp")
    parser.add_argument("--text", metavar="FILE", help="the text, in UTF-8 (default: one that comes with castiron)")
    parser.add_argument("-c", "--context", type=int, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    parser.add_argument("--chunks", type=int, metavar="N", help="maximum number of chunks (default: the complete text)")
    add_options(parser, "--json")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N",
                        help="greedy tokens to compare for each of 8 prompts (default: 64; 0: none)")  # fmt: skip
    add_options(parser, "--checkpoint", "--threads")


def main(args: argparse.Namespace) -> int:
    if args.max_tokens < 0:
        raise PipelineError(f"-n is {args.max_tokens}; it must be at least 0")
    bundle = require_generation(open_bundle(args.bundle))
    manifest = bundle.manifest
    if args.context > manifest.context:
        raise PipelineError(
            f"--context is {args.context}, but the bundle has {manifest.context} positions; give less, or compile with more"
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
        "chunks": len(chunks), "tokens": sum(len(chunk.targets) for chunk in chunks), "ppl": ppl, "base": base,
    }  # fmt: skip
    print(json.dumps(facts, ensure_ascii=False) if args.json else "\n".join(report(facts)))
    return 0


def report(facts: dict) -> list[str]:
    """Format the result in the layout of llama.cpp's perplexity tool."""
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
    """Format a mean and its error."""
    return f"{value['mean']:10.6f} ± {value['error']:10.6f}"


def percent(value: float, error: float) -> str:
    """Format a share of 1 and its error in percent."""
    return f"{100 * value:6.3f} ± {100 * error:5.3f} %"


def ordered(values: dict[str, float]) -> list[tuple[str, float]]:
    """Return (padded name, value) of the maximum, the percentiles, the median and the minimum."""
    return [
        (f"{f'{name:>5}' if '%' in name else name.capitalize():<7}", value)
        for name, value in values.items()
        if "%" in name or name in ("maximum", "median", "minimum")
    ]


def greedy_lines(greedy: dict) -> list[str]:
    """Format the comparison of greedy tokens, without lines if no prompt was compared."""
    if not greedy["prompts"]:
        return []
    equal = f"Equal: {greedy['equal']} of {len(greedy['prompts'])} prompts, {greedy['tokens']} tokens each"
    different = [each for each in greedy["prompts"] if each["first_difference"] is not None]
    first = (f"{each['name']}: differs from token {each['first_difference']} on" for each in different)
    return ["", "====== Greedy texts ======", equal, *first]


def arithmetic(numerics: str, cache: str) -> str:
    """Describe a bundle's numerics and cache type: `exact`, or `fast, cache of f16`."""
    return numerics + f", cache of {cache}" * (cache != "f32")


class Base(Rows):
    """A model that a bundle is compared with: its name, logits and greedy tokens."""

    name: str

    @abstractmethod
    def greedy(self, prompt: list[int], ours: list[int]) -> list[int]:
        """Return as many tokens after `prompt` as `ours` has, valid up to the first difference."""


class BundleBase(BundleRows, Base):
    """Another bundle as the base."""

    def __init__(self, bundle: Bundle, threads: int | None):
        super().__init__(Session(bundle, threads))
        self.name = f"{bundle.path} ({arithmetic(bundle.manifest.numerics, bundle.manifest.cache)})"

    def greedy(self, prompt: list[int], ours: list[int]) -> list[int]:
        return greedy(self.session, prompt, len(ours))


class HuggingFace(Base):
    """HF transformers in f32 as the base; it reads the checkpoint by itself."""

    name = "HF transformers"

    def __init__(self, checkpoint: Path, weights: str, threads: int, adapter: Path | None):
        self.model = load_reference(checkpoint, weights, threads, adapter)

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            found = self.model(ids, use_cache=False, logits_to_keep=len(tokens) - first).logits[0].numpy()
        yield from found

    def greedy(self, prompt: list[int], ours: list[int]) -> list[int]:
        return expect(self.model, prompt, ours).tokens


class LlamaCpp(Base):
    """llama.cpp as the base, with its defaults: an f16 cache, and activations rounded to int8."""

    name = "llama.cpp"

    def __init__(self, checkpoint: Path, context: int, threads: int):
        from llama_cpp import Llama

        try:
            self.llama = Llama(
                str(checkpoint), n_ctx=context, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
            )
        except ValueError as error:
            raise PipelineError(f"llama.cpp cannot read {checkpoint}: {error}") from None

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        self.llama.reset()
        self.llama.eval(list(tokens))
        yield from self.llama.scores[first : len(tokens)]

    def greedy(self, prompt: list[int], ours: list[int]) -> list[int]:
        # llama.cpp predicts each token after ours: after a difference no token counts.
        rows = self.rows([*prompt, *ours[:-1]], len(prompt) - 1)
        return [int(np.argmax(row)) for row in rows]


def base_of(bundle: Bundle, named: str, context: int, threads: int, checkpoint: str | None = None) -> Base:
    """Return the base that `--against` names: hf, llama.cpp, or a bundle with the same tokens.

    context: positions that it needs.
    """
    if named == "hf":
        # HF's weights are not quantised, to measure the cost of that, but rounded to a float type like the bundle's.
        weights = "native" if bundle.manifest.weights in QUANTISED else bundle.manifest.weights
        return HuggingFace(checkpoint_of(bundle, checkpoint), weights, threads, adapter_of(bundle))
    if named == "llama.cpp":
        import llama_cpp  # noqa: F401  A missing package is reported first.

        if adapter_of(bundle):
            raise PipelineError("llama.cpp cannot merge the bundle's adapter; compare with hf or a bundle")
        source = checkpoint_of(bundle, checkpoint, any_format=True)
        if source.is_dir():
            raise PipelineError(f"llama.cpp reads GGUF files, and {source} is a directory; give a file with --checkpoint")
        return LlamaCpp(source, context, threads)
    other = open_bundle(named)
    if other.manifest.vocab != bundle.manifest.vocab or not same_tokens(bundle, other):
        raise PipelineError(f"{other.path} and {bundle.path} have different tokens; compare bundles of the same model")
    if other.manifest.context < context:
        raise PipelineError(
            f"{other.path} has a context of {other.manifest.context}, but {context} are needed; give a smaller -c or -n, "
            "or compile it with a larger --context"
        )
    return BundleBase(other, threads)


def same_tokens(one: Bundle, other: Bundle) -> bool:
    """Return whether two bundles have the same tokenizer; true if one of them has none."""
    if one.tokenizer is None or other.tokenizer is None:
        return True
    return load_tokenizer(one).backend.to_str() == load_tokenizer(other).backend.to_str()


def prompts_of(bundle: Bundle, n: int) -> list[tuple[str, list[int]]]:
    """Return the names and token ids of those of verify's prompts that leave `n` positions."""
    found = [] if n == 0 else encoded_prompts(bundle)[::PROMPT_STEP]
    return [(prompt.name, tokens) for prompt, tokens in found if len(tokens) + n <= bundle.manifest.context]


def greedy_texts(session: Session, base: Base, prompts: Sequence[tuple[str, list[int]]], n: int, progress: Report) -> dict:
    """Compare `n` greedy tokens after each prompt with those of the base; return the JSON value."""
    found = []
    for done, (name, prompt) in enumerate(prompts):
        progress(done, len(prompts))
        ours = greedy(session, prompt, n)
        found.append({"name": name, "first_difference": first_difference(base.greedy(prompt, ours), ours)})
    progress(1, 1)
    return {"tokens": n, "equal": sum(each["first_difference"] is None for each in found), "prompts": found}
