"""Compute the vectors of texts with an embedding model: one JSON object per line.

Examples of models are Qwen3-Embedding and EmbeddingGemma. Texts come from the command line, or one
per line from a file or stdin. Texts longer than the model's limit are truncated, with a message.
Vectors equal those of sentence-transformers, up to the rounding of f32.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from castiron.pipelines.cli.open_engine import open_model
from castiron.pipelines.cli.options import add_loading, add_model, add_options
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.file_errors import naming

EXAMPLES = """\
examples:
  castiron embed build/qwen3-embedding-0.6b "Ice melts." "The sky is blue."
  castiron embed build/embeddinggemma-300m --file lines.txt --dimensions 256 -o vectors.npy
  cat lines.txt | castiron embed build/embeddinggemma-300m -

Each line has index, tokens (number), truncated and embedding. --json prints one object: model, prompt,
dimensions, truncated (number of texts) and embeddings, a list of {index, tokens, truncated,
embedding}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="the texts; a single - reads stdin, one text per line")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the texts from a file, one per line; - is stdin")
    parser.add_argument("-o", "--output", metavar="FILE", help="write a NumPy file, f32 [texts, dimensions], and print nothing")
    prompts = parser.add_mutually_exclusive_group()
    add_options(prompts, "--prompt-name")
    prompts.add_argument("--prompt", metavar="TEXT", help="put this before each text")
    add_options(parser, "--dimensions", "--json")
    add_loading(parser)


def main(args: argparse.Namespace) -> int:
    import numpy as np

    from castiron.pipelines.text.embedder import Embedder, print_cut

    texts = list(texts_of(args))
    embedder = Embedder(open_model(args.bundle, args), args.threads)
    embedder.check_vectors()
    prompt = embedder.prompt(args.prompt_name) if args.prompt is None else args.prompt
    embedder.check_dimensions(args.dimensions)
    tokens = [embedder.tokens(text, prompt) for text in texts]
    cut = sum(found.cut for found in tokens)
    print_cut(tokens, embedder.facts.max_tokens)
    rows, vectors = [], []
    for index, found in enumerate(tokens):
        vector = embedder.vector(found, args.dimensions)
        rows.append({"index": index, "tokens": len(found.ids), "truncated": found.cut})
        if args.output:
            vectors.append(vector)
        else:
            # The shortest decimals that read back as the same f32.
            rows[-1]["embedding"] = [float(str(x)) for x in vector]
        if not args.output and not args.json:
            print(json.dumps(rows[-1]), flush=True)
    if args.output:
        with naming(args.output), open(args.output, "wb") as file:
            np.save(file, np.stack(vectors))
    if args.json:
        dimensions = args.dimensions or embedder.bundle.manifest.hidden
        facts = {"model": embedder.name, "prompt": prompt, "dimensions": dimensions, "truncated": cut}
        print(json.dumps(facts | {"embeddings": rows}, ensure_ascii=False))
    return 0


def texts_of(args: argparse.Namespace) -> Iterator[str]:
    """Yield the texts of the arguments, a file or stdin; PipelineError if there are none."""
    if args.texts and args.file:
        args.parser.error("texts cannot be combined with --file; remove the texts or --file")
    source = "-" if args.texts == ["-"] else args.file
    if source is None and not args.texts:
        raise PipelineError("no texts; give them as arguments, or a file with --file")
    if source is None:
        yield from args.texts
        return
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    lines = data.decode("utf-8-sig", "surrogateescape").split("\n")
    lines = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not lines:
        raise PipelineError(f"{'stdin' if source == '-' else source} is empty; give one text per line")
    yield from lines
