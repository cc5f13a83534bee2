"""castiron quantise: castiron and gguf's own reader read its files back as the model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

from castiron.emitter.codecs.quantise import convert
from castiron.pipelines import files
from castiron.pipelines.checkpoints.checkpoint import SAMPLE, CheckpointError
from castiron.pipelines.checkpoints.gguf.gguf_file import read_gguf
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.quantise_gguf import quantise
from castiron.pipelines.compile.weight_codecs import codecs_of
from castiron.pipelines.errors import PipelineError
from castiron.reference import tiny
from tests.support.gguf_models import IMPLIED, MODELS
from tests.support.hf_to_gguf import convert as converted
from tests.support.tiny_gguf import write_llama
from tests.support.tokenizer_directories import base, write

# Families whose files castiron reads and does not write.
UNWRITTEN = {
    "deepseek_v2", "deepseek_v3", "falcon_h1", "gemma4_text", "granitemoehybrid", "lfm2_moe", "ministral3", "nemotron_h", "olmo3",
}  # fmt: skip
WRITTEN = {name: model for name, model in MODELS.items() if model[0] not in UNWRITTEN and name != "hunyuan, alpha"}
WRITTEN["mistral"] = ("mistral", {"sliding_window": None})
PLAIN = Options(weights="f32")


def quiet(stage: str, done: float) -> None:
    assert 0 <= done <= 1


@pytest.mark.parametrize("name", WRITTEN)
def test_a_directory_is_read_back_as_itself(tmp_path, name):
    """castiron reads tensors and graph back; gguf reads what llama.cpp's converter writes."""
    model_type, config = WRITTEN[name]
    directory = tiny.tiny_model(model_type, tmp_path / "model", **config)
    report = quantise(directory, tmp_path / "out.gguf", PLAIN, quiet)
    before, after = open_checkpoint(directory), open_checkpoint(report.file)
    assert set(before.tensors) == set(after.tensors)
    for tensor in before.tensors.values():
        # Adding 1 to a norm rounds its last digits.
        atol = 2**-20 if model_type.startswith(("gemma", "qwen3_5")) and len(tensor.shape) == 1 else 0
        np.testing.assert_allclose(after.tensors[tensor.name].dequantise(), tensor.dequantise(), 0, atol, err_msg=tensor.name)
    ours, theirs = (
        build_model(checkpoint, Options(context=24, prefill=(8,), batch=(), verify_widths=())) for checkpoint in (before, after)
    )
    assert {f.name: [(op.kind, op.path) for op in f.ops] for f in ours.functions.values()} == {
        f.name: [(op.kind, op.path) for op in f.ops] for f in theirs.functions.values()
    }
    for weight in ours.weights.values():
        if weight.values is not None:
            np.testing.assert_allclose(theirs.weights[weight.name].values(), weight.values(), atol=2e-6)
    assert report.file.stat().st_size == report.bytes and sum(report.codecs.values()) == len(read_gguf(report.file).tensors)
    if model_type == "mistral":  # a llama for llama.cpp
        return
    theirs = converted(directory, AutoConfig.from_pretrained(directory), tmp_path / "theirs.gguf")
    one, other = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (report.file, theirs))
    assert set(one) == set(other)
    for key in one:
        np.testing.assert_allclose(one[key].data, other[key].data, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("weights", ["q4_k_m", "q8_0", "q5_1", "bf16"])
def test_gguf_reads_the_same_numbers(tmp_path, weights):
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
    """Metadata of every type stays byte for byte, and rows keep the file's order."""
    own = {
        "general.name": "mine", "general.file_type": 0, "tokenizer.ggml.model": "no_vocab", "tokenizer.chat_template": "{{ x }}",
        "somebody.flag": True, "somebody.numbers": [1.5, 2.5], "somebody.words": ["a", "", "ü"], "somebody.flags": [True, False],
    }  # fmt: skip
    source = write_llama(tmp_path / "in.gguf", own, {"rope_freqs.weight": np.ones(8, np.float32)})
    out = quantise(source, tmp_path / "out.gguf", Options(weights="q8_0"), quiet).file
    before, after = read_gguf(source), read_gguf(out)
    for key, entry in before.entries.items():
        if key != "general.file_type":
            assert entry == after.entries[key], key
    assert after.metadata.keys() - before.metadata.keys() == {"general.quantization_version"}
    assert after.metadata["general.file_type"] == 7 and after.metadata["general.quantization_version"] == 2
    assert list(after.tensors) == list(before.tensors)
    for tensor in before.tensors.values():
        found = after.tensors[tensor.name]
        wanted = tensor.data if len(tensor.shape) == 1 else convert("f32", tensor.data, "q8_0")
        assert np.array_equal(found.data, wanted), tensor.name
    assert len(gguf.GGUFReader(out).tensors) == len(before.tensors)


@pytest.mark.parametrize(
    ("family", "config", "leaf"),
    # A tensor that is two of HF's; columns in an order of their own, since a block spans two heads.
    [("qwen3_next", {}, "ssm_ba"), ("qwen3_5_text", {"linear_num_value_heads": 4, "linear_value_head_dim": 16}, "ssm_out")],
)
def test_a_gguf_file_is_quantised_twice(family, config, leaf, tmp_path):
    directory = tiny.tiny_model(family, tmp_path / "model", **IMPLIED.get(family, {}) | config)
    source = converted(directory, AutoConfig.from_pretrained(directory), tmp_path / "f32.gguf")
    first = quantise(source, tmp_path / "first.gguf", Options(weights="q8_0"), quiet).file
    second = quantise(first, tmp_path / "second.gguf", Options(weights="q4_0", requantise=True), quiet).file
    before, after = (read_gguf(file).tensors[f"blk.0.{leaf}.weight"] for file in (first, second))
    assert (before.codec, after.codec) == ("q8_0", "q4_0") and after.shape == before.shape
    assert np.array_equal(after.data, convert("q8_0", before.data, "q4_0"))
    shapes = [{name: tensor.shape for name, tensor in open_checkpoint(file).tensors.items()} for file in (first, second)]
    assert shapes[0] == shapes[1]


def test_columns_are_reordered_before_they_are_quantised(tmp_path):
    """A block of 32 columns spans two value heads, whose order in GGUF is not HF's."""
    config = {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
    directory = tiny.tiny_model("qwen3_5_text", tmp_path / "model", **config)
    out = quantise(directory, tmp_path / "out.gguf", Options(weights="q8_0"), quiet).file
    (name,) = {name for name in open_checkpoint(directory).tensors if name.endswith("0.linear_attn.out_proj.weight")}
    rows = open_checkpoint(directory).tensors[name].dequantise()
    # 4 value heads, 2 of each of 2 key heads
    rows = np.ascontiguousarray(rows.reshape(-1, 2, 2, 16).swapaxes(1, 2).reshape(rows.shape))
    stored = read_gguf(out).tensors["blk.0.ssm_out.weight"]
    assert stored.codec == "q8_0" and np.array_equal(stored.data, convert("f32", rows.view(np.uint8), "q8_0"))


def test_a_byte_level_tokenizer_is_written_and_read_back(smollm2, tmp_path):
    """SmolLM2's tokenizer and template are read back: same tokens, same special ids."""
    from tokenizers import Tokenizer

    directory = tiny.tiny_model("llama", tmp_path / "model", vocab_size=49152, hidden_size=32, num_hidden_layers=1)
    (directory / "tokenizer.json").write_text(json.dumps(smollm2.tokenizer))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    found = open_checkpoint(quantise(directory, tmp_path / "out.gguf", Options(weights="q8_0"), quiet).file)
    ours, theirs = (Tokenizer.from_str(json.dumps(content)) for content in (smollm2.tokenizer, found.tokenizer))
    for text in (SAMPLE, "<|im_start|>user\n12 3<|im_end|>", " a  b"):
        assert ours.encode(text).ids == theirs.encode(text).ids
    assert found.chat_template == "{{ messages }}"
    # <|endoftext|> and <reponame> end an answer of any GGUF file.
    assert (found.bos_token_id, found.eos_token_ids) == (1, (2, 0, 4))


def test_the_roles_of_special_tokens_are_written(tmp_path):
    directory = tiny.tiny_model("llama", tmp_path / "model", vocab_size=310, eos_token_id=2, pad_token_id=None)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write(directory, {"tokenizer.json": base("gpt2"), "tokenizer_config.json": json.dumps(roles)})
    found = open_checkpoint(quantise(directory, tmp_path / "out.gguf", Options(weights="q8_0"), quiet).file)
    assert found.special_tokens == roles and {1, 2} <= {*found.eos_token_ids}


def refused(model: Path, out: Path, expected_message: str, **options) -> None:
    with pytest.raises((CheckpointError, PipelineError), match=expected_message) as error:
        quantise(model, out, Options(**({"weights": "q8_0"} | options)), quiet)
    assert "\n" not in str(error.value)
    assert not out.exists() or out.samefile(model)
    assert not [name for name in os.listdir(out.parent) if name.startswith(".")]


def test_rejects_models_that_gguf_cannot_express(smollm2, tmp_path):
    out = tmp_path / "out.gguf"
    scaled = tiny.tiny_model("gemma2", tmp_path / "scaled", query_pre_attn_scalar=20)
    refused(scaled, out, "GGUF has no keys for these settings of gemma2 models: .*; convert")
    sliding = tiny.tiny_model("mistral", tmp_path / "sliding", sliding_window=24)
    refused(
        sliding,
        out,
        "GGUF has no keys for these settings of mistral models: windows; convert",
    )
    model = tiny.tiny_model("llama", tmp_path / "model")
    content = {**smollm2.tokenizer, "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}}
    (model / "tokenizer.json").write_text(json.dumps(content))
    refused(model, out, "its tokenizer is neither byte-level BPE nor SentencePiece")
    split = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
    steps = {
        "type": "Sequence",
        "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}],
    }
    (model / "tokenizer.json").write_text(json.dumps({**smollm2.tokenizer, "pre_tokenizer": steps}))
    refused(model, out, "castiron does not know the GGUF name of its pre-tokenizer")
    (model / "tokenizer.json").write_text(json.dumps({**smollm2.tokenizer, "normalizer": {"type": "Lowercase"}}))
    refused(model, out, "cannot be written as GGUF: the tokenizer in the GGUF file would split text differently")


def test_errors_are_one_line_and_leave_no_file(tmp_path, monkeypatch):
    out = tmp_path / "out.gguf"
    source = write_llama(tmp_path / "in.gguf")
    refused(source, source, "is the checkpoint itself")
    with monkeypatch.context() as full:
        full.setattr(files.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - 99, 99))
        refused(source, out, "out.gguf needs .* has 0.0 MB free")
        with pytest.raises(PipelineError, match="the bundle .* needs .* has 0.0 MB free; delete files there"):
            compile_model(source, tmp_path / "bundle", Options(context=8, lowering="portable", batch=(), verify_widths=()))
        assert not (tmp_path / "bundle").exists()
    q8 = gguf.GGMLQuantizationType.Q8_0
    small = write_llama(tmp_path / "q8.gguf", tensors={"blk.0.attn_q.weight": (np.ones((64, 64), np.float32), q8)})
    refused(small, out, "is already quantised to q8_0.*--requantise")
    spoilt = write_llama(tmp_path / "nan.gguf", tensors={"blk.0.ffn_up.weight": np.full((96, 64), np.nan, np.float32)})
    refused(spoilt, out, "up_proj.weight has infinities")
    directory = tiny.tiny_model("llama", tmp_path / "short")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    refused(directory, out, "q_proj.bias .* is missing")


def test_quantise_prints_the_file_and_its_codecs(tmp_path, capsys):
    source, out = write_llama(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    assert cli.main(["quantise", str(source), "-o", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(out) and facts["bytes"] == out.stat().st_size
    assert facts["codecs"] == {"f32": 5, "q5_0": 12, "q8_0": 3}
    assert cli.main(["quantise", str(source), "-o", str(out), "--weights", "q4_0"]) == 0
    assert "15 q4_0" in capsys.readouterr().out
    smaller = tmp_path / "smaller.gguf"
    assert cli.main(["quantise", str(out), "-o", str(smaller), "--weights", "q8_0", "--requantise"]) == 0
    assert "15 q4_0" in capsys.readouterr().out
    assert cli.main(["quantise", str(source), "-o", str(out), "--weights", "q8_0"]) == 0
    assert cli.main(["quantise", str(out), "-o", str(smaller), "--weights", "q4_0", "--requantise"]) == 0
    assert "15 q4_0" in capsys.readouterr().out
    assert cli.main(["quantise", str(tmp_path / "none"), "-o", str(out)]) == 1
