"""In which order the rows of a window are run: beginnings that they share are computed once, and long rows come first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from castiron.pipelines.batch.requests import Work
from castiron.pipelines.generation.positions import shared

# Rows that are held at once, or sequences where a row has several, and tokens of their prompts.
ROWS, TOKENS = 512, 1 << 20
# Seconds after its first row came in which a window is begun, though others may come.
WAIT = 0.25
# Rows are kept together that share so many tokens more than all around them.
BEGINNING = 32
# Tokens of a prompt that are read in the time of one decode step of a batch.
READ = 16


def in_windows(works: Iterable[Work | None], rows: int = ROWS) -> Iterator[Work | None]:
    """All works, a window of them after another, each in the order of `arranged`; None, as among `works`, where the next one is
    not there yet."""
    window, held, tokens, began = list[Work](), 0, 0, 0.0
    for work in works:
        if work is not None:
            began = began if window else time.monotonic()
            window.append(work)
            held += max(1, len(work.sequences))
            tokens += sum(len(sequence.prompt) for sequence in work.sequences)
            if held < rows and tokens < TOKENS:
                continue
        elif not window or time.monotonic() - began < WAIT:
            yield None
            continue
        yield from arranged(window)
        window, held, tokens = [], 0, 0
    yield from arranged(window)


def arranged(works: Sequence[Work]) -> list[Work]:
    """Those that need no sequence first; then so that what shares a beginning stands together, and otherwise what may take
    longest comes first, which leaves short rows for the end, when slots fall empty."""
    done = [work for work in works if not work.sequences]
    rest = [work for work in works if work.sequences]
    # Big ends first: the order of the bytes is the order of the tokens.
    rest.sort(key=lambda work: (_prompt(work).astype(">u4").tobytes(), work.row.index))
    common = [0, *(shared(_prompt(a), _prompt(b)) for a, b in zip(rest, rest[1:]))]
    costs = [_cost(work) for work in rest]
    return done + [rest[i] for i in _longest_first(costs, common, 0, len(rest))]


def _longest_first(costs: Sequence[float], common: Sequence[int], first: int, last: int) -> list[int]:
    """The works `first` to `last`, sorted by prompt, of which each shares `common` tokens with the one before it: branch by
    branch of the tree of their beginnings, the one with the longest work first, at each fork."""
    found, stack = list[int](), [(first, last)]
    while stack:
        first, last = stack.pop()
        if last - first == 1:
            found.append(first)
        if last - first <= 1:
            continue
        least = min(common[first + 1 : last]) + BEGINNING
        cuts = [first, *(i for i in range(first + 1, last) if common[i] < least), last]
        branches = list(zip(cuts, cuts[1:]))
        # The longest on top; of equals the first.
        stack += sorted(reversed(branches), key=lambda branch: max(costs[slice(*branch)]))
    return found


def _prompt(work: Work) -> np.ndarray:
    return work.sequences[0].prompt


def _cost(work: Work) -> float:
    """How many decode steps a slot is taken for, at most."""
    return sum(sequence.limit + len(sequence.prompt) / READ for sequence in work.sequences)
