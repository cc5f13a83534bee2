"""The catalogue of mutants matches the code, and two of them, other ones every day, are caught."""

from __future__ import annotations

import ast
import datetime
import os

import pytest

from tests.mutants import __main__ as command
from tests.mutants.mutant import CATALOGUE, ROOT, Mutant
from tests.mutants.running import Outcome, examine, failure_of

SHARE = 2  # mutants that one run applies; `make mutants` applies all
QUICK = ("tests/emitter/test_packing.py::test_row_blocks_of_two_weights_alternate",)
EQUIVALENT = Mutant(
    "a quoted annotation",
    "emitter/kernels/weights/packing.py",
    "def packed_shape(codec_name: str,",
    "def packed_shape(codec_name: 'str',",
    QUICK,
)


def test_every_mutant_matches_exactly_one_line_and_is_python():
    """After a change of the quoted code, update the mutant's quote instead of removing the mutant."""
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE) >= 60
    for mutant in CATALOGUE:
        faulty, original = mutant.mutated(), (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(original)), f"{mutant.name} changes nothing"
    with pytest.raises(ValueError, match=r"a quoted annotation: README.md has its text 0 times; quote text"):
        Mutant(EQUIVALENT.name, "README.md", EQUIVALENT.old, "", QUICK).mutated()


def test_every_mutant_names_tests_that_exist():
    for mutant in CATALOGUE:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(), f"{mutant.name}: {test}"


def test_a_share_is_caught_and_what_harms_nothing_is_not():
    """CASTIRON_MUTANTS_SEED repeats the share of another day."""
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    seed = int(os.environ.get("CASTIRON_MUTANTS_SEED", today))
    print(f"CASTIRON_MUTANTS_SEED={seed}")
    chosen = [EQUIVALENT, *(CATALOGUE[(seed * SHARE + i) % len(CATALOGUE)] for i in range(SHARE))]
    before = {mutant.file: (ROOT / mutant.file).read_bytes() for mutant in chosen}
    found = dict(examine(chosen, original=False))
    assert {file: (ROOT / file).read_bytes() for file in before} == before, "the checkout has changed"
    assert found.pop(EQUIVALENT).status == "survived"
    for mutant, outcome in found.items():
        assert outcome.status == "caught", f"CASTIRON_MUTANTS_SEED={seed}: {command.line(mutant, outcome)}"


def test_the_command_reports_survivors(monkeypatch, capsys):
    outcomes = {
        "nibble order": Outcome("caught", 1.5, "tests/a.py::test_b", "no"),
        "sign of a minimum": Outcome("survived", 2.0),
    }
    monkeypatch.setattr(command, "examine", lambda mutants: [(mutant, outcomes[mutant.name]) for mutant in mutants])
    assert command.main(["nibble order"]) == 0
    printed = capsys.readouterr().out
    assert "nibble order (emitter/codecs/scaled.py)  a.py::test_b" in printed and "1 of 1" in printed
    assert command.main(["nibble order", "sign of a minimum"]) == 1
    printed = capsys.readouterr().out
    assert "survived " in printed and "sign of a minimum (" in printed and "1 of 2" in printed


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("FAILED a.py::test_b[1 thread] - AssertionError: no", ("a.py::test_b[1 thread]", "AssertionError: no")),
        ("ERROR a.py - ImportError", ("a.py", "ImportError")),
        ("FAILED a.py::test_b", ("a.py::test_b", "")),
        ("no tests ran", ("", "no tests ran")),
    ],
)
def test_the_failed_test_is_read_from_the_summary(summary, expected):
    assert failure_of(f"{summary}\n") == expected
