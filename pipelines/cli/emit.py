"""Print the MLIR of a checkpoint. The same checkpoint and options give the same bytes.

--function and --layer print a part of the model, and --kernel prints one kernel without a model.
The output is always a complete module. --lowering portable prints StableHLO only, for any compiler:
the weights of a function are its last arguments, under their names in the checkpoint.
"""

import argparse
import json
import sys
from collections import Counter

from castiron.emitter.graph.ir import Module
from castiron.emitter.graph.printer import print_module
from castiron.pipelines.cli.options import add_checkpoint, add_compile_options, add_options, compile_options
from castiron.pipelines.compile.extract import extract_function, extract_layer
from castiron.pipelines.compile.named_kernel import KINDS, kernel_module, named_kernel
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import Progress
from castiron.vmfb.file_errors import write_text

KERNELS = "\n".join(f"  {name:<18} {kind.shape:<24} {kind.tokens_words}" for name, kind in KINDS.items())
EXAMPLES = f"""\
examples:
  castiron emit smollm2-135m-instruct > model.mlir
  castiron emit smollm2-135m-instruct --layer 3 --function decode_step
  castiron emit ~/models/Llama-3.2-1B --lowering portable --function prefill_128 -o prefill.mlir
  castiron emit --kernel attention_decode --shape 9x3x64 --context 2048 --kv-cache-type f16 --isa avx512

--kernel           --shape                  --tokens
{KERNELS}

--tokens: rows of x; for attention_decode sequences of a batch, for experts (token, expert) pairs.

--json prints one object: text, functions (operations by kind, for each), parameters (type by name).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, nargs="?")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the text to a file instead of stdout")
    parser.add_argument("--function", metavar="NAME", help="print one function: decode_step, prefill_128, ...")
    parser.add_argument("--layer", type=int, metavar="N", help="print one layer, from 0; its inputs become arguments")
    parser.add_argument("--weights-as", choices=("parameters", "arguments"), metavar="FORM",
                        help="weights are IREE's parameters, or arguments (default with --lowering portable)")  # fmt: skip
    add_options(parser, "--json")
    group = parser.add_argument_group("one kernel instead of a MODEL")
    group.add_argument("--kernel", metavar="NAME", help=f"{', '.join(list(KINDS)[:4])}, ...; see below")
    group.add_argument("--shape", metavar="NxN", help="sizes of the kernel, as below")
    group.add_argument(
        "--codec", type=str.lower, default="f32", metavar="TYPE", help="type of the weight: q4_1, bf16, ... (default: f32)"
    )
    group.add_argument("--tokens", type=int, metavar="N", help="tokens that the kernel processes at once, as below")
    group.add_argument("--isa", choices=("avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", "neon", "neoni8mm"),
                       metavar="ISA", help="avx2, avx512, amx, neon, ... (default: that of --target)")  # fmt: skip
    add_compile_options(parser)


def main(args: argparse.Namespace) -> int:
    module = _kernel(args) if args.kernel else _model(args)
    # The kernels of other lowerings are IREE's too.
    text = print_module(module, args.weights_as or ("arguments" if args.lowering == "portable" else "parameters"))
    if args.output:
        write_text(args.output, text)
    if args.json:
        facts = {
            "text": None if args.output else text,
            "functions": {
                name: dict(Counter(op.kind for op in function.ops).most_common()) for name, function in module.functions.items()
            },
            "parameters": {param.name: str(param.type) for param in module.params.values()},
        }
        print(json.dumps(facts))
    elif not args.output:
        sys.stdout.write(text)
    return 0


def _model(args: argparse.Namespace) -> Module:
    from castiron.pipelines.compile.build_model import build_module, open_source

    if args.model is None:
        raise PipelineError("nothing to print; give a MODEL, or --kernel with its --shape")
    if args.shape or args.tokens is not None or args.isa:
        raise PipelineError("--shape, --tokens and --isa need --kernel; add --kernel, or remove the options that need it")
    options = compile_options(args)
    with Progress() as progress:
        checkpoint = open_source(args.model, options, progress)
        progress("emitting", 0.0)
        module = build_module(checkpoint, options)
    if args.function:
        module = extract_function(module, args.function)
    return module if args.layer is None else extract_layer(module, args.layer)


def _kernel(args: argparse.Namespace) -> Module:
    from castiron.vmfb.targets import resolve

    options = compile_options(args)
    if args.model or args.function or args.layer is not None:
        raise PipelineError("--kernel cannot be combined with MODEL, --function or --layer; remove --kernel or the others")
    if options.lowering != "kernels" or args.weights_as:
        raise PipelineError("--lowering and --weights-as are for models, not for --kernel; remove them")
    if not args.shape:
        raise PipelineError(f"--kernel {args.kernel} needs --shape; see castiron emit --help")
    kernel = named_kernel(
        args.kernel,
        args.shape,
        tokens=args.tokens,
        codec=args.codec,
        isa=args.isa or resolve(args.target).isa,
        threads=options.threads_or_cores,
        context=args.context or 8192,
        numerics=options.numerics,
        kv_cache_type=options.kv_cache_type,
    )
    return kernel_module(kernel)
