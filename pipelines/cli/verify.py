"""Compare a bundle's greedy tokens with those of HF transformers on the same checkpoint.

Both generate N tokens after each prompt, and do not stop at an end-of-text token. HF computes in
f32. The exit status is 1 if any token differs. Prompts that do not fit in the bundle's largest
context are skipped, with a message.
"""

import argparse
import json

from castiron.pipelines.cli.open_engine import with_device
from castiron.pipelines.cli.options import add_options, token_ids
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import Progress, print_message

EXAMPLES = """\
examples:
  castiron verify build/model
  castiron verify build/model --prompts mine.txt -n 128
  castiron verify build/model --tokens 1,2,3 --checkpoint ~/models/Llama-3.2-1B

A prompts file has one prompt a line; a line that starts with { is JSON: {"name": ..., "prompt":
TEXT, "raw": true} (raw leaves the chat template out) or {"name": ..., "tokens": [1, 2, 3]}.

--json prints one object: exact, compared, tokens (for each prompt), skipped, and prompts, each with
name, prompt_tokens, exact, first_difference (position among the generated tokens), castiron and hf
(the tokens there), hf_margin (between HF's two largest logits there), smallest_hf_margin, tokens.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", metavar="FILE", help="the prompts (default: 32 that come with castiron)")
    prompts.add_argument("--tokens", type=token_ids, metavar="IDS", help="one prompt of token ids: 1,2,3")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="tokens for each prompt (default: 64)")
    add_options(parser, "--checkpoint", "--threads", "--device", "--json")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.compile.open_model import require_generation
    from castiron.pipelines.evaluate.verify import (
        Prompt,
        adapter_of,
        checkpoint_of,
        compare,
        encoded_prompts,
        load_reference,
        text_of,
    )
    from castiron.vmfb.bundle.bundle import open_bundle
    from castiron.vmfb.run.session import Session

    if args.max_tokens < 1:
        raise PipelineError(f"-n is {args.max_tokens}; it must be at least 1")
    bundle = with_device(require_generation(open_bundle(args.bundle)), args.device)
    bundle = bundle.with_context(bundle.manifest.max_context)
    given = [Prompt("--tokens", tokens=tuple(args.tokens))] if args.tokens else None
    gathered, context = encoded_prompts(bundle, args.prompts, given), bundle.manifest.context
    prompts = [(prompt, tokens) for prompt, tokens in gathered if len(tokens) + args.max_tokens - 1 <= context]
    skipped = [prompt.name for prompt, tokens in gathered if len(tokens) + args.max_tokens - 1 > context]
    if not prompts:
        raise PipelineError(f"no prompt leaves space for {args.max_tokens} tokens in the context of {context}; reduce -n")
    source = checkpoint_of(bundle, args.checkpoint)
    session = Session(bundle, threads=args.threads)
    found = []
    with Progress() as progress:
        progress("loading HF transformers", 0.0)
        adapter, text = adapter_of(bundle), text_of(bundle)
        model = load_reference(source, bundle.manifest.weights, session.threads, adapter, text)
        for done, (prompt, tokens) in enumerate(prompts):
            progress("comparing", done / len(prompts))
            found.append(compare(session, model, prompt, tokens, args.max_tokens))
            if not args.json:
                progress.print(line(found[-1]))
    exact = sum(each["exact"] for each in found)
    if args.json:
        facts = {"exact": exact == len(found), "compared": len(found), "tokens": args.max_tokens, "skipped": skipped,
                 "prompts": found}  # fmt: skip
        print(json.dumps(facts, ensure_ascii=False))
    else:
        if skipped:
            print_message(f"skipped (longer than the context of {context} tokens): {', '.join(skipped)}")
        print(f"{exact} of {len(found)} prompts exact over {args.max_tokens} tokens each")
    return 0 if exact == len(found) else 1


def line(facts: dict) -> str:
    head = f"{facts['name']:<20.20}  {facts['prompt_tokens']:>5} + {len(facts['tokens'])} tokens  "
    if facts["exact"]:
        return f"exact   {head}HF's smallest margin {facts['smallest_hf_margin']:.4f}"
    return (
        f"DIFFERS {head}at generated token {facts['first_difference']}: castiron {facts['castiron']}, HF {facts['hf']}, "
        f"HF's margin {facts['hf_margin']:.6f}"
    )
