"""Talks with a bundle in the model's chat template. The cache is kept: a turn costs only its own tokens.

/retry answers again, /undo takes a question back, /set changes settings, /reset begins anew, /save FILE and /load FILE
keep a conversation, /quit or Ctrl-D ends, /help lists the commands. Ctrl-C stops the answer. When the context is full the
oldest turns are dropped, a quarter of the context at once and with a note; the system message stays.
"""

import argparse
import sys

from castiron.pipelines.commands.generating import (
    add_bundle_argument,
    add_length_argument,
    add_prefix_cache_arguments,
    add_sampling_arguments,
    add_special_argument,
    add_template_argument,
    draft_of,
    length_of,
    prefix_store,
    sampling_of,
    template_args,
    trust_of,
)
from castiron.pipelines.progress import say

EXAMPLES = '''\
examples:
  castiron chat smollm2-135m-instruct
  castiron chat build/model
  castiron chat model.castiron --system "Answer in one sentence." --temperature 0.7 --seed 1
  printf 'What is the capital of France?\\nAnd of Italy?\\n' | castiron chat build/model

Answers go to stdout, all else to stderr. A paste is one message; so are the lines between two lots of """, and a line
that ends in \\ continues in the next one. What is typed at a terminal is kept in chat/history.jsonl in castiron's cache
folder ($CASTIRON_CACHE, else $XDG_CACHE_HOME/castiron, else ~/.cache/castiron) for the next time.
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_template_argument(parser)
    add_special_argument(parser)
    add_length_argument(parser)
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    add_sampling_arguments(parser, model_default=True)
    add_prefix_cache_arguments(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per physical core)")
    parser.add_argument("--no-history", action="store_true", help="neither read nor keep what was typed in other sessions")
    parser.add_argument("--quiet", action="store_true", help="do not print speed and context used after each answer")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.named import bundle_of, generating
    from castiron.pipelines.commands.console import Console
    from castiron.pipelines.errors import PipelineError
    from castiron.pipelines.generation.chat import Chat
    from castiron.pipelines.generation.model_sampling import in_words
    from castiron.pipelines.generation.text import load_text
    from castiron.pipelines.measuring.memory import warn_of_shortage
    from castiron.vmfb.cache import cache_root
    from castiron.vmfb.session import Session

    asked, usual = length_of(args)
    bundle = generating(bundle_of(args.bundle, **trust_of(args)))
    draft = draft_of(args, bundle)
    warn_of_shortage(bundle.manifest, *([draft.session.manifest] if draft else []))
    sampling = sampling_of(args, bundle.manifest.generation)
    text = load_text(bundle, template_args(args), args.parse_special)
    if text.chat_template is None:
        raise PipelineError(f"{bundle.path} has no chat template; castiron run --raw continues plain text")
    chat = Chat(
        Session(bundle, threads=args.threads), text, sampling=sampling, system=args.system, stops=args.stop,
        max_tokens=asked, usual_tokens=usual, speculate=args.speculate == "ngram", draft=draft,
        repetition_stop=args.repetition_stop, store=prefix_store(args, bundle.manifest),
    )  # fmt: skip
    if args.load:
        chat.load(args.load)
    if sys.stdin.isatty():
        say(f"{bundle.manifest.name}, context {chat.session.context}, {in_words(sampling)}; /help lists the commands")
    history = None if args.no_history else cache_root() / "chat" / "history.jsonl"
    return Console(chat, quiet=args.quiet, history=history).run()
