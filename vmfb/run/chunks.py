"""Split a prompt into prefill calls."""

from __future__ import annotations

from collections.abc import Sequence

# The cost of reading and dequantising all weights in a call, in units of one token's cost.
CALL_ROWS = 4.0


def chunks(total: int, start: int, context: int, widths: Sequence[int], padding: float) -> list[tuple[int, int]]:
    """Split a prompt into prefill calls; return (width, number of real tokens) of each call.

    total: number of tokens. start: position of the first. No call ends past `context`, padding
        included. Width 1 (decode steps) is always possible.
    padding: cost of a padding token, relative to a real one: 0 if kernels skip padding.

    Full calls of the largest width come first, then the cheapest calls for the rest. Only the last
    call may have padding.
    """
    widths = sorted({1, *widths})
    widest = widths[-1]
    full = min(total, context - start) // widest
    rest, space = total - full * widest, context - start - full * widest

    # best[n]: (cost, -tokens of the first call, its width) of the cheapest calls for the last n
    # tokens. Ties go to the first call with the most tokens, then to the narrowest.
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for left in range(1, rest + 1):
        free = space - (rest - left)
        options = []
        for width in widths:
            if width <= free:
                count = min(width, left)
                cost = count + padding * (width - count) + CALL_ROWS
                options.append((cost + best[left - count][0], -count, width))
        best.append(min(options))
    calls = [(widest, widest)] * full
    while rest:
        width = best[rest][2]
        calls.append((width, min(width, rest)))
        rest -= min(width, rest)
    return calls
