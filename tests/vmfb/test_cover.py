"""Which calls decode some slots of a batch: they hold every slot once, and no others cost less."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from castiron.vmfb.cover import Cover, Span

# Four-bit weights: a row alone waits for memory, several for arithmetic.
FOUR_BITS = {1: 6.25, 4: 8.0, 8: 16.0}


def test_slots_that_stand_far_apart_are_stepped_by_narrow_calls():
    cover = Cover(8, FOUR_BITS)
    assert cover.of((5,)) == ((5, 1),)
    assert cover.of((0, 5)) == ((0, 1), (5, 1))
    assert cover.of((4, 6)) == ((4, 4),)
    assert cover.of((1, 5, 6, 7)) == ((1, 1), (4, 4))
    assert cover.of(tuple(range(8))) == cover.of((0, 1, 6, 7)) == ((0, 8),)
    # Where every call waits for memory, and where nothing is known, there is one.
    for costs in ({1: 10.0, 4: 10.5, 8: 11.0}, dict.fromkeys(FOUR_BITS, 0.0)):
        assert Cover(8, costs).of((0, 5)) == ((0, 8),) and Cover(8, costs).of((5, 6)) == ((4, 4),)
        assert Cover(8, costs).of((5,)) == ((5, 1),)


SIZES = st.sampled_from([(8, (4, 8)), (4, (2, 4)), (8, (3, 8)), (1, ())])


@given(st.data())
def test_no_other_calls_cost_less(data):
    size, widths = data.draw(SIZES)
    costs = {width: data.draw(st.integers(1, 20)) for width in (1, *widths)}
    slots = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    cover = Cover(size, costs)
    found = cover.of(tuple(sorted(slots)))
    held = [slot for first, width in found for slot in range(first, first + width)]
    assert set(held) >= slots and len(held) == len(set(held)) and max(held) < size
    price = lambda spans: sum(cover.spans[span] for span in spans)
    holds = lambda spans: slots <= set(chain.from_iterable(range(first, first + width) for first, width in spans))
    wide: list[Span] = [span for span in cover.spans if span[1] > 1]
    for count in range(len(wide) + 1):
        for some in combinations(wide, count):
            rest = slots - {slot for first, width in some for slot in range(first, first + width)}
            spans = [*some, *((slot, 1) for slot in rest)]
            assert holds(spans) and price(found) <= price(spans)
