"""The tiers of tests: every line of the table names a test, and a test is in the right tiers."""

from __future__ import annotations

import re
from pathlib import Path

from tests import tiers

ROOT = Path(__file__).parent.parent


def test_every_line_of_the_full_tier_names_an_existing_test():
    for line in tiers.FULL:
        file, _, test = line.partition("::")
        name = re.match(r"\w*", test)[0]
        assert any(f"def {name}" in path.read_text() for path in ROOT.glob(file) if path.is_file()), line


def test_real_checkpoints_are_tested_by_their_tier_only():
    real, full, quick = (
        "tests/models/test_real_templates.py::test_a",
        "tests/evaluate/test_bench.py::test_a",
        "tests/x.py::test_a",
    )
    tiers_of = lambda test: [tier for tier in ("quick", "full", "all", "models") if tiers.is_in(test, tier)]
    assert (tiers_of(real), tiers_of(full), tiers_of(quick)) == (["models"], ["full", "all"], ["quick", "all"])
