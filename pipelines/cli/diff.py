"""Run a model with castiron and HF transformers, and show the first module that differs.

castiron interprets the emitted graph with NumPy in f32, so a difference comes from the graph and
not from a kernel. With --lowering kernels, it runs the NumPy definition of each kernel instead. Use
a small model, because the interpreter is slow.
"""

import argparse
import json

from castiron.pipelines.cli.options import add_checkpoint, add_options, token_ids
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import Progress

EXAMPLES = """\
examples:
  castiron diff smollm2-135m-instruct
  castiron diff ~/models/new-family --tokens 1,2,3,4,5,6,7,8
  castiron diff model.gguf -p "The quick brown fox" --json

The exit status is 1 if anything differs. --json prints one object: equal, first (module),
operations (kind and path), modules (name and difference).
"""
TEXT = "The quick brown fox jumps over the lazy dog, and 12 more of them follow."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("-p", "--prompt", metavar="TEXT", default=TEXT, help="the text to run")
    given.add_argument("--tokens", type=token_ids, metavar="IDS", help="the token ids to run: 1,2,3")
    add_options(parser, "--lowering", default="portable", help="graph to run: portable (default) or kernels")
    parser.add_argument("--tolerance", type=float, default=1e-3, metavar="X",
                        help="largest difference that counts as equal, relative to HF's values (default: 0.001)")  # fmt: skip
    add_options(parser, "--json", "--ignore-key")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
    from castiron.pipelines.evaluate.diff import compare

    if not 0 <= args.tolerance < float("inf"):
        raise PipelineError(f"--tolerance is {args.tolerance:g}; give a number of at least 0")
    with Progress() as progress:
        checkpoint = open_checkpoint(args.model, progress, args.ignore_keys)
        tokens = tokens_of(args, checkpoint)
        progress("comparing", 0.0)
        found = compare(checkpoint, tokens, args.tolerance, args.lowering)
        progress("comparing", 1.0)
    print(json.dumps(found) if args.json else "\n".join(report(found)))
    return 0 if found["equal"] else 1


def tokens_of(args: argparse.Namespace, checkpoint) -> list[int]:
    """Return the token ids of --tokens or --prompt; PipelineError if these are invalid or few."""
    from castiron.emitter.models import read_config
    from castiron.pipelines.text.generate import check_token_ids

    if args.tokens:
        check_token_ids(tokens := args.tokens, read_config(checkpoint.config).vocab)
    elif checkpoint.tokenizer is None:
        raise PipelineError(f"{checkpoint.path} has no tokenizer; give token ids with --tokens 1,2,3")
    else:
        from castiron.pipelines.checkpoints.checkpoint import tokenizer_of
        from castiron.pipelines.text.tokenizer import encode_text

        tokens = encode_text(tokenizer_of(checkpoint.tokenizer, checkpoint.path), args.prompt).ids
    if len(tokens) < 2:
        raise PipelineError(f"the prompt has {len(tokens)} token; give a longer one, because attention needs at least 2")
    return tokens


def report(found: dict) -> list[str]:
    """Return lines on the first module that differs and three before, or on the last four."""
    modules, first = found["modules"], found["first"]
    width = max(len(each["module"]) for each in modules)
    end = next((i for i, each in enumerate(modules) if each["module"] == first), len(modules) - 1)
    lines = [f"{each['module']:<{width}}  {each['difference']:.1e}" for each in modules[max(0, end - 3) : end + 1]]
    if first is None:
        worst = max(modules, key=lambda each: each["difference"])
        largest = f"{worst['difference']:.1e} in {worst['module']}"
        return [*lines, f"all {len(modules)} modules agree; the largest difference is {largest}"]
    lines.append(f"first difference: {first}, after these operations:")
    return lines + [f"  {kind:<12} {path}" for kind, path in found["operations"]]
