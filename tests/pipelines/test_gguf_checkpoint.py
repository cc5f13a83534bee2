"""A GGUF file becomes what its model is at HF: config, names, order of rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

from castiron.pipelines.checkpoints import CheckpointError, missing_and_left_over, open_checkpoint
from castiron.pipelines.checkpoints.gguf_file import read_gguf
from tests.pipelines.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LLAMA_SIZES,
    VOCAB,
    llama_tensors,
    write_gguf,
    write_llama,
)  # fmt: skip

# What a config says about where it came from, or about training.
_NOT_MATHEMATICS = {"_name_or_path", "_model_name_or_path", "unk_token_id", "transformers_version"}


def _as_hf_reads(config: dict) -> dict:
    config = AutoConfig.for_model(**config).to_dict()
    return {key: value for key, value in config.items() if key not in _NOT_MATHEMATICS}


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_config_is_that_of_transformers(name, request, tmp_path):
    """transformers' own reading of the same metadata, without the vocabulary, which it reads for half a minute."""
    path, checkpoint = request.getfixturevalue(f"{name}_path"), request.getfixturevalue(name)
    metadata = read_gguf(path).metadata
    arch = metadata.pop("general.architecture")
    short = {key: value for key, value in metadata.items() if isinstance(value, (str, int, float))}
    short[f"{arch}.vocab_size"] = checkpoint.config["vocab_size"]
    write_gguf(tmp_path / "x.gguf", arch, short, {"output_norm.weight": np.ones(1, np.float32)})
    peer = AutoConfig.from_pretrained(tmp_path, gguf_file="x.gguf").to_dict()
    assert _as_hf_reads(checkpoint.config) == {k: v for k, v in peer.items() if k not in _NOT_MATHEMATICS}


def test_smollm2_tensors_are_those_of_the_config(smollm2):
    config = smollm2.config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    required = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        required |= {
            f"{block}input_layernorm.weight": (hidden,),
            f"{block}post_attention_layernorm.weight": (hidden,),
            f"{block}self_attn.q_proj.weight": (hidden, hidden),
            f"{block}self_attn.k_proj.weight": (kv, hidden),
            f"{block}self_attn.v_proj.weight": (kv, hidden),
            f"{block}self_attn.o_proj.weight": (hidden, hidden),
            f"{block}mlp.gate_proj.weight": (inner, hidden),
            f"{block}mlp.up_proj.weight": (inner, hidden),
            f"{block}mlp.down_proj.weight": (hidden, inner),
        }
    assert missing_and_left_over(required, smollm2) == []
    assert smollm2.tensors["model.layers.0.mlp.gate_proj.weight"].codec == "q4_1"
    assert smollm2.eos_token_ids == (2,)
    assert "<|im_start|>" in smollm2.chat_template


def test_tensors_are_views_of_the_mapped_file(smollm2):
    tensor = smollm2.tensors["model.embed_tokens.weight"]
    assert not tensor.data.flags.owndata and not tensor.data.flags.writeable
    assert tensor.data.shape == (49152, 576 // 32 * 34)


def _permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of q and k (LlamaModel.permute)."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_q_and_k_rows_come_back_in_hf_order(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(1)
    q = random.standard_normal((HIDDEN, HIDDEN), np.float32)
    k = random.standard_normal((KV_HEADS * HEAD_DIM, HIDDEN), np.float32)
    bias = random.standard_normal(HIDDEN).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": (_permute(q, HEADS), kind),
        "blk.0.attn_k.weight": (_permute(k, KV_HEADS), kind),
        "blk.0.attn_q.bias": _permute(bias, HEADS),
    }
    checkpoint = open_checkpoint(write_llama(tmp_path / "x.gguf", tensors=tensors))

    def stored(values):
        return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)

    read = checkpoint.tensors
    assert np.array_equal(read["model.layers.0.self_attn.q_proj.weight"].dequantise(), stored(q))
    assert np.array_equal(read["model.layers.0.self_attn.k_proj.weight"].dequantise(), stored(k))
    assert np.array_equal(read["model.layers.0.self_attn.q_proj.bias"].dequantise(), bias)
    assert checkpoint.config["attention_bias"] is True


def test_tied_and_untied_output_heads(tmp_path):
    tied = open_checkpoint(write_llama(tmp_path / "tied.gguf"))
    head = {"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    untied = open_checkpoint(write_llama(tmp_path / "untied.gguf", tensors=head))
    assert tied.config["tie_word_embeddings"] is True and "lm_head.weight" not in tied.tensors
    assert untied.config["tie_word_embeddings"] is False and "lm_head.weight" in untied.tensors


def test_a_file_without_tokenizer_has_none(tmp_path):
    assert open_checkpoint(write_llama(tmp_path / "x.gguf")).tokenizer is None


REFUSED = {
    "unknown architecture": (lambda path: write_gguf(path, "mamba", {}, llama_tensors()), "holds a mamba model"),
    "unread key": (lambda path: write_llama(path, {"llama.attention.clamp_kqv": 8.0}), "llama.attention.clamp_kqv"),
    "no layers": (lambda path: write_llama(path, {"llama.block_count": 0}), "llama.block_count is missing or 0"),
    "layers in words": (lambda path: write_llama(path, {"llama.block_count": "two"}), "is 'two'"),
    "heads per layer": (lambda path: write_llama(path, {"llama.attention.head_count": [4, 2]}), r"is \[4, 2\]"),
    "heads that do not divide": (
        lambda path: write_llama(path, {"llama.attention.head_count_kv": 3}),
        "cannot be divided among",
    ),
    "a part": (lambda path: write_llama(path, {"split.count": 3}), "one of 3 parts"),
    "an adapter": (lambda path: write_llama(path, {"general.type": "adapter"}), "of type 'adapter'"),
    "partial rotation": (lambda path: write_llama(path, {"llama.rope.dimension_count": 8}), "rotates 8 of 16"),
    "unknown rope scaling": (lambda path: write_llama(path, {"llama.rope.scaling.type": "x"}), "'x'"),
    "value length": (lambda path: write_llama(path, {"llama.attention.value_length": 8}), "value_length is 8"),
    "not finite": (lambda path: write_llama(path, {"llama.rope.freq_base": float("nan")}), "not finite"),
    "token id in words": (lambda path: write_llama(path, {"tokenizer.ggml.eos_token_id": "</s>"}), "not a token id"),
    "rows that heads cannot share": (
        lambda path: write_llama(path, tensors={"blk.0.attn_k.weight": np.zeros((6, HIDDEN), np.float32)}),
        "attn_k.weight has 6 rows",
    ),
    "a name twice": (
        lambda path: write_llama(path, tensors={"blk.00.ffn_up.weight": np.zeros((1, 1), np.float32)}),
        "are the same",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name, tmp_path):
    write, sentence = REFUSED[name]
    with pytest.raises(CheckpointError, match=sentence) as error:
        open_checkpoint(write(tmp_path / "x.gguf"))
    assert "\n" not in str(error.value)


def test_an_unknown_tensor_is_kept_to_be_reported(tmp_path):
    strange = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32), "rope_factors_long.weight": np.ones(8, np.float32)}
    checkpoint = open_checkpoint(write_llama(tmp_path / "x.gguf", tensors=strange))
    required = {name: t.shape for name, t in checkpoint.tensors.items() if name not in strange}
    required["model.layers.9.mlp.up_proj.weight"] = (3, 4)
    required["model.norm.weight"] = (7,)
    assert sorted(missing_and_left_over(required, checkpoint)) == [
        "blk.0.attn_sinks.weight [4] is left over",
        "model.layers.9.mlp.up_proj.weight [3, 4] is missing",
        "model.norm.weight is [64], the config calls for [7]",
        "rope_factors_long.weight [8] is left over",
    ]


def test_sizes_agree_with_the_smallest_of_files(tmp_path):
    config = open_checkpoint(write_llama(tmp_path / "x.gguf")).config
    assert config["hidden_size"] == LLAMA_SIZES["llama.embedding_length"]
    assert config["head_dim"] == HEAD_DIM
    assert config["vocab_size"] == VOCAB
    assert config["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
