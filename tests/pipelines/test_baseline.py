"""What became slower or faster than a saved run."""

from __future__ import annotations

import copy
import json

import pytest

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring.baseline import compare, read_baseline, table
from castiron.pipelines.measuring.bench import spread


def engine(decode: list[float], prefill: list[float], first: list[float], memory: float) -> dict:
    runs = {"decode_tok_s": spread(decode), "prefill_tok_s": spread(prefill), "ttft_ms": spread(first)}
    return {**{key: values["median"] for key, values in runs.items()}, "rss_mb": memory, "runs": runs}


MODEL = {
    "castiron": engine([9, 10, 11], [90, 100, 110], [50], 800),
    "peers": {"llama.cpp": engine([5], [50], [100], 900)},
    "machine": {"cpu": "a CPU", "cores": 2, "read_gb_s": 20.0, "peak_gflop_s": 100.0, "runs": {}},
    "settings": {"model": "m", "threads": 2, "gen": 64},
}
KERNEL = {"kernel": "gemv_x", "us": 10.0, "runs": {"us": spread([10.0])}, "settings": {"kernel": "gemv"}, "machine": {}}


def verdicts(before: dict, now: dict) -> dict[tuple[str, str], tuple[float, str]]:
    return {(row["of"], row["figure"]): (row["ratio"], row["verdict"]) for row in compare(before, now)["figures"]}


def test_a_run_against_itself_is_the_same():
    assert set(verdicts(MODEL, MODEL).values()) == {(1.0, "same")} and len(verdicts(MODEL, MODEL)) == 8
    assert compare(MODEL, MODEL)["notes"] == []


def test_ratios_above_one_are_better_now_whatever_the_figure():
    now = copy.deepcopy(MODEL)
    now["castiron"] = engine([18, 20, 22], [45, 50, 55], [40], 1000)
    found = verdicts(MODEL, now)
    assert found["castiron", "decode tok/s"] == (2.0, "faster")
    assert found["castiron", "prefill tok/s"] == (0.5, "slower")
    assert found["castiron", "first token ms"] == (1.25, "faster")
    assert found["castiron", "memory MB"] == (0.8, "more")
    assert found["llama.cpp", "decode tok/s"] == (1.0, "same")


def test_what_lies_among_the_runs_of_before_is_the_same():
    now = copy.deepcopy(MODEL)
    now["castiron"] = engine([9.5, 10.5, 11], [90, 111, 120], [50], 800)
    found = verdicts(MODEL, now)
    assert found["castiron", "decode tok/s"] == (1.05, "same")
    # 111 is outside 90 to 110.
    assert found["castiron", "prefill tok/s"] == (1.11, "faster")
    # One run says nothing of how far apart they are.
    assert verdicts(KERNEL, KERNEL | {"us": 9.0, "runs": {"us": spread([9.0])}}) == {("gemv", "us"): (1.111, "faster")}


def test_other_machines_and_settings_are_noted_and_limits_only_when_far_apart():
    now = copy.deepcopy(MODEL)
    now["machine"] |= {"cpu": "another", "read_gb_s": 20.5, "peak_gflop_s": 120.0}
    now["settings"] |= {"threads": 4}
    assert compare(MODEL, now)["notes"] == [
        "other settings: threads was 2 and is 4",
        "other machine: cpu was a CPU and is another",
        "the machine's peak_gflop_s was 100 and is 120",
    ]


def test_figures_that_one_of_both_lacks_are_left_out():
    now = copy.deepcopy(MODEL)
    now["peers"] = {}
    assert {of for of, _ in verdicts(MODEL, now)} == {of for of, _ in verdicts(now, MODEL)} == {"castiron"}
    assert compare(KERNEL, MODEL)["figures"] == compare(MODEL, KERNEL)["figures"] == []
    assert "no figure" in table(compare(KERNEL, MODEL), "x.json")


def test_what_is_no_such_file_is_refused(tmp_path):
    file = tmp_path / "saved.json"
    with pytest.raises(PipelineError, match=r"saved\.json cannot be read: No such file"):
        read_baseline(str(file))
    for text in ("", "{", "[]", '{"machine": 1, "settings": {}}', "[" * 100_000):
        file.write_text(text)
        with pytest.raises(PipelineError, match="is not what castiron bench --save writes"):
            read_baseline(str(file))
    file.write_text(json.dumps(MODEL))
    assert read_baseline(str(file)) == MODEL
