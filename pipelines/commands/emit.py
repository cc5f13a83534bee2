"""Prints the MLIR that a checkpoint becomes, as the compiler gets it; equal checkpoints and options give equal bytes.

With --function or --layer a part of it, with --kernel one kernel of a given shape without any model: each is a complete
module that iree-compile takes. With --weights-as arguments the text of the portable lowering is pure StableHLO that any
StableHLO compiler takes.
"""

import argparse
import json
import sys
from collections import Counter

from castiron.emitter.ir import Function, Module
from castiron.emitter.printer import print_module
from castiron.pipelines.casting import excerpt
from castiron.pipelines.casting.named_kernel import KINDS, named_kernel
from castiron.pipelines.commands.options import add_compile_arguments, add_model, compile_options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import Progress
from castiron.vmfb.disk import write_text

KERNELS = "\n".join(f"  {name:<18} {kind.shape:<24} {kind.tokens_words}" for name, kind in KINDS.items())
EXAMPLES = f"""\
examples:
  castiron emit smollm2-135m-instruct > model.mlir
  castiron emit model.gguf --lowering portable --weights-as arguments -o model.stablehlo.mlir
  castiron emit smollm2-135m-instruct --layer 3 --function decode_step
  castiron emit --kernel gemv --codec q4_1 --shape 1536x576
  castiron emit --kernel attention_decode --shape 9x3x64 --context 2048 --cache f16 --isa avx512

--kernel           --shape                  --tokens
{KERNELS}

--tokens are rows of x; of attention_decode sequences of a batch, of experts pairs of a token and an expert.

--json prints one object: text, functions (operations by kind, for each), parameters (type by name).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, nargs="?")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the text to a file instead of stdout")
    parser.add_argument("--weights-as", choices=("parameters", "arguments"), default="parameters",
                        help="how functions get weights: as the module's parameters, for IREE, or as arguments")  # fmt: skip
    parser.add_argument("--function", metavar="NAME", help="this function alone: decode_step, prefill_128, ...")
    parser.add_argument("--layer", type=int, metavar="N", help="this block alone, from 0; what comes in are arguments")
    parser.add_argument("--kernel", metavar="NAME", help="instead of a MODEL, one kernel: " + ", ".join(KINDS))
    parser.add_argument("--shape", metavar="NxN", help="sizes of that kernel, as below")
    parser.add_argument("--codec", default="f32", help="how its weight is stored: q4_1, q8_0, bf16, ... (default: f32)")
    parser.add_argument("--tokens", type=int, metavar="N", help="how many tokens it takes at once, as below")
    parser.add_argument("--isa", choices=("avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", "neon", "neoni8mm"),
                        help="vector registers that kernels are shaped for (default: those of --target)")  # fmt: skip
    add_compile_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    module = _kernel(args) if args.kernel else _model(args)
    text = print_module(module, args.weights_as)
    if args.output:
        write_text(args.output, text)
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


def _model(args: argparse.Namespace) -> Module:
    """The module of a checkpoint, or the part of it that was asked for."""
    from castiron.pipelines.casting.compile import build_module, open_source

    if args.model is None:
        raise PipelineError("there is nothing to print: give a MODEL, or --kernel with its --shape")
    if args.shape or args.tokens is not None or args.isa:
        raise PipelineError("--shape, --tokens and --isa are those of a kernel: give --kernel, or leave them out")
    options = compile_options(args)
    with Progress() as progress:
        checkpoint = open_source(args.model, options, progress)
        progress("emit", 0.0)
        module = build_module(checkpoint, options)
    if args.function:
        module = excerpt.one_function(module, args.function)
    return module if args.layer is None else excerpt.one_layer(module, args.layer)


def _kernel(args: argparse.Namespace) -> Module:
    """A module that calls one kernel."""
    from castiron.vmfb.targets import resolve

    options = compile_options(args)
    if args.model or args.function or args.layer is not None:
        raise PipelineError("--kernel prints a kernel of no model: leave MODEL, --function and --layer out")
    if options.lowering != "kernels" or args.weights_as != "parameters":
        raise PipelineError("a kernel has no StableHLO form: leave --lowering and --weights-as out")
    if not args.shape:
        raise PipelineError(f"--kernel {args.kernel} needs its --shape, as castiron emit --help says")
    kernel = named_kernel(
        args.kernel,
        args.shape,
        tokens=args.tokens,
        codec=args.codec,
        isa=args.isa or resolve(args.target).isa,
        threads=options.threads_or_cores,
        context=args.context or 8192,
        numerics=options.numerics,
        cache=options.cache,
    )
    return excerpt.one_kernel(kernel)


def kinds(function: Function) -> dict[str, int]:
    """How many operations of each kind a function has, most frequent first."""
    return dict(Counter(op.kind for op in function.ops).most_common())
