"""Writes a bundle as one file, which every command takes as it takes the directory.

The file is a zip archive whose parts are stored as they are, on pages of their own: the weights are mapped where they
lie, and unzip gives the directory back. What is packed is checked against the manifest's sha256. Of a file explain copies
program and weights into the cache, once, because IREE's own tools want paths.
"""

import argparse
import json
from pathlib import Path

from castiron.pipelines.commands.options import megabytes
from castiron.pipelines.progress import Progress

EXAMPLES = """\
examples:
  castiron pack build/smollm2-135m-instruct -o smollm2.castiron
  castiron run smollm2.castiron -p "Why is the sky blue?"
  castiron verify smollm2.castiron
  castiron pack build/smollm2-135m-instruct -o signed.castiron --sign key.pem
  unzip smollm2.castiron -d bundle

--json prints one object: file, bytes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: DIR.castiron)")
    parser.add_argument("--sign", metavar="KEY", help="sign it with the private Ed25519 key in this PEM file, for those who "
                        "open it with --verify-key; without it a signature stays as it is")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.vmfb.bundle import open_bundle, pack_bundle

    # Packing asks nothing of this machine.
    bundle = open_bundle(args.bundle, run=False)
    out = Path(args.output or f"{Path(args.bundle).resolve()}.castiron")
    with Progress() as progress:
        pack_bundle(bundle, out, lambda done, total: progress("pack", done / total), args.sign)
    size = out.stat().st_size
    print(json.dumps({"file": str(out), "bytes": size}) if args.json else f"{out}: {megabytes(size)}")
    return 0
