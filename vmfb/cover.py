"""Which calls decode the tokens of some slots: one for all, or several narrower ones where few are taken and far apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from castiron.vmfb.manifest import Manifest

# FLOP that a CPU does in the time in which it reads a byte: some 100 GFLOP/s beside 10 GB/s a core.
FLOPS_A_BYTE = 10

# The first slot of a call and how many it is for; one alone is that slot's own `decode_step`.
Span = tuple[int, int]


class Cover:
    """The cheapest spans that hold given slots, of those that begin at a multiple of their width; of equal ones the fewest,
    and then the narrowest."""

    def __init__(self, size: int, costs: Mapping[int, float]):
        """Of `size` slots; what a call costs by its width, of which one is 1."""
        self.spans = {(first, w): costs[w] for w in costs for first in range(0, size - w + 1, w)}
        self.widths = sorted(costs)
        self.of = lru_cache(4096)(self._of)

    def _of(self, slots: tuple[int, ...]) -> tuple[Span, ...]:
        """The spans for `slots`, which ascend."""
        # Of the last n of them: cost, calls, their widths, and the spans.
        best: list[tuple[float, int, int, tuple[Span, ...]]] = [(0.0, 0, 0, ())]
        for at in reversed(range(len(slots))):
            found = []
            for width in self.widths:
                first = slots[at] // width * width
                if (first, width) in self.spans:
                    cost, calls, widths, others = best[sum(slot >= first + width for slot in slots)]
                    found.append((cost + self.spans[first, width], calls + 1, widths + width, ((first, width), *others)))
            best.append(min(found))
        return best[-1][3]


def costs(manifest: Manifest) -> dict[int, float]:
    """What decoding takes by how many rows a call has, 1 and those of the batch functions, in a unit that compares: of each
    kernel the longer of computing and reading. All 0 for a bundle that does not say what its kernels do."""
    functions = [manifest.function("decode"), *(manifest.function("batch", width) for width in manifest.widths("batch"))]
    work = manifest.compile.get("work", {})
    known = all(work.get(function.name) for function in functions)
    return {f.width: sum(map(_cost, work[f.name].values())) if known else 0.0 for f in functions}


def _cost(kernel: Mapping) -> float:
    # At position 0: what more there is at others is every row's own, whichever call it is in.
    return kernel["calls"] * max(kernel["flops"][0], FLOPS_A_BYTE * kernel["bytes"][0])
