"""Random models of every architecture are read from llama.cpp's form as HF saved them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from castiron.pipelines.checkpoints.checkpoint import CheckpointError, missing_and_left_over
from castiron.pipelines.checkpoints.gguf.architectures import ARCHITECTURES, architecture_names
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.reference import hf
from castiron.reference.tiny import tiny_model
from tests.emitter.test_models import EPSILON_KEYS
from tests.support.deepseek_as_gguf import LATENT
from tests.support.gguf_models import IMPLIED, MODELS, READ_AS
from tests.support.hf_to_gguf import GGUF_NAMES, NORMS_PLUS_ONE, convert, metadata_of, rope_tensors, tensors_of
from tests.support.tiny_gguf import write_gguf, write_llama

# A file without a tokenizer has no ids of special tokens.
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def saved(name: str, path, **changes):
    """Write the model `name` of MODELS to the directory `path`; return its config."""
    family, config = MODELS[name]
    epsilon = {EPSILON_KEYS.get(family, "rms_norm_eps"): 3e-5}
    tiny_model(family, path, **NO_IDS | epsilon | config | changes)
    return AutoConfig.from_pretrained(path)


def saved_as(family: str, path):
    """Write the tiny model of a family to the directory `path`; return its config."""
    tiny_model(family, path, **NO_IDS | IMPLIED.get(family, {}))
    return AutoConfig.from_pretrained(path)


def test_every_architecture_is_tested():
    """test_encoders.py tests gemma-embedding; nemotron_h is nemotron_h_moe under another name."""
    others = {"gemma-embedding", "nemotron_h"}
    assert {*GGUF_NAMES.values()} | others == set(architecture_names())
    assert {*GGUF_NAMES} - {*READ_AS} == {row.model_type for row in ARCHITECTURES.values()}


@pytest.fixture(params=MODELS, scope="module")
def converted(request, tmp_path_factory):
    """A model, its saved directory as a checkpoint, and its GGUF file as a checkpoint."""
    tmp_path = tmp_path_factory.mktemp("converted")
    path = convert(tmp_path / "hf", saved(request.param, tmp_path / "hf"), tmp_path / "model.gguf")
    return hf.load(tmp_path / "hf", threads=1), open_checkpoint(tmp_path / "hf"), open_checkpoint(path)


def test_read_back_as_itself(converted):
    model, directory, checkpoint = converted
    required = {name: tensor.shape for name, tensor in directory.tensors.items()}
    assert missing_and_left_over(required, checkpoint) == []
    norms_move = model.config.model_type in NORMS_PLUS_ONE
    for name, tensor in directory.tensors.items():
        values, expected = checkpoint.tensors[name].dequantise(), tensor.dequantise()
        if name.endswith("A_log"):
            # through exp and log
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)
            continue
        if norms_move and name.endswith("norm.weight") and ".linear_attn." not in name:
            expected = (expected + np.float32(1)) - np.float32(1)
        assert np.array_equal(values, expected), name


def test_config_gives_the_same_logits(converted):
    model, _, checkpoint = converted
    ours = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config)).eval()
    ours.load_state_dict(model.state_dict())
    tokens = torch.randint(0, model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, expected = ours(tokens).logits, model(tokens).logits
    # the metadata is f32, so that a factor such as 0.1 is off by one part in 1e8
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert checkpoint.config["tie_word_embeddings"] == model.config.tie_word_embeddings


# Keys of training and generation, and rotary embeddings, which have two forms.
_NOT_COMPARED = {
    "_name_or_path", "architectures", "dtype", "transformers_version", "initializer_range", "rope_parameters",
    "router_aux_loss_coef", "max_window_layers",
}  # fmt: skip


def test_config_equals_the_models_config(converted):
    """Activations and epsilons too, whose difference could be too small for the logits to show."""
    model, _, checkpoint = converted
    ours = AutoConfig.for_model(**checkpoint.config).to_dict()
    for key, value in model.config.to_dict().items():
        if key in _NOT_COMPARED or key not in ours or (key == "head_dim" and value is None):
            continue
        if isinstance(value, float):
            assert ours[key] == pytest.approx(value, rel=1e-6), key
        else:
            assert ours[key] == value, key


@pytest.mark.parametrize("family", READ_AS)
def test_a_file_of_a_family_read_as_its_twin_has_its_sizes(family, tmp_path):
    config = saved_as(family, tmp_path)
    checkpoint = open_checkpoint(convert(tmp_path, config, tmp_path / "x.gguf"))
    assert checkpoint.config["model_type"] == READ_AS[family]
    ours = AutoConfig.for_model(**checkpoint.config).to_dict()
    alike = {key for key, value in config.to_dict().items() if key in ours and ours[key] == value}
    assert {"num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers", "vocab_size"} <= alike


def test_projections_that_early_files_of_qwen3_next_fuse_are_read(tmp_path):
    config = saved_as("qwen3_next", tmp_path)
    tensors = tensors_of(tmp_path, config)
    expected = open_checkpoint(convert(tmp_path, config, tmp_path / "x.gguf")).tensors
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("in_proj_qkvz.weight"):
            block = f"blk.{name.split('.')[2]}"
            del tensors[f"{block}.attn_qkv.weight"], tensors[f"{block}.attn_gate.weight"]
            tensors[f"{block}.ssm_in.weight"] = values
    path = write_gguf(tmp_path / "fused.gguf", "qwen3next", metadata_of(config), tensors)
    assert any(".ssm_in." in name for name in tensors)
    found = open_checkpoint(path).tensors
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].dequantise(), tensor.dequantise()) for name, tensor in expected.items())


@pytest.mark.parametrize("rows", [6, 16])
def test_fused_projections_with_wrong_rows_are_rejected(rows, tmp_path):
    config = saved_as("qwen3_next", tmp_path)
    tensors = tensors_of(tmp_path, config)
    tensors["blk.0.ssm_ba.weight"] = np.resize(tensors["blk.0.ssm_ba.weight"], (rows, config.hidden_size))
    with pytest.raises(CheckpointError, match=f"blk.0.ssm_ba.weight has {rows} rows, not 8"):
        open_checkpoint(write_gguf(tmp_path / "x.gguf", "qwen3next", metadata_of(config), tensors))


@pytest.mark.parametrize("family", LATENT)
def test_a_file_without_absorbed_projections_is_read_as_one_with_them(family, tmp_path):
    """As the converter wrote them before it split `kv_b_proj`; V2 had no key of the function."""
    config = saved_as(family, tmp_path)
    expected = open_checkpoint(convert(tmp_path, config, tmp_path / "x.gguf"))
    metadata, tensors = metadata_of(config), tensors_of(tmp_path, config)
    if family == "deepseek_v2":
        del metadata["deepseek2.expert_gating_func"]
    for side in ("key", "value"):
        metadata[f"deepseek2.attention.{side}_length"] = metadata.pop(f"deepseek2.attention.{side}_length_mla")
    metadata["deepseek2.attention.head_count_kv"] = config.num_attention_heads
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("kv_b_proj.weight"):
            block = f"blk.{name.split('.')[2]}"
            del tensors[f"{block}.attn_k_b.weight"], tensors[f"{block}.attn_v_b.weight"]
            tensors[f"{block}.attn_kv_b.weight"] = values
    found = open_checkpoint(write_gguf(tmp_path / "old.gguf", "deepseek2", metadata, tensors))
    assert found.config == expected.config and found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.tensors[n].dequantise(), tensor.dequantise()) for n, tensor in expected.tensors.items())


def test_absorbed_projections_keep_a_float_type_and_are_f32_otherwise(tmp_path):
    config = saved_as("deepseek_v3", tmp_path)
    both = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
    for type_, codec in (("F16", "f16"), ("Q8_0", "f32")):
        kind, tensors = gguf.GGMLQuantizationType[type_], tensors_of(tmp_path, config)
        for leaf in ("attn_k_b", "attn_v_b") if type_ == "F16" else ("attn_v_b",):
            tensors[f"blk.0.{leaf}.weight"] = tensors[f"blk.0.{leaf}.weight"], kind
        path = write_gguf(tmp_path / "x.gguf", "deepseek2", metadata_of(config), tensors)
        found = open_checkpoint(path).tensors["model.layers.0.self_attn.kv_b_proj.weight"]
        assert found.codec == codec and found.shape == both.shape
        np.testing.assert_allclose(found.dequantise(), both, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.key_length", 41, "attention.key_length is 41, not 40, which attention.kv_lora_rank 32 requires"),
        ("attention.value_length", 31, "attention.value_length is 31, not 32, which attention.kv_lora_rank 32 requires"),
        (
            "attention.key_length_mla",
            8,
            "is inconsistent: a head has keys of 8 features, of which 8 rotate, and values of 20",
        ),
        ("attention.value_length_mla", 0, "a head has keys of 20 features, of which 8 rotate, and values of 0"),
        ("expert_gating_func", 3, r"expert_gating_func is 3, not 1 \(softmax\) or 2 \(sigmoid\)"),
        ("attn_k_b", np.ones((4, 32), np.float32), "is inconsistent: .* do not fit each other"),
        ("attn_v_b", np.ones(32, np.float32), "is inconsistent: .* do not fit each other"),
        ("attn_k_b", None, "is inconsistent: it has blk.0.attn_v_b.weight without blk.0.attn_k_b.weight"),
    ],
)
def test_invalid_latent_attention_is_rejected(key, value, message, tmp_path):
    config = saved_as("deepseek_v3", tmp_path)
    metadata, tensors = metadata_of(config), tensors_of(tmp_path, config)
    if key in ("attn_k_b", "attn_v_b"):
        tensors |= {f"blk.0.{key}.weight": value}
        tensors = {name: values for name, values in tensors.items() if values is not None}
    else:
        metadata[f"deepseek2.{key}"] = value
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf(tmp_path / "x.gguf", "deepseek2", metadata, tensors))


@pytest.mark.parametrize("size", [16, 32])
def test_quantised_columns_stay_quantised_also_if_a_block_spans_heads(size, tmp_path):
    config = saved("qwen3_5_text", tmp_path, linear_num_value_heads=6, linear_value_head_dim=size)
    tensors, kind = tensors_of(tmp_path, config), gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.dequantize(gguf.quants.quantize(tensors["blk.0.ssm_out.weight"], kind), kind)
    tensors["blk.0.ssm_out.weight"] = tensors["blk.0.ssm_out.weight"], kind
    path = write_gguf(tmp_path / "x.gguf", "qwen35", metadata_of(config), tensors)
    checkpoint, name = open_checkpoint(path), "model.layers.0.linear_attn.out_proj.weight"
    found, order = checkpoint.tensors[name], checkpoint.column_orders.get(name)
    values = found.dequantise()
    assert (order is not None) == (size == 16)
    if order:
        values = values[:, np.argsort(checkpoint.tensors[order].dequantise())]
    # 6 heads of values, 3 of each of 2 heads of keys
    expected = stored.reshape(-1, 3, 2, size).swapaxes(1, 2).reshape(stored.shape)
    assert found.codec == "q8_0" and np.array_equal(values, expected)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    config = saved("qwen3_5_text", tmp_path)
    tensors, metadata = tensors_of(tmp_path, config), metadata_of(config)
    metadata |= {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    tensors["blk.3.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "qwen35", metadata, tensors))
    assert checkpoint.config["num_hidden_layers"] == 3
    assert checkpoint.tensors.keys() == open_checkpoint(tmp_path).tensors.keys()


def gemma4_file(path, metadata: dict, tensors: dict):
    """Write a GGUF file of Gemma 4 with other or more metadata and tensors."""
    config = saved("gemma4_text", path)
    stated = {f"gemma4.{key}": value for key, value in metadata.items()}
    complete = tensors_of(path, config) | rope_tensors(config) | tensors
    return write_gguf(path / "x.gguf", "gemma4", metadata_of(config) | stated, complete)


def test_shared_keys_and_values_are_left_out(tmp_path):
    """A checkpoint may have keys and values of layers that use those of other layers."""
    shapes = {"k_proj": (64, 64), "v_proj": (64, 64), "k_norm": (32,)}
    unused = {leaf: np.ones(shape, np.float32) for leaf, shape in shapes.items()}
    in_gguf = {f"blk.4.attn_{leaf.removesuffix('_proj')}.weight": values for leaf, values in unused.items()}
    path = gemma4_file(tmp_path, {}, in_gguf)
    expected = open_checkpoint(tmp_path).tensors.keys()
    assert open_checkpoint(path).tensors.keys() == expected
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {f"model.layers.4.self_attn.{leaf}.weight": values for leaf, values in unused.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(tmp_path).tensors.keys() == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", [True] * 5, "not a flag for each of 5 layers"),
        ("attention.sliding_window", 0, "attention.sliding_window is 0"),
        ("attention.shared_kv_layers", 5, "shared_kv_layers is 5, not less than 5"),
        ("attention.head_count_kv", [2, 2, 1, 2, 2], "not a divisor of 4 heads, equal in layers of one type"),
        (
            "attention.head_count_kv",
            [2, 1, 2, 1, 1],
            "layers have .1, 2. KV heads; with attn_v.weight .* supports only one number",
        ),
        ("attention.value_length", 20, "value_length is 20, not [0-9]+, as attention.key_length"),
        (
            "feed_forward_length",
            [96, 96, 192, 192, 192],
            "not the same in all layers, or twice as much in all that share",
        ),
        ("rope.dimension_count", 16, "rope.dimension_count is 16, not 24"),
        ("rope_freqs.weight", [1.0, 1e30] * 6, "rope_freqs.weight is not 1s and then 1e30s"),
    ],
)
def test_invalid_gemma4_metadata_is_rejected(key, value, message, tmp_path):
    of_tensor = key == "rope_freqs.weight"
    tensors, metadata = ({key: np.array(value, np.float32)}, {}) if of_tensor else ({}, {key: value})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(gemma4_file(tmp_path, metadata, tensors))


def test_invalid_heads_by_layer_are_rejected(tmp_path):
    config = saved("lfm2", tmp_path)
    for heads in ([0, 2], [0, 0, 0], [0, 1, 2], [0, 3, 0], 0):
        metadata = metadata_of(config) | {"lfm2.attention.head_count_kv": heads}
        path = write_gguf(tmp_path / "x.gguf", "lfm2", metadata, tensors_of(tmp_path, config))
        with pytest.raises(
            CheckpointError,
            match="attention.head_count_kv is .*, not (an integer of at least 0|a list with|the same divisor of [0-9]+)",
        ):
            open_checkpoint(path)


def test_rejects_factors_together_with_scaling_keys(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    factors = {"rope_freqs.weight": np.full(8, 2, np.float32)}
    with pytest.raises(CheckpointError, match="is inconsistent: it has both rope_freqs.weight and rope.scaling"):
        open_checkpoint(write_llama(tmp_path / "x.gguf", metadata, factors))
