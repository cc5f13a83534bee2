"""Casts a checkpoint into a bundle: a directory that the IREE runtime runs without torch, transformers or a compiler.

MODEL is a GGUF file, an HF directory (config.json, safetensors, tokenizer.json), a name from the catalogue (`castiron inspect`
lists it), or org/name on Hugging Face's hub; what a name stands for is fetched and checked. A bundle that is up to date is left
as it is.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from castiron.pipelines.commands.options import add_compile_arguments, add_model, compile_options, default_bundle, megabytes
from castiron.pipelines.progress import Progress, say

EXAMPLES = """\
examples:
  castiron compile smollm2-135m-instruct
  castiron compile ~/models/Llama-3.2-1B-Instruct -o build/llama --context 4096
  castiron compile model.Q4_K_M.gguf -o build/model --target x86-64-v3
  castiron compile org/name-GGUF --file Q4_K_M
  castiron compile model.gguf --cache q8_0 --context 32768
  castiron compile outputs/merged --weights q4_k_m --calibrate examples.txt
  castiron compile ~/models/base --adapter outputs/checkpoint-500 --weights q8_0
  castiron compile model.gguf --keep kept --iree-flag=--iree-opt-level=O2

--weights q8_0 and smaller types quantise f32, bf16 or f16 checkpoints, with less error than llama.cpp's quantiser; the types of
q4_k_m and q5_k_m by tensor are its own. castiron evaluate DIR --against hf, or another bundle, says what that costs.

--json prints one object: bundle, up_to_date, seconds (by stage), files (bytes by name), cache (of what elements), tokenizer
(false if the bundle takes token ids only), left_out (how many tensors are no part of a text's model, by what their names begin
with), accuracy (with --numerics fast, where this machine runs the bundle: how far it is from its own exact steps on a few
hundred tokens, as in the manifest; else null).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="where to write the bundle (default: build/NAME)")
    add_compile_arguments(parser)
    parser.add_argument("--no-tuned", action="store_true", help="ignore what castiron tune found on this machine")
    parser.add_argument("--iree-flag", action="append", default=[], metavar="FLAG", help="a flag for iree-compile, after "
                        "castiron's own: --iree-flag=--iree-opt-level=O2; may be repeated")  # fmt: skip
    parser.add_argument("--keep", metavar="DIR", help="keep all MLIR, before lowering and after, and the commands that "
                        "make the module and put it into the bundle")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object about what was done")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.compile import compile_model
    from castiron.pipelines.checking.likelihood import own_accuracy
    from castiron.pipelines.checkpoints.text_part import in_words

    out, keep = args.output or default_bundle(args.model), args.keep and Path(args.keep)
    with Progress() as progress:
        report = compile_model(args.model, out, compile_options(args), progress, keep=keep, evaluate=own_accuracy)
    if report.accuracy:
        say(f"numerics {args.numerics}, {report.accuracy}")
    elif args.numerics == "fast":
        say(f"numerics {args.numerics}: not evaluated, since it takes a machine that runs {args.target} and a longer text")
    tokenizer = "tokenizer.json" in report.files
    if args.json:
        print(json.dumps(asdict(report) | {"bundle": str(report.bundle), "tokenizer": tokenizer}))
        return 0
    size = megabytes(sum(report.files.values())) + ("" if report.cache == "f32" else f", {report.cache} cache")
    if report.up_to_date:
        print(f"{out}: up to date, {size}")
    else:
        stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.seconds.items())
        print(f"{out}: {size} ({stages})")
    if args.keep:
        print(f"{args.keep}: its MLIR, and the commands that make it")
    if report.left_out:
        print(f"left out: {in_words(report.left_out)}")
    if not tokenizer:
        print("the checkpoint has no tokenizer: this bundle takes token ids only (castiron run DIR --tokens 1,2,3)")
    return 0
