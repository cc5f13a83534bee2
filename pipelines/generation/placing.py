"""Which slots the sequences that decode are to be in, so that a small batch function takes in all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from castiron.vmfb.batch import fitting, window

# A sequence moves if so many tokens may still come: its rows are copied in the time in which a few steps read them.
MOVED = 16


def move(sizes: Collection[int], lengths: Mapping[int, int], resting: Mapping[int, int]) -> tuple[int, int] | None:
    """From which slot to which a sequence is to move next, of those that decode in slots of so many `lengths` tokens; `resting`
    are those of slots that nobody uses. None where they are in as few neighbouring slots as there is a function of.

    The fewest tokens move: a place is chosen for what it costs to bring the others there.
    """
    if len(lengths) < 2 or window(sizes, lengths)[0] == (rows := fitting(sizes, len(lengths))):
        return None
    found = []
    for first in range(max(sizes) - rows + 1):
        inside = range(first, first + rows)
        away, room = [slot for slot in lengths if slot not in inside], [slot for slot in resting if slot in inside]
        if len(away) <= len(room):
            found.append((sum(lengths[slot] for slot in away), away, room))
    if not found:
        return None
    _, away, room = min(found)
    return min(away, key=lambda slot: (lengths[slot], slot)), min(room, key=lambda slot: (resting[slot], slot))
