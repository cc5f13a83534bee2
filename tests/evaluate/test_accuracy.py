"""Test the accuracy that compile --numerics fast measures and the manifest records."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import gguf
import pytest

from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile import compile_model as compiling
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.evaluate import perplexity
from castiron.pipelines.evaluate.perplexity import bundle_logits, chunks_of
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import BundleError, dump, parse
from castiron.vmfb.run.session import Session
from tests.support import tiny_gguf
from tests.support.toy_text import read_json


@pytest.fixture(scope="module")
def rounded_checkpoint(tmp_path_factory):
    """Write a GGUF file with quantised matrices, which have int8 kernels, without a tokenizer."""
    # Small values keep rounding small; q4_0, because AVX2 multiplies 8-bit codes in f32.
    tensors = {
        name: (0.1 * array, gguf.GGMLQuantizationType.Q4_0)
        for name, array in tiny_gguf.llama_tensors().items()
        if array.ndim == 2 and array.shape[-1] % 32 == 0
    }
    return tiny_gguf.write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", tensors=tensors)


@pytest.fixture(scope="module")
def fast(rounded_checkpoint, tmp_path_factory):
    """Return the bundle's path, and the command that compiles it."""
    location = tmp_path_factory.mktemp("bundle") / "fast"
    options = "--numerics fast --batch none --context 96".split()
    return location, ["compile", str(rounded_checkpoint), "-o", str(location), *options]


def test_compile_measures_the_accuracy_of_fast_numerics(fast, capsys):
    location, argv = fast
    for up_to_date in (False, True):
        assert cli.main([*argv, "--json"]) == 0
        out, err = capsys.readouterr()
        facts = read_json(out)
        accuracy = facts["accuracy"]
        assert facts["up_to_date"] == up_to_date and ("evaluate" in facts["seconds"]) == (not up_to_date)
        assert err == f"castiron: numerics fast, {open_bundle(location).manifest.accuracy}\n"
    assert cli.main(["inspect", str(location)]) == 0
    shown = re.search(
        r"^numerics +fast \((\d+) of (\d+) matmuls x .*rounded to \w+ by (\w+)\)$", capsys.readouterr().out, re.MULTILINE
    )
    isa = ISAS[open_bundle(location).manifest.target.isa]
    assert shown and 0 < int(shown[1]) < int(shown[2]) and shown[3] == (isa.matrix or isa.dot)
    assert accuracy["against"] == "decode_step" and accuracy["context"] == 96 and accuracy["tokens"] == 2 * 47
    assert 0 < accuracy["kld_mean"] < accuracy["kld_99"] <= accuracy["kld_maximum"] < 1 and accuracy["kld_error"] > 0
    # The reference is decode steps, which have no rounding of activations.
    session = Session(open_bundle(location), 1)
    chunks = chunks_of(perplexity.tokens_of(open_bundle(location)), 96, 2)
    steps = bundle_logits(Session(session.program), steps=True)
    found = perplexity.statistics(perplexity.compare(bundle_logits(session), steps, chunks))
    assert found["kld"]["mean"] == pytest.approx(accuracy["kld_mean"]) and found["kld"]["99.0%"] == accuracy["kld_99"]
    assert found["same_top_p"]["mean"] == accuracy["same_top_p"]
    others = bundle_logits(Session(session.program), steps=True)
    assert perplexity.compare(others, steps, chunks[:1]).kld.max() < 1e-12

    assert cli.main(["inspect", str(location)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("accuracy"))
    assert f"{accuracy['kld_mean']:.6f}" in line and "over 94 tokens" in line


@pytest.fixture(scope="module")
def exact(rounded_checkpoint, tmp_path_factory):
    options = Options(context=96, batch=())
    return open_bundle(compile_model(rounded_checkpoint, tmp_path_factory.mktemp("bundle") / "exact", options).bundle)


def test_does_not_measure_exact_numerics_or_foreign_targets(exact, fast, monkeypatch, capsys, tmp_path):
    assert exact.manifest.accuracy is None
    assert perplexity.own_accuracy(exact).kld_maximum < 1e-8
    _, argv = fast
    argv[3] = str(tmp_path / "fast")
    monkeypatch.setattr(compiling, "missing_features", lambda target: ("wings",))
    assert cli.main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert read_json(out)["accuracy"] is None and "accuracy not measured" in err and err.count("\n") == 1


def test_a_context_shorter_than_a_chunk_has_no_accuracy(exact, monkeypatch):
    monkeypatch.setattr(perplexity, "SHORT_CONTEXT", 3)
    assert perplexity.own_accuracy(exact) is None


def test_a_manifest_stores_its_accuracy_and_rejects_invalid_ones(exact):
    accuracy = perplexity.own_accuracy(exact)
    manifest = replace(exact.manifest, accuracy=accuracy)
    assert parse(dump(manifest), "here") == manifest
    value = json.loads(dump(manifest))
    value["accuracy"]["kld_mean"] = "small"
    with pytest.raises(BundleError, match="accuracy.kld_mean is 'small'; it must be a number"):
        parse(json.dumps(value).encode(), "here")
