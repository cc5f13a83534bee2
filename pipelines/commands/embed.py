"""Gives the vector of each text, for search and comparison: one JSON object a line, in the order of the texts.

DIR is a bundle of a model that encodes texts, such as Qwen3-Embedding or EmbeddingGemma, or such a model itself, which is cast
when it is first named and kept in the cache. Texts come from the command line, or one a line from a file or stdin. A text that
is longer than the model takes is cut, which is said on stderr. Vectors are those of sentence-transformers, to the rounding of
f32.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from castiron.pipelines.commands.generating import add_bundle_argument, trust_of
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.disk import naming

EXAMPLES = """\
examples:
  castiron embed build/qwen3-embedding-0.6b "Ice melts." "The sky is blue."
  castiron embed build/qwen3-embedding-0.6b --prompt-name query "What does ice do?"
  castiron embed build/embeddinggemma-300m --file lines.txt --dimensions 256 -o vectors.npy
  cat lines.txt | castiron embed build/embeddinggemma-300m -

A line has index, tokens (how many), cut (whether the text had more) and embedding. --json prints one object in their place:
model, prompt, dimensions, cut (how many texts were) and embeddings, a list of {index, tokens, cut, embedding}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text each; - alone reads stdin, a text a line")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the texts from a file, one a line; - is stdin")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt-name", metavar="NAME", help="put the model's prompt of this name before each text, such as "
                         "query; castiron inspect lists them (default: the model's own default, or none)")  # fmt: skip
    prompts.add_argument("--prompt", metavar="TEXT", help="put this before each text")
    parser.add_argument("--dimensions", type=int, metavar="N", help="the first N numbers of each vector, of length 1 again "
                        "where the model's are (default: all)")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="write the vectors as a NumPy file, f32 [texts, dimensions], "
                        "and print none")  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per physical core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line for each text")


def main(args: argparse.Namespace) -> int:
    import numpy as np

    from castiron.pipelines.casting.named import bundle_of
    from castiron.pipelines.embedding import Embedder, say_cut

    texts = list(texts_of(args))
    embedder = Embedder(bundle_of(args.bundle, **trust_of(args)), args.threads)
    embedder.check_vectors()
    prompt = embedder.prompt(args.prompt_name) if args.prompt is None else args.prompt
    embedder.check_dimensions(args.dimensions)
    tokens = [embedder.tokens(text, prompt) for text in texts]
    cut = sum(found.cut for found in tokens)
    say_cut(cut, len(tokens), embedder.facts.max_tokens)
    rows = []
    for index, found in enumerate(tokens):
        vector = embedder.vector(found, args.dimensions)
        row = {"index": index, "tokens": len(found.ids), "cut": found.cut}
        if args.output:
            rows.append((row, vector))
        elif args.json:
            rows.append((row | {"embedding": numbers(vector)}, vector))
        else:
            print(json.dumps(row | {"embedding": numbers(vector)}), flush=True)
    if args.output:
        with naming(args.output), open(args.output, "wb") as file:
            np.save(file, np.stack([vector for _, vector in rows]))
    if args.json:
        dimensions = args.dimensions or embedder.bundle.manifest.hidden
        facts = {"model": embedder.name, "prompt": prompt, "dimensions": dimensions, "cut": cut}
        print(json.dumps(facts | {"embeddings": [row for row, _ in rows]}, ensure_ascii=False))
    return 0


def texts_of(args: argparse.Namespace) -> Iterator[str]:
    """The texts asked about; PipelineError if there are none."""
    if args.texts and args.file:
        args.parser.error("argument TEXT: not allowed with --file")
    place = "-" if args.texts == ["-"] else args.file
    if place is None and not args.texts:
        raise PipelineError("there is no text: give some as arguments, or a file with --file, where - is stdin")
    if place is None:
        yield from args.texts
        return
    data = sys.stdin.buffer.read() if place == "-" else Path(place).read_bytes()
    lines = data.decode("utf-8-sig", "surrogateescape").split("\n")
    # What ends the last line begins no other.
    lines = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not lines:
        raise PipelineError(f"{'stdin' if place == '-' else place} has no lines: give a text a line")
    yield from lines


def numbers(vector) -> list[float]:
    """As few digits as say which f32 each is."""
    return [float(str(x)) for x in vector]
