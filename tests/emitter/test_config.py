"""Reading a config.json: strictly, in the words of old and new transformers alike, with HF's defaults and no others."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from castiron.emitter.models import FAMILIES, build, family, hf_keys, ignored_keys
from castiron.emitter.models.config import HARMLESS, ConfigReader
from castiron.emitter.models.hf_keys import DEFINED
from castiron.emitter.rotary import Rotary
from castiron.emitter.types import EmitError
from castiron.reference import config_keys
from castiron.reference.tiny import COMMON
from castiron.reference.tiny import FAMILIES as TINY

# As published before transformers 5, with the keys that those checkpoints carry besides.
_LISTED = {"short_factor": [1.0 + i / 48 for i in range(48)], "long_factor": [1.5 + i for i in range(48)]}
PUBLISHED: dict[str, dict] = {
    "Llama 2 7B": dict(
        model_type="llama", architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu",
        hidden_size=4096, initializer_range=0.02, intermediate_size=11008, max_position_embeddings=4096,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pretraining_tp=1, rms_norm_eps=1e-5,
        rope_scaling=None, tie_word_embeddings=False, torch_dtype="float16", transformers_version="4.31.0",
        use_cache=True, vocab_size=32000,
    ),
    "Llama 3.2 1B": dict(
        model_type="llama", attention_bias=False, head_dim=64, hidden_act="silu", hidden_size=2048,
        intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32,
        num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling={
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        tie_word_embeddings=True, torch_dtype="bfloat16", eos_token_id=[128001, 128008, 128009], vocab_size=128256,
    ),
    "SmolLM2": dict(
        model_type="llama", attention_bias=False, attention_dropout=0.0, hidden_act="silu", hidden_size=576,
        intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, mlp_bias=False,
        num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3, pad_token_id=2, pretraining_tp=1,
        rms_norm_eps=1e-5, rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}, vocab_size=49152,
    ),
    "Mistral 7B 0.1": dict(
        model_type="mistral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
        rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, vocab_size=32000,
    ),
    "Mistral 7B 0.3": dict(
        model_type="mistral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
        rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False, vocab_size=32768,
    ),
    "Qwen 2.5 0.5B": dict(
        model_type="qwen2", attention_dropout=0.0, hidden_act="silu", hidden_size=896, intermediate_size=4864,
        max_position_embeddings=32768, max_window_layers=21, num_attention_heads=14, num_hidden_layers=24,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768,
        tie_word_embeddings=True, use_mrope=False, use_sliding_window=False, vocab_size=151936,
    ),
    "Qwen 3 0.6B": dict(
        model_type="qwen3", attention_bias=False, attention_dropout=0.0, head_dim=128, hidden_act="silu",
        hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28,
        num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936,
    ),
    "Gemma 2 2B": dict(
        model_type="gemma2", attention_bias=False, attn_logit_softcapping=50.0, cache_implementation="hybrid",
        final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", hidden_size=2304, intermediate_size=9216,
        max_position_embeddings=8192, num_attention_heads=8, num_hidden_layers=26, num_key_value_heads=4,
        query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, vocab_size=256000,
    ),
    "Gemma 3 1B": dict(
        model_type="gemma3_text", attention_bias=False, attn_logit_softcapping=None, cache_implementation="hybrid",
        final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=1152,
        intermediate_size=6912, max_position_embeddings=32768, num_attention_heads=4, num_hidden_layers=26,
        num_key_value_heads=1, query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_local_base_freq=10000,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, vocab_size=262144,
    ),
    "Phi 3 mini 4k": dict(
        model_type="phi3", attention_bias=False, attention_dropout=0.0, auto_map={"AutoConfig": "x"}, embd_pdrop=0.0,
        hidden_act="silu", hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, original_max_position_embeddings=4096,
        resid_pdrop=0.0, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, sliding_window=2047,
        tie_word_embeddings=False, vocab_size=32064,
    ),
    "Phi 3.5 mini": dict(
        model_type="phi3", attention_bias=False, hidden_act="silu", hidden_size=3072, intermediate_size=8192,
        max_position_embeddings=131072, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
        original_max_position_embeddings=4096, rms_norm_eps=1e-5, rope_scaling={**_LISTED, "type": "longrope"},
        rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=False, vocab_size=32064,
    ),
    "Phi 4 mini": dict(
        model_type="phi3", attention_bias=False, full_attn_mod=1, hidden_act="silu", hidden_size=3072,
        intermediate_size=8192, interpolate_factor=1, lm_head_bias=False, max_position_embeddings=131072,
        mlp_bias=False, num_attention_heads=24, num_hidden_layers=32, num_key_value_heads=8,
        original_max_position_embeddings=4096, partial_rotary_factor=0.75, rms_norm_eps=1e-5,
        rope_scaling={**_LISTED, "type": "longrope"}, rope_theta=10000.0, sliding_window=262144,
        tie_word_embeddings=True, vocab_size=200064,
    ),
    "OLMo 2 1B": dict(
        model_type="olmo2", attention_bias=False, attention_dropout=0.0, hidden_act="silu", hidden_size=2048,
        intermediate_size=8192, max_position_embeddings=4096, num_attention_heads=16, num_hidden_layers=16,
        num_key_value_heads=16, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
        vocab_size=100352,
    ),
    "SmolLM3 3B": dict(
        model_type="smollm3", attention_bias=False, attention_dropout=0.0, hidden_act="silu", hidden_size=2048,
        intermediate_size=11008, layer_types=["full_attention"] * 36, max_position_embeddings=65536,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
        num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=1e-6,
        rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False, vocab_size=128256,
    ),
    "Granite 3.1 2B": dict(
        model_type="granite", attention_bias=False, attention_dropout=0.1, attention_multiplier=0.015625,
        embedding_multiplier=12.0, hidden_act="silu", hidden_size=2048, intermediate_size=8192, logits_scaling=8.0,
        max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=40,
        num_key_value_heads=8, residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=5000000.0,
        tie_word_embeddings=True, vocab_size=49155,
    ),
    "Falcon-H1 0.5B": dict(
        model_type="falcon_h1", attention_bias=False, attention_dropout=0.0, attention_in_multiplier=1.0,
        attention_out_multiplier=0.9375, attn_layer_indices=None, embedding_multiplier=5.656854249492381, head_dim=64,
        hidden_act="silu", hidden_size=1024, initializer_range=0.02, intermediate_size=2048, key_multiplier=0.390625,
        lm_head_multiplier=0.0390625, mamba_chunk_size=128, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64,
        mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=24,
        mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True,
        max_position_embeddings=16384, mlp_bias=False, mlp_expansion_factor=8,
        mlp_multipliers=[0.8838834764831844, 0.5859375], num_attention_heads=8, num_hidden_layers=36,
        num_key_value_heads=2, num_logits_to_keep=1, projectors_bias=False, rms_norm_eps=1e-5, rope_scaling=None,
        rope_theta=100000000000.0, ssm_in_multiplier=1.25,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        ssm_out_multiplier=0.23570226039551587, tie_word_embeddings=False, vocab_size=32784,
    ),
    "Granite 4.0 H Tiny": dict(
        model_type="granitemoehybrid", attention_bias=False, attention_dropout=0.0, attention_multiplier=0.0078125,
        embedding_multiplier=12, hidden_act="silu", hidden_size=1536, init_method="mup", initializer_range=0.1,
        intermediate_size=512, layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, logits_scaling=6,
        mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
        mamba_n_groups=1, mamba_n_heads=48, mamba_proj_bias=False, max_position_embeddings=131072,
        normalization_function="rmsnorm", num_attention_heads=12, num_experts_per_tok=6, num_hidden_layers=40,
        num_key_value_heads=4, num_local_experts=64, output_router_logits=False, position_embedding_type="nope",
        residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000, router_aux_loss_coef=0.0001,
        shared_intermediate_size=1024, tie_word_embeddings=True, vocab_size=100352,
    ),
    "LFM2 1.2B": dict(
        model_type="lfm2", block_auto_adjust_ff_dim=True, block_dim=2048, block_ff_dim=12288, block_ffn_dim_multiplier=1.0,
        block_mlp_init_scale=1.0, block_multiple_of=256, block_norm_eps=1e-5, block_out_init_scale=1.0, block_use_swiglu=True,
        block_use_xavier_init=True, conv_L_cache=3, conv_bias=False, conv_dim=2048, conv_dim_out=2048,
        conv_use_xavier_init=True, full_attn_idxs=[2, 5, 8, 10, 12, 14], hidden_size=2048, initializer_range=0.02,
        max_position_embeddings=128000, norm_eps=1e-5, num_attention_heads=32, num_heads=32, num_hidden_layers=16,
        num_key_value_heads=8, rope_theta=1000000.0, use_pos_enc=True, vocab_size=65536,
    ),
    "LFM2 8B A1B": dict(
        model_type="lfm2_moe", conv_L_cache=3, conv_bias=False, hidden_size=2048, initializer_range=0.02,
        intermediate_size=7168, layer_types=(["conv", "conv", "full_attention", "conv"] * 6), max_position_embeddings=128000,
        moe_intermediate_size=1792, norm_eps=1e-5, norm_topk_prob=True, num_attention_heads=32, num_dense_layers=2,
        num_experts=32, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8, rope_theta=1000000.0,
        routed_scaling_factor=1.0, use_expert_bias=True, vocab_size=65536,
    ),
    "LFM3 1.7B": dict(
        model_type="lfm3", conv_L_cache=7, conv_bias=False, head_dim=128, hidden_size=2048, intermediate_size=7680,
        layer_types=["conv", *["conv", "full_attention", "conv", "sliding_attention"] * 5, "conv", "full_attention", "conv"],
        max_position_embeddings=128000, norm_eps=1e-5, num_attention_heads=16, num_hidden_layers=24, num_key_value_heads=4,
        rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        sliding_window=256, tie_word_embeddings=True, use_attention_gate=True, use_sandwich_norm=True, vocab_size=128000,
    ),
    "Nemotron 3 Nano 30B A3B": dict(
        model_type="nemotron_h", attention_bias=False, attention_dropout=0.0, chunk_size=128, conv_kernel=4, expand=2,
        head_dim=128, hidden_dropout=0.0, hidden_size=2688,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", initializer_range=0.02,
        intermediate_size=1856, layer_norm_epsilon=1e-5, mamba_head_dim=64, mamba_hidden_act="silu", mamba_num_heads=64,
        mamba_proj_bias=False, mamba_ssm_cache_dtype="float32", max_position_embeddings=262144, mlp_bias=False,
        mlp_hidden_act="relu2", moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, n_groups=8,
        n_routed_experts=128, n_shared_experts=1, norm_eps=1e-5, norm_topk_prob=True, num_attention_heads=32,
        num_experts_per_tok=6, num_hidden_layers=52, num_key_value_heads=2, num_logits_to_keep=1,
        partial_rotary_factor=1.0, rescale_prenorm_residual=True, residual_in_fp32=False, rope_theta=10000,
        routed_scaling_factor=2.5, sliding_window=None, ssm_state_size=128, tie_word_embeddings=False, time_step_floor=1e-4,
        time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001, topk_group=1, use_bias=False,
        use_conv_bias=True, use_mamba_kernels=True, vocab_size=131072,
    ),
    "Qwen 3.5 4B, its text": dict(
        model_type="qwen3_5_text", attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16",
        full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=2560, initializer_range=0.02,
        intermediate_size=9216, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
        max_position_embeddings=262144, mlp_only_layers=[], mtp_num_hidden_layers=1, num_attention_heads=16,
        num_hidden_layers=32, num_key_value_heads=4, rms_norm_eps=1e-6,
        rope_parameters={
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        tie_word_embeddings=True, mamba_ssm_dtype="float32", vocab_size=248320,
    ),
    "Qwen 3.5 35B A3B, its text": dict(
        model_type="qwen3_5_moe_text", attention_bias=False, attention_dropout=0.0, attn_output_gate=True,
        full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, mamba_ssm_dtype="float32",
        max_position_embeddings=262144, mlp_only_layers=[], moe_intermediate_size=512, mtp_num_hidden_layers=1,
        num_attention_heads=16, num_experts=256, num_experts_per_tok=8, num_hidden_layers=40, num_key_value_heads=2,
        rms_norm_eps=1e-6, router_aux_loss_coef=0.001, shared_expert_intermediate_size=512, vocab_size=248320,
        rope_parameters={
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
    ),
    "Qwen3-Next 80B A3B": dict(
        model_type="qwen3_next", attention_dropout=0.0, decoder_sparse_step=1, full_attention_interval=4, head_dim=256,
        hidden_act="silu", hidden_size=2048, initializer_range=0.02, intermediate_size=5120, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
        max_position_embeddings=262144, mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True,
        num_attention_heads=16, num_experts=512, num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=2,
        output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000000,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=512, tie_word_embeddings=False,
        use_sliding_window=False, vocab_size=151936,
    ),
    "StableLM 2 1.6B": dict(
        model_type="stablelm", hidden_act="silu", hidden_size=2048, intermediate_size=5632, layer_norm_eps=1e-5,
        max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=24, num_key_value_heads=32,
        partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False, use_qkv_bias=True, vocab_size=100352,
    ),
    "StarCoder2 3B": dict(
        model_type="starcoder2", activation_function="gelu", attention_dropout=0.1, attention_softmax_in_fp32=True,
        embedding_dropout=0.1, hidden_act="gelu_pytorch_tanh", hidden_size=3072, intermediate_size=12288,
        layer_norm_epsilon=1e-5, max_position_embeddings=16384, mlp_type="default", norm_epsilon=1e-5,
        norm_type="layer_norm", num_attention_heads=24, num_hidden_layers=30, num_key_value_heads=2,
        residual_dropout=0.1, rope_theta=999999.4420358813, scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True, sliding_window=4096, use_bias=True, vocab_size=49152,
    ),
    "Mixtral 8x7B": dict(
        model_type="mixtral", attention_dropout=0.0, hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
        num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5,
        rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
        vocab_size=32000,
    ),
    "Qwen 3 30B A3B": dict(
        model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=128, hidden_act="silu",
        hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48,
        mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
        num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False,
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    ),
    "Gemma 2B": dict(
        model_type="gemma", attention_bias=False, attention_dropout=0.0, bos_token_id=2, eos_token_id=1, head_dim=256,
        hidden_act="gelu", hidden_size=2048, intermediate_size=16384, max_position_embeddings=8192,
        num_attention_heads=8, num_hidden_layers=18, num_key_value_heads=1, pad_token_id=0, rms_norm_eps=1e-6,
        rope_scaling=None, rope_theta=10000.0, vocab_size=256000,
    ),
    "OLMo 3 7B": dict(
        model_type="olmo3", attention_bias=False, attention_dropout=0.0, hidden_act="silu", hidden_size=4096,
        intermediate_size=11008, layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
        max_position_embeddings=65536, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
        rms_norm_eps=1e-6, rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, vocab_size=100278,
        rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    ),
    "EXAONE 4.0 1.2B": dict(
        model_type="exaone4", attention_dropout=0.0, head_dim=64, hidden_act="silu", hidden_size=2048,
        intermediate_size=4096, layer_types=["full_attention"] * 30, max_position_embeddings=65536,
        num_attention_heads=32, num_hidden_layers=30, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000,
        rope_scaling={
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True, vocab_size=102400,
    ),
    "EXAONE 4.0 32B": dict(
        model_type="exaone4", attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=5120,
        intermediate_size=27392, max_position_embeddings=131072, num_attention_heads=40, num_hidden_layers=64,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000, sliding_window=4096, sliding_window_pattern="LLLG",
        rope_scaling={
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False, vocab_size=102400,
    ),
    "AFM 4.5B": dict(
        model_type="arcee", attention_bias=False, attention_dropout=0.0, head_dim=128, hidden_act="relu2",
        hidden_size=2560, intermediate_size=18432, max_position_embeddings=65536, mlp_bias=False,
        num_attention_heads=20, num_hidden_layers=36, num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=10000.0,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        tie_word_embeddings=False, vocab_size=128004,
    ),
    "Ministral 3 3B": dict(
        model_type="ministral3", attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=3072,
        intermediate_size=9216, max_position_embeddings=262144, num_attention_heads=32, num_hidden_layers=26,
        num_key_value_heads=8, rms_norm_eps=1e-5, sliding_window=None, tie_word_embeddings=True, vocab_size=131072,
        rope_parameters={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
    ),
    "Command R7B": dict(
        model_type="cohere2", attention_bias=False, attention_dropout=0.0, cache_implementation="hybrid", head_dim=128,
        hidden_act="silu", hidden_size=4096, intermediate_size=14336, layer_norm_eps=1e-5, layer_switch=4,
        logit_scale=0.25, max_position_embeddings=132096, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=8, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
        rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True,
        vocab_size=256000,
    ),
    "ERNIE 4.5 0.3B": dict(
        model_type="ernie4_5", head_dim=128, hidden_act="silu", hidden_size=1024, intermediate_size=3072,
        max_position_embeddings=131072, num_attention_heads=16, num_hidden_layers=18, num_key_value_heads=2,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=500000.0, tie_word_embeddings=True, use_bias=False,
        vocab_size=103424,
    ),
    "Hunyuan 1.8B": dict(
        model_type="hunyuan_v1_dense", attention_bias=False, attention_dropout=0.0, attention_head_dim=128,
        cla_share_factor=2, eod_token_id=120020, head_dim=128, hidden_act="silu", hidden_size=2048,
        intermediate_size=6144, max_position_embeddings=262144, mlp_bias=False, norm_type="rms",
        num_attention_heads=16, num_hidden_layers=32, num_key_value_heads=4, rms_norm_eps=1e-5,
        rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        rope_theta=10000.0, tie_word_embeddings=True, use_cla=False, use_qk_norm=True, use_rotary_pos_emb=True,
        vocab_size=120818,
    ),
    "Granite 3.1 1B A400M": dict(
        model_type="granitemoe", attention_bias=False, attention_dropout=0.1, attention_multiplier=0.015625,
        embedding_multiplier=12.0, hidden_act="silu", hidden_size=1024, intermediate_size=512, logits_scaling=6.0,
        max_position_embeddings=131072, num_attention_heads=16, num_experts_per_tok=8, num_hidden_layers=24,
        num_key_value_heads=8, num_local_experts=32, output_router_logits=False, residual_multiplier=0.22,
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1500000, router_aux_loss_coef=0.0, tie_word_embeddings=True,
        vocab_size=49155,
    ),
    "Gemma 4 E2B": dict(
        model_type="gemma4_text", attention_bias=False, attention_dropout=0.0, attention_k_eq_v=False,
        enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", hidden_size=1536, hidden_size_per_layer_input=256,
        intermediate_size=6144, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        max_position_embeddings=131072, num_attention_heads=8, num_experts=None, num_global_key_value_heads=None,
        num_hidden_layers=35, num_key_value_heads=1, num_kv_shared_layers=20, rms_norm_eps=1e-6,
        rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        sliding_window=512, tie_word_embeddings=True, top_k_experts=None, use_bidirectional_attention=None,
        use_double_wide_mlp=True, vocab_size=262144, vocab_size_per_layer_input=262144,
    ),
    "GLM 4.7 Flash": dict(
        model_type="glm4_moe_lite", attention_bias=False, attention_dropout=0.0, first_k_dense_replace=1,
        hidden_act="silu", hidden_size=2048, intermediate_size=10240, kv_lora_rank=512, max_position_embeddings=202752,
        moe_intermediate_size=1536, n_group=1, n_routed_experts=64, n_shared_experts=1, norm_topk_prob=True,
        num_attention_heads=20, num_experts_per_tok=4, num_hidden_layers=47, num_key_value_heads=20,
        num_nextn_predict_layers=1, partial_rotary_factor=1.0, q_lora_rank=768, qk_nope_head_dim=192,
        qk_rope_head_dim=64, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8,
        tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=256, vocab_size=154880,
    ),
    "GPT-2": dict(
        model_type="gpt2", activation_function="gelu_new", attn_pdrop=0.1, bos_token_id=50256, embd_pdrop=0.1,
        eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-5, n_ctx=1024, n_embd=768, n_head=12,
        n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
        summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257,
    ),
    "gpt-oss 20B": dict(
        model_type="gpt_oss", attention_bias=True, attention_dropout=0.0, experts_per_token=4, head_dim=64,
        hidden_act="silu", hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8,
        num_local_experts=32, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=150000,
        quantization_config={"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, vocab_size=201088,
    ),
}  # fmt: skip


def read(config: dict) -> dict:
    """What a family reads out of a config, in a form that compares."""
    c = family(config).Config.read(config)
    return {field.name: _comparable(getattr(c, field.name)) for field in fields(c)}


def _comparable(value):
    if isinstance(value, Rotary):
        return value.inv_freq.tolist(), value.positions, value.attention_factor
    return value


def as_saved_by_transformers(config: dict) -> dict:
    """The config as transformers 5 understands it and writes it again."""
    return AutoConfig.for_model(**config).to_dict()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_reads_as_transformers_understands_it(name):
    assert read(PUBLISHED[name]) == read(as_saved_by_transformers(PUBLISHED[name]))


def test_every_family_has_a_published_config():
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
_GEMMA = {"hidden_activation": "gelu", "tie_word_embeddings": False}
UNLIKE = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA,
    "qwen2": _WINDOWED,
    "qwen3": _WINDOWED,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 24, "mlp_only_layers": [1], "norm_topk_prob": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 24},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "phi3": {"sliding_window": 24},
    "nemotron_h": {"tie_word_embeddings": False},
}


def unlike_the_defaults(model_type: str) -> dict:
    """A config whose values are not HF's defaults, as transformers 5 writes it."""
    unlike = {"tie_word_embeddings": True, **UNLIKE.get(model_type, {})}
    config = {"hidden_act": "gelu", **COMMON, **TINY[model_type], **unlike}
    if "hidden_activation" in config:
        del config["hidden_act"]
    return as_saved_by_transformers({"model_type": model_type, **config})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_is_absent_has_the_default_of_transformers(model_type):
    """Or it is asked for: never another default."""
    whole = unlike_the_defaults(model_type)
    read(whole)
    asked_for = []
    for key in whole:
        partial = {k: v for k, v in whole.items() if k != key}
        try:
            expected = as_saved_by_transformers(partial) if key != "model_type" else None
        except Exception:  # whatever transformers raises where it has no default either
            expected = None
        try:
            ours = read(partial)
        except EmitError:
            asked_for.append(key)
            continue
        assert expected is not None and ours == read(expected), f"without {key}"
    # Nemotron-H's layers say how many they are.
    sizes = {"model_type", "hidden_size", "vocab_size", "num_hidden_layers"} & {
        *whole,
        *CONFIG_MAPPING[model_type].attribute_map,
    }
    assert {CONFIG_MAPPING[model_type].attribute_map.get(size, size) for size in sizes} <= set(asked_for)
    # What a family asks for is what no checkpoint leaves out: sizes, not flags.
    assert len(asked_for) <= 9, asked_for


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_hf_reads_and_nobody_understands_is_refused(model_type, monkeypatch):
    config = {**unlike_the_defaults(model_type), "sink_multiplier": 2.0}
    monkeypatch.setitem(DEFINED, model_type, DEFINED[model_type] | {"sink_multiplier"})
    with pytest.raises(EmitError, match=f"the {model_type} config has 'sink_multiplier', which castiron does not") as error:
        read(config)
    assert "--ignore-key" in str(error.value) and len(str(error.value)) < 300


# As trainers and older transformers leave them.
LEFTOVERS = {
    "unsloth_version": "2025.1.8", "unsloth_fixed": True, "max_length": 8192, "_flash_attn_2_enabled": True,
    "neftune_noise_alpha": 5, "temperature": 0.7, "do_sample": True, "quantization": "none", "use_flash_attn": True,
    "attention_chunk_size": None, "quantization_config": None,
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_hf_never_reads_changes_nothing_and_is_named(model_type):
    config = unlike_the_defaults(model_type)
    assert read({**config, **LEFTOVERS}) == read(config)
    assert set(ignored_keys({**config, **LEFTOVERS})) - set(ignored_keys(config)) == set(LEFTOVERS)


@pytest.mark.parametrize("key", ["attention_chunk_size", "quantization_config", "is_causal"])
def test_what_hf_looks_for_in_every_config_is_refused(key):
    with pytest.raises(EmitError, match=f"the llama config has '{key}'"):
        read({**PUBLISHED["SmolLM2"], key: {"bits": 4} if key.endswith("config") else 8})


def test_many_keys_that_are_not_understood_make_one_short_sentence(monkeypatch):
    keys = {f"sink_multiplier_{n}": n for n in range(40)}
    monkeypatch.setitem(DEFINED, "llama", DEFINED["llama"] | set(keys))
    with pytest.raises(EmitError, match="'sink_multiplier_0', .* and 37 more, which") as error:
        read({**PUBLISHED["SmolLM2"], **keys})
    assert len(str(error.value)) < 300


def test_of_a_family_that_hf_does_not_know_trainers_keys_alone_are_passed_over():
    for key, refused in (("unsloth_version", False), ("neftune_noise_alpha", False), ("use_flash_attn", True)):
        reader = ConfigReader({"model_type": "decaying_sum", key: 1})
        if refused:
            with pytest.raises(EmitError, match=key):
                reader.finish()
        else:
            reader.finish()


def test_the_keys_that_hf_reads_are_those_of_the_installed_transformers():
    """`python -m castiron.reference.config_keys` makes it so again."""
    assert Path(hf_keys.__file__).read_text() == config_keys.source()


def test_what_every_config_class_of_hf_has_is_bookkeeping():
    assert {field.name for field in fields(PreTrainedConfig)} <= HARMLESS


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("llama", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("llama", {"hidden_size": "64"}, "'hidden_size' in the llama config is '64', not int"),
        ("llama", {"num_hidden_layers": 0}, "'num_hidden_layers' in the llama config is 0, which is less than 1"),
        ("llama", {"num_key_value_heads": True}, "is True, not int"),
        ("llama", {"hidden_act": "mish"}, "'hidden_act' in the llama config is 'mish'; supported are silu"),
        ("llama", {"partial_rotary_factor": 0.5}, "this family rotates whole heads"),
        ("llama", {"rope_scaling": {"type": "ntk"}}, "rope scaling 'ntk' is not supported"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "for each of its 3 layers"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "must say 'full_attention' or 'sliding_attention'"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "but no 'sliding_window'"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "'no_rope_layers' in the smollm3 config must hold 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "for each of its 3 layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "only False is supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "config is 50.0; only null is supported"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "'full_attention' and 'sliding_attention' alone"),
        ("phi3", {"lm_head_bias": True}, "'lm_head_bias' in the phi3 config is True; only False"),
        ("stablelm", {"head_dim": 20}, "the stablelm config has 'head_dim', which castiron does not understand"),
        ("starcoder2", {"norm_type": "rms_norm"}, "only 'layer_norm' is supported"),
        ("gemma", {"hidden_act": "silu"}, "only 'gelu' or 'gelu_pytorch_tanh' is supported"),
        ("olmo3", {"rope_parameters": YARN}, "must hold 'full_attention' and 'sliding_attention' alone"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "the exaone4 config lacks 'layer_types'"),
        ("ministral3", {"rope_parameters": YARN}, "lacks 'llama_4_scaling_beta' in its 'rope_parameters'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "names 'fp8'; only 'mxfp4' is supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "only 'vision' is supported"),
        ("gemma4_text", {"num_kv_shared_layers": 4}, "leaves a kind of layer without keys and values"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 24}}}, "must give every full layer, and none else, the same"),
        ("gemma4_text", {"rope_parameters": {"full_attention": {}}}, "must hold 'full_attention' and 'sliding_attention'"),
        (
            "gemma4_text",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "beta_fast": 1}, "sliding_attention": {}}},
            "'proportional' has the unknown key beta_fast",
        ),
        ("glm4_moe_lite", {"n_group": 4}, "cannot choose 2 of 6 experts from 1 of 4 groups"),
        (
            "falcon_h1",
            {"time_step_limit": [2.0, 1.0]},
            "'time_step_limit' in the falcon_h1 config is .2.0, 1.0., not the least",
        ),
        ("lfm3", {"sliding_window": None}, "has layers with a sliding window, but no 'sliding_window'"),
        ("nemotron_h", {"tie_word_embeddings": True}, "config is True; only False is supported"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "'hybrid_override_pattern' in the nemotron_h config has X, not M"),
        ("glm4_moe_lite", {"num_key_value_heads": 2}, "must be its 'num_attention_heads'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "must say 'dense' or 'sparse' for each of 3 layers"),
    ],
)
def test_a_value_that_is_not_understood_is_refused(model_type, change, words):
    with pytest.raises(EmitError, match=words):
        read({**unlike_the_defaults(model_type), **change})


def test_a_null_of_a_key_that_may_be_null_is_no_default():
    reader = ConfigReader({"model_type": "mistral", "sliding_window": None})
    assert reader.nullable("sliding_window", 4096) is None
    assert ConfigReader({"model_type": "mistral"}).nullable("sliding_window", 4096) == 4096


def test_longrope_holds_for_the_original_length_and_says_so():
    config = PUBLISHED["Phi 3.5 mini"]
    assert family(config).Config.read(config).max_positions == 4096
    with pytest.raises(EmitError, match="1 to 4096 positions, past which its rotary scaling would change"):
        build(config, lambda name: "f32", 8192, ())


def test_a_context_past_the_models_is_refused():
    with pytest.raises(EmitError, match="a context of 257 is outside what the model allows .1 to 256 positions.$"):
        build(unlike_the_defaults("llama"), lambda name: "f32", 257, ())
