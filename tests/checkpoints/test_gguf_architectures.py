"""Every row of the table of architectures: a random transformers model is written as llama.cpp
writes it, and read back.

The tensors must be those that `save_pretrained` writes, bit for bit, and the config one from which
transformers builds a model with the same logits.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from castiron.pipelines.checkpoints.checkpoint import CheckpointError, missing_and_left_over
from castiron.pipelines.checkpoints.gguf_architectures import ARCHITECTURES, architecture_names
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from tests.support.hf_to_gguf import GGUF_NAMES, NORMS_PLUS_ONE, convert, metadata_of, rope_tensors, tensors_of
from tests.support.tiny_gguf import write_gguf, write_llama

SIZES = dict(
    vocab_size=80, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
DEFAULT_ROPE = dict(rope_type="default", rope_theta=5000.0)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
ODD_LLAMA3 = LLAMA3 | dict(factor=4.0, low_freq_factor=2.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
ALPHA = dict(rope_type="dynamic", rope_theta=10000.0, alpha=9.0, factor=1.0)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, original_max_position_embeddings=128,
    long_factor=[1.5, 2.0, 3.0, 4.0], short_factor=[1.0, 1.1, 1.2, 1.3],
)  # fmt: skip
GEMMA3_ROPES = dict(
    full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
)
GEMMA4 = dict(
    head_dim=24, global_head_dim=32, sliding_window=8, rms_norm_eps=3e-5,
    layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=50000.0, partial_rotary_factor=0.25),
        sliding_attention=dict(rope_type="default", rope_theta=5000.0),
    ),
)  # fmt: skip
EVERY_OTHER = ["sliding_attention", "full_attention"] * 2
PATTERN = ["sliding_attention"] * 5 + ["full_attention"] * 1

MAMBA = dict(mamba_n_heads=6, mamba_d_state=12)
GRANITE4 = dict(
    attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, mamba_n_heads=8,
    mamba_d_state=12, mamba_d_head=16, shared_intermediate_size=40, position_embedding_type="nope",
)  # fmt: skip
DELTA = dict(
    head_dim=24, layer_types=["linear_attention", "full_attention"], full_attention_interval=2, linear_num_key_heads=2,
    linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=12, rms_norm_eps=3e-5,
    rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5),
)  # fmt: skip

MODELS = {
    "llama": transformers.LlamaConfig(**SIZES, rms_norm_eps=3e-5, rope_parameters=DEFAULT_ROPE),
    "llama, tied, biased": transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama, odd head_dim, one kv head": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=24),
    "llama 3": transformers.LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3),
    "llama 3, other numbers": transformers.LlamaConfig(**SIZES, head_dim=32, rope_parameters=ODD_LLAMA3),
    "llama, yarn": transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama, linear": transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=24),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=24, query_pre_attn_scalar=24, sliding_window=8),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6}, head_dim=24, query_pre_attn_scalar=24, sliding_window=8,
        rope_parameters=GEMMA3_ROPES, layer_types=PATTERN,
    ),
    "gemma4": transformers.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 5}, **GEMMA4, num_kv_shared_layers=2, hidden_size_per_layer_input=20,
        vocab_size_per_layer_input=96, use_double_wide_mlp=True, final_logit_softcapping=7.0,
    ),
    "gemma4, experts": transformers.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 5}, **GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True,
        num_global_key_value_heads=1, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=40,
    ),
    "phi3": transformers.Phi3Config(**SIZES, sliding_window=8),
    "phi3, partial rotary": transformers.Phi3Config(
        **SIZES, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    ),
    "phi3, longrope": transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=128, rope_parameters=LONGROPE, tie_word_embeddings=True
    ),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "smollm3": transformers.SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=True),
    "granite": transformers.GraniteConfig(
        **SIZES, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0
    ),
    "stablelm": transformers.StableLmConfig(**SIZES, use_qkv_bias=True, layer_norm_eps=3e-5),
    "stablelm, parallel": transformers.StableLmConfig(**SIZES, use_parallel_residual=True, qk_layernorm=True),
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=24, rope_parameters=DEFAULT_ROPE | {"rope_theta": 10000.0}),
    "arcee": transformers.ArceeConfig(**SIZES, mlp_bias=True, rope_parameters=YARN),
    "exaone4, hybrid": transformers.Exaone4Config(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=8, rope_parameters=ODD_LLAMA3, layer_types=EVERY_OTHER,
    ),
    "exaone4": transformers.Exaone4Config(
        **SIZES, sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=DEFAULT_ROPE, rms_norm_eps=3e-5,
    ),
    "cohere2": transformers.Cohere2Config(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=8, logit_scale=0.5, rope_parameters=DEFAULT_ROPE,
        layer_norm_eps=3e-5,
    ),
    "ernie4_5": transformers.Ernie4_5Config(**SIZES, head_dim=24, tie_word_embeddings=False),
    "hunyuan": transformers.HunYuanDenseV1Config(**SIZES, head_dim=24, attention_bias=True, rope_parameters=ALPHA),
    "granitemoe": transformers.GraniteMoeConfig(
        **SIZES, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0,
        num_local_experts=4,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES, head_dim=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        rope_parameters=YARN | {"truncate": False},
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=80, n_positions=256, n_embd=64, n_layer=2, n_head=4, n_inner=96, bos_token_id=None, eos_token_id=None,
        layer_norm_epsilon=3e-5,
    ),
    "lfm2": transformers.Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"], conv_L_cache=4, norm_eps=3e-5, block_auto_adjust_ff_dim=False
    ),
    "lfm2_moe": transformers.Lfm2MoeConfig(
        **SIZES, layer_types=["conv", "full_attention"], conv_L_cache=4, norm_eps=3e-5, num_dense_layers=1, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "ministral3": transformers.Ministral3Config(
        **SIZES, head_dim=24, sliding_window=None,
        rope_parameters=YARN | dict(llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=1.0),
    ),
    "olmo3": transformers.Olmo3Config(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=8, layer_types=EVERY_OTHER,
        rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT_ROPE | {"rope_theta": 10000.0}),
    ),
    "falcon_h1": transformers.FalconH1Config(
        **SIZES, **MAMBA, mamba_d_ssm=48, mamba_norm_before_gate=False, mamba_rms_norm=True, rope_parameters=DEFAULT_ROPE,
        mamba_d_head=8,
    ),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **SIZES, **GRANITE4, layer_types=["linear_attention", "full_attention"], num_local_experts=4, num_experts_per_tok=2,
    ),
    "granitemoehybrid, dense": transformers.GraniteMoeHybridConfig(
        **SIZES, **GRANITE4, layer_types=["full_attention", "linear_attention"], num_local_experts=0,
    ),
    "nemotron_h": transformers.NemotronHConfig(
        **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"}, head_dim=24, mamba_num_heads=6,
        mamba_head_dim=8, n_groups=2, ssm_state_size=12, n_routed_experts=4, moe_intermediate_size=32, moe_latent_size=32,
        moe_shared_expert_intermediate_size=40, routed_scaling_factor=2.5, n_group=2, layer_norm_epsilon=3e-5,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
    ),
    "qwen3_5": transformers.Qwen3_5TextConfig(**SIZES, **DELTA),
    "qwen3_5, as many heads": transformers.Qwen3_5TextConfig(**SIZES, **DELTA | dict(linear_num_key_heads=6)),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"}, **DELTA, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=40,
    ),
    "starcoder2": transformers.Starcoder2Config(
        **SIZES, tie_word_embeddings=True, sliding_window=None, norm_epsilon=3e-5,
        rope_parameters=DEFAULT_ROPE,
    ),
}  # fmt: skip


def test_every_architecture_is_tested():
    """test_encoders.py tests gemma-embedding; nemotron_h is nemotron_h_moe under another name."""
    others = {"gemma-embedding", "nemotron_h"}
    assert {GGUF_NAMES[config.model_type] for config in MODELS.values()} | others == set(architecture_names())
    assert {config.model_type for config in MODELS.values()} == {row.model_type for row in ARCHITECTURES.values()}


def saved(name: str, path) -> transformers.PretrainedConfig:
    """Save the model `name` of MODELS to the directory `path`; return its config."""
    model = AutoModelForCausalLM.from_config(MODELS[name])
    model.save_pretrained(path)
    return model.config


@pytest.fixture(params=MODELS, scope="module")
def converted(request, tmp_path_factory):
    """A model, its saved directory as a checkpoint, and its GGUF file as a checkpoint."""
    tmp_path = tmp_path_factory.mktemp("converted")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param]).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too must differ from their defaults
            parameter.uniform_(-0.2, 0.2)
    model.save_pretrained(tmp_path / "hf")
    path = convert(tmp_path / "hf", model.config, tmp_path / "model.gguf")
    return model, open_checkpoint(tmp_path / "hf"), open_checkpoint(path)


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
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 200), generator=torch.Generator().manual_seed(1))
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
        if key in _NOT_COMPARED or (key == "head_dim" and value is None):
            continue
        if isinstance(value, float):
            assert ours[key] == pytest.approx(value, rel=1e-6), key
        else:
            assert ours[key] == value, key


@pytest.mark.parametrize(("size", "codec"), [(16, "f32"), (32, "q8_0")])
def test_columns_become_f32_if_a_block_spans_heads(size, codec, tmp_path):
    model = AutoModelForCausalLM.from_config(transformers.Qwen3_5TextConfig(**SIZES, **DELTA | {"linear_value_head_dim": size}))
    model.save_pretrained(tmp_path)
    tensors, kind = tensors_of(tmp_path, model.config), gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.dequantize(gguf.quants.quantize(tensors["blk.0.ssm_out.weight"], kind), kind)
    tensors["blk.0.ssm_out.weight"] = tensors["blk.0.ssm_out.weight"], kind
    path = write_gguf(tmp_path / "x.gguf", "qwen35", metadata_of(model.config), tensors)
    found = open_checkpoint(path).tensors["model.layers.0.linear_attn.out_proj.weight"]
    # 6 heads of values, 3 of each of 2 heads of keys
    expected = stored.reshape(-1, 3, 2, size).swapaxes(1, 2).reshape(stored.shape)
    assert found.codec == codec and np.array_equal(found.dequantise(), expected)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    config = saved("qwen3_5", tmp_path)
    tensors, metadata = tensors_of(tmp_path, config), metadata_of(config)
    metadata |= {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    tensors["blk.2.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", "qwen35", metadata, tensors))
    assert checkpoint.config["num_hidden_layers"] == 2
    assert checkpoint.tensors.keys() == open_checkpoint(tmp_path).tensors.keys()


def gemma4_file(path, metadata: dict, tensors: dict):
    """Write a GGUF file of `MODELS["gemma4"]` with other or more metadata and tensors."""
    config = saved("gemma4", path)
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
        ("attention.sliding_window", 0, "attention.sliding_window is missing or 0"),
        ("attention.shared_kv_layers", 5, "shared_kv_layers is 5, not less than 5"),
        ("attention.head_count_kv", [2, 2, 1, 2, 2], "heads, one for each type of layer"),
        ("attention.head_count_kv", [2, 1, 2, 1, 1], "full-attention layers with value projections"),
        ("attention.value_length", 24, "value_length is 24, not [0-9]+, as attention.key_length"),
        ("feed_forward_length", [96, 96, 192, 192, 192], "not one number, or twice it in layers that share"),
        ("rope.dimension_count", 16, "rope.dimension_count is 16, not 32"),
        ("rope_freqs.weight", [1.0, 1e30] * 8, "rope_freqs.weight is missing or has invalid factors"),
    ],
)
def test_invalid_gemma4_metadata_is_rejected(key, value, message, tmp_path):
    of_tensor = key == "rope_freqs.weight"
    tensors, metadata = ({key: np.array(value, np.float32)}, {}) if of_tensor else ({}, {key: value})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(gemma4_file(tmp_path, metadata, tensors))


def test_invalid_heads_by_layer_are_rejected(tmp_path):
    config = saved("lfm2", tmp_path)
    for heads in ([0, 2, 2], [0, 0], [1, 2], [0, 3], 0):
        metadata = metadata_of(config) | {"lfm2.attention.head_count_kv": heads}
        path = write_gguf(tmp_path / "x.gguf", "lfm2", metadata, tensors_of(tmp_path, config))
        with pytest.raises(CheckpointError, match="attention.head_count_kv is .*, not a (number|divisor of [0-9]+ heads)"):
            open_checkpoint(path)


def test_rejects_factors_together_with_scaling_keys(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    factors = {"rope_freqs.weight": np.full(8, 2, np.float32)}
    with pytest.raises(CheckpointError, match="only one of them can apply"):
        open_checkpoint(write_llama(tmp_path / "x.gguf", metadata, factors))
