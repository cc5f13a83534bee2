"""Runs a model beside HF transformers and shows the first module whose activations differ.

Our side is the emitted graph in a NumPy interpreter, so that a difference is one of mathematics and not of a kernel;
--lowering kernels runs the kernels' NumPy definitions instead. For small models: everything is computed in f32.
"""

import argparse
import json

from castiron.pipelines.commands.options import add_ignore_key, add_model
from castiron.pipelines.progress import Progress

EXAMPLES = """\
examples:
  castiron diff smollm2-135m-instruct
  castiron diff ~/models/new-family --tokens 1,2,3,4,5,6,7,8
  castiron diff model.gguf -p "The quick brown fox" --all

The exit status is 1 if anything differs. --json prints one object: equal, first (module), operations (kind and path),
modules (name and difference).
"""
TEXT = "The quick brown fox jumps over the lazy dog, and 12 more of them follow."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("-p", "--prompt", metavar="TEXT", default=TEXT, help="the text to run")
    given.add_argument("--tokens", metavar="IDS", help="token ids to run: 1,2,3")
    parser.add_argument("--lowering", choices=("kernels", "portable"), default="portable", help="the graph to interpret")
    parser.add_argument("--tolerance", type=float, default=1e-3, metavar="X",
                        help="largest difference, as a share of the root mean square (default: 0.001)")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="list every module, not only those near the first difference")
    add_ignore_key(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.checking.diff import compare
    from castiron.pipelines.checkpoints import open_checkpoint

    with Progress() as progress:
        checkpoint = open_checkpoint(args.model, progress, args.ignore_keys)
        tokens = tokens_of(args, checkpoint)
        progress("compare", 0.0)
        found = compare(checkpoint, tokens, args.tolerance, args.lowering)
        progress("compare", 1.0)
    if args.json:
        first = found.modules[found.first].module if found.first is not None else None
        modules = [{"module": m.module, "difference": m.difference} for m in found.modules]
        facts = {"equal": found.first is None, "first": first, "operations": found.operations, "modules": modules}
        print(json.dumps(facts))
    else:
        print("\n".join(report(found, args.all)))
    return 0 if found.first is None else 1


def tokens_of(args: argparse.Namespace, checkpoint) -> list[int]:
    """The ids to run, at least two."""
    from castiron.pipelines.errors import PipelineError

    if args.tokens:
        try:
            tokens = [int(part) for part in args.tokens.split(",")]
        except ValueError:
            raise PipelineError(f"--tokens takes ids with commas, such as 1,2,3, not {args.tokens!r}") from None
    elif checkpoint.tokenizer is None:
        raise PipelineError(f"{checkpoint.path} has no tokenizer: give token ids with --tokens 1,2,3")
    else:
        from castiron.pipelines.generation.tokenizing import encoded
        from castiron.pipelines.generation.trial import tokenizer_of

        tokens = encoded(tokenizer_of(checkpoint.tokenizer, checkpoint.path), args.prompt, True)
    if len(tokens) < 2:
        raise PipelineError("give at least two tokens: one alone does not test attention")
    return tokens


def report(found, everything: bool) -> list[str]:
    """The result for a person."""
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
