"""Plan the calls that decode one token of several sequences: each reads the weights once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from castiron.vmfb.bundle.manifest import Manifest

# FLOP that a CPU core computes in the time that it takes to read one byte: 100 GFLOP/s at 10 GB/s.
FLOPS_PER_BYTE = 10

# A call: (first slot, number of slots). A call of one slot is a `decode_step`.
Span = tuple[int, int]


class Cover:
    """The cheapest decode calls that append one token to each of the given slots.

    A call of width w decodes w adjacent slots, the first of which is a multiple of w; some of them
    may get no token. Ties go to the fewest calls, then to the smallest total width.
    """

    def __init__(self, size: int, costs: Mapping[int, float]):
        """Plan for `size` slots; `costs`: time of a call by width, in any unit."""
        self.spans = {(first, w): costs[w] for w in costs for first in range(0, size - w + 1, w)}
        self.widths = sorted(costs)
        self.of = lru_cache(4096)(self._of)

    def _of(self, slots: tuple[int, ...]) -> tuple[Span, ...]:
        # best[n]: (cost, number of calls, total width, spans) of the best plan for the last n slots.
        best: list[tuple[float, int, int, tuple[Span, ...]]] = [(0.0, 0, 0, ())]
        for slot in reversed(slots):
            found = []
            for width in self.widths:
                span = slot // width * width, width
                if span in self.spans:
                    cost, calls, widths, spans = best[sum(other >= span[0] + width for other in slots)]
                    found.append((cost + self.spans[span], calls + 1, widths + width, (span, *spans)))
            best.append(min(found))
        return best[-1][3]


def costs_of(manifest: Manifest) -> dict[int, float]:
    """Return the estimated time of one decode call by width, in the time of one FLOP.

    It is the sum over the call's kernels at position 0 of their compute time or memory time,
    whichever is longer; 0 for all widths if the manifest does not have these numbers.
    """
    functions = [manifest.function("decode"), *(manifest.function("batch", width) for width in manifest.widths("batch"))]
    work = manifest.compile.get("work", {})
    if not all(work.get(function.name) for function in functions):
        return dict.fromkeys((function.width for function in functions), 0.0)
    cost = lambda kernel: kernel["calls"] * max(kernel["flops"][0], FLOPS_PER_BYTE * kernel["bytes"][0])
    return {function.width: sum(map(cost, work[function.name].values())) for function in functions}
