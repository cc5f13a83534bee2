"""Puts a module that was compiled by hand into a bundle, which then says so.

The module's functions and their types must be those of the bundle's manifest, and the parameters that it reads those of
the bundle's weights. Weights are linked, not copied, where the file system can.
"""

import argparse
import json
from pathlib import Path

EXAMPLES = """\
examples:
  castiron compile model.gguf -o build/model --keep kept
  iree-compile kept/module.mlir ... -o mine.vmfb    # kept/commands.sh has the flags
  castiron repack build/model --module mine.vmfb -o build/mine

--json prints one object: bundle, module, sha256 (of the module).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR|FILE", help="the bundle, a directory or packed")
    parser.add_argument("--module", metavar="FILE", required=True, help="the module, a .vmfb that iree-compile wrote")
    parser.add_argument("-o", "--output", metavar="DIR", help="where to write the bundle (default: in its place)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.repack import repack
    from castiron.pipelines.errors import PipelineError
    from castiron.vmfb.bundle import open_bundle

    module = Path(args.module)
    if not module.is_file():
        raise PipelineError(f"{module} is not there; give --module a .vmfb that iree-compile wrote")
    bundle = open_bundle(args.bundle, run=False)
    if bundle.packed and not args.output:
        raise PipelineError(f"{args.bundle} is one file, in which nothing is replaced: give a directory with -o")
    made = repack(bundle, module, Path(args.output or args.bundle))
    fact = made.manifest.compile["repacked"]
    facts = {"bundle": str(made.path), "module": fact["module"], "sha256": fact["sha256"]}
    print(json.dumps(facts) if args.json else f"{args.output or args.bundle}: has the module {args.module}")
    return 0
