"""castiron quantise: GGUF files that are read back as what they were made of, by castiron and by gguf's own reader."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

from castiron.emitter.quantise import convert
from castiron.pipelines import cli, space
from castiron.pipelines.casting.compile import Options, build_model, compile_model
from castiron.pipelines.casting.quantise import quantise
from castiron.pipelines.casting.weights import codecs_of
from castiron.pipelines.checkpoints import CheckpointError, open_checkpoint
from castiron.pipelines.checkpoints.gguf_file import read_gguf
from castiron.pipelines.checkpoints.tokenizer_as_gguf import SAMPLE
from castiron.pipelines.errors import PipelineError
from castiron.reference import tiny
from tests.pipelines.hf_to_gguf import convert as converted
from tests.pipelines.tiny_gguf import write_llama

# What a tiny model has that GGUF's metadata cannot say is left out.
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.5, original_max_position_embeddings=128,
    long_factor=[1.5, 2.0, 3.0, 4.0], short_factor=[1.0, 1.1, 1.2, 1.3],
)  # fmt: skip
FOURTH = ["sliding_attention"] * 3 + ["full_attention"]
MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}), "olmo2": ("olmo2", {}), "granite": ("granite", {}), "phi3": ("phi3", {}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3_text": ("gemma3_text", {"query_pre_attn_scalar": 24, "layer_types": ["sliding_attention"] * 3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "stablelm": ("stablelm", {"qk_layernorm": True}), "starcoder2": ("starcoder2", {"sliding_window": None}),
    "mixtral": ("mixtral", {}), "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {}), "arcee": ("arcee", {}), "ernie4_5": ("ernie4_5", {}), "granitemoe": ("granitemoe", {}),
    "hunyuan": ("hunyuan_v1_dense", {}), "gpt2": ("gpt2", {}), "lfm2": ("lfm2", {}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "layer_types": FOURTH}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "layer_types": FOURTH}),
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 7.0, "rope_parameters": YARN | {"truncate": False}}),
}  # fmt: skip
PLAIN = Options(weights="f32")


def quiet(stage: str, done: float) -> None:
    assert 0 <= done <= 1


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_is_read_back_as_itself(tmp_path, name):
    """The tensors name for name and bit for bit, and a graph of the same operations and tables; gguf reads it too, and
    finds what llama.cpp's converter would write."""
    model_type, config = MODELS[name]
    directory = tiny.tiny_model(model_type, tmp_path / "model", **config)
    report = quantise(directory, tmp_path / "out.gguf", PLAIN, quiet)
    before, after = open_checkpoint(directory), open_checkpoint(report.file)
    assert set(before.tensors) == set(after.tensors)
    for tensor in before.tensors.values():
        # A norm that is stored with one added loses its last digits there.
        atol = 2**-20 if model_type.startswith("gemma") and len(tensor.shape) == 1 else 0
        np.testing.assert_allclose(after.tensors[tensor.name].dequantise(), tensor.dequantise(), 0, atol, err_msg=tensor.name)
    ours, theirs = (
        build_model(checkpoint, Options(context=24, batch=(), speculate=()), (8,)) for checkpoint in (before, after)
    )
    assert {f.name: [(op.kind, op.path) for op in f.ops] for f in ours.functions.values()} == {
        f.name: [(op.kind, op.path) for op in f.ops] for f in theirs.functions.values()
    }
    for weight in ours.weights.values():
        if weight.values is not None:
            np.testing.assert_allclose(theirs.weights[weight.name].values(), weight.values(), atol=2e-6)
    assert report.file.stat().st_size == report.bytes and sum(report.codecs.values()) == len(read_gguf(report.file).tensors)
    if model_type == "mistral":  # llama.cpp holds it for a llama
        return
    theirs = converted(directory, AutoConfig.from_pretrained(directory), tmp_path / "theirs.gguf")
    one, other = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (report.file, theirs))
    assert set(one) == set(other)
    for key in one:
        np.testing.assert_allclose(one[key].data, other[key].data, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("weights", ["q4_k_m", "q8_0", "q5_1", "bf16"])
def test_gguf_reads_the_numbers_that_were_meant(tmp_path, weights):
    directory = tiny.tiny_model("llama", tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64)
    out = quantise(directory, tmp_path / "out.gguf", Options(weights=weights), quiet).file
    checkpoint, read = open_checkpoint(directory), open_checkpoint(out)
    codecs = codecs_of(checkpoint, weights)
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    for name, tensor in read.tensors.items():
        assert tensor.codec == codecs[name]
        meant = convert("f32", checkpoint.tensors[name].data, codecs[name])
        assert np.array_equal(tensor.data, meant), name
        theirs = by_name[tensor.source]
        values = gguf.quants.dequantize(theirs.data, theirs.tensor_type).astype(np.float32)
        assert np.array_equal(np.sort(values.reshape(tensor.shape), axis=0), np.sort(tensor.dequantise(), axis=0)), name


def test_a_gguf_file_keeps_everything_but_its_weights(tmp_path):
    """Metadata of every type as it was, byte for byte, and rows in the file's own order."""
    own = {
        "general.name": "mine", "general.file_type": 0, "tokenizer.ggml.model": "no_vocab", "tokenizer.chat_template": "{{ x }}",
        "somebody.flag": True, "somebody.numbers": [1.5, 2.5], "somebody.words": ["a", "", "ü"], "somebody.flags": [True, False],
    }  # fmt: skip
    source = write_llama(tmp_path / "in.gguf", own, {"rope_freqs.weight": np.ones(8, np.float32)})
    out = quantise(source, tmp_path / "out.gguf", Options(weights="q8_0"), quiet).file
    before, after = read_gguf(source), read_gguf(out)
    for key, place in before.entries.items():
        if key != "general.file_type":
            assert before.data[slice(*place)].tobytes() == after.data[slice(*after.entries[key])].tobytes(), key
    assert after.metadata.keys() - before.metadata.keys() == {"general.quantization_version"}
    assert after.metadata["general.file_type"] == 7 and after.metadata["general.quantization_version"] == 2
    assert list(after.tensors) == list(before.tensors)
    for tensor in before.tensors.values():
        found = after.tensors[tensor.name]
        wanted = before.rows(tensor) if len(tensor.shape) == 1 else convert("f32", before.rows(tensor), "q8_0")
        assert np.array_equal(after.rows(found), wanted), tensor.name
    assert len(gguf.GGUFReader(out).tensors) == len(before.tensors)


def test_the_experts_of_a_file_are_quantised_where_they_are_stacked(tmp_path):
    directory = tiny.tiny_model("mixtral", tmp_path / "model", hidden_size=64)
    f32 = quantise(directory, tmp_path / "f32.gguf", PLAIN, quiet).file
    straight = quantise(directory, tmp_path / "a.gguf", Options(weights="q4_0"), quiet).file
    by_way = quantise(f32, tmp_path / "b.gguf", Options(weights="q4_0"), quiet).file
    one, other = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (straight, by_way))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.tensor_type == other[name].tensor_type and np.array_equal(tensor.data, other[name].data), name
    assert one["blk.0.ffn_up_exps.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_0
    assert one["blk.0.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_a_byte_level_tokenizer_goes_along(smollm2, tmp_path):
    """A directory with SmolLM2's tokenizer and template: what comes back cuts text into the same tokens, and knows its ids."""
    from tokenizers import Tokenizer

    directory = tiny.tiny_model("llama", tmp_path / "model", vocab_size=49152, hidden_size=32, num_hidden_layers=1)
    (directory / "tokenizer.json").write_text(json.dumps(smollm2.tokenizer))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    found = open_checkpoint(quantise(directory, tmp_path / "out.gguf", Options(weights="q8_0"), quiet).file)
    ours, theirs = (Tokenizer.from_str(json.dumps(content)) for content in (smollm2.tokenizer, found.tokenizer))
    for text in (SAMPLE, "<|im_start|>user\n12 3<|im_end|>", " a  b"):
        assert ours.encode(text).ids == theirs.encode(text).ids
    assert found.chat_template == "{{ messages }}"
    assert (found.bos_token_id, found.eos_token_ids) == (1, (2,))


def refused(model: Path, out: Path, says: str, **options) -> None:
    with pytest.raises((CheckpointError, PipelineError), match=says) as error:
        quantise(model, out, Options(**({"weights": "q8_0"} | options)), quiet)
    assert "\n" not in str(error.value)
    assert not out.exists() or out.samefile(model)
    assert not [name for name in os.listdir(out.parent) if name.startswith(".")]


def test_what_cannot_be_said_in_gguf_is_refused(smollm2, tmp_path):
    out = tmp_path / "out.gguf"
    scaled = tiny.tiny_model("gemma2", tmp_path / "scaled", query_pre_attn_scalar=20)
    refused(scaled, out, "a gemma2 model whose .* would be read back otherwise: convert it with llama.cpp")
    sliding = tiny.tiny_model("mistral", tmp_path / "sliding", sliding_window=24)
    refused(sliding, out, "a mistral model whose windows would be read back otherwise")
    model = tiny.tiny_model("llama", tmp_path / "model")
    content = {**smollm2.tokenizer, "model": {**smollm2.tokenizer["model"], "type": "Unigram"}}
    (model / "tokenizer.json").write_text(json.dumps(content))
    refused(model, out, "a tokenizer that is neither byte-level BPE nor")
    split = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]}
    (model / "tokenizer.json").write_text(json.dumps({**smollm2.tokenizer, "pre_tokenizer": steps}))
    refused(model, out, "cuts text by rules without a name")
    (model / "tokenizer.json").write_text(json.dumps({**smollm2.tokenizer, "normalizer": {"type": "Lowercase"}}))
    refused(model, out, "would cut text otherwise with")


def test_mistakes_are_one_sentence_and_leave_nothing(tmp_path, monkeypatch):
    out = tmp_path / "out.gguf"
    source = write_llama(tmp_path / "in.gguf")
    refused(source, source, "is the checkpoint itself")
    with monkeypatch.context() as full:
        full.setattr(space.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9 - 99, 99))
        refused(source, out, "out.gguf needs .* where 0.0 MB are free")
        with pytest.raises(PipelineError, match="the bundle .* needs .* where 0.0 MB are free: make room there"):
            compile_model(source, tmp_path / "bundle", Options(context=8, lowering="portable", batch=(), speculate=()))
        assert not (tmp_path / "bundle").exists()
    q8 = gguf.GGMLQuantizationType.Q8_0
    small = write_llama(tmp_path / "q8.gguf", tensors={"blk.0.attn_q.weight": (np.ones((64, 64), np.float32), q8)})
    refused(small, out, "holds q8_0 already")
    spoilt = write_llama(tmp_path / "nan.gguf", tensors={"blk.0.ffn_up.weight": np.full((96, 64), np.nan, np.float32)})
    refused(spoilt, out, "up_proj.weight holds infinities")
    directory = tiny.tiny_model("llama", tmp_path / "short")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    refused(directory, out, "q_proj.bias .* is missing")


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    source, out = write_llama(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    assert cli.main(["quantise", str(source), "-o", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(out) and facts["bytes"] == out.stat().st_size
    assert facts["codecs"] == {"f32": 5, "q5_0": 12, "q8_0": 3}
    assert cli.main(["quantise", str(source), "-o", str(out), "--weights", "q4_0"]) == 0
    assert "15 q4_0" in capsys.readouterr().out
    assert cli.main(["quantise", str(tmp_path / "none"), "-o", str(out)]) == 1
