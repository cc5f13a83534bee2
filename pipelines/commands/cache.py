"""Lists what castiron keeps to make it only once, clears it, and adds the state of a long system message.

The folder is $CASTIRON_CACHE, else $XDG_CACHE_HOME/castiron, else ~/.cache/castiron. All of it can be made again: models are
fetched again, the rest is computed. One that cannot be written is said on stderr and fails nothing.

castiron cache add BUNDLE FILE --prefix-cache DIR reads the text of FILE as the system message that conversations will begin
with (with --raw as the beginning of plain text) and keeps the bundle's state in DIR, where run, chat and serve with the same
option find it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.commands.generating import (
    add_prefix_cache_arguments,
    add_template_argument,
    prefix_store,
    template_args,
)
from castiron.pipelines.commands.options import megabytes
from castiron.pipelines.errors import PipelineError
from castiron.vmfb import cache
from castiron.vmfb.cache import KINDS

if TYPE_CHECKING:
    import numpy as np

    from castiron.pipelines.generation.text import Text

EXAMPLES = """\
examples:
  castiron cache
  castiron cache clear
  castiron cache clear compile unpacked --older-than 30
  CASTIRON_CACHE=/data/castiron castiron cache --json
  castiron cache add build/model system.txt --prefix-cache states

models    checkpoints fetched by name
compile   what iree-compile made of modules; beyond 512 MB what was unused longest goes by itself
unpacked  program and weights of packed bundles, for IREE's tools; unused for a week, they make room for others
verified  which bundles were found whole, so that their files are not hashed each time
calibrated  how large activations were on a text, for compile --calibrate
tuned     tiles that castiron tune found; without them compile takes the shipped ones
shapes    random checkpoints of known shapes, which castiron bench --shape made
bundles   bundles of models that run, chat, serve and castiron.load were given by name or checkpoint
fetched   bundles that nodes of a cluster fetched, one for all processes of a node
chat      what was typed in chats, for the arrow keys; cleared when it is named only

--json prints one object: folder, bytes (of all that is listed), kinds (kind, about, files, bytes, newest: when one was
written or used last, ISO 8601, or null) and cleared (whether they are gone by now); of add: folder, tokens (of the text with
what the template puts before it) and kept (of how many of them there is a state now).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "clear", "add"), default="list", help="default: list")
    parser.add_argument("words", nargs="*", metavar="KIND|BUNDLE FILE",
                        help=f"of list and clear: {', '.join(KINDS)} (default: all; chat is cleared only when named); of add: "
                        "a bundle or a model, and a file of text")  # fmt: skip
    parser.add_argument(
        "--older-than", type=days, metavar="DAYS", help="clear what was neither written nor used for so many days"
    )
    group = parser.add_argument_group("castiron cache add")
    add_prefix_cache_arguments(group)
    group.add_argument("--raw", action="store_true", help="take the text as it is, without the chat template")
    add_template_argument(group)
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per physical core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


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
    if args.action == "add":
        return add(args)
    if unknown := [word for word in args.words if word not in KINDS]:
        args.parser.error(f"argument KIND: {unknown[0]!r} is not one of {', '.join(KINDS)}")
    clears = args.action == "clear"
    kinds = tuple(dict.fromkeys(args.words)) or tuple(kind for kind in KINDS if not (clears and kind in cache.PRECIOUS))
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


def add(args: argparse.Namespace) -> int:
    """Keeps the state of a text that prompts will begin with."""
    if len(args.words) != 2 or args.prefix_cache is None:
        args.parser.error("add takes a bundle, a file and a folder: castiron cache add BUNDLE FILE --prefix-cache DIR")
    from castiron.pipelines.casting.named import bundle_of
    from castiron.pipelines.commands.run import decoded
    from castiron.pipelines.generation.text import load_text
    from castiron.pipelines.progress import Progress
    from castiron.vmfb.session import Session

    place, file = args.words
    words, bundle = decoded(Path(file).read_bytes()), bundle_of(place)
    store, text = prefix_store(args, bundle.manifest), load_text(bundle, template_args(args))
    tokens = beginning(text, words, args.raw)
    with Progress() as progress:
        kept = store.prepare(
            Session(bundle, threads=args.threads), tokens, lambda done, total: progress("reading the text", done / total)
        )
    if args.json:
        print(json.dumps({"folder": str(store.directory), "tokens": len(tokens), "kept": kept}))
    else:
        print(f"{store.directory}: {kept} of {len(tokens)} tokens kept; the rest is less than a whole chunk of {store.width}")
    return 0


def beginning(text: "Text", words: str, raw: bool) -> "np.ndarray":
    """The ids, i32 [n], that every conversation with this system message begins with; or every plain text that begins so."""
    import numpy as np

    from castiron.pipelines.generation.positions import shared

    if raw or text.chat_template is None:
        # The last one may become another with what follows it.
        return np.array(text.encode(words)[:-1], np.int32)
    # As a shell gives it to --system "$(cat FILE)".
    system = {"role": "system", "content": words.rstrip("\n")}
    # What questions have in common that begin with other letters.
    asked = [np.array(text.encode_chat([system, {"role": "user", "content": q}]), np.int32) for q in ("A", "7")]
    return asked[0][: shared(*asked)]


def as_json(row: cache.Held) -> dict:
    newest = None if row.newest is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row.newest))
    return {"kind": row.kind, "about": KINDS[row.kind], "files": row.files, "bytes": row.bytes, "newest": newest}
