"""Answer PROMPT with a model, and stream the text to stdout.

The prompt is rendered with the model's chat template, unless --raw is given. Text on stdin is
appended to the prompt. A checkpoint is compiled at its first use, with castiron compile's default
options, and its bundle is cached. Reasoning is dimmed on a terminal and left out of piped output.
The last line on stderr reports the speed.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from castiron.pipelines.cli import options
from castiron.pipelines.cli.open_engine import open_engine
from castiron.pipelines.engine.memory import peak_rss_mb
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import DIM, PLAIN, Progress, counted, print_message, sanitised
from castiron.pipelines.text.chat_template import prepare
from castiron.pipelines.text.fill_in_the_middle import fim_of
from castiron.pipelines.text.generate import encode_prompt, encode_question
from castiron.pipelines.text.reasoning import Reasoning
from castiron.pipelines.text.text_output import Stream, text_request
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.vmfb.atomic_write import write_file

if TYPE_CHECKING:
    from castiron.pipelines.text.grammar import Grammar

EXAMPLES = """\
examples:
  castiron run smollm2-135m-instruct "Why is the sky blue?"
  cat report.txt | castiron run build/model "Summarise in three sentences."
  castiron run build/model -p "Once upon a time" --raw -n 100 --temperature 0.8 --seed 7
  castiron run build/model --tokens 1,2,3 -n 40 --ignore-eos --json
  castiron run build/model "Invent a person." --json-schema person.json
  castiron run build/coder "def add(a, b):" --suffix "print(add(1, 2))"
  castiron run build/model "Name three colours." --receipt answer.json

--json prints one object: tokens, text (null without a tokenizer), reasoning_content (or null),
prompt_tokens, cached_tokens (from --prefix-cache), finish_reason (stop, length or context),
prefill_tok_s (without cached tokens), decode_tok_s, ttft_ms (from the start of prefill), load_s,
peak_rss_mb, speculation (null without --speculative and --draft-model; else passes, tokens proposed and
accepted by ngram and draft, and draft_share of the decode time).
"""
STDIN = 0
# Seconds without input on stdin until a message explains the wait.
STDIN_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="the prompt; several words are joined")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads stdin")
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file, and ignore stdin")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    options.add_options(parser, "-n --max-tokens", "-c --context", "--json")
    parser.add_argument("--receipt", metavar="FILE", help="write what castiron audit needs to repeat the answer")
    group = parser.add_argument_group("prompt")
    prompt.add_argument("--tokens", type=options.token_ids, metavar="IDS", help="the prompt as token ids: 1,2,3")
    group.add_argument("--suffix", metavar="TEXT", help="fill in the text between PROMPT and TEXT; needs a code model")
    options.add_options(group, "--raw", "--template-arg", "--parse-special", "--ignore-eos")
    options.add_options(group, "--prefix-cache", "--prefix-cache-size")
    group = parser.add_argument_group("structured output")
    form = group.add_mutually_exclusive_group()
    options.add_options(form, "--json-schema")
    form.add_argument("--regex", metavar="RE", help="generate text that a regular expression matches completely")
    form.add_argument("--grammar", metavar="FILE", help="generate text that matches the grammar in a file (Lark or GBNF)")
    group.add_argument("--compact-json", action="store_true", help="JSON without spaces; most models write spaced JSON better")
    options.add_sampling_options(parser)
    options.add_loading(parser)


def main(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    sampling, limit = options.sampling_of(args), options.answer_limit(args.max_tokens)
    check_prompt(args)
    if not (args.raw or args.tokens or args.suffix is not None):
        prepare()
    bundle, engine = open_engine(args)
    with contextlib.closing(engine):
        prompt, text, fim_ends = read_prompt(args, bundle)
        grammar = read_grammar(args, text)
        load_seconds = time.perf_counter() - start
        with Progress() as progress:
            request = text_request(
                prompt, engine.context, text, sampling=sampling, stop_strings=args.stop, grammar=grammar,
                max_tokens=limit, stop_tokens=() if args.ignore_eos else (*bundle.manifest.tokens.eos, *fim_ends),
                repetition_stop=args.repetition_stop, reasoning=not (args.raw or args.tokens or args.suffix is not None),
                receipt=args.receipt is not None,
                on_prefill=lambda done, total: progress("reading the prompt", done / total),
            )  # fmt: skip
            stream = Stream(engine, request, reasoning=True)
            first = next(stream, "")
        if args.json:
            parts = [first, *stream]
            reasoning = "".join(part for part in parts if isinstance(part, Reasoning))
            answer: str | None = "".join(part for part in parts if not isinstance(part, Reasoning))
            if text is None:
                text = load_tokenizer(bundle, lazy=True) if bundle.tokenizer else None
                answer = text.decode(stream.tokens) if text else None
            # Flushed now, because freeing a large vocabulary takes a tenth of a second.
            print(json.dumps(report(stream, answer, reasoning or None, load_seconds), ensure_ascii=False), flush=True)
            write_receipt(stream, args.receipt)
            return 0
        output, thinking = AnswerOutput(), False
        try:
            output.write(first)
            for part in stream:
                output.write(part)
            thinking = output.thinking
            output.write("\n")
        finally:
            print(speed(stream, thinking), file=sys.stderr)
            if stream.finish_reason == "length":
                print_message(f"stopped at {counted(len(stream.tokens), 'token')}; -n -1 for no limit")
        write_receipt(stream, args.receipt)
        return 0


def write_receipt(stream: Stream, path: str | None) -> None:
    if path is not None and stream.receipt:
        write_file(Path(path), stream.receipt.to_json().encode())


def check_prompt(args: argparse.Namespace) -> None:
    """Check the options that give a prompt, and set args.prompt; "-" is stdin."""
    has_option = not (args.prompt is args.file is args.tokens is None)
    if args.words and has_option:
        args.parser.error(f"argument PROMPT ({' '.join(args.words)}): not allowed with -p, -f or --tokens")
    if not has_option and not args.words and os.isatty(STDIN):
        raise PipelineError("no prompt; give a prompt as an argument or with -p, -f or --tokens, or use castiron chat")
    if not has_option:
        args.prompt = " ".join(args.words) or "-"
    if args.suffix is not None and (args.system or args.tokens or args.template_arg):
        raise PipelineError("--suffix needs a text prompt and no chat template; remove --system, --tokens and --template-arg")
    if args.tokens and (args.system or args.raw):
        raise PipelineError(
            "--system and --raw do not work with --tokens; give a text prompt instead of --tokens, or remove --system and --raw"
        )
    if args.template_arg and (args.tokens or args.raw):
        raise PipelineError("--template-arg needs the chat template; remove --template-arg, or remove --raw and --tokens")


def read_prompt(args: argparse.Namespace, bundle) -> tuple[list[int], Tokenizer | None, tuple[int, ...]]:
    """Return (token ids, tokenizer if needed, additional end tokens of --suffix)."""
    if args.tokens:
        encode_prompt(args.tokens, None, bundle.manifest.vocab)
        needed = args.stop or not args.json or args.json_schema or args.regex or args.grammar
        return args.tokens, load_tokenizer(bundle, lazy=True) if bundle.tokenizer and needed else None, ()
    text = load_tokenizer(bundle, dict(args.template_arg), args.parse_special, lazy=True)
    prompt = prompt_text(args)
    if args.suffix is not None:
        fim = fim_of(text)
        return fim.prompt(prompt, args.suffix), text, fim.ends
    return encode_question(prompt, text, args.system, args.raw), text, ()


def read_grammar(args: argparse.Namespace, text: Tokenizer | None) -> Grammar | None:
    """Return the grammar of --json-schema, --regex or --grammar; None if none is given."""
    if args.json_schema is args.regex is args.grammar is None:
        return None
    if text is None:
        raise PipelineError(
            f"{args.bundle} has no tokenizer, which structured output needs; remove --json-schema, --regex and --grammar"
        )
    if args.regex is not None:
        return text.grammar(regex=args.regex)
    if args.grammar:
        return text.grammar(grammar=decoded(Path(args.grammar).read_bytes()))
    return text.grammar(json_schema=options.read_schema(args.json_schema), compact_json=args.compact_json)


def prompt_text(args: argparse.Namespace) -> str:
    """Return the text of --file, of stdin, or of PROMPT and stdin."""
    if args.file:
        prompt, source = decoded(Path(args.file).read_bytes()), args.file
    elif args.prompt == "-":
        prompt, source = decoded(read_stdin()), "stdin"
    else:
        document = "" if os.isatty(STDIN) else decoded(read_stdin())
        prompt, source = "\n\n".join(part for part in (args.prompt, document) if part), "the prompt"
    # A raw prompt may be a line break.
    if not (prompt if args.raw else prompt.strip()):
        raise PipelineError(f"{source} is empty; give the model something to answer")
    return prompt


def decoded(data: bytes) -> str:
    """Decode UTF-8; invalid bytes become surrogates, which tokenizers reject."""
    return data.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")


def read_stdin() -> bytes:
    """Return all bytes of stdin; print a message if no input comes within STDIN_SECONDS."""
    try:
        if not select.select([STDIN], [], [], STDIN_SECONDS)[0]:
            print_message("waiting for stdin; end it with Ctrl-D, or run the command with < /dev/null")
        with open(STDIN, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        # Treat a closed stdin as empty.
        return b""


def rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens and seconds else None


def report(stream: Stream, text: str | None, reasoning: str | None, load_seconds: float) -> dict:
    request = stream.request
    return {
        "tokens": stream.tokens,
        "text": text,
        "reasoning_content": reasoning,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": request.cached,
        "finish_reason": stream.finish_reason,
        "prefill_tok_s": rate(len(request.prompt) - request.cached, stream.prefill_seconds),
        "decode_tok_s": rate(stream.steps, stream.decode_seconds),
        "ttft_ms": stream.prefill_seconds * 1e3,
        "load_s": load_seconds,
        "peak_rss_mb": peak_rss_mb(),
        "speculation": stream.speculator.report() if stream.speculator else None,
    }


def speed(stream: Stream, thinking: bool) -> str:
    request = stream.request
    cached = f" ({request.cached} cached)" if request.cached else ""
    parts = [f"prompt {len(request.prompt)} tokens{cached}, first token after {stream.prefill_seconds * 1e3:.0f} ms"]
    if decode := rate(stream.steps, stream.decode_seconds):
        parts.append(f"{len(stream.tokens)} tokens at {decode:.1f} tok/s")
    if stream.speculator and stream.speculator.proposed:
        parts.append(str(stream.speculator))
    if stream.finish_reason == "context":
        parts.append("the context is full")
    if thinking:
        parts.append("the answer ended inside its reasoning")
    if stream.repeated:
        parts.append("stopped in a repetition loop: --no-repetition-stop disables this")
    parts.append(f"peak memory {peak_rss_mb():.0f} MB")
    return f"castiron: {'; '.join(parts)}"


class AnswerOutput:
    """A writer of a growing answer; reasoning is dimmed, and left out in a pipe."""

    def __init__(self, out: TextIO | None = None):
        self.out = out or sys.stdout
        self.shown = self.out.isatty()
        self.dims = self.shown and os.environ.get("TERM") != "dumb"
        # Whether the last text was reasoning, and the answer has not begun.
        self.thinking = False

    def write(self, part: str) -> None:
        text = sanitised(part) if self.shown else part
        if isinstance(part, Reasoning):
            self.thinking = True
            if not self.shown:
                return
            text = f"{DIM}{text}{PLAIN}" if self.dims else text
        else:
            starts = self.thinking and bool(part.strip())
            self.thinking = self.thinking and not starts
            text = f"\n\n{text}" if starts and self.shown else text
        self.out.write(text)
        self.out.flush()
