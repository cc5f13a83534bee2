"""What --speculate and --draft bring: greedy answers with and without, to prompts that answers repeat and to others."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.draft import Draft
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.positions import room

# Edits and quotations, whose answers say again what the prompt says.
REPEATING = {
    "edit code": """Add a docstring to this Python class and change nothing else. Answer with the whole class.

```python
class Stack:
    def __init__(self, limit):
        self.limit = limit
        self.items = []

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError("the stack is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items[-1]

    def __len__(self):
        return len(self.items)
```""",
    "quote": """The lighthouse of Kereon stands on a rock so small that the tower covers it almost wholly. It was built \
between 1907 and 1916, and in those nine years the men could work for only a few hundred hours, because landing was \
possible on the calmest days alone. The keepers were hoisted from a boat on a rope, one after the other, with their food \
and their letters. Inside, the floors are laid with oak and mahogany in the shape of a compass rose, so fine that the men \
wore felt slippers over their shoes. The light was made automatic in 2004, and since then nobody has lived there.

Summarise the text above. Quote its sentences.""",
}
OTHER = {
    "story": "Write a short story about a clockmaker who finds a letter in an old clock.",
    "advice": "What should I pack for a week of walking in the mountains, and why?",
    "letter": "Write a letter to a friend who has moved to another country.",
}


@dataclass
class Answer:
    """One prompt: tokens of its answer, decode rates of each round, and what was told of the last. `undrafted`: rates with
    proposals from the text alone, where `speculating` are those with a draft too."""

    repeats: bool
    prompt_tokens: int
    tokens: int
    equal: bool
    plain: list[float]
    speculating: list[float]
    told: dict
    undrafted: list[float]

    @property
    def ratio(self) -> float:
        """Of the medians; above 1 is faster with speculation."""
        return statistics.median(self.speculating) / statistics.median(self.plain)

    @property
    def draft_ratio(self) -> float | None:
        """Of the medians; above 1 is faster with a draft than with proposals from the text alone. None without a draft."""
        return statistics.median(self.speculating) / statistics.median(self.undrafted) if self.undrafted else None

    def as_json(self) -> dict:
        drafted = {"draft_ratio": round(self.draft_ratio, 3)} if self.draft_ratio else {}
        return {
            "repeats": self.repeats,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "equal": self.equal,
            "plain_tok_s": round(statistics.median(self.plain), 1),
            "speculating_tok_s": round(statistics.median(self.speculating), 1),
            "ratio": round(self.ratio, 3),
            **drafted,
            "proposed": sum(source["proposed"] for source in self.told["sources"].values()),
            "accepted": sum(source["accepted"] for source in self.told["sources"].values()),
            **self.told,
        }


def measure(
    session, text, tokens: int, rounds: int, progress: Callable[[str, float], None], draft: Draft | None = None
) -> dict[str, Answer]:
    """Answers of at most `tokens` tokens, all ways in turn, `rounds` times and once to warm up; PipelineError for a bundle
    without verify functions, a chat template or room for the prompts, and for an answer of one token. The ways: plain,
    --speculate ngram, and with a `draft` that and --draft."""
    if not session.manifest.widths("verify"):
        raise PipelineError("this bundle cannot check proposed tokens; compile it with --speculate 4,8")
    found = {}
    names = [(name, words, repeats) for kind, repeats in ((REPEATING, True), (OTHER, False)) for name, words in kind.items()]
    prompts = {name: text.encode_chat([{"role": "user", "content": words}]) for name, words, _ in names}
    if (longest := max(map(len, prompts.values()))) > session.context:
        raise PipelineError(
            f"the longest prompt of this bench has {longest} tokens and the bundle's context is {session.context}: compile "
            "with a larger --context"
        )
    ways = [{}, {"speculate": True}, *([{"speculate": True, "draft": draft}] if draft else [])]
    for done, (name, _, repeats) in enumerate(names):
        prompt = prompts[name]
        limit = min(tokens, room(session.context, 0, len(prompt)))
        rates: list[list[float]] = [[] for _ in ways]
        said: list[list[int]] = [[] for _ in ways]
        for turn in range(rounds + 1):
            progress("speculation", (done + turn / (rounds + 1)) / len(names))
            for way, options in enumerate(ways):
                session.rewind(0)
                generation = Generation(session, prompt, max_tokens=limit, stop_tokens=text.eos, **options)
                said[way] = list(generation)
                if not generation.steps:
                    raise PipelineError(f"the answer to {name!r} is one token, which has no speed: give --gen 2 or more")
                if turn:
                    rates[way].append(generation.steps / generation.decode_seconds)
        found[name] = Answer(
            repeats, len(prompt), len(said[0]), all(tokens == said[0] for tokens in said), rates[0], rates[-1],
            generation.speculator.report(), rates[1] if draft else [],
        )  # fmt: skip
    progress("speculation", 1.0)
    return found


def summarise(found: dict[str, Answer]) -> dict:
    """The medians of the ratios of both kinds, whether all tokens were equal, and every answer."""
    ratios = {kind: [a.ratio for a in found.values() if a.repeats == kind] for kind in (True, False)}
    each = [answer.draft_ratio for answer in found.values() if answer.draft_ratio]
    drafted = {"draft_ratio": round(statistics.median(each), 3), "least_draft_ratio": round(min(each), 3)} if each else {}
    return {
        "repeating_ratio": round(statistics.median(ratios[True]), 3),
        "other_ratio": round(statistics.median(ratios[False]), 3),
        **drafted,
        "tokens_equal": all(answer.equal for answer in found.values()),
        "answers": {name: answer.as_json() for name, answer in found.items()},
    }


def table(result: dict) -> str:
    """The result for a person."""
    drafted = "draft_ratio" in result
    last = f"{'of draft':>10}" if drafted else ""
    lines = [f"{'':<12}{'tokens':>8}{'tok/s':>9}{'speculating':>13}{'ratio':>8}{'right':>10}{last}"]
    for name, answer in result["answers"].items():
        right = f"{answer['accepted']}/{answer['proposed']}"
        lines.append(
            f"{name:<12}{answer['tokens']:>8}{answer['plain_tok_s']:>9.1f}{answer['speculating_tok_s']:>13.1f}"
            f"{answer['ratio']:>7.2f}x{right:>10}" + (f"{answer['draft_ratio']:>9.2f}x" if drafted else "")
        )
    equal = "the same" if result["tokens_equal"] else "DIFFERENT"
    ratios = f"text that repeats {result['repeating_ratio']:.2f}x, elsewhere {result['other_ratio']:.2f}x"
    lines.append(f"{ratios}; tokens are {equal}")
    return "\n".join(lines)
