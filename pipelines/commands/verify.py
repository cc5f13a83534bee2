"""Compares a bundle's greedy tokens with those of HF transformers in f32, which reads the same checkpoint by itself.

The bundle names its checkpoint and the checkpoint's hash: one that was moved is given with --checkpoint, and another one is
refused. Each prompt is continued by N tokens on both sides, past the end-of-text token. The exit status is 1 if any token
differs. Prompts that need more positions than the bundle has are left out and named.
"""

import argparse
import json

from castiron.pipelines.commands.run import token_ids
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import Progress, say

EXAMPLES = """\
examples:
  castiron verify build/model
  castiron verify build/model --prompts mine.txt -n 128
  castiron verify build/model --tokens 1,2,3 --checkpoint ~/models/Llama-3.2-1B

A prompts file has one prompt a line; a line that starts with { is JSON: {"name": ..., "prompt": TEXT, "raw": true} (raw
leaves the chat template out) or {"name": ..., "tokens": [1, 2, 3]}.

--json prints one object: exact, compared, tokens (for each prompt), skipped, and prompts, each with name, prompt_tokens, exact,
first_difference (position among the generated tokens), castiron and hf (the tokens there), hf_margin (between HF's two
largest logits there), smallest_hf_margin, tokens.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", metavar="FILE", help="the prompts (default: 32 of many kinds that come with castiron)")
    prompts.add_argument("--tokens", type=token_ids, metavar="IDS", help="one prompt of token ids: 1,2,3")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="tokens for each prompt (default: 64)")
    parser.add_argument("--checkpoint", metavar="PATH", help="where the checkpoint is that the bundle was made from "
                        "(default: where it was then)")  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads, for both sides")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.named import generating
    from castiron.pipelines.checking.verify import (
        Prompt,
        adapter_of,
        checkpoint_of,
        compare,
        encoded_prompts,
        load_reference,
        text_of,
    )
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.session import Session

    if args.max_tokens < 1:
        raise PipelineError(f"-n is {args.max_tokens}; it must be at least 1")
    bundle = generating(open_bundle(args.bundle))
    given = [Prompt("--tokens", tokens=tuple(args.tokens))] if args.tokens else None
    gathered = encoded_prompts(bundle, args.prompts, given)
    prompts, skipped = fitting(gathered, bundle.manifest.context, args.max_tokens)
    source = checkpoint_of(bundle, args.checkpoint)
    session = Session(bundle, threads=args.threads)
    found = []
    with Progress() as progress:
        progress("loading HF transformers", 0.0)
        adapter, text = adapter_of(bundle), text_of(bundle)
        model = load_reference(source, bundle.manifest.weights, session.threads, adapter, text)
        for comparison in compare(
            session, model, prompts, args.max_tokens, lambda done, total: progress("comparing", done / total)
        ):
            found.append(comparison)
            if not args.json:
                progress.print(line(comparison))
    exact = all(comparison.first_difference is None for comparison in found)
    if args.json:
        facts = {"exact": exact, "compared": len(found), "tokens": args.max_tokens, "skipped": skipped,
                 "prompts": [comparison.as_json() for comparison in found]}  # fmt: skip
        print(json.dumps(facts, ensure_ascii=False))
    else:
        if skipped:
            say(f"left out, because they need more than the context of {bundle.manifest.context}: {', '.join(skipped)}")
        print(summary(found, args.max_tokens))
    return 0 if exact else 1


def fitting(prompts: list, context: int, n: int) -> tuple[list, list[str]]:
    """The prompts that have room for `n` tokens after them, and the names of those that have not."""
    fits = [(prompt, tokens) for prompt, tokens in prompts if len(tokens) + n - 1 <= context]
    if not fits:
        raise PipelineError(f"no prompt has room for {n} tokens after it in the bundle's context of {context}; lower -n")
    chosen = {id(prompt) for prompt, _ in fits}
    return fits, [prompt.name for prompt, _ in prompts if id(prompt) not in chosen]


def line(comparison) -> str:
    """One prompt's result for a person."""
    facts = comparison.as_json()
    head = f"{facts['name']:<20.20}  {facts['prompt_tokens']:>5} + {len(comparison.tokens)} tokens  "
    if facts["exact"]:
        return f"exact   {head}HF's smallest margin {facts['smallest_hf_margin']:.4f}"
    return (
        f"DIFFERS {head}at generated token {facts['first_difference']}: castiron {facts['castiron']}, HF {facts['hf']}, "
        f"HF's margin {facts['hf_margin']:.6f}"
    )


def summary(found: list, n: int) -> str:
    exact = sum(comparison.first_difference is None for comparison in found)
    return f"{exact} of {len(found)} prompts exact over {n} tokens each"
