"""The catalogue of mutants fits the code as it is, and a share of it is applied, another one every day."""

from __future__ import annotations

import ast
import json
import os

import pytest

from tests.mutants import __main__ as command
from tests.mutants.faults import CATALOGUE
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.running import Outcome, SoundCodeFails, examine

# How many are applied here; `make mutants` applies all.
SHARE = 2
QUICK = ("tests/emitter/test_packing.py::test_interleave_alternates_blocks_of_16",)
HARMLESS = Mutant(
    "a word of a docstring", "emitter/kernels/weights/packing.py", "Shape in bytes of", "The shape in bytes of", QUICK
)


def test_every_mutant_stands_in_one_place_and_is_python():
    """After a change of what it mutates a mutant is to be written anew, not dropped."""
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE) >= 60
    for mutant in CATALOGUE:
        faulty, sound = mutant.mutated(), (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(sound)), f"{mutant.name} changes nothing"
    with pytest.raises(ValueError, match=r"a word of a docstring: README.md has its text 0 times, not once"):
        Mutant(HARMLESS.name, "README.md", HARMLESS.old, "", QUICK).mutated()


def test_every_mutant_names_tests_that_there_are():
    for mutant in CATALOGUE:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(), f"{mutant.name}: {test}"


def test_shares_one_after_another_are_all_of_the_catalogue():
    turns = -(-len(CATALOGUE) // SHARE)
    assert {mutant for seed in range(command.today(), command.today() + turns) for mutant in command.share(SHARE, seed)} == set(
        CATALOGUE
    )


def test_a_share_is_caught_and_what_harms_nothing_is_not():
    """CASTIRON_MUTANTS_SEED repeats the share of another day."""
    seed = int(os.environ.get("CASTIRON_MUTANTS_SEED", command.today()))
    print(f"CASTIRON_MUTANTS_SEED={seed}")
    chosen = [HARMLESS, *command.share(SHARE, seed)]
    before = {mutant.file: (ROOT / mutant.file).read_bytes() for mutant in chosen}
    found = dict(examine(chosen, sound=False))
    assert {file: (ROOT / file).read_bytes() for file in before} == before, "the checkout stays as it was"
    assert found.pop(HARMLESS).of == "survived"
    for mutant, outcome in found.items():
        assert outcome.of == "caught", f"CASTIRON_MUTANTS_SEED={seed}: {command.line(mutant, outcome)}"


def test_the_command_tells_who_survives(monkeypatch, capsys):
    outcomes = {
        "nibble order": Outcome("caught", 1.5, "tests/a.py::test_b", "no"),
        "sign of a minimum": Outcome("survived", 2.0),
    }
    monkeypatch.setattr(command, "examine", lambda mutants: [(mutant, outcomes[mutant.name]) for mutant in mutants])
    assert command.main(["nibble order"]) == 0
    assert "nibble order (emitter/codecs.py)  a.py::test_b" in (said := capsys.readouterr().out) and "1 of 1" in said
    assert command.main(["--json", "nibble order", "sign of a minimum"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["caught"], told["of"]) == (1, 2)
    assert {mutant["name"]: mutant["outcome"] for mutant in told["mutants"]} == {n: o.of for n, o in outcomes.items()}

    def fails(mutants):
        raise SoundCodeFails("tests/a.py fails without a mutant: no")

    monkeypatch.setattr(command, "examine", fails)
    assert command.main([]) == 2 and "fails without a mutant" in capsys.readouterr().err
    assert command.main(["--share", "3", "--seed", "5", "--list"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 3 and "share of seed 5" in said.err
    with pytest.raises(SystemExit):
        command.main(["no such fault"])
    assert "no mutant has no such fault in its name or file" in capsys.readouterr().err
