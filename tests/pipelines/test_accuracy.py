"""compile --numerics fast measures how far its functions are from exact steps, and the bundle says so."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import gguf
import pytest

from castiron.emitter.kernels.writing.isa import ISAS
from castiron.pipelines import cli
from castiron.pipelines.casting import compile as compiling
from castiron.pipelines.casting.compile import Options, compile_model
from castiron.pipelines.checking import distances, likelihood
from castiron.pipelines.checking.likelihood import BundleRows, chunks_of
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.manifest import BundleError, dump, parse
from castiron.vmfb.session import Session
from tests.pipelines import tiny_gguf
from tests.pipelines.toy_text import read_json


@pytest.fixture(scope="module")
def rounded_checkpoint(tmp_path_factory):
    """A GGUF file of quantised matrices, without a tokenizer: only they have products of bytes."""
    # Small enough that rounding stays small.
    tensors = {
        name: (0.1 * array, gguf.GGMLQuantizationType.Q8_0)
        for name, array in tiny_gguf.llama_tensors().items()
        if array.ndim == 2 and array.shape[-1] % 32 == 0
    }
    return tiny_gguf.write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", tensors=tensors)


@pytest.fixture(scope="module")
def fast(rounded_checkpoint, tmp_path_factory):
    """What `compile --numerics fast --json` says, and the bundle's place."""
    place = tmp_path_factory.mktemp("bundle") / "fast"
    return place, [
        "compile",
        str(rounded_checkpoint),
        "-o",
        str(place),
        "--numerics",
        "fast",
        "--batch",
        "none",
        "--context",
        "96",
    ]


def test_compile_measures_what_fast_numerics_cost(fast, capsys):
    place, argv = fast
    for up_to_date in (False, True):
        assert cli.main([*argv, "--json"]) == 0
        out, err = capsys.readouterr()
        facts = read_json(out)
        accuracy = facts["accuracy"]
        assert facts["up_to_date"] == up_to_date and ("evaluate" in facts["seconds"]) == (not up_to_date)
        assert err == f"castiron: numerics fast, {open_bundle(place).manifest.accuracy}\n"
    assert cli.main(["inspect", str(place)]) == 0
    shown = re.search(
        r"^numerics +fast \((\d+) of (\d+) products x .*rounded to \w+ by (\w+)\)$", capsys.readouterr().out, re.MULTILINE
    )
    isa = ISAS[open_bundle(place).manifest.target.isa]
    assert shown and 0 < int(shown[1]) < int(shown[2]) and shown[3] == (isa.matrix or isa.dot)
    assert accuracy["against"] == "decode_step" and accuracy["context"] == 96 and accuracy["tokens"] == 2 * 47
    assert 0 < accuracy["kld_mean"] < accuracy["kld_99"] <= accuracy["kld_maximum"] < 1 and accuracy["kld_error"] > 0
    # The steps are the reference: nothing of it is the exact functions' own noise.
    session = Session(open_bundle(place), 1)
    chunks = chunks_of(likelihood.tokens_of(open_bundle(place)), 96, 2)
    steps = BundleRows(Session(session.program), steps=True)
    found = distances.statistics(likelihood.compare(BundleRows(session), steps, chunks))
    assert found["kld"]["mean"] == pytest.approx(accuracy["kld_mean"]) and found["kld"]["99.0%"] == accuracy["kld_99"]
    assert found["same_top_p"]["mean"] == accuracy["same_top_p"]
    others = BundleRows(Session(session.program), steps=True)
    assert likelihood.compare(others, steps, chunks[:1]).kld.max() < 1e-12

    assert cli.main(["inspect", str(place)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("accuracy"))
    assert f"{accuracy['kld_mean']:.6f}" in line and "over 94 tokens" in line


@pytest.fixture(scope="module")
def exact(rounded_checkpoint, tmp_path_factory):
    options = Options(context=96, batch=())
    return open_bundle(compile_model(rounded_checkpoint, tmp_path_factory.mktemp("bundle") / "exact", options).bundle)


def test_exact_numerics_are_not_measured_and_neither_is_another_machines_bundle(exact, fast, monkeypatch, capsys, tmp_path):
    assert exact.manifest.accuracy is None
    assert likelihood.own_accuracy(exact).kld_maximum < 1e-8
    _, argv = fast
    argv[3] = str(tmp_path / "fast")
    monkeypatch.setattr(compiling, "missing_features", lambda target: ("wings",))
    assert cli.main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert read_json(out)["accuracy"] is None and "not evaluated" in err and err.count("\n") == 1


def test_a_context_without_room_for_a_chunk_has_no_accuracy(exact, monkeypatch):
    monkeypatch.setattr(likelihood, "SHORT_CONTEXT", 3)
    assert likelihood.own_accuracy(exact) is None


def test_a_manifest_keeps_its_accuracy_and_refuses_another_form(exact):
    accuracy = likelihood.own_accuracy(exact)
    manifest = replace(exact.manifest, accuracy=accuracy)
    assert parse(dump(manifest), "here") == manifest
    value = json.loads(dump(manifest))
    value["accuracy"]["kld_mean"] = "small"
    with pytest.raises(BundleError, match="accuracy.kld_mean is 'small', not a number"):
        parse(json.dumps(value).encode(), "here")
