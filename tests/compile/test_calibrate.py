"""--calibrate: the squares of matmuls' inputs are those of HF's modules, and weigh quantised columns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from castiron.emitter.codecs.quantise import convert
from castiron.emitter.graph.types import EmitError
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile import calibration
from castiron.pipelines.compile import quantise_gguf as quantise_gguf
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.calibration import CHUNK, MIN_SHARE, WIDTH, chunks_of
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.quantise_gguf import quantise
from castiron.pipelines.compile.weight_codecs import pack_parameter
from castiron.pipelines.errors import PipelineError
from castiron.reference import hf, tiny
from castiron.vmfb.cache_folder import cache_path
from tests.compile.test_quantise import quiet


@pytest.fixture(scope="module")
def directory(smollm2, tmp_path_factory) -> Path:
    """A small llama with SmolLM2's tokenizer."""
    path = tiny.tiny_model(
        "llama", tmp_path_factory.mktemp("calibrate") / "llama", vocab_size=49152, tie_word_embeddings=True, num_hidden_layers=2
    )
    (path / "tokenizer.json").write_text(json.dumps(smollm2.tokenizer))
    return path


def means_of_hf(path: Path, chunks: list[list[int]]) -> dict[str, np.ndarray]:
    """Return the mean square of each column of a module's input, over their mean, by weight."""
    model, sums = hf.load(path, 1), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def hook(_module, args, name=name):
                x = args[0].detach().numpy().reshape(-1, args[0].shape[-1]).astype(np.float64)
                sums[name] = sums.get(name, 0) + np.square(x).sum(axis=0)

            module.register_forward_pre_hook(hook)
    for chunk in chunks:
        hf.logits(model, chunk)
    return {f"{name}.weight": total / total.mean() for name, total in sums.items()}


def test_squares_are_those_of_hfs_inputs(directory):
    """Two separate texts take several calls each; a tied head has the embedding's importance."""
    tokens = np.random.default_rng(0).integers(3, 49152, 2 * 2 * WIDTH).tolist()
    chunks = [tokens[: 2 * WIDTH], tokens[2 * WIDTH :]]
    found = calibration.measure(open_checkpoint(directory), chunks, quiet)
    expected = means_of_hf(directory, chunks)
    assert set(found) == {*expected, "model.embed_tokens.weight"}
    for name, means in expected.items():
        np.testing.assert_allclose(found[name], np.maximum(means, MIN_SHARE), rtol=1e-4, err_msg=name)
    assert np.array_equal(found["model.embed_tokens.weight"], found["lm_head.weight"])


def test_an_experts_inner_values_count_where_it_was_chosen(tmp_path):
    """The input of an expert's down projection counts for the tokens that chose the expert."""
    directory = tiny.tiny_model("qwen3_moe", tmp_path / "moe", num_hidden_layers=2)
    tokens = np.random.default_rng(0).integers(3, 211, WIDTH).tolist()
    found = calibration.measure(open_checkpoint(directory), [tokens], quiet)
    model, seen = hf.load(directory, 1), {}
    for number, layer in enumerate(model.model.layers):

        def hook(module, args, number=number):
            x, chosen = args[0].reshape(-1, args[0].shape[-1]), args[1]
            for expert in range(module.num_experts):
                own = x[(chosen == expert).any(-1)]
                gate, up = torch.nn.functional.linear(own, module.gate_up_proj[expert]).chunk(2, -1)
                inner = (module.act_fn(gate) * up).detach().numpy().astype(np.float64)
                seen[f"model.layers.{number}.mlp.experts.{expert}.down_proj.weight"] = np.square(inner).sum(0)

        layer.mlp.experts.register_forward_pre_hook(hook)
    hf.logits(model, tokens)
    assert len(seen) == 2 * model.config.num_experts and len({total.tobytes() for total in seen.values()}) == len(seen)
    for name, total in seen.items():
        np.testing.assert_allclose(found[name], np.maximum(total / total.mean(), MIN_SHARE), rtol=1e-3, err_msg=name)
    # Gate and up read what the router reads.
    for leaf in ("gate_proj", "up_proj"):
        assert np.array_equal(found[f"model.layers.1.mlp.experts.3.{leaf}.weight"], found["model.layers.1.mlp.gate.weight"])


def test_stacked_experts_are_quantised_by_their_own_columns(tmp_path, monkeypatch):
    directory = tiny.tiny_model("mixtral", tmp_path / "model", hidden_size=64, num_hidden_layers=1)
    plain = quantise(directory, tmp_path / "f32.gguf", Options(weights="f32"), quiet).file
    random = np.random.default_rng(0)
    columns = {n: random.random(t.shape[-1], np.float32) for n, t in open_checkpoint(directory).tensors.items()}
    monkeypatch.setattr(quantise_gguf, "calibrate", lambda *_: columns)
    one, other = (
        {
            t.name: t.data
            for t in gguf.GGUFReader(quantise(source, tmp_path / name, Options(weights="q4_0"), quiet).file).tensors
        }
        for source, name in ((directory, "a.gguf"), (plain, "b.gguf"))
    )
    assert all(np.array_equal(data, other[name]) for name, data in one.items())
    stacked = other["blk.0.ffn_down_exps.weight"]
    tensor = open_checkpoint(directory).tensors["model.layers.0.block_sparse_moe.experts.2.w2.weight"]
    assert np.array_equal(stacked[2], convert("f32", tensor.data, "q4_0", columns[tensor.name]))


@pytest.fixture
def reports(monkeypatch, tmp_path):
    """Replace the measurement: a column's importance is its number. Return the list of runs."""
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    runs = []

    def measure(checkpoint, chunks, progress):
        runs.append(chunks)
        weights = build_model(checkpoint, Options(context=16, prefill=(), batch=(), verify_widths=(), embed=(8,))).weights
        return {n: np.arange(1, w.shape[1] + 1, dtype=np.float32) for n, w in weights.items() if len(w.shape) == 2}

    monkeypatch.setattr(calibration, "measure", measure)
    return runs


def text(path: Path, words: int = 400) -> Path:
    path.write_text("the quick brown fox " * (words // 4), encoding="utf-8")
    return path


def test_weights_are_quantised_by_their_importance(directory, tmp_path, reports):
    options = Options(weights="q4_0", calibrate=str(text(tmp_path / "text")))
    out = quantise(directory, tmp_path / "out.gguf", options, quiet).file
    tensor = open_checkpoint(directory).tensors["model.layers.1.mlp.down_proj.weight"]
    columns = np.arange(1, tensor.shape[1] + 1, dtype=np.float32)
    wanted = convert("f32", tensor.data, "q4_0", columns)
    assert np.array_equal(open_checkpoint(out).tensors[tensor.name].data, wanted)
    assert not np.array_equal(convert("f32", tensor.data, "q4_0"), wanted)
    # A bundle's weights are weighed, too.
    module = build_model(
        open_checkpoint(directory), Options(context=16, weights="q4_0", prefill=(), batch=(), verify_widths=())
    )
    from castiron.emitter.lowering import lower

    lowered = lower(module)
    param = next(p for p in lowered.params.values() if (tensor.name, "q4_0") in p.source.tensors)
    checkpoint = open_checkpoint(directory)
    weighed = pack_parameter(checkpoint, param, {tensor.name: columns})
    assert not np.array_equal(weighed, pack_parameter(checkpoint, param))


def test_results_are_cached_by_weights_and_text(directory, tmp_path, reports):
    def importance(text: Path, path: Path = directory):
        return calibration.calibrate(open_checkpoint(path), Options(weights="q4_0", calibrate=str(text)), quiet)

    one, other = text(tmp_path / "one"), text(tmp_path / "other", 800)
    first, second = importance(one), importance(one)
    assert len(reports) == 1 and first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    model = shutil.copytree(directory, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    importance(one, model)
    importance(other)
    assert len(reports) == 3
    for stored in cache_path("calibrated").iterdir():
        stored.write_bytes(b"")
    again = importance(one)
    assert len(reports) == 4 and all(np.array_equal(first[name], again[name]) for name in first)


def test_a_text_is_split_into_complete_calls(directory, tmp_path):
    checkpoint = open_checkpoint(directory)
    short = chunks_of(checkpoint, text(tmp_path / "short", 300))
    assert [len(chunk) for chunk in short] == [2 * WIDTH]
    long = chunks_of(checkpoint, text(tmp_path / "long", 3 * CHUNK))
    assert {len(chunk) for chunk in long} == {CHUNK} and len(long) in (2, 3)


def test_rejects_texts_without_enough_tokens(directory, tmp_path):
    checkpoint = open_checkpoint(directory)
    with pytest.raises(PipelineError, match=f"tokens, and calibration needs {WIDTH}"):
        chunks_of(checkpoint, text(tmp_path / "few", 40))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PipelineError, match="is not UTF-8 text"):
        chunks_of(checkpoint, tmp_path / "binary")
    bare = open_checkpoint(tiny.tiny_model("llama", tmp_path / "bare"))
    with pytest.raises(PipelineError, match="has no tokenizer"):
        chunks_of(bare, text(tmp_path / "text"))
    with pytest.raises(EmitError, match="cannot calibrate weights 'native'; use a quantised type"):
        Options(calibrate="text")
