"""Test castiron explain: the work of every kernel, and the time of a step outside the runtime."""

from __future__ import annotations

import time

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compiler import compile_model
from castiron.pipelines.compile.options import Options
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.session import Session
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
    return compile_model(checkpoint, directory / "out", Options(context=32, speculate=(), batch=(), threads=1)).bundle


def explained(capsys, bundle, *options) -> dict:
    assert cli.main(["explain", str(bundle), "--threads", "1", "--position", "7", *options, "--json"]) == 0
    return read_json(capsys.readouterr().out)


def test_kernels_have_work_and_decode_steps_have_python_time(bundle, capsys):
    found = explained(capsys, bundle)
    assert 0 < found["python_us"] < 1e6
    rows = [row for row in found["dispatches"] if row["paths"] == ["model.layers.*.self_attn"]]
    attention = next(row for row in rows if "attention" in row["kernel"])
    # Two layers, each with four operations per position and element of the heads.
    assert attention["calls"] == 2 and attention["flops"] == 2 * 4 * 8 * HIDDEN
    assert explained(capsys, bundle, "--function", "prefill_8")["python_us"] is None


def test_a_packed_bundle_is_explained_as_its_directory(bundle, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    pack_bundle(open_bundle(bundle), tmp_path / "one.castiron")
    work = [
        sorted((row["kernel"], row["calls"], row["bytes"]) for row in explained(capsys, location)["dispatches"])
        for location in (bundle, tmp_path / "one.castiron")
    ]
    assert work[0] == work[1]


def test_a_session_counts_the_runtimes_share_of_its_steps(bundle):
    session = Session(open_bundle(bundle), 1)
    session.step(1)
    seconds = session.count_runtime()
    assert seconds() == 0
    start = time.perf_counter()
    tokens = [session.step(1) for _ in range(3)]
    assert 0 < seconds() < time.perf_counter() - start
    other = Session(open_bundle(bundle), 1)
    assert [other.step(1) for _ in range(4)][1:] == tokens


def test_html_writes_a_page_and_the_table_fits(bundle, tmp_path, capsys):
    out = tmp_path / "page.html"
    found = explained(capsys, bundle, "--html", str(out))
    text = out.read_text()
    assert all(row["kernel"] in text for row in found["dispatches"]) and "2 layers, each" in text
    assert found["rest_ms"] >= 0
    assert cli.main(["explain", str(bundle), "--threads", "1", "--position", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and lines[-1].endswith("no kernel")
