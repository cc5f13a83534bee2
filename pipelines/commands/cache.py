"""Lists what castiron keeps to make it only once, and clears it.

The folder is $CASTIRON_CACHE, else $XDG_CACHE_HOME/castiron, else ~/.cache/castiron. All of it can be made again: models are
fetched again, the rest is computed. One that cannot be written is said on stderr and fails nothing.
"""

import argparse
import json
import time

from castiron.pipelines.commands.options import megabytes
from castiron.pipelines.errors import PipelineError
from castiron.vmfb import cache
from castiron.vmfb.cache import KINDS

EXAMPLES = """\
examples:
  castiron cache
  castiron cache clear
  castiron cache clear compile unpacked --older-than 30
  CASTIRON_CACHE=/data/castiron castiron cache --json

models    checkpoints fetched by name
compile   what iree-compile made of modules; beyond 512 MB what was unused longest goes by itself
unpacked  program and weights of packed bundles, for IREE's tools; unused for a week, they make room for others
verified  which bundles were found whole, so that their files are not hashed each time
calibrated  how large activations were on a text, for compile --calibrate
tuned     tiles that castiron tune found; without them compile takes the shipped ones
shapes    random checkpoints of known shapes, which castiron bench --shape made
bundles   bundles of models that run, chat, serve and castiron.load were given by name or checkpoint
chat      what was typed in chats, for the arrow keys; cleared when it is named only

--json prints one object: folder, bytes (of all that is listed), kinds (kind, about, files, bytes, newest: when one was
written or used last, ISO 8601, or null) and cleared (whether they are gone by now).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "clear"), default="list", help="default: list")
    parser.add_argument("kinds", nargs="*", type=kind, metavar="KIND",
                        help=f"{', '.join(KINDS)} (default: all; chat is cleared only when named)")  # fmt: skip
    parser.add_argument(
        "--older-than", type=days, metavar="DAYS", help="clear what was neither written nor used for so many days"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def kind(text: str) -> str:
    """A name of KINDS; argparse's error for another word."""
    if text not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(KINDS)}")
    return text


def days(text: str) -> float:
    """A number of days, which may be 0 or a fraction; argparse's error for anything else."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return found


def main(args: argparse.Namespace) -> int:
    clears = args.action == "clear"
    kinds = tuple(dict.fromkeys(args.kinds)) or tuple(kind for kind in KINDS if not (clears and kind in cache.PRECIOUS))
    if args.older_than is not None and not clears:
        raise PipelineError("--older-than says what to clear: castiron cache clear --older-than DAYS")
    rows = cache.clear(kinds, args.older_than or 0.0) if clears else [row for row in cache.held() if row.kind in kinds]
    total = sum(row.bytes for row in rows)
    if args.json:
        facts = {"folder": str(cache.cache_root()), "bytes": total, "cleared": clears, "kinds": [as_json(row) for row in rows]}
        print(json.dumps(facts))
        return 0
    if not clears:
        print(f"{cache.cache_root()}: {megabytes(total)}")
    for row in rows:
        print(f"  {row.kind:<8} {row.files:>6} files {megabytes(row.bytes):>11}  {KINDS[row.kind]}")
    if clears:
        print(f"{megabytes(total)} cleared from {cache.cache_root()}")
    return 0


def as_json(row: cache.Held) -> dict:
    newest = None if row.newest is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row.newest))
    return {"kind": row.kind, "about": KINDS[row.kind], "files": row.files, "bytes": row.bytes, "newest": newest}
