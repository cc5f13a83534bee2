"""Generates text from a bundle: an answer to -p in the model's chat template, streamed to stdout as it comes.

Greedy unless --temperature is given. Speed is told on stderr at the end.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.stops import StopStrings
from castiron.pipelines.generation.streaming import pieces
from castiron.pipelines.generation.text import load_text
from castiron.pipelines.measuring.memory import peak_rss_mb, warn_of_shortage
from castiron.pipelines.progress import Progress

EXAMPLES = """\
examples:
  castiron run build/model -p "Why is the sky blue?"
  castiron run build/model -p "Once upon a time" --raw -n 100 --temperature 0.8 --top-p 0.95 --seed 7
  echo "Translate to French: good morning" | castiron run build/model
  castiron run build/model --tokens 1,2,3 -n 40 --ignore-eos --json
  castiron run build/model -f edit-this-code.txt --speculate ngram

--json prints one object: tokens, text (null without a tokenizer), prompt_tokens, finish_reason (stop, length or
context), prefill_tok_s, decode_tok_s, ttft_ms (from the start of prefill), load_s, peak_rss_mb.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="DIR", help="the bundle")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads it from stdin, "
                        "as leaving it out does in a pipe")  # fmt: skip
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    prompt.add_argument("--tokens", type=token_ids, metavar="IDS", help="token ids as the prompt: 1,2,3")
    parser.add_argument("-n", "--max-tokens", type=int, metavar="N", help="tokens to generate (default: until the model "
                        "ends or the context is full)")  # fmt: skip
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-text token")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    add_sampling_arguments(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `sampling_of`; shared by every command that generates."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest; 0 is all")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="... among the likeliest that make up P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="... among those P times as likely as the "
                       "likeliest")  # fmt: skip
    group.add_argument("--repeat-penalty", type=float, default=1.0, metavar="X", help="hold the last 64 tokens against "
                       "themselves; 1 is not at all")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be "
                       "repeated")  # fmt: skip
    group.add_argument("--speculate", choices=("ngram",), help="check several tokens at once where the text repeats "
                       "itself: the same greedy tokens, sooner")  # fmt: skip


def sampling_of(args: argparse.Namespace) -> Sampling:
    """PipelineError for a value out of its range."""
    return Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repeat_penalty, args.seed)


def stops_of(args: argparse.Namespace) -> StopStrings:
    """PipelineError for an empty stop string, which would end every text at once."""
    if "" in args.stop:
        raise PipelineError("--stop is empty; give the text to end before")
    return StopStrings(args.stop)


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
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.session import Session

    start = time.perf_counter()
    sampler, stops = Sampler(sampling_of(args)), stops_of(args)
    if args.prompt is args.file is args.tokens is None:
        if sys.stdin.isatty():
            raise PipelineError("there is no prompt: give one with -p, -f or --tokens, or talk with castiron chat")
        args.prompt = "-"
    if args.tokens and (args.system or args.raw):
        raise PipelineError("--system and --raw go with a text prompt, not with --tokens")
    bundle = open_bundle(args.bundle)
    warn_of_shortage(bundle.manifest)
    prompt, text = read_prompt(args, bundle)
    if args.stop and bundle.tokenizer is None:
        raise PipelineError("--stop needs a tokenizer, and this bundle has none")
    session = Session(bundle, threads=args.threads)
    load_seconds = time.perf_counter() - start
    stop = () if args.ignore_eos else bundle.manifest.tokens.eos
    with Progress() as progress:
        generation = Generation(
            session, prompt, sampler=sampler, max_tokens=args.max_tokens, stop_tokens=stop, speculate=args.speculate == "ngram",
            progress=lambda done, total: progress("reading the prompt", done / total),
        )  # fmt: skip
        first = next(generation, None)
    tokens = itertools.chain(() if first is None else (first,), generation)
    if args.json:
        # Ids in, ids out: the tokenizer is not waited for before the first token.
        text = text or (load_text(bundle) if bundle.tokenizer else None)
        words = "".join(spoken(generation, tokens, text, stops))
        print(json.dumps(report(generation, words if text else None, load_seconds), ensure_ascii=False))
        return 0
    try:
        for piece in spoken(generation, tokens, text, stops):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    finally:
        print(speed(generation), file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace, bundle) -> tuple[list[int], object]:
    """The prompt's ids, and the bundle's Text or None; the latter only where the prompt is ids."""
    if args.tokens:
        vocab = bundle.manifest.vocab
        if max(args.tokens) >= vocab:
            raise PipelineError(f"token {max(args.tokens)} is outside the vocabulary of {vocab} tokens")
        return args.tokens, load_text(bundle) if bundle.tokenizer and not args.json else None
    text = load_text(bundle)
    words = args.prompt
    if args.file or words == "-":
        data = Path(args.file).read_bytes() if args.file else sys.stdin.buffer.read()
        # What is not UTF-8 is refused with the rest, by the tokenizer.
        words = data.decode("utf-8", "surrogateescape")
    if args.raw or text.chat_template is None:
        if args.system:
            raise PipelineError("--system needs the chat template, which --raw and models without one leave out")
        return text.encode(words), text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return text.encode_chat([*system, {"role": "user", "content": words}]), text


def spoken(generation: Generation, tokens: Iterable[int], text, stops: StopStrings) -> Iterator[str]:
    """The tokens as text that streams, or as ids where there is no tokenizer; a stop string ends the generation."""
    if text is None:
        yield from (f"{token} " for token in tokens)
        return
    yield from pieces(tokens, text, stops)
    if stops.stopped:
        generation.finish_reason = "stop"
        generation.settle()


def rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second, if there were any."""
    return tokens / seconds if tokens and seconds else None


def report(generation: Generation, text: str | None, load_seconds: float) -> dict:
    """What --json prints."""
    return {
        "tokens": generation.tokens,
        "text": text,
        "prompt_tokens": generation.prompt_tokens,
        "finish_reason": generation.finish_reason,
        "prefill_tok_s": rate(generation.prompt_tokens, generation.prefill_seconds),
        "decode_tok_s": rate(generation.steps, generation.decode_seconds),
        "ttft_ms": generation.prefill_seconds * 1e3,
        "load_s": load_seconds,
        "peak_rss_mb": peak_rss_mb(),
    }


def speed(generation: Generation) -> str:
    """The line about speed that ends a run."""
    parts = [f"prompt {generation.prompt_tokens} tokens, first token after {generation.prefill_seconds * 1e3:.0f} ms"]
    if decode := rate(generation.steps, generation.decode_seconds):
        parts.append(f"{len(generation.tokens)} tokens at {decode:.1f} tok/s")
    if generation.speculator and generation.speculator.proposed:
        parts.append(f"{generation.speculator.accepted} of {generation.speculator.proposed} proposed tokens were right")
    if generation.finish_reason == "context":
        parts.append("the context is full")
    parts.append(f"peak memory {peak_rss_mb():.0f} MB")
    return f"castiron: {'; '.join(parts)}"
