"""Read mutants of small checkpoints: each must be accepted, or rejected with a one-line error, within
limits of time and memory.

`test_hostile_checkpoints.py` reads some of them. This command reads thousands:

python -m tests.support.hostile_checkpoints --mutants 20000

It prints how many were accepted and rejected, by how many lines of the sources, and all that were
neither; its status is 1 if there are any. --only N reads one mutant. --corpus prints one mutant for
each line that rejects some, for `hostile_corpus.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from castiron.emitter.graph.printer import print_module
from castiron.emitter.lowering import lower
from castiron.emitter.models import read_config
from castiron.pipelines.checkpoints.checkpoint import check_tokenizer, validate
from castiron.pipelines.compile.build_model import build_model, open_source
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.weight_codecs import pack_parameter
from tests.support.hostile import REJECTED, fine, limited
from tests.support.hostile_mutants import mutant, source_of
from tests.support.valid_checkpoints import ADAPTER, write_beside, write_valid

# Seconds of CPU time and bytes of memory for each mutant.
SECONDS, BYTES = 5, 1 << 30
CORPUS = Path(__file__).with_name("hostile_corpus.txt")


def read_fully(path: Path) -> None:
    """Do all that castiron does with a checkpoint before iree-compile, and pack the weights."""
    # A NumPy warning about NaN would be shown to the user.
    warnings.simplefilter("error", RuntimeWarning)
    adapter = path / ADAPTER
    adapted = str(adapter) if adapter.is_dir() else None
    options = Options(prefill=(8,), batch=(), verify_widths=(), lowering="portable", tuned=False, adapter=adapted)
    checkpoint = open_source(path, options)
    # One width of prefill is enough: the widths do not depend on the checkpoint.
    module = lower(build_model(checkpoint, options), options.lowering)
    print_module(module)
    vocab = read_config(checkpoint.config).vocab
    validate(checkpoint, vocab)
    check_tokenizer(checkpoint, vocab)
    for param in module.params.values():
        pack_parameter(checkpoint, param)
    json.dumps([checkpoint.config, checkpoint.generation_config], ensure_ascii=False).encode()
    (checkpoint.chat_template or "").encode()


def verdict_on(number: int, source: Path) -> str:
    """Return the verdict on mutant `number` of a valid checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        return limited(mutant(number, source, Path(folder)), read_fully, SECONDS, BYTES)


def corpus() -> list[tuple[str, int]]:
    """Return the name of the source and the number of each mutant in the corpus."""
    lines = [line.split() for line in CORPUS.read_text().splitlines() if not line.startswith("#")]
    return [(name, int(number)) for name, number, *_ in lines]


def sources(folder: Path) -> list[Path]:
    """Write all valid checkpoints."""
    folder.mkdir()
    return write_valid(folder) + write_beside(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--only", type=int, help="read this mutant only, with its traceback, and keep its files")
    parser.add_argument("--corpus", action="store_true", help="print one mutant for each source line that rejects some")
    args = parser.parse_args()
    if args.only is not None:
        folder = Path(tempfile.mkdtemp())
        path = mutant(args.only, source_of(args.only, sources(folder / "valid")), folder)
        print(path)
        read_fully(path)
        return 0
    found: dict[str, list[tuple[str, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CASTIRON_CACHE"] = f"{folder}/cache"
        valid = sources(Path(folder) / "valid")
        for number in range(args.mutants):
            source = source_of(number, valid)
            found.setdefault(verdict_on(number, source), []).append((source.name, number))
    counts: Counter = Counter()
    for message, which in sorted(found.items(), key=lambda item: -len(item[1])):
        counts[message.split()[0]] += len(which)
        if not fine(message):
            print(f"{len(which):6} {message}   e.g. {which[:3]}")
        elif args.corpus and message.startswith(REJECTED):
            print(*which[0], message)
    counts["lines"] = sum(message.startswith(REJECTED) for message in found)
    print(json.dumps(dict(counts)))
    return int(not all(map(fine, found)))


if __name__ == "__main__":
    sys.exit(main())
