"""Measure how much faster a draft makes a model, for greedy answers to code, prose and short prompts.

`python -m tests.speculation BUNDLE DRAFT [TURNS]` opens both bundles once. First it prints how many
decode steps a proposal of the draft and a call of each verify function take. Then, for each prompt,
plain decoding, n-grams alone, and n-grams with the draft take turns. It prints the speed of plain
decoding in the last turn, and the median ratio of each to plain decoding in the same turn. Every
text must have the same tokens. Each text gets a new draft, which knows nothing about earlier texts,
as in `castiron run`.
"""

from __future__ import annotations

import statistics
import sys
import time

from castiron.pipelines.engine.draft import Draft
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.text.text_output import Stream, text_request
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session

TOKENS = 160
PROMPTS = {
    "code": (
        "Write a Python class for a priority queue with push, pop and peek, with tests.",
        "Write a C function that reverses a singly linked list, and explain it.",
        "Write a JavaScript function that parses a CSV file with quoted fields.",
    ),
    "prose": (
        "Why did the Roman Empire fall?",
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Give advice to somebody who starts a first job in an office.",
    ),
    "short": (
        "What is the capital of Australia? Answer in one sentence.",
        "Which is larger, 17 * 23 or 400? Answer briefly.",
        "Name three colours.",
    ),
}
MODES = {"plain": (False, False), "ngram": (True, False), "draft": (True, True)}


def costs(target: Session, draft: Session, rounds: int = 40) -> dict[str, float]:
    """Return how long calls take, in decode steps of `target`: medians of calls that take turns."""
    widths = sorted(function.width for function in target.manifest.functions if function.role == "verify")
    calls = {"step": lambda: target.step(7), "proposal": lambda: draft.step(7)}
    calls |= {f"verify_{width}": lambda width=width: target.verify([7] * width) for width in widths}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for session in (target, draft):
                session.rewind(0)
                session.prefill(range(1, 65))
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) / statistics.median(seconds["step"]) for name, own in seconds.items()}


def main() -> None:
    target, drafting = open_bundle(sys.argv[1]), open_bundle(sys.argv[2])
    turns = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    tokenizer, eos = load_tokenizer(target), target.manifest.tokens.eos
    session, draft_session = Session(target), Session(drafting)
    print(", ".join(f"{name} {steps:.2f}" for name, steps in costs(session, draft_session).items()), flush=True)
    for kind, prompts in PROMPTS.items():
        for question in prompts:
            prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
            expected, ratios, notes = None, {mode: [] for mode in MODES}, {}
            for _ in range(turns):
                speeds = {}
                for mode, (ngrams, uses_draft) in MODES.items():
                    draft = Draft(draft_session, target.manifest.vocab) if uses_draft else None
                    engine = Engine(session, draft=draft, ngrams=ngrams)
                    request = text_request(prompt, engine.context, tokenizer, max_tokens=TOKENS, stop_tokens=eos)
                    stream = Stream(engine, request).run()
                    expected = expected or stream.tokens
                    assert stream.tokens == expected, f"{mode} changes the tokens of {question!r}"
                    speeds[mode] = stream.steps / stream.decode_seconds
                    ratios[mode].append(speeds[mode] / speeds["plain"])
                    notes[mode] = stream.speculator
            found = ", ".join(f"{mode} {statistics.median(ratio):.2f}x" for mode, ratio in ratios.items())
            print(f"{kind}, {len(expected)} tokens at {speeds['plain']:.1f} tok/s: {found}; {notes['draft']}", flush=True)


if __name__ == "__main__":
    main()
