"""List and clear the files that castiron caches.

The cache is the folder $CASTIRON_CACHE, else $XDG_CACHE_HOME/castiron, else ~/.cache/castiron.
Except for the history of chats, castiron makes deleted files again when it needs them. Files that
castiron did not write are neither listed nor cleared, and no link is followed.
"""

import argparse
import json
import time

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import megabytes, print_message
from castiron.vmfb.cache_folder import KINDS, PRECIOUS, cache_root, clear, usage

EXAMPLES = """\
examples:
  castiron cache
  castiron cache clear compile models --older-than 30

models      checkpoints fetched by name
compile     output of iree-compile; above 512 MB the least recently used files are deleted
verified    bundles whose hashes were checked
devices     GPUs that gave the known answer of a bundle
calibrated  activation sizes on a text, for compile --calibrate
tuned       tiles that castiron tune found
shapes      random checkpoints of castiron bench --shape
bundles     bundles that run, chat, serve and castiron.load compiled
fetched     bundles that nodes of a cluster fetched
prefixes    states of long prompts that castiron serve stores for its next start
chat        the history of chats; cleared only when named

--json prints one object: folder, bytes, kinds (kind, about, files, bytes, newest: ISO 8601 or null)
and cleared.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "clear"), default="list", help="default: list")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="kinds, as below (default: all)")
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="clear only files that were not used for so many days")
    add_options(parser, "--json")


def main(args: argparse.Namespace) -> int:
    if unknown := [kind for kind in args.kinds if kind not in KINDS]:
        args.parser.error(f"argument KIND: {unknown[0]!r} is not one of {', '.join(KINDS)}")
    if args.older_than is not None and not 0 <= args.older_than < float("inf"):
        args.parser.error(f"argument --older-than: invalid number of days: {args.older_than:g}; give 0 or more")
    clears = args.action == "clear"
    kinds = tuple(dict.fromkeys(args.kinds)) or tuple(kind for kind in KINDS if not (clears and kind in PRECIOUS))
    if args.older_than is not None and not clears:
        raise PipelineError("--older-than needs the action clear; use castiron cache clear --older-than DAYS")
    rows = clear(kinds, args.older_than or 0.0) if clears else [row for row in usage() if row.kind in kinds]
    total = sum(row.bytes for row in rows)
    for row in rows if clears else ():
        if row.others:
            names = ", ".join(path.name for path in row.others[:3]) + (", …" if len(row.others) > 3 else "")
            print_message(f"not cleared, because castiron did not write it: {names} in {row.others[0].parent}")
    if args.json:
        when = lambda seconds: None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
        found = [
            {"kind": row.kind, "about": KINDS[row.kind], "files": row.files, "bytes": row.bytes, "newest": when(row.newest)}
            for row in rows
        ]
        print(json.dumps({"folder": str(cache_root()), "bytes": total, "cleared": clears, "kinds": found}))
        return 0
    if not clears:
        print(f"{cache_root()}: {megabytes(total)}")
    for row in rows:
        print(f"  {row.kind:<8} {row.files:>6} files {megabytes(row.bytes):>11}  {KINDS[row.kind]}")
    if clears:
        print(f"{megabytes(total)} cleared from {cache_root()}")
    return 0
