"""Cutting a prompt into calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vmfb.chunks import chunks, default_costs


@st.composite
def prompts(draw):
    widths = tuple(draw(st.sets(st.integers(2, 40), max_size=3)))
    context = draw(st.integers(max([1, *widths]), 120))
    start = draw(st.integers(0, context - 1))
    return draw(st.integers(1, context - start)), start, context, default_costs(widths)


@given(prompts())
def test_calls_take_every_token_once_and_never_write_past_the_context(prompt):
    total, start, context, costs = prompt
    calls = chunks(*prompt)
    assert sum(count for _, count in calls) == total
    assert all(count == width for width, count in calls[:-1])
    position = start
    for width, count in calls:
        assert width in costs and 1 <= count <= width and position + width <= context
        position += count


def test_wide_calls_first_then_the_cheapest_end():
    costs = default_costs((16, 128))
    assert chunks(300, 0, 2048, costs) == [(128, 128)] * 2 + [(16, 16)] * 2 + [(16, 12)]
    assert chunks(2, 0, 2048, costs) == [(1, 1)] * 2
    # 16 rows would pass the end of the context.
    assert chunks(10, 2038, 2048, costs) == [(1, 1)] * 10


def test_measured_costs_decide():
    assert chunks(100, 0, 2048, {1: 5.0, 16: 20.0, 128: 90.0}) == [(128, 100)]
    assert chunks(100, 0, 2048, {1: 1.0, 16: 20.0, 128: 200.0}) == [(1, 1)] * 100
