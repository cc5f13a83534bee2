"""One engine in a process of its own, driven by lines of JSON on stdin and stdout, so that memory and threads are its
own and bench can let engines take turns.

    python -m castiron.pipelines.measuring.bench_worker ENGINE MODEL THREADS CONTEXT [IDS]

It answers {"op": "prefill" | "fill" | "decode" | "memory"}; with IDS it prints the greedy token after them, and ends.
"""

import json
import os
import sys
import time
from collections.abc import Sequence

from castiron.pipelines.measuring.memory import peak_rss_mb


class Castiron:
    """A bundle's session; `decode` feeds what the model chooses, as generation does, rather than given tokens."""

    def __init__(self, model: str, threads: int, context: int):
        from castiron.vmfb.bundle import open_bundle
        from castiron.vmfb.session import Session

        self.session = Session(open_bundle(model), threads=threads)

    def prefill(self, tokens: Sequence[int]) -> float:
        self.session.rewind(0)
        start = time.perf_counter()
        self.session.prefill(tokens)
        return time.perf_counter() - start

    def fill(self, tokens: Sequence[int]) -> None:
        self.prefill(tokens)
        self.session.keep()

    def decode(self, depth: int, tokens: Sequence[int]) -> float:
        self.session.rewind(depth)
        token, step = tokens[0], self.session.step
        start = time.perf_counter()
        for _ in tokens:
            token = step(token)
        return time.perf_counter() - start

    def first(self, tokens: Sequence[int]) -> int:
        return self.session.prefill(tokens)


def engine(name: str, model: str, threads: int, context: int):
    """The engine called `name`, loaded."""
    if name == "castiron":
        return Castiron(model, threads, context)
    from castiron.reference.peers import ENGINES

    return ENGINES[name](model, threads, context)


def main(argv: Sequence[str]) -> int:
    # The pipe to bench is kept out of reach of libraries that print.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, model, threads, context = argv[:4]
    worker = engine(name, model, int(threads), int(context))
    if len(argv) > 4:
        print(worker.first([int(token) for token in argv[4].split(",")]), file=pipe, flush=True)
        return 0
    print(json.dumps({"ready": True}), file=pipe, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(worker, json.loads(line))), file=pipe, flush=True)
    return 0


def answer(worker, request: dict) -> dict:
    """Memory, or the seconds of an engine's method, which a fill does not tell."""
    op = request.pop("op")
    return {"rss_mb": peak_rss_mb()} if op == "memory" else {"seconds": getattr(worker, op)(**request)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
