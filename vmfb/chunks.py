"""How a prompt is cut into calls."""

from __future__ import annotations

from collections.abc import Mapping

# What a call costs beyond its rows, in rows: every call reads all the weights. A decode step does little else.
CALL_ROWS = 4.0


def default_costs(widths: tuple[int, ...]) -> dict[int, float]:
    """The cost of a call by its width, in rows, where nothing has been measured; width 1 is a decode step."""
    return {width: width + CALL_ROWS for width in (1, *widths)}


def chunks(total: int, start: int, context: int, costs: Mapping[int, float]) -> list[tuple[int, int]]:
    """Calls (width, tokens) that take `total` tokens from position `start`; tokens < width only in the last.

    Chunks of the widest width as long as they fill up, then for the rest whatever costs least in sum, a padded chunk
    among it. A chunk's whole width stays below `context`, padding included: it writes to the cache. `costs` holds the
    cost of a call for every width, width 1 (a decode step) among them.
    """
    widest = max(costs)
    whole = min(total, context - start) // widest
    rest, space = total - whole * widest, context - start - whole * widest

    # best[n]: the cheapest way to take the last n tokens; they start where `space - (rest - n)` positions are left.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for left in range(1, rest + 1):
        room = space - (rest - left)
        best.append(min((cost + best[max(0, left - w)][0], w) for w, cost in costs.items() if w <= room))
    calls = [(widest, widest)] * whole
    while rest:
        width = best[rest][1]
        calls.append((width, min(width, rest)))
        rest -= min(width, rest)
    return calls
