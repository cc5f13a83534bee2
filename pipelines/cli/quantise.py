"""Write a checkpoint with quantised weights as a GGUF file, for castiron and llama.cpp.

MODEL is an HF directory or a GGUF file. To use the model only with castiron, no GGUF file is
needed, because castiron compile --weights quantises in the same way.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from castiron.emitter.abi import WEIGHTS
from castiron.pipelines.cli.options import add_checkpoint, add_options
from castiron.pipelines.terminal import Progress, megabytes

EXAMPLES = """\
examples:
  castiron quantise merged -o mine.q4_k_m.gguf
  castiron quantise model.f16.gguf -o model.q6_k.gguf --weights q6_k
  castiron quantise base --adapter outputs/checkpoint-500 -o mine.q8_0.gguf --weights q8_0

--json prints one object: file, bytes, codecs (tensors by codec), seconds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, help="HF directory, GGUF file, or org/name on the hub")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the GGUF file")
    add_options(parser, "--weights", choices=WEIGHTS[1:], default="q4_k_m",
                help=f"{', '.join(WEIGHTS[1:6])}, ... {', '.join(WEIGHTS[-2:])} (default: q4_k_m)")  # fmt: skip
    add_options(parser, "--requantise", "--adapter", "--calibrate", "--ignore-key", "--json")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.compile.compile_options import Options
    from castiron.pipelines.compile.quantise_gguf import quantise

    options = Options(
        weights=args.weights, requantise=args.requantise, adapter=args.adapter, calibrate=args.calibrate,
        ignore_keys=tuple(args.ignore_keys),
    )  # fmt: skip
    with Progress() as progress:
        report = quantise(args.model, Path(args.output), options, progress)
    if args.json:
        print(json.dumps(asdict(report) | {"file": str(report.file)}))
        return 0
    counts = ", ".join(f"{count} {codec}" for codec, count in report.codecs.items())
    print(f"{report.file}: {megabytes(report.bytes)}, {counts} ({report.seconds:.1f} s)")
    return 0
