"""Prints the MLIR that a checkpoint becomes, as the compiler gets it; equal checkpoints and options give equal bytes.

With --weights-as arguments the text of the portable lowering is pure StableHLO that any StableHLO compiler takes.
"""

import argparse
import json
import sys

from castiron.pipelines.commands.options import add_compile_arguments, compile_options
from castiron.pipelines.progress import Progress

EXAMPLES = """\
examples:
  castiron emit smollm2-135m-instruct > model.mlir
  castiron emit model.gguf --lowering portable --weights-as arguments -o model.stablehlo.mlir

--json prints one object: text, functions (operations by kind, for each), parameters (type by name).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="GGUF file, HF directory or catalogue name")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the text to a file instead of stdout")
    parser.add_argument("--weights-as", choices=("parameters", "arguments"), default="parameters",
                        help="how functions get weights: as the module's parameters, for IREE, or as arguments")  # fmt: skip
    add_compile_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.emitter.printer import print_module
    from castiron.pipelines.casting.compile import build_module
    from castiron.pipelines.checkpoints import open_checkpoint

    options = compile_options(args)
    with Progress() as progress:
        checkpoint = open_checkpoint(args.model, progress)
        progress("emit", 0.0)
        module = build_module(checkpoint, options)
        text = print_module(module, args.weights_as)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(text)
    if args.json:
        facts = {
            "text": None if args.output else text,
            "functions": {name: kinds(function) for name, function in module.functions.items()},
            "parameters": {param.name: str(param.type) for param in module.params.values()},
        }
        print(json.dumps(facts))
    elif not args.output:
        sys.stdout.write(text)
    return 0


def kinds(function) -> dict[str, int]:
    """How many operations of each kind a function has, most frequent first."""
    from collections import Counter

    return dict(Counter(op.kind for op in function.ops).most_common())
