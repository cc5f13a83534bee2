"""Writes a checkpoint with quantised weights as a GGUF file, which castiron and llama.cpp read.

MODEL is an HF directory, or a GGUF file in f16, bf16 or f32, whose metadata and tokenizer are carried over. Of a directory they
are made, for the families that castiron reads from GGUF, with a byte-level tokenizer, SentencePiece's or none.
castiron compile --weights makes a bundle of the same weights without a file between.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from castiron.pipelines.commands.options import WEIGHTS, add_adapter, add_calibrate, add_ignore_key, add_model, megabytes
from castiron.pipelines.progress import Progress

EXAMPLES = """\
examples:
  castiron quantise merged -o mine.q4_k_m.gguf
  castiron quantise model.f16.gguf -o model.q6_k.gguf --weights q6_k
  castiron quantise base --adapter outputs/checkpoint-500 -o mine.q8_0.gguf --weights q8_0

--json prints one object: file, bytes, codecs (how many tensors by codec), seconds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, help="HF directory, or GGUF file in f16, bf16 or f32; or org/name on the hub")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the GGUF file to write")
    parser.add_argument("--weights", choices=WEIGHTS[1:], default="q4_k_m", help="number format of the weight matrices; q4_k_m "
                        "and q5_k_m mix types as llama.cpp does (default: q4_k_m)")  # fmt: skip
    add_adapter(parser)
    add_calibrate(parser)
    add_ignore_key(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.compile import Options
    from castiron.pipelines.casting.quantise import quantise

    options = Options(weights=args.weights, adapter=args.adapter, calibrate=args.calibrate, ignore_keys=tuple(args.ignore_keys))
    with Progress() as progress:
        report = quantise(args.model, Path(args.output), options, progress)
    if args.json:
        print(json.dumps(asdict(report) | {"file": str(report.file)}))
        return 0
    held = ", ".join(f"{count} {codec}" for codec, count in report.codecs.items())
    print(f"{report.file}: {megabytes(report.bytes)}, {held} ({report.seconds:.1f} s)")
    return 0
