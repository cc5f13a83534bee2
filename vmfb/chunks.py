"""How a prompt is cut into calls."""

from __future__ import annotations

from collections.abc import Sequence

# What a call costs beyond its rows, in rows: every call reads and decodes all the weights. A decode step does little
# else.
CALL_ROWS = 4.0


def chunks(total: int, start: int, context: int, widths: Sequence[int], padding: float) -> list[tuple[int, int]]:
    """Calls (width, tokens) that take `total` tokens from position `start`; tokens < width only in the last.

    Chunks of the widest width as long as they fill up, then for the rest whatever costs least in sum, a padded chunk
    among it; width 1, a decode step, is always there. `padding` is what a row of padding costs, in rows: 0 where the
    kernels leave it out, 1 where it is computed. A chunk's whole width stays below `context`, padding included.
    """
    widths = sorted({1, *widths})
    widest = widths[-1]
    whole = min(total, context - start) // widest
    rest, space = total - whole * widest, context - start - whole * widest

    # best[n]: the cheapest way to take the last n tokens; they start where `space - (rest - n)` positions are left.
    # Of equal ends, the one that takes most tokens first, in the narrowest call that holds them.
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for left in range(1, rest + 1):
        room = space - (rest - left)
        options = []
        for width in widths:
            if width <= room:
                count = min(width, left)
                cost = count + padding * (width - count) + CALL_ROWS
                options.append((cost + best[left - count][0], -count, width))
        best.append(min(options))
    calls = [(widest, widest)] * whole
    while rest:
        width = best[rest][2]
        calls.append((width, min(width, rest)))
        rest -= min(width, rest)
    return calls
