"""Generates text: an answer to PROMPT in the model's chat template, streamed to stdout as it comes.

What is run is a bundle, or a model by its name or checkpoint: it is then cast when it is first named, with the options
that castiron compile has by default, and kept in the cache. A document on stdin comes after the prompt, with an empty line
between. What a reasoning model thinks is shown dimmed at a terminal, and is no part of what is piped on.
Greedy unless --temperature is given, whatever the model's own settings are. The last line on stderr says how fast
it was.
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import json
import os
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

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
from castiron.pipelines.commands.spoken import Spoken
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.positions import at_most, room
from castiron.pipelines.generation.text import Text, load_text
from castiron.pipelines.generation.thoughts import Thought
from castiron.pipelines.measuring.memory import peak_rss_mb, warn_of_shortage
from castiron.pipelines.progress import Progress, say

if TYPE_CHECKING:
    from castiron.pipelines.generation.grammar import Grammar


EXAMPLES = """\
examples:
  castiron run smollm2-135m-instruct "Why is the sky blue?"
  castiron run build/model -p "Why is the sky blue?"
  cat report.txt | castiron run build/model -p "Summarise in three sentences."
  castiron run build/model -p "Once upon a time" --raw -n 100 --temperature 0.8 --top-p 0.95 --seed 7
  echo "Translate to French: good morning" | castiron run build/model
  castiron run build/model --tokens 1,2,3 -n 40 --ignore-eos --json
  castiron run build/model -f edit-this-code.txt --speculate ngram
  castiron run build/model -p "Why is the sky blue?" --draft build/smaller-model
  castiron run build/model "Invent a person." --json-schema person.json
  castiron run build/model "Is ice cold?" --regex "(yes|no), because [a-z ]{10,80}"

--json prints one object: tokens, text (null without a tokenizer), thoughts (null without any), prompt_tokens, cached_tokens (of
them by --prefix-cache), finish_reason (stop, length or context), prefill_tok_s (of the others), decode_tok_s, ttft_ms (from the
start of prefill), load_s, peak_rss_mb, speculation (null without --speculate and --draft: passes that checked proposals; of the
sources ngram and draft how many tokens were proposed and accepted; draft_share of the decode time).
"""
STDIN = 0
# How long nothing may come there before a word is said.
STDIN_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="the prompt; several words are joined")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt too; what a pipe or a file on stdin holds comes "
                        "after it, and is the prompt without one or with -")  # fmt: skip
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file, and nothing from stdin")
    prompt.add_argument("--tokens", type=token_ids, metavar="IDS", help="token ids as the prompt: 1,2,3")
    add_length_argument(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-text token")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    add_template_argument(parser)
    add_special_argument(parser)
    group = parser.add_argument_group("structured output", "What the text has to be; tokens that do not fit are never chosen.")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="JSON that holds to the JSON schema in a file")
    form.add_argument("--regex", metavar="RE", help="a text that a regular expression matches as a whole")
    form.add_argument("--grammar", metavar="FILE", help="a text of the grammar in a file, Lark's or llama.cpp's GBNF")
    add_sampling_arguments(parser)
    add_prefix_cache_arguments(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per physical core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def token_ids(text: str) -> list[int]:
    """ "1,2,3" as ids; argparse's error otherwise."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3")
    return ids


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.named import bundle_of, generating
    from castiron.vmfb.session import Session

    start = time.perf_counter()
    sampling, (asked, usual) = sampling_of(args), length_of(args)
    if args.words and not (args.prompt is args.file is args.tokens is None):
        args.parser.error(f"argument PROMPT ({' '.join(args.words)}): not allowed with -p, -f or --tokens")
    if args.words:
        args.prompt = " ".join(args.words)
    if args.prompt is args.file is args.tokens is None:
        if os.isatty(STDIN):
            raise PipelineError("there is no prompt: give one as an argument, with -p, -f or --tokens, or use castiron chat")
        args.prompt = "-"
    if args.tokens and (args.system or args.raw):
        raise PipelineError("--system and --raw need a text prompt, not --tokens")
    if args.template_arg and (args.tokens or args.raw):
        raise PipelineError("--template-arg needs the chat template, which --raw and --tokens leave out")
    bundle = generating(bundle_of(args.bundle, **trust_of(args)))
    store = prefix_store(args, bundle.manifest)
    draft = draft_of(args, bundle)
    warn_of_shortage(bundle.manifest, *([draft.session.manifest] if draft else []))
    prompt, text = read_prompt(args, bundle)
    grammar = read_grammar(args, text)
    session = Session(bundle, threads=args.threads)
    load_seconds = time.perf_counter() - start
    ids = np.array(prompt)
    known = store.take(session, ids) if store else 0
    kept = Kept(known, time.perf_counter() - start - load_seconds)

    def read(done: int, total: int) -> None:
        if store:
            store.offer(session, ids)
        progress("reading the prompt", done / total)

    with Progress() as progress:
        generation = Generation(
            session, prompt[known:], max_tokens=asked or at_most(usual, room(session.context, 0, len(prompt))),
            sampling=sampling, history=prompt[:known], text=text, progress=read,
            stop_tokens=() if args.ignore_eos else bundle.manifest.tokens.eos, stop_strings=args.stop,
            speculate=args.speculate == "ngram", draft=draft, repetition_stop=args.repetition_stop,
            thoughts=not (args.raw or args.tokens), grammar=grammar,
        )  # fmt: skip
        told = generation.stream() if text else (f"{token} " for token in generation)
        told = itertools.chain([next(told, "")], told)
    if args.json:
        pieces = list(told)
        words: str | None = "".join(piece for piece in pieces if not isinstance(piece, Thought))
        if text is None:
            text = load_text(bundle) if bundle.tokenizer else None
            words = text.decode(generation.tokens) if text else None
        thoughts = "".join(piece for piece in pieces if isinstance(piece, Thought))
        # Now, since letting go of a large vocabulary takes a tenth of a second.
        print(json.dumps(report(generation, words, thoughts or None, load_seconds, kept), ensure_ascii=False), flush=True)
        return 0
    spoken, thinking = Spoken(), False
    try:
        for piece in told:
            spoken.write(piece)
        thinking = spoken.thinking
        spoken.write("\n")
    finally:
        print(speed(generation, usual, thinking, kept), file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace, bundle) -> tuple[list[int], Text | None]:
    """The prompt's ids, and the bundle's Text; None where ids go in and ids come out, which need not wait for it."""
    if args.tokens:
        vocab = bundle.manifest.vocab
        if max(args.tokens) >= vocab:
            raise PipelineError(f"token {max(args.tokens)} is outside the vocabulary of {vocab} tokens")
        needed = args.stop or not args.json or args.json_schema or args.regex or args.grammar
        return args.tokens, load_text(bundle) if bundle.tokenizer and needed else None
    text = load_text(bundle, template_args(args), args.parse_special)
    words = prompt_words(args)
    if args.raw or text.chat_template is None:
        if args.system:
            raise PipelineError("--system needs a chat template: drop --raw, or take a model that has a template")
        return text.encode(words), text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return text.encode_chat([*system, {"role": "user", "content": words}]), text


def read_grammar(args: argparse.Namespace, text: Text | None) -> Grammar | None:
    """What --json-schema, --regex or --grammar says that the text has to be; PipelineError for what cannot be honoured."""
    if args.json_schema is args.regex is args.grammar is None:
        return None
    if text is None:
        raise PipelineError("structured output needs a tokenizer, and this bundle has none")
    if args.regex is not None:
        return text.grammar(regex=args.regex)
    if args.grammar:
        return text.grammar(grammar=decoded(Path(args.grammar).read_bytes()))
    try:
        return text.grammar(json_schema=json.loads(Path(args.json_schema).read_bytes()))
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"{args.json_schema} is not JSON: {error}") from None


def prompt_words(args: argparse.Namespace) -> str:
    """The prompt's text: of the command line, of a file, of stdin, or of the first and the last with an empty line between;
    PipelineError if there is none."""
    if args.file:
        words, place = decoded(Path(args.file).read_bytes()), args.file
    elif args.prompt == "-":
        words, place = decoded(read_stdin()), "stdin"
    else:
        document = "" if os.isatty(STDIN) else decoded(read_stdin())
        words, place = "\n\n".join(part for part in (args.prompt, document) if part), "the prompt"
    # Plain text may well be a line break.
    if not (words if args.raw else words.strip()):
        raise PipelineError(f"{place} is empty: give the model something to answer")
    return words


def decoded(data: bytes) -> str:
    """As UTF-8, without the mark that some editors begin a file with; what is not UTF-8 the tokenizer refuses."""
    return data.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")


def read_stdin() -> bytes:
    """All of it; says so if it does not come, because a pipe that nobody closes would keep the command waiting in silence."""
    try:
        if not select.select([STDIN], [], [], STDIN_SECONDS)[0]:
            say("reading stdin, where nothing comes; end it with Ctrl-D, or give the command < /dev/null")
        with open(STDIN, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        # Closed: as good as empty.
        return b""


@dataclass(frozen=True)
class Kept:
    """What --prefix-cache had of a prompt, and how long it took to map."""

    tokens: int = 0
    seconds: float = 0.0


def rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second, if there were any."""
    return tokens / seconds if tokens and seconds else None


def report(generation: Generation, text: str | None, thoughts: str | None, load_seconds: float, kept: Kept) -> dict:
    """What --json prints."""
    return {
        "tokens": generation.tokens,
        "text": text,
        "thoughts": thoughts,
        "prompt_tokens": kept.tokens + generation.prompt_tokens,
        "cached_tokens": kept.tokens,
        "finish_reason": generation.finish_reason,
        "prefill_tok_s": rate(generation.prompt_tokens, generation.prefill_seconds),
        "decode_tok_s": rate(generation.steps, generation.decode_seconds),
        "ttft_ms": (kept.seconds + generation.prefill_seconds) * 1e3,
        "load_s": load_seconds,
        "peak_rss_mb": peak_rss_mb(),
        "speculation": generation.speculator.report() if generation.speculator else None,
    }


def speed(generation: Generation, usual: int | None, thinking: bool = False, kept: Kept = Kept()) -> str:
    """The line that ends an answer: its speed, and why it is no longer; `usual` as `length_of` has it, `thinking` whether
    it never came to its answer."""
    cached = f" ({kept.tokens} cached)" if kept.tokens else ""
    seconds = kept.seconds + generation.prefill_seconds
    parts = [f"prompt {kept.tokens + generation.prompt_tokens} tokens{cached}, first token after {seconds * 1e3:.0f} ms"]
    if decode := rate(generation.steps, generation.decode_seconds):
        parts.append(f"{len(generation.tokens)} tokens at {decode:.1f} tok/s")
    if generation.speculator and generation.speculator.proposed:
        parts.append(str(generation.speculator))
    if generation.finish_reason == "context":
        parts.append("the context is full")
    if thinking:
        parts.append("the answer ended inside its thoughts")
    if generation.repeated:
        parts.append("stopped because it said the same over and over: --no-repetition-stop lets it go on")
    parts.append(f"peak memory {peak_rss_mb():.0f} MB")
    if generation.finish_reason == "length" and usual:
        parts.append(f"stopped at {usual} tokens: -n N allows more, -n -1 as many as the context holds")
    return f"castiron: {'; '.join(parts)}"
