"""Write a bundle as one file, which every command accepts in place of the directory.

castiron pack first compares the bundle's files with the hashes in the manifest. The new file is a
zip archive; unzip restores the directory. The files in it are uncompressed and page-aligned, so
that weights can be memory-mapped.
"""

import argparse
import json
from pathlib import Path

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.terminal import Progress, megabytes

EXAMPLES = """\
examples:
  castiron pack build/smollm2-135m-instruct -o smollm2.castiron
  castiron run smollm2.castiron "Why is the sky blue?"
  unzip smollm2.castiron -d bundle

--json prints one object: file, bytes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file (default: DIR.castiron)")
    add_options(parser, "--json")


def main(args: argparse.Namespace) -> int:
    from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle

    bundle = open_bundle(args.bundle, run=False)
    out = Path(args.output or f"{Path(args.bundle).resolve()}.castiron")
    with Progress() as progress:
        pack_bundle(bundle, out, lambda done, total: progress("pack", done / total))
    size = out.stat().st_size
    print(json.dumps({"file": str(out), "bytes": size}) if args.json else f"{out}: {megabytes(size)}")
    return 0
