"""List and clear the files that castiron caches, or add a long system message to a prefix cache.

The folder is $CASTIRON_CACHE, else $XDG_CACHE_HOME/castiron, else ~/.cache/castiron. castiron makes
a cleared file again when it needs it, except the history of chats.

castiron cache add BUNDLE FILE --prefix-cache DIR computes the model's state after the system
message in FILE (with --raw: after plain text), and stores it in DIR. run, chat and serve with the
same --prefix-cache DIR reuse it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.cli.options import add_options, prefix_store
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import megabytes
from castiron.vmfb import cache
from castiron.vmfb.cache import KINDS

if TYPE_CHECKING:
    import numpy as np

    from castiron.pipelines.text.tokenizer import Tokenizer

EXAMPLES = """\
examples:
  castiron cache
  castiron cache clear compile models --older-than 30
  castiron cache add build/model system.txt --prefix-cache states

models      checkpoints fetched by name
compile     output of iree-compile; above 512 MB the least recently used files are deleted
verified    bundles whose hashes were checked
calibrated  activation sizes on a text, for compile --calibrate
tuned       tiles that castiron tune found
shapes      random checkpoints of castiron bench --shape
bundles     bundles that run, chat, serve and castiron.load compiled
fetched     bundles that nodes of a cluster fetched
prefixes    states of long prompts that castiron serve stores for its next start
chat        the history of chats; cleared only when named

--json prints one object: folder, bytes, kinds (kind, about, files, bytes, newest: ISO 8601 or null)
and cleared; of add: folder, tokens (of the prefix) and stored (tokens whose state is stored now).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "clear", "add"), default="list", help="default: list")
    parser.add_argument("words", nargs="*", metavar="KIND|BUNDLE FILE",
                        help="list, clear: kinds, as below (default: all); add: a bundle and a text file")  # fmt: skip
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="clear only files that were not used for so many days")
    add_options(parser, "--json")
    group = parser.add_argument_group("castiron cache add")
    add_options(group, "--prefix-cache", "--prefix-cache-size", "--raw", "--template-arg", "--threads")


def main(args: argparse.Namespace) -> int:
    if args.action == "add":
        return add(args)
    if unknown := [word for word in args.words if word not in KINDS]:
        args.parser.error(f"argument KIND: {unknown[0]!r} is not one of {', '.join(KINDS)}")
    if args.older_than is not None and not 0 <= args.older_than < float("inf"):
        args.parser.error(f"argument --older-than: invalid number of days: {args.older_than:g}")
    clears = args.action == "clear"
    kinds = tuple(dict.fromkeys(args.words)) or tuple(kind for kind in KINDS if not (clears and kind in cache.PRECIOUS))
    if args.older_than is not None and not clears:
        raise PipelineError("--older-than needs the action clear; use castiron cache clear --older-than DAYS")
    rows = cache.clear(kinds, args.older_than or 0.0) if clears else [row for row in cache.usage() if row.kind in kinds]
    total = sum(row.bytes for row in rows)
    if args.json:
        when = lambda seconds: None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
        found = [
            {"kind": row.kind, "about": KINDS[row.kind], "files": row.files, "bytes": row.bytes, "newest": when(row.newest)}
            for row in rows
        ]
        print(json.dumps({"folder": str(cache.cache_root()), "bytes": total, "cleared": clears, "kinds": found}))
        return 0
    if not clears:
        print(f"{cache.cache_root()}: {megabytes(total)}")
    for row in rows:
        print(f"  {row.kind:<8} {row.files:>6} files {megabytes(row.bytes):>11}  {KINDS[row.kind]}")
    if clears:
        print(f"{megabytes(total)} cleared from {cache.cache_root()}")
    return 0


def add(args: argparse.Namespace) -> int:
    """Run `castiron cache add`: compute the states (KV cache) after a text; store them on disk."""
    if len(args.words) != 2 or args.prefix_cache is None:
        args.parser.error("add needs a bundle, a file and --prefix-cache DIR")
    from castiron.pipelines.cli.run import decoded
    from castiron.pipelines.compile.open_model import open_or_compile
    from castiron.pipelines.terminal import Progress
    from castiron.pipelines.text.tokenizer import load_tokenizer
    from castiron.vmfb.session import Session

    model, file = args.words
    prefix, bundle = decoded(Path(file).read_bytes()), open_or_compile(model, announce=True)
    store, text = prefix_store(args, bundle.manifest), load_tokenizer(bundle, dict(args.template_arg))
    tokens = prefix_tokens(text, prefix, args.raw)
    with Progress() as progress:
        stored = store.prepare(
            Session(bundle, threads=args.threads), tokens, lambda done, total: progress("reading the text", done / total)
        )
    if args.json:
        print(json.dumps({"folder": str(store.directory), "tokens": len(tokens), "stored": stored}))
    else:
        print(f"{store.directory}: {stored} of {len(tokens)} tokens stored; the rest is less than a chunk of {store.width}")
    return 0


def prefix_tokens(text: "Tokenizer", prefix: str, raw: bool) -> "np.ndarray":
    """Return the token ids, i32 [n], that all prompts with the prefix `prefix` have in common.

    text: the model's tokenizer. prefix: a system message, or with `raw` the start of a plain text.
    """
    import numpy as np

    from castiron.pipelines.engine.context import common_prefix

    if raw or text.chat_template is None:
        # The last token of the prefix may depend on the text after it.
        return np.array(text.encode(prefix)[:-1], np.int32)
    # A shell also strips the last line feed from --system "$(cat FILE)".
    system = {"role": "system", "content": prefix.rstrip("\n")}
    # The two questions differ in their first letter, so only the tokens of the prefix are equal.
    prompts = [np.array(text.encode_chat([system, {"role": "user", "content": q}]), np.int32) for q in ("A", "7")]
    return prompts[0][: common_prefix(*prompts)]
