"""A GGUF file is read as HF's model: config, names of tensors, order of rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

from castiron.pipelines.checkpoints.checkpoint import CheckpointError, missing_and_left_over
from castiron.pipelines.checkpoints.gguf.gguf_file import read_gguf
from castiron.pipelines.checkpoints.gguf.open_gguf import scaled
from castiron.pipelines.checkpoints.open_checkpoint import checkpoint_sha256, open_checkpoint
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.quantise_gguf import quantise
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.pipelines.locate import model_name
from tests.support.hf_to_gguf import permute
from tests.support.tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LLAMA_SIZES, llama_tensors, write_gguf, write_llama

# Keys about the config's origin.
_NOT_MATHEMATICS = {"_name_or_path", "_model_name_or_path", "unk_token_id", "transformers_version"}


def _as_hf_reads(config: dict) -> dict:
    config = AutoConfig.for_model(**config).to_dict()
    return {key: value for key, value in config.items() if key not in _NOT_MATHEMATICS}


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_config_is_that_of_transformers(name, request, tmp_path):
    """transformers reads the same metadata without the vocabulary, which would take half a minute."""
    path, checkpoint = request.getfixturevalue(f"{name}_path"), request.getfixturevalue(name)
    metadata = read_gguf(path).metadata
    arch = metadata.pop("general.architecture")
    short = {key: value for key, value in metadata.items() if isinstance(value, (str, int, float))}
    short[f"{arch}.vocab_size"] = checkpoint.config["vocab_size"]
    write_gguf(tmp_path / "x.gguf", arch, short, {"output_norm.weight": np.ones(1, np.float32)})
    peer = AutoConfig.from_pretrained(tmp_path, gguf_file="x.gguf").to_dict()
    assert _as_hf_reads(checkpoint.config) == {k: v for k, v in peer.items() if k not in _NOT_MATHEMATICS}


def test_tensors_are_views_of_the_mapped_file(smollm2):
    tensor = smollm2.tensors["model.embed_tokens.weight"]
    assert not tensor.data.flags.owndata and not tensor.data.flags.writeable
    assert tensor.data.shape == (49152, 576 // 32 * 34)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_q_and_k_rows_come_back_in_hf_order(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(1)
    q = random.standard_normal((HIDDEN, HIDDEN), np.float32)
    k = random.standard_normal((KV_HEADS * HEAD_DIM, HIDDEN), np.float32)
    bias = random.standard_normal(HIDDEN).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": (permute(q, HEADS), kind),
        "blk.0.attn_k.weight": (permute(k, KV_HEADS), kind),
        "blk.0.attn_q.bias": permute(bias, HEADS),
    }
    checkpoint = open_checkpoint(write_llama(tmp_path / "x.gguf", tensors=tensors))

    def stored(values):
        return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)

    read = checkpoint.tensors
    assert np.array_equal(read["model.layers.0.self_attn.q_proj.weight"].dequantise(), stored(q))
    assert np.array_equal(read["model.layers.0.self_attn.k_proj.weight"].dequantise(), stored(k))
    assert np.array_equal(read["model.layers.0.self_attn.q_proj.bias"].dequantise(), bias)
    assert checkpoint.config["attention_bias"] is True


def test_weights_in_nvfp4_are_multiplied_by_their_scales(tmp_path):
    """llama.cpp writes a scale of each matrix, and one of its activations, which castiron drops."""
    kind = gguf.GGMLQuantizationType.NVFP4
    out, up = raw_rows("nvfp4", HIDDEN, HIDDEN, 0), raw_rows("nvfp4", 96, HIDDEN, 1)
    own = {"blk.0.attn_output.weight": (out, kind), "blk.0.ffn_up.weight": (up, kind)}
    given = {"blk.0.attn_output.scale": np.float32([0.3]), "blk.0.attn_output.input_scale": np.float32([2.0])}
    checkpoint = open_checkpoint(write_llama(tmp_path / "x.gguf", tensors=own | given))
    assert not [name for name in checkpoint.tensors if "scale" in name]
    found = {
        leaf: checkpoint.tensors[f"model.layers.0.{leaf}.weight"].dequantise() for leaf in ("self_attn.o_proj", "mlp.up_proj")
    }
    want = gguf.quants.dequantize(out, kind) * np.float32(0.3)
    np.testing.assert_allclose(found["self_attn.o_proj"], want, rtol=2.0**-22)
    assert np.array_equal(found["mlp.up_proj"], gguf.quants.dequantize(up, kind))


def test_stacked_experts_in_nvfp4_have_a_scale_each(tmp_path):
    kind, stack = gguf.GGMLQuantizationType.NVFP4, raw_rows("nvfp4", 24, 64, 0).reshape(3, 8, -1)
    scales = np.float32([1, 0.5, -2])
    for own in scales, scales[:2]:
        tensors = {"blk.0.ffn_up_exps.weight": (stack, kind), "blk.0.ffn_up_exps.scale": own}
        file = read_gguf(write_gguf(tmp_path / "x.gguf", "llama", {}, tensors))
        if len(own) == len(stack):
            (tensor,) = scaled(file.path, file.tensors).values()
            assert np.array_equal(tensor.dequantise(), gguf.quants.dequantize(stack, kind) * own[:, None, None])
            continue
        with pytest.raises(CheckpointError, match="ffn_up_exps.scale has 2 numbers, not 1 or 3"):
            scaled(file.path, file.tensors)


def test_a_model_in_parts_is_opened_by_its_first(tmp_path):
    tensors = {name: (value, gguf.GGMLQuantizationType.F32) for name, value in llama_tensors().items()}
    names = [f"tiny-{part:05d}-of-00003.gguf" for part in (1, 2, 3)]
    for number, name in enumerate(names):
        own = {key: value for at, (key, value) in enumerate(tensors.items()) if at % 3 == number}
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        write_gguf(tmp_path / name, "llama", {**LLAMA_SIZES, **split} if number == 0 else split, own)
    one, complete = open_checkpoint(tmp_path / names[0]), open_checkpoint(write_llama(tmp_path / "complete.gguf"))
    assert one.tensors.keys() == complete.tensors.keys() and model_name(one.path) == "tiny"
    assert all(np.array_equal(tensor.data, complete.tensors[name].data) for name, tensor in one.tensors.items())
    made = quantise(one.path, tmp_path / "q.gguf", Options(weights="q8_0"), lambda stage, done: None)
    assert open_checkpoint(made.file).tensors.keys() == complete.tensors.keys()
    before = checkpoint_sha256(one.path)
    with pytest.raises(CheckpointError, match="is one of 3 parts; give NAME-00001-of-00003.gguf"):
        open_checkpoint(tmp_path / names[1])
    third = (tmp_path / names[2]).read_bytes()
    (tmp_path / names[2]).write_bytes((tmp_path / names[1]).read_bytes())
    with pytest.raises(CheckpointError, match="is not part 3 of 3"):
        open_checkpoint(one.path)
    assert checkpoint_sha256(one.path) != before
    (tmp_path / names[2]).unlink()
    with pytest.raises(CheckpointError, match=f"{names[2]}: no such file; download all 3 parts"):
        open_checkpoint(one.path)
    (tmp_path / names[2]).write_bytes(third)
    assert checkpoint_sha256(one.path) == before


INVALID_METADATA = {
    ("general.architecture", "mamba"): "has the unsupported architecture mamba",
    ("llama.attention.clamp_kqv", 8.0): "llama.attention.clamp_kqv",
    ("llama.block_count", 0): "llama.block_count is 0",
    ("llama.block_count", "two"): "is 'two'",
    ("llama.attention.head_count", (4, 2)): r"is \[4, 2\]",
    ("llama.attention.head_count_kv", 3): "not a multiple of 3 key-value heads",
    ("split.count", 3): "one of 3 parts",
    ("general.type", "adapter"): "of type 'adapter'",
    ("llama.rope.dimension_count", 8): "dimension_count is 8, not 16",
    ("llama.rope.scaling.type", "x"): "'x'",
    ("llama.attention.value_length", 8): "value_length is 8",
    ("llama.rope.freq_base", float("nan")): "not a finite number",
    ("tokenizer.ggml.eos_token_id", "</s>"): "not an integer",
}
INVALID_TENSORS = {"blk.0.attn_k.weight": ((6, HIDDEN), "has 6 rows"), "blk.00.ffn_up.weight": ((1, 1), "both contain")}


def test_invalid_metadata_and_tensors_end_in_one_line(tmp_path):
    path = tmp_path / "x.gguf"

    def check(message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as error:
            open_checkpoint(path)
        assert "\n" not in str(error.value)

    for (key, value), message in INVALID_METADATA.items():
        metadata = {key: list(value) if isinstance(value, tuple) else value}
        if key == "general.architecture":
            write_gguf(path, value, {}, llama_tensors())
        else:
            write_llama(path, metadata)
        check(message)
    for name, (shape, message) in INVALID_TENSORS.items():
        write_llama(path, tensors={name: np.zeros(shape, np.float32)})
        check(message)


def test_an_unknown_tensor_is_reported_as_left_over(tmp_path):
    strange = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32), "rope_factors_long.weight": np.ones(8, np.float32)}
    checkpoint = open_checkpoint(write_llama(tmp_path / "x.gguf", tensors=strange))
    required = {name: t.shape for name, t in checkpoint.tensors.items() if name not in strange}
    left_over = ["blk.0.attn_sinks.weight [4] is left over", "rope_factors_long.weight [8] is left over"]
    assert sorted(missing_and_left_over(required, checkpoint)) == left_over
