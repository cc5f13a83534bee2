"""Cutting a prompt into calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from castiron.vmfb.chunks import chunks


@st.composite
def prompts(draw):
    widths = tuple(draw(st.sets(st.integers(2, 40), max_size=3)))
    context = draw(st.integers(max([1, *widths]), 120))
    start = draw(st.integers(0, context - 1))
    # Up to the end of the context more often than not: there padding has no room.
    total = draw(st.integers(1, context - start)) if draw(st.booleans()) else context - start
    return total, start, context, widths, draw(st.sampled_from([0.0, 1.0]))


@given(prompts())
def test_calls_take_every_token_once_and_never_write_past_the_context(prompt):
    total, start, context, widths, _ = prompt
    calls = chunks(*prompt)
    assert sum(count for _, count in calls) == total
    assert all(count == width for width, count in calls[:-1])
    position = start
    for width, count in calls:
        assert width in (1, *widths) and 1 <= count <= width and position + width <= context
        position += count


def test_where_padding_costs_the_end_is_cut_fine():
    widths = (16, 128)
    assert chunks(300, 0, 2048, widths, 1.0) == [(128, 128)] * 2 + [(16, 16)] * 2 + [(16, 12)]
    assert chunks(2, 0, 2048, widths, 1.0) == [(1, 1)] * 2
    # 16 rows would pass the end of the context.
    assert chunks(10, 2038, 2048, widths, 1.0) == [(1, 1)] * 10


def test_where_padding_is_free_the_end_is_one_call():
    assert chunks(300, 0, 2048, (16, 128), 0.0) == [(128, 128)] * 2 + [(128, 44)]
    assert chunks(12, 0, 2048, (16, 128), 0.0) == [(16, 12)]
    assert chunks(100, 1948, 2048, (16, 128), 0.0) == [(16, 16)] * 6 + [(1, 1)] * 4
    assert chunks(7, 33, 40, (4, 10), 0.0) == [(4, 4)] + [(1, 1)] * 3
