"""The memory that a bundle needs is reported, with a warning if the machine has less."""

from __future__ import annotations

import json

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine import memory
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import WEIGHTS
from tests.support import toy_text
from tests.support.tiny_gguf import write_llama
from tests.vmfb import toy

bundle = toy_text.bundle


def test_memory_counts_states_per_sequence_and_weights_per_process(bundle):
    manifest = open_bundle(bundle).manifest
    one, eight = memory.needed(manifest), memory.needed(manifest, 8)
    state = 2 * toy.LAYERS * toy_text.CONTEXT * toy.HEAD_DIM * 4
    assert (one.weights, one.state) == (manifest.files[WEIGHTS].size, state) == (eight.weights, eight.state)
    assert f"8 x {memory.megabytes(state)} when full" in str(eight) and " x " not in str(one)


@pytest.mark.parametrize("command", [["run", "BUNDLE", "--tokens", "1", "-n", "1"], ["inspect", "BUNDLE"]])
def test_warns_of_weights_larger_than_the_memory(bundle, command, monkeypatch, capsys):
    argv = [bundle if word == "BUNDLE" else word for word in command]
    assert cli.main(argv) == 0
    assert "every token will read them from disk" not in capsys.readouterr().err
    monkeypatch.setattr(memory, "total_bytes", lambda: 100)
    assert cli.main(argv) == 0
    assert "every token will read them from disk" in capsys.readouterr().err


def test_inspect_reports_what_a_checkpoint_will_need(tmp_path, monkeypatch, capsys):
    """The sizes are those of the compiled bundle, whose file also has a header and padding."""
    source = write_llama(tmp_path / "x.gguf")
    assert cli.main(["inspect", str(source), "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]
    manifest = compile_model(source, tmp_path / "bundle", Options(prefill=(8,), batch=(), verify_widths=())).manifest
    found = memory.needed(manifest)
    assert (needs["states"], needs["context"]) == (found.state, manifest.context)
    assert 0 < found.weights - needs["weights"] < 3 * 4096 + 256 * 40
    assert 0 < needs["largest_weight"] < needs["weights"]
    monkeypatch.setattr(memory, "total_bytes", lambda: 100)
    assert cli.main(["inspect", str(source)]) == 0
    shown = capsys.readouterr()
    assert f"weights {memory.megabytes(needs['weights'])}, states" in shown.out
    assert "every token will read them from disk" in shown.err


def test_a_container_has_less_memory_than_its_machine(tmp_path, monkeypatch):
    (tmp_path / "limit").write_text("123456\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(memory, "LIMITS", (tmp_path / "none", tmp_path / "absent"))
    machine = memory.total_bytes()
    monkeypatch.setattr(memory, "LIMITS", (tmp_path / "none", tmp_path / "limit"))
    assert memory.total_bytes() == 123456 < machine
