"""Compile a checkpoint into a bundle, which runs without torch, transformers or a compiler.

If the model is given by name, it is downloaded first and its hash is checked. A bundle that is up
to date is not compiled again.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from castiron.pipelines.cli.options import add_checkpoint, add_compile_options, add_options, compile_options, default_bundle
from castiron.pipelines.terminal import Progress, megabytes, print_message

EXAMPLES = """\
examples:
  castiron compile smollm2-135m-instruct
  castiron compile ~/models/Llama-3.2-1B-Instruct -o build/llama --context 4096
  castiron compile org/name-GGUF:Q4_K_M --kv-cache-type q8_0
  castiron compile ~/models/base --adapter outputs/checkpoint-500 --weights q4_k_m --calibrate examples.txt
  castiron compile build/model --module mine.vmfb    # --save-temps writes the flags of iree-compile

--weights q8_0 and smaller types quantise checkpoints in f32, bf16 or f16; q4_k_m and q5_k_m mix
types as llama.cpp does. castiron evaluate measures what that costs.

--json prints one object: bundle, up_to_date, seconds (by stage), files (bytes by name), kv_cache_type
(type), tokenizer (false: the bundle takes token ids only), left_out (tensors that are not part of
the text model, by prefix), accuracy (with --numerics fast on this machine: the distance from exact
numerics; else null). With --module: bundle, module, sha256.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="the bundle's directory (default: build/NAME)")
    add_compile_options(parser)
    add_options(parser, "--json")
    group = parser.add_argument_group("debugging")
    group.add_argument("--no-tuned", action="store_true", help="ignore tiles that castiron tune found on this machine")
    group.add_argument("--save-temps", metavar="DIR", help="write all MLIR and the exact compiler commands to this folder")
    group.add_argument("--module", metavar="FILE", help="replace the module of the bundle MODEL by this .vmfb file")
    group.add_argument("--iree-flag", action="append", default=[], metavar="FLAG",
                       help="flag for iree-compile, as in --iree-flag=--iree-opt-level=O2; may be repeated")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    if args.module:
        return replace_module(args)
    from castiron.pipelines.checkpoints.hf.tensor_layouts import in_words
    from castiron.pipelines.compile.compile_model import compile_model
    from castiron.pipelines.compile.compile_options import GPU_LOWERING
    from castiron.pipelines.evaluate.perplexity import own_accuracy

    out, keep = args.output or default_bundle(args.model), args.save_temps and Path(args.save_temps)
    with Progress() as progress:
        report = compile_model(args.model, out, compile_options(args), progress, keep=keep, evaluate=own_accuracy)
    manifest, up_to_date, seconds = report.manifest, report.up_to_date, report.seconds
    if manifest.accuracy:
        print_message(f"numerics {args.numerics}, {manifest.accuracy}")
    elif args.numerics == "fast":
        print_message(f"numerics {args.numerics}: accuracy not measured; run castiron evaluate on a machine with such a CPU")
    files, left_out = {name: file.size for name, file in manifest.files.items()}, manifest.source["left_out"]
    tokenizer = "tokenizer.json" in files
    if args.json:
        facts = {"bundle": str(report.bundle), "up_to_date": up_to_date, "seconds": seconds, "files": files}
        accuracy = manifest.accuracy and asdict(manifest.accuracy)
        facts |= {"kv_cache_type": manifest.cache, "tokenizer": tokenizer, "left_out": left_out, "accuracy": accuracy}
        print(json.dumps(facts))
        return 0
    size = megabytes(sum(files.values())) + ("" if manifest.cache == "f32" else f", {manifest.cache} cache")
    if up_to_date:
        print(f"{out}: up to date, {size}")
    else:
        stages = ", ".join(f"{stage} {taken:.1f} s" for stage, taken in seconds.items())
        print(f"{out}: {size} ({stages})")
    if args.save_temps:
        print(f"{args.save_temps}: MLIR and compiler commands")
    if manifest.lowering == GPU_LOWERING:
        from castiron.emitter.kernels.gpu.words import widened

        for codec in manifest.codecs:
            if stored := widened(codec):
                print(f"{codec} weights are stored as {stored}")
    if left_out:
        print(f"left out: {in_words(left_out)}")
    if not tokenizer:
        print("no tokenizer: this bundle takes token ids only; use castiron run DIR --tokens 1,2,3")
    return 0


def replace_module(args: argparse.Namespace) -> int:
    """Replace the .vmfb file of a bundle (`castiron compile --module`); return the exit status."""
    from castiron.pipelines.errors import PipelineError
    from castiron.vmfb.bundle.bundle import open_bundle
    from castiron.vmfb.compiler import replace_module as compiled

    module = Path(args.module)
    if not module.is_file():
        raise PipelineError(f"no such file: {module}; give --module a .vmfb that iree-compile wrote")
    bundle = open_bundle(args.model, run=False)
    if bundle.packed and not args.output:
        raise PipelineError(f"cannot change a packed bundle: {args.model}; write a new bundle with -o DIR")
    made = compiled.replace_module(bundle, module, Path(args.output or args.model))
    custom = made.manifest.compile["custom_module"]
    result = {"bundle": str(made.path), "module": custom["module"], "sha256": custom["sha256"]}
    print(json.dumps(result) if args.json else f"{made.path}: module replaced by {args.module}")
    return 0
