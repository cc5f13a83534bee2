"""Test castiron explain: the work of every kernel, and the table."""

from __future__ import annotations

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from tests.evaluate.test_bench import FixedMachine
from tests.support.tiny_gguf import HIDDEN, write_llama
from tests.support.toy_text import read_json


@pytest.fixture(autouse=True)
def fixed_machine(monkeypatch):
    monkeypatch.setattr("castiron.pipelines.cli.explain.Machine", FixedMachine)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("explained")
    checkpoint = write_llama(directory / "tiny.gguf")
    return compile_model(checkpoint, directory / "out", Options(context=32, verify_widths=(), batch=(), threads=1)).bundle


def explained(capsys, bundle, *options) -> dict:
    assert cli.main(["explain", str(bundle), "--threads", "1", "--position", "7", *options, "--json"]) == 0
    return read_json(capsys.readouterr().out)


def test_kernels_have_work(bundle, capsys):
    found = explained(capsys, bundle)
    rows = [row for row in found["dispatches"] if row["paths"] == ["model.layers.*.self_attn"]]
    attention = next(row for row in rows if "attention" in row["kernel"])
    # Two layers, each with four operations per position and element of the heads.
    assert attention["calls"] == 2 and attention["flops"] == 2 * 4 * 8 * HIDDEN


def test_the_table_fits(bundle, capsys):
    assert explained(capsys, bundle)["rest_ms"] >= 0
    assert cli.main(["explain", str(bundle), "--threads", "1", "--position", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and lines[-1].endswith("no kernel")
