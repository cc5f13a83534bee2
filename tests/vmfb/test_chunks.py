"""Prompts are divided into prefill calls, and slots of a batch into decode calls, at low cost."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from castiron.vmfb.run.chunks import chunks
from castiron.vmfb.run.decode_plan import Cover


@st.composite
def prompts(draw):
    widths = tuple(draw(st.sets(st.integers(2, 40), max_size=3)))
    context = draw(st.integers(max([1, *widths]), 120))
    start = draw(st.integers(0, context - 1))
    # More than half of the prompts end at the end of the context, where padding does not fit.
    total = draw(st.integers(1, context - start)) if draw(st.booleans()) else context - start
    return total, start, context, widths, draw(st.sampled_from([0.0, 1.0]))


@given(prompts())
def test_calls_take_every_token_within_the_context(prompt):
    total, start, context, widths, _ = prompt
    calls = chunks(*prompt)
    assert sum(count for _, count in calls) == total
    assert all(count == width for width, count in calls[:-1])
    position = start
    for width, count in calls:
        assert width in (1, *widths) and 1 <= count <= width and position + width <= context
        position += count


def test_costly_padding_is_avoided():
    widths = (16, 128)
    assert chunks(300, 0, 2048, widths, 1.0) == [(128, 128)] * 2 + [(16, 16)] * 2 + [(16, 12)]
    assert chunks(2, 0, 2048, widths, 1.0) == [(1, 1)] * 2
    # 16 rows would pass the end of the context.
    assert chunks(10, 2038, 2048, widths, 1.0) == [(1, 1)] * 10


def test_free_padding_makes_the_rest_one_call():
    assert chunks(300, 0, 2048, (16, 128), 0.0) == [(128, 128)] * 2 + [(128, 44)]
    assert chunks(12, 0, 2048, (16, 128), 0.0) == [(16, 12)]
    assert chunks(100, 1948, 2048, (16, 128), 0.0) == [(16, 16)] * 6 + [(1, 1)] * 4
    assert chunks(7, 33, 40, (4, 10), 0.0) == [(4, 4)] + [(1, 1)] * 3


# Costs with 4-bit weights: one row waits for memory, eight rows for arithmetic.
FOUR_BITS = {1: 6.25, 4: 8.0, 8: 16.0}


def test_distant_slots_use_narrow_calls():
    cover = Cover(8, FOUR_BITS)
    assert cover.of((0, 5)) == ((0, 1), (5, 1))
    assert cover.of((4, 6)) == ((4, 4),)
    assert cover.of((1, 5, 6, 7)) == ((1, 1), (4, 4))
    assert cover.of(tuple(range(8))) == cover.of((0, 1, 6, 7)) == ((0, 8),)
    # One call is enough if every call waits for memory, or if the costs are unknown.
    for costs in ({1: 10.0, 4: 10.5, 8: 11.0}, dict.fromkeys(FOUR_BITS, 0.0)):
        assert [Cover(8, costs).of(slots) for slots in ((0, 5), (5, 6), (5,))] == [((0, 8),), ((4, 4),), ((5, 1),)]


SIZES = st.sampled_from([(8, (4, 8)), (4, (2, 4)), (8, (3, 8)), (1, ())])


@given(st.data())
def test_the_chosen_calls_are_the_cheapest(data):
    size, widths = data.draw(SIZES)
    costs = {width: data.draw(st.integers(1, 20)) for width in (1, *widths)}
    slots = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    cover = Cover(size, costs)
    slots_of = lambda spans: list(chain.from_iterable(range(first, first + width) for first, width in spans))
    price = lambda spans: sum(cover.spans[span] for span in spans)
    found = cover.of(tuple(sorted(slots)))
    assert slots <= set(slots_of(found)) <= set(range(size)) and len(slots_of(found)) == len(set(slots_of(found)))
    wide = [span for span in cover.spans if span[1] > 1]
    for some in chain.from_iterable(combinations(wide, count) for count in range(len(wide) + 1)):
        assert price(found) <= price([*some, *((slot, 1) for slot in slots - set(slots_of(some)))])
