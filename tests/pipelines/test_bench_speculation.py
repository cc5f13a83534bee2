"""The bench of speculation: both ways say the same, ratios are of medians, and what cannot be measured is one sentence."""

from __future__ import annotations

import json

import pytest

from castiron.pipelines import cli
from castiron.pipelines.generation.speculate import Speculator
from castiron.pipelines.measuring import bench_speculation
from castiron.pipelines.measuring.bench_speculation import Answer, summarise
from tests.pipelines import served


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return str(served.bundle(tmp_path_factory.mktemp("speculation"), (4,)))


@pytest.fixture
def short_prompts(monkeypatch):
    monkeypatch.setattr(bench_speculation, "REPEATING", {"again": "na na na na na na na na"})
    monkeypatch.setattr(bench_speculation, "OTHER", {"once": "Hello"})


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main(["bench", *argv, "--speculation", "--gen", "30", "--rounds", "1"])
    return status, *capsys.readouterr()


def test_it_measures_both_kinds_of_text(bundle, short_prompts, tmp_path, capsys):
    status, out, _ = run(capsys, bundle, "--json", "--output", str(tmp_path / "out.json"))
    result = json.loads(out)
    assert status == 0 and json.loads((tmp_path / "out.json").read_text()) == result
    assert set(result) == {"repeating_ratio", "other_ratio", "tokens_equal", "answers"} and result["tokens_equal"]
    again, once = result["answers"]["again"], result["answers"]["once"]
    assert again["repeats"] and not once["repeats"] and 0 < again["tokens"] <= 30
    assert result["repeating_ratio"] == again["ratio"] > 0 and result["other_ratio"] == once["ratio"] > 0
    assert again["plain_tok_s"] > 0 and again["accepted"] <= again["proposed"]
    status, out, _ = run(capsys, bundle, "--draft", bundle, "--output", str(tmp_path / "draft.json"))
    assert status == 0 and "tokens are the same" in out
    answers = json.loads((tmp_path / "draft.json").read_text())["answers"]
    assert all(answer["sources"].keys() == {"ngram", "draft"} for answer in answers.values())


def test_a_token_that_differs_is_told(bundle, short_prompts, monkeypatch, capsys):
    choose = Speculator._choose

    def other(self, found, at):
        argmax, logits, chosen = choose(self, found, at)
        return argmax, logits, chosen ^ 1

    monkeypatch.setattr(Speculator, "_choose", other)
    status, out, _ = run(capsys, bundle)
    assert status == 1 and "tokens are DIFFERENT" in out


def test_ratios_are_of_medians():
    def answer(repeats, plain, speculating, *undrafted):
        return Answer(repeats, 1, 9, True, plain, speculating, {"sources": {}}, list(undrafted))

    found = {"a": answer(True, [1.0, 10.0, 11.0], [15.0, 20.0, 90.0]), "b": answer(False, [4.0], [3.0])}
    result = summarise(found)
    assert result["repeating_ratio"] == 2.0 and result["other_ratio"] == 0.75 and "draft_ratio" not in result
    result = summarise({"a": answer(True, [10.0], [20.0], 5.0, 16.0, 90.0), "b": answer(False, [4.0], [3.0], 4.0)})
    assert (result["draft_ratio"], result["least_draft_ratio"]) == (1.0, 0.75)
    assert result["answers"]["a"]["ratio"] == 2.0 and result["answers"]["a"]["draft_ratio"] == 1.25


def test_what_has_no_room_and_what_has_no_speed_is_one_sentence(bundle, monkeypatch, capsys):
    status, _, err = run(capsys, bundle)
    assert status == 1 and "and the bundle's context is 126: compile with a larger --context" in err
    monkeypatch.setattr(bench_speculation, "REPEATING", {"again": "na"})
    monkeypatch.setattr(bench_speculation, "OTHER", {"once": "Hello"})
    assert cli.main(["bench", bundle, "--speculation", "--gen", "1", "--rounds", "1"]) == 1
    assert "the answer to 'again' is one token" in capsys.readouterr().err


def test_without_verify_functions_the_way_out_is_named(tmp_path_factory, capsys):
    bare = str(served.bundle(tmp_path_factory.getbasetemp()))
    status, out, err = run(capsys, bare)
    assert status == 1 and out == "" and "compile it with --speculate" in err
