"""Draw examples of a strategy outside a test."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

Case = TypeVar("Case")


def draw(strategy: st.SearchStrategy[Case], count: int) -> list[Case]:
    """Return `count` examples, the same ones in every run."""
    found: list[Case] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found
