"""Answers the rows of a file, as many at once as the bundle's batch functions have slots.

A row is a prompt (a text, or token ids), or messages, with other columns, which are kept: the answer stands in columns beside
them. Or it is a row of OpenAI's batch format (custom_id, method, url and body), and is answered as castiron serve answers it.
IN is JSON lines, also gzipped, a table in Parquet, or - for lines on stdin; OUT likewise, by its ending.

A row that cannot be answered says why in its own result, and the others go on. What rows begin with in common is computed
once. OUT appears when all rows are done. Until then what is done stands in OUT.journal: a job that ended early, in whatever
way, goes on from there when the same command is given again, and does again what was changed: rows, options or the bundle.
The journal stays, so that rows can be mended later; without it all is done anew.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.pipelines.commands.generating import (
    DRAWING,
    add_bundle_argument,
    add_length_argument,
    add_prefix_cache_arguments,
    add_sampling_arguments,
    add_template_argument,
    length_of,
    prefix_store,
    sampling_of,
    template_args,
    trust_of,
)
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import Progress, say
from castiron.pipelines.sizes import counted

if TYPE_CHECKING:
    from castiron.pipelines.batch.job import Answer, Summary
    from castiron.pipelines.batch.requests import Kind, Requests
    from castiron.pipelines.batch.rows import Row
    from castiron.pipelines.generation.scheduler import Scheduler
    from castiron.pipelines.generation.text import Text
    from castiron.vmfb.bundle import Bundle

EXAMPLES = """\
examples:
  castiron batch build/model prompts.jsonl -o answers.jsonl -n 200
  castiron batch build/model prompts.parquet -o answers.parquet --ordered
  castiron batch build/model requests.jsonl -o results.jsonl.gz --json
  cat prompts.jsonl | castiron batch build/model - -o - | grep Paris
  castiron batch build/model prompts.jsonl -o answers.jsonl --ray head:6379
  castiron batch build/embeddinggemma-300m texts.jsonl -o vectors.parquet --embed

Greedy unless --temperature is given; what is drawn is drawn by --seed and each row's own number, so that the same job gives
the same results. OpenAI's rows have the server's defaults, and the options here where a body says nothing.

A plain result has generated (the text), finish_reason, prompt_tokens, generated_tokens and error, and thoughts of a reasoning
model; with --embed embedding, prompt_tokens, cut and error. A column of the row that has one of these names is replaced.

With --ray every node of the cluster has a part of the rows, nodes that come during the job too, and the results are the same.
What was done so far is kept here, so that a job may go on with --ray or without.

--json prints one object: rows, before (of them done by an earlier run), failed, prompt_tokens, generated_tokens, cached_tokens
(of the prompts, found in the cache), seconds, tok_s, output.
"""
# Seconds between two lines that tell how far a job is where stderr is no terminal.
TOLD = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    parser.add_argument("input", metavar="IN", help="the rows: a file that ends in .jsonl, .jsonl.gz or .parquet, or - for "
                        "JSON lines on stdin")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the results, in the same kinds of file; - is "
                        "JSON lines on stdout, each as it comes, where an interrupted job cannot go on later")  # fmt: skip
    parser.add_argument("--ordered", action="store_true", help="results in the order of the rows (default: as they come)")
    add_length_argument(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-text token")
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    parser.add_argument("--raw", action="store_true", help="take prompts as they are, without the chat template")
    add_template_argument(parser)
    parser.add_argument("--json-schema", metavar="FILE", help="every answer is JSON that holds to the JSON schema in a file")
    add_sampling_arguments(parser, speculates=False)
    group = parser.add_argument_group("vectors", "Of a model that encodes texts; a row has a text, prompt or input.")
    group.add_argument("--embed", action="store_true", help="give the vector of each row's text")
    group.add_argument("--prompt-name", metavar="NAME", help="put the model's prompt of this name before each text, such as "
                       "query (default: the model's own default, or none)")  # fmt: skip
    group.add_argument("--dimensions", type=int, metavar="N", help="the first N numbers of each vector (default: all)")
    parser.add_argument("--name", metavar="NAME", help="what the bodies of OpenAI's rows call the model (default: the "
                        "bundle's own name, and its directory's works too)")  # fmt: skip
    add_prefix_cache_arguments(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per physical core)")
    parser.add_argument("--ray", metavar="ADDRESS", help="run on the cluster of Ray at host:port, or auto for the one that "
                        "this machine is in, or local to begin one here; with --threads N an engine for every N CPUs of a "
                        "node (default: one for all of a node's)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object with the job's counts")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.batch.job import run_job
    from castiron.pipelines.batch.rows import kind_of, open_rows
    from castiron.pipelines.casting.named import bundle_of

    output = None if args.output == "-" else Path(args.output)
    kind_of(args.output)
    if output and output.is_dir():
        raise PipelineError(f"{args.output} is a folder: give the results a file of their own")
    if output is None and args.json:
        raise PipelineError("--json prints its object on stdout, where the results go: give -o a file")
    if output and args.input != "-" and output.exists() and output.samefile(args.input):
        raise PipelineError(f"{args.output} is the input: give the results a file of their own")
    if output is None:
        say("results go to stdout and are kept nowhere: if this job is interrupted, another run begins anew")
    rows, args.json_schema = open_rows(args.input), read_schema(args.json_schema)
    try:
        with engine(args, bundle_of(args.bundle, **trust_of(args))) as (key, answer), Progress() as progress:
            summary = run_job(rows, key, answer, output, ordered=args.ordered, told=teller(progress))
    except KeyboardInterrupt:
        if output:
            say("what is done is kept: the same command goes on from there")
        raise
    if summary.alike:
        say(f"{counted(summary.alike, 'row')} with a custom_id that another row has before")
    say(in_words(summary) + (f"; results in {output}" if output else ""))
    if args.json:
        print(json.dumps(counts(summary) | {"output": args.output}))
    return 0


@contextlib.contextmanager
def engine(args: argparse.Namespace, bundle: "Bundle") -> "Iterator[tuple[Callable[[Row], str], Answer]]":
    """What gives rows their keys and what answers them: this process, or with --ray a cluster."""
    from castiron.pipelines.batch.job import answering

    if args.ray is None:
        requests, scheduler = prepare(args, bundle)
        yield requests.key, answering(scheduler, requests)
        return
    from castiron.pipelines.cluster.batch import answering_on_cluster, connected

    # Every option is refused here, before a node has heard of the job.
    requests, _ = prepare(args, bundle, runs=False)
    with connected(args.ray):
        yield requests.key, answering_on_cluster(args, bundle, prepare)


def prepare(args: argparse.Namespace, bundle: "Bundle", runs: bool = True) -> "tuple[Requests, Scheduler | None]":
    """What makes rows into work, as the options say, and what `runs` it: None for a bundle that encodes texts. The schema has
    been read by now."""
    from castiron.pipelines.batch.requests import Requests, identity
    from castiron.pipelines.generation.scheduler import Scheduler
    from castiron.pipelines.measuring.memory import say_memory, slots_of

    manifest, seed = bundle.manifest, args.seed or 0
    options = {name: value for name, value in vars(args).items() if name in ANSWERING}
    schema = args.json_schema
    bound = identity(manifest, options | {"seed": seed, "json_schema": schema})
    if args.embed or manifest.encoder:
        return Requests(*encoding(args, bundle), bound, seed), None
    requests = Requests(*generating(args, bundle, schema), bound, seed)
    if not runs:
        return requests, None
    say_memory(manifest, slots_of(manifest))
    scheduler = Scheduler(bundle, args.threads, store=prefix_store(args, manifest))
    # Nobody waits for one row's next token.
    scheduler.interleaved, scheduler.fills = scheduler.widest, True
    return requests, scheduler


# The options that answers depend on, besides the seed and the schema.
ANSWERING = {
    "max_tokens", "ignore_eos", "system", "raw", "template_arg", "temperature", "top_k", "top_p", "min_p", "repeat_penalty",
    "stop", "repetition_stop", "embed", "prompt_name", "dimensions", "name",
}  # fmt: skip


def generating(args: argparse.Namespace, bundle: "Bundle", schema: Any) -> "tuple[Kind, Callable[[], Kind]]":
    """Plain rows of prompts, and what makes OpenAI's."""
    from castiron.pipelines.batch.plain import Prompts, Wanted
    from castiron.pipelines.generation.text import load_text

    if args.prompt_name or args.dimensions:
        raise PipelineError("--prompt-name and --dimensions are for --embed")
    # Each row has a seed that follows from the job's, of which the range alone is looked at here.
    sampling, (most, usual) = sampling_of(argparse.Namespace(**{**vars(args), "seed": None})), length_of(args)
    replace(sampling, seed=args.seed)
    text = load_text(bundle, template_args(args))
    wanted = Wanted(
        most, usual, sampling, args.stop, args.ignore_eos, args.repetition_stop, args.raw, args.system, json_schema=schema
    )
    plain = Prompts(bundle.manifest, text, wanted)
    return plain, lambda: openai_rows(args, bundle, text, schema)


def openai_rows(args: argparse.Namespace, bundle: "Bundle", text: "Text", schema: Any) -> "Kind":
    """Rows of OpenAI's format for a bundle that generates."""
    from castiron.pipelines.batch.openai import OpenAI

    given = {name: getattr(args, name) for name in (*DRAWING, "temperature", "repeat_penalty") if name != "seed"}
    flags = {"ignore_eos": args.ignore_eos or None, "repetition_stop": args.repetition_stop or None, "stop": args.stop or None}
    if args.max_tokens != -1:
        flags["max_tokens"] = args.max_tokens
    if schema is not None:
        flags["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    defaults = {name: value for name, value in (given | flags).items() if value is not None}
    return OpenAI(bundle.manifest, text, names(args, bundle), defaults)


def encoding(args: argparse.Namespace, bundle: "Bundle") -> "tuple[Kind, Callable[[], Kind]]":
    """Plain rows of texts for vectors, and what makes OpenAI's."""
    from castiron.pipelines.batch.plain import Embeddings
    from castiron.pipelines.embedding import Embedder

    facts = bundle.manifest.encoder
    if not args.embed and not (facts and facts.relevance):
        raise PipelineError(f"{bundle.path} encodes texts and generates none: add --embed for their vectors")
    embedder = Embedder(bundle, args.threads)

    def openai() -> "Kind":
        from castiron.pipelines.batch.openai import OpenAI

        return OpenAI(bundle.manifest, embedder.text, names(args, bundle), {}, embedder)

    return Embeddings(embedder, embedder.prompt(args.prompt_name), args.dimensions), openai


def names(args: argparse.Namespace, bundle: "Bundle") -> list[str]:
    """What the model is called, as castiron serve has it."""
    own = [bundle.manifest.name, bundle.path.resolve().name.removesuffix(".castiron")]
    return [args.name] if args.name else list(dict.fromkeys(own))


def read_schema(place: str | None) -> Any:
    """The JSON schema in a file; PipelineError for what is no JSON."""
    if place is None:
        return None
    try:
        return json.loads(Path(place).read_bytes())
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"{place} is not JSON: {error}") from None


def teller(progress: Progress) -> "Callable[[Summary, float | None], None]":
    """Tells how far a job is: a bar at a terminal, elsewhere a line now and then."""
    told = time.monotonic()

    def tell(summary: "Summary", share: float | None) -> None:
        nonlocal told
        note = f"{counted(summary.rows, 'row')}, {summary.tokens_per_second:,.0f} tok/s"
        if progress.shown:
            # The end is said in another line.
            progress("rows", min(share or 0.0, 0.999), note)
        elif time.monotonic() - told > TOLD:
            told = time.monotonic()
            # What an earlier run did took this one no time.
            own = share * summary.done / summary.rows if share else 0.0
            left = f", about {summary.seconds * (1 - share) / own:,.0f} s left" if share and own else ""
            say(f"{note}{left}")

    return tell


def in_words(summary: "Summary") -> str:
    """The line that ends a job."""
    parts = [f"{number:,} {what}" for number, what in ((summary.failed, "failed"), (summary.before, "done before")) if number]
    rows = counted(summary.rows, "row") + (f" ({', '.join(parts)})" if parts else "")
    cached = f" ({summary.cached_tokens:,} cached)" if summary.cached_tokens else ""
    return (
        f"{rows}; prompts {summary.prompt_tokens:,} tokens{cached}, answers {summary.generated_tokens:,}, in "
        f"{summary.seconds:,.1f} s: {summary.tokens_per_second:,.1f} tok/s"
    )


def counts(summary: "Summary") -> Mapping[str, Any]:
    """What --json prints of a job."""
    return {
        "rows": summary.rows, "before": summary.before, "failed": summary.failed, "prompt_tokens": summary.prompt_tokens,
        "generated_tokens": summary.generated_tokens, "cached_tokens": summary.cached_tokens,
        "seconds": round(summary.seconds, 3), "tok_s": round(summary.tokens_per_second, 1),
    }  # fmt: skip
