"""Run a model with castiron and HF transformers, and show the first module that differs.

castiron runs the emitted graph in a NumPy interpreter, in f32: a difference is in the mathematics,
not in a kernel. --lowering kernels runs the kernels' NumPy definitions. Use a small model.
"""

import argparse
import json

from castiron.pipelines.cli.options import add_checkpoint, add_options, token_ids
from castiron.pipelines.terminal import Progress

EXAMPLES = """\
examples:
  castiron diff smollm2-135m-instruct
  castiron diff ~/models/new-family --tokens 1,2,3,4,5,6,7,8
  castiron diff model.gguf -p "The quick brown fox" --all

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
                        help="difference that counts as equal, by HF's root mean square (default: 0.001)")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="list every module, not only those before the difference")
    add_options(parser, "--json", "--ignore-key")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
    from castiron.pipelines.evaluate.diff import compare

    with Progress() as progress:
        checkpoint = open_checkpoint(args.model, progress, args.ignore_keys)
        tokens = tokens_of(args, checkpoint)
        progress("comparing", 0.0)
        found = compare(checkpoint, tokens, args.tolerance, args.lowering)
        progress("comparing", 1.0)
    if args.json:
        first = found.modules[found.first].module if found.first is not None else None
        modules = [{"module": m.module, "difference": m.difference} for m in found.modules]
        facts = {"equal": found.first is None, "first": first, "operations": found.operations, "modules": modules}
        print(json.dumps(facts))
    else:
        print("\n".join(report(found, args.all)))
    return 0 if found.first is None else 1


def tokens_of(args: argparse.Namespace, checkpoint) -> list[int]:
    """Return the token ids to run, at least two."""
    from castiron.pipelines.errors import PipelineError

    if args.tokens:
        tokens = args.tokens
    elif checkpoint.tokenizer is None:
        raise PipelineError(f"{checkpoint.path} has no tokenizer; give token ids with --tokens 1,2,3")
    else:
        from castiron.pipelines.checkpoints.checkpoint import tokenizer_of
        from castiron.pipelines.text.tokenizer import encode_text

        tokens = encode_text(tokenizer_of(checkpoint.tokenizer, checkpoint.path), args.prompt).ids
    if len(tokens) < 2:
        raise PipelineError(f"the prompt has {len(tokens)} token; attention needs at least 2")
    return tokens


def report(found, everything: bool) -> list[str]:
    """Format the result as text: all modules, or a few before the first difference."""
    width = max(len(m.module) for m in found.modules)
    shown = range(len(found.modules))
    if not everything:
        around = found.first if found.first is not None else len(found.modules) - 1
        shown = range(max(0, around - 3), min(len(found.modules), around + 1))
    lines = [f"{m.module:<{width}}  {m.difference:.1e}" for m in (found.modules[i] for i in shown)]
    if found.first is None:
        worst = max(found.modules, key=lambda m: m.difference)
        return [
            *lines,
            f"all {len(found.modules)} modules agree; the largest difference is {worst.difference:.1e} in {worst.module}",
        ]
    lines.append(f"first difference: {found.modules[found.first].module}, after these operations:")
    return lines + [f"  {kind:<12} {path}" for kind, path in found.operations]
