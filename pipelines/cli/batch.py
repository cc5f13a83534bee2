"""Answer every record of a file; a bundle with batch functions answers several at once.

A record has a column `prompt` (text or token ids) or `messages`. Other columns are copied to the
output. Requests in OpenAI's batch format (custom_id, method, url and body) are also records. IN and
OUT are JSON lines or Parquet, according to their file name extension; - is JSON lines on stdin or
stdout.

The result of a failed record has an error message. OUT is written when all records are finished;
until then the results are in OUT.journal. After an interruption, run the same command again: it
answers only records that are new or have changed.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.cli import options
from castiron.pipelines.cli.open_engine import open_model
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import Progress, counted, print_message

if TYPE_CHECKING:
    from castiron.pipelines.batch.job import Answer, Summary
    from castiron.pipelines.batch.records import Conversion, Format, Record
    from castiron.pipelines.engine.engine import Engine
    from castiron.vmfb.bundle.bundle import Bundle

EXAMPLES = """\
examples:
  castiron batch build/model prompts.jsonl -o answers.jsonl -n 200
  cat prompts.jsonl | castiron batch build/model - -o - | grep Paris
  castiron batch build/model prompts.jsonl -o answers.jsonl --ray head:6379
  castiron batch build/embeddinggemma-300m texts.jsonl -o vectors.parquet --embed

Each record has its own seed, derived from --seed, so the same job gives the same results.

A result has generated (text), finish_reason, prompt_tokens, generated_tokens, error, and
reasoning_content of a reasoning model; with --embed: embedding, prompt_tokens, truncated and error.

--json prints one object: records (number of records), before (finished by earlier runs), failed,
prompt_tokens, generated_tokens, cached_tokens (of the prompts), duplicates (records with the
custom_id of an earlier one), seconds, tok_s, output.
"""
# Seconds between two progress lines where stderr is not a terminal.
REPORT_SECONDS = 60.0
# Options with an effect on plain prompts only: requests in OpenAI's format set them in their bodies.
PROMPT_OPTIONS = {
    "max_tokens", "ignore_eos", "system", "raw", "temperature", "temperature_schedule", "top_k", "top_p", "min_p",
    "repeat_penalty", "repeat_last_n", "stop", "repetition_stop", "json_schema",
}  # fmt: skip
# Options that change answers. They are part of a record's key, as is the seed.
ANSWER_OPTIONS = PROMPT_OPTIONS | {"template_arg", "embed", "prompt_name", "dimensions", "name"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("input", metavar="IN", help="records: .jsonl or .parquet; - is JSON lines on stdin")
    parser.add_argument("-o", "--output", metavar="OUT", required=True,
                        help="results: .jsonl or .parquet; - is stdout, where a job cannot be continued")  # fmt: skip
    options.add_options(parser, "-n --max-tokens", "-c --context", "--json")
    parser.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster: host:port, auto, or local (started here)")
    group = parser.add_argument_group("prompt")
    group.add_argument("--system", metavar="TEXT", help="system message before each prompt")
    options.add_options(group, "--raw", "--template-arg", "--ignore-eos", "--json-schema")
    group.add_argument("--name", metavar="NAME", help="the model's name in OpenAI's requests (default: the bundle's)")
    options.add_options(group, "--prefix-cache", "--prefix-cache-size")
    options.add_sampling_options(parser, speculates=False)
    group = parser.add_argument_group("embedding models")
    group.add_argument("--embed", action="store_true", help="compute the vector of each record's text, prompt or input")
    options.add_options(group, "--prompt-name", "--dimensions")
    options.add_loading(parser)


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.batch.job import open_records, run_job
    from castiron.pipelines.batch.records import is_table

    output = None if args.output == "-" else Path(args.output)
    is_table(args.output)
    if output is None and args.json:
        raise PipelineError("--json and the results both use stdout; give a file for the results with -o")
    if output and output.exists() and not output.is_file():
        what = "a directory" if output.is_dir() else "a device or a pipe"
        raise PipelineError(f"output is {what}: {args.output}; give a file, or - for stdout")
    if output and args.input != "-" and output.exists() and output.samefile(args.input):
        raise PipelineError(f"output is the input: {args.output}; give another file")
    if output is None:
        print_message("results on stdout are not stored: if this job is interrupted, the next run starts from the beginning")
    records, args.json_schema = open_records(args.input), options.read_schema(args.json_schema)
    try:
        with engine(args, open_model(args.bundle, args)) as (key, answer), Progress() as progress:
            summary = run_job(records, key, answer, output, progress_reporter(progress))
    except KeyboardInterrupt:
        if output:
            print_message("finished results are stored; run the same command again to continue")
        raise
    if summary.duplicates:
        print_message(f"{counted(summary.duplicates, 'record')} with the custom_id of an earlier record")
    print_message(summary_line(summary) + (f"; results in {output}" if output else ""))
    if args.json:
        rounded = {"seconds": round(summary.seconds, 3), "tok_s": round(summary.tokens_per_second, 1), "output": args.output}
        print(json.dumps(asdict(summary) | rounded))
    return 0


@contextlib.contextmanager
def engine(args: argparse.Namespace, bundle: "Bundle") -> "Iterator[tuple[Callable[[Record], str], Answer]]":
    """Yield two functions: the key of a record, and the answers of records."""
    from castiron.pipelines.batch.job import answering

    if args.ray is None:
        conversion, engine = prepare(args, bundle)
        yield conversion.key, answering(engine, conversion)
        return
    from castiron.pipelines.cluster.actors import answering_on_cluster, connected

    # Invalid options are rejected here, before a node gets the job.
    conversion, _ = prepare(args, bundle, runs=False)
    with connected(args.ray):
        yield conversion.key, answering_on_cluster(args, bundle, prepare)


def prepare(args: argparse.Namespace, bundle: "Bundle", runs: bool = True) -> "tuple[Conversion, Engine | None]":
    """Return (converter of records, engine); no engine for embeddings, or without `runs`."""
    from castiron.pipelines.batch.records import Conversion, identity
    from castiron.pipelines.engine.engine import Engine
    from castiron.pipelines.engine.memory import print_memory, slots_of

    # Set the context here, because an actor of a cluster opens the bundle without it.
    bundle = bundle if args.context is None else bundle.with_context(args.context)
    manifest, seed = bundle.manifest, args.seed or 0
    given = {name: value for name, value in vars(args).items() if name in ANSWER_OPTIONS}
    job_identity = identity(manifest, given | {"seed": seed})
    if args.embed or manifest.encoder:
        return Conversion(*embedding_formats(args, bundle), job_identity, seed), None
    conversion = Conversion(*text_formats(args, bundle), job_identity, seed)
    if not runs:
        return conversion, None
    print_memory(manifest, slots_of(manifest))
    return conversion, Engine(bundle, args.threads, store=options.prefix_store(args, manifest), fill_slots=True)


def text_formats(args: argparse.Namespace, bundle: "Bundle") -> "tuple[Format, Callable[[], Format]]":
    """Return the converter of records, and a function that makes that of OpenAI's format."""
    from castiron.pipelines.batch.openai_batch import OpenAI
    from castiron.pipelines.batch.plain_records import Prompts
    from castiron.pipelines.text.tokenizer import load_tokenizer

    if args.prompt_name or args.dimensions:
        raise PipelineError("--prompt-name and --dimensions need --embed; add --embed, or remove both options")
    # Each record gets its own seed; this checks the range of --seed.
    unseeded = argparse.Namespace(**vars(args) | {"seed": None})
    sampling, max_tokens = options.sampling_of(unseeded), options.answer_limit(args.max_tokens)
    replace(sampling, seed=args.seed)
    text = load_tokenizer(bundle, dict(args.template_arg))
    plain = Prompts(
        bundle.manifest, text, max_tokens, sampling, args.stop, args.ignore_eos, args.repetition_stop, args.raw,
        args.system, args.json_schema,
    )  # fmt: skip

    def openai() -> "Format":
        values = {name: getattr(args, name) for name in sorted(PROMPT_OPTIONS)}
        if given := [name for name, value in values.items() if value is not False and value not in (None, [])]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            print_message(f"no effect on requests in OpenAI's format: {flags}; set these options in their bodies")
        return OpenAI(bundle.manifest, text, names(args, bundle))

    return plain, openai


def embedding_formats(args: argparse.Namespace, bundle: "Bundle") -> "tuple[Format, Callable[[], Format]]":
    """Return the converter of texts, and a function that makes that of OpenAI's format."""
    from castiron.pipelines.batch.openai_batch import OpenAI
    from castiron.pipelines.batch.plain_records import Embeddings
    from castiron.pipelines.text.embedder import Embedder

    encoder = bundle.manifest.encoder
    if not args.embed and not (encoder and encoder.relevance):
        raise PipelineError(f"{bundle.path} is an embedding model and cannot generate text; add --embed for vectors")
    embedder = Embedder(bundle, args.threads)
    openai = lambda: OpenAI(bundle.manifest, embedder.tokenizer, names(args, bundle), embedder)
    return Embeddings(embedder, embedder.prompt(args.prompt_name), args.dimensions), openai


def names(args: argparse.Namespace, bundle: "Bundle") -> list[str]:
    """Return the allowed values of the field `model` in requests in OpenAI's format."""
    from castiron.pipelines.api.model_api import names_of

    return [args.name] if args.name else names_of(bundle, args.bundle)


def progress_reporter(progress: Progress) -> "Callable[[Summary, float | None], None]":
    """Return a callback that shows a job's progress: a bar or, in a pipe, a line a minute."""
    last = time.monotonic()

    def report(summary: "Summary", share: float | None) -> None:
        nonlocal last
        note = f"{counted(summary.records, 'record')}, {summary.tokens_per_second:,.0f} tok/s"
        if progress.shown:
            # At 1 the bar would be erased and drawn again for the next record.
            progress("records", min(share or 0.0, 0.999), note)
        elif time.monotonic() - last > REPORT_SECONDS:
            last = time.monotonic()
            # Records that an earlier run finished took no time in this run.
            own = share * (1 - summary.before / summary.records) if share else 0.0
            left = f", about {summary.seconds * (1 - share) / own:,.0f} s left" if share and own else ""
            print_message(f"{note}{left}")

    return report


def summary_line(summary: "Summary") -> str:
    counts = [f"{number:,} {what}" for number, what in ((summary.failed, "failed"), (summary.before, "done before")) if number]
    records = counted(summary.records, "record") + (f" ({', '.join(counts)})" if counts else "")
    cached = f" ({summary.cached_tokens:,} cached)" if summary.cached_tokens else ""
    return (
        f"{records}; prompts {summary.prompt_tokens:,} tokens{cached}, answers {summary.generated_tokens:,}, in "
        f"{summary.seconds:,.1f} s: {summary.tokens_per_second:,.1f} tok/s"
    )
