"""The table of GGUF architectures, for reading and writing GGUF files.

Sources: llama.cpp's convert_hf_to_gguf.py for metadata keys and rearranged tensors,
gguf.tensor_mapping for GGUF's names, llama.cpp's src/models for constants, HF's config classes for
HF's names. To add an architecture, add a row. If a row is not enough, add a function to gguf_rules.
"""

from dataclasses import replace

from castiron.pipelines.checkpoints import gguf_metadata as names
from castiron.pipelines.checkpoints.gguf_deepseek2 import V2, V3
from castiron.pipelines.checkpoints.gguf_metadata import Architecture, experts, mamba, mamba_vectors

# Keys of rows for files that need another row than their architecture's: "llama" files with experts
# are Mixtral models, "olmo2" files with a sliding window OLMo 3 models. "deepseek2" files whose
# experts are chosen by a softmax are DeepSeek V2 models, the others DeepSeek V3 or GLM-4.7-Flash.
MIXTRAL, OLMO3, DEEPSEEK2 = "llama with experts", "olmo2 with a window", "deepseek2 with softmax"

_LLAMA = Architecture(
    "llama",
    flags=names.LLAMA_FLAGS,
    permuted=names.LLAMA_PERMUTED,
    rules=("llama_head_dim", "full_rotary", "rope_scaling", "rope_factors"),
)
_GEMMA2 = Architecture(
    "gemma2",
    tensors=names.GEMMA_TENSORS,
    ints={**names.SIZES_AND_HEAD, **names.WINDOW},
    floats={**names.RMS, "attn_logit_softcapping": "attn_logit_softcapping", **names.FINAL_CAP},
    constants=names.GEMMA2,
    norms_plus_one=True,
    rules=("full_rotary", "gemma_scale", "layer_types"),
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    floats={**names.RMS, "rope.freq_base_swa": "rope_local_base_freq", **names.FINAL_CAP},
    constants=names.GEMMA3,
    rules=("full_rotary", "gemma_scale", "layer_types", "rope_scaling"),
)
_GRANITE = Architecture(
    "granite", ints=names.SIZES, floats=names.GRANITE_FLOATS, flags=names.LLAMA_FLAGS, permuted=names.LLAMA_PERMUTED
)
_OLMO2 = Architecture(
    "olmo2",
    tensors={**names.ATTENTION, **names.MLP, **names.POST_NORMS, **names.QK_NORMS},
    ints=names.SIZES,
    constants={**names.SILU, "attention_bias": False},
)
_QWEN3 = Architecture(
    "qwen3",
    constants={**names.SILU, **names.NO_WINDOW},
    flags=names.ATTENTION_BIAS,
)
_LFM2 = Architecture(
    "lfm2",
    tensors={
        **names.ATTENTION, "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
        "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
    },
    # The number of key-value heads is 0 in convolution layers, so a rule reads it by layer.
    ints={**names.SIZES_BY_LAYER, "shortconv.l_cache": "conv_L_cache"},
    floats={**names.ROPE, "attention.layer_norm_rms_epsilon": "norm_eps"},
    constants={"conv_bias": False, "block_auto_adjust_ff_dim": False},
    rules=("lfm2_layers", "full_rotary", "rope_scaling"),
)  # fmt: skip
_NEMOTRON_H = Architecture(
    "nemotron_h",
    tensors={
        **{leaf: own.replace("self_attn", "mixer") for leaf, own in names.ATTENTION.items()}, **mamba("mixer"),
        "attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    per_index={"ffn_up_exps": "mixer.experts.{}.up_proj", "ffn_down_exps": "mixer.experts.{}.down_proj"},
    ints={
        "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
        "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads", **names.EXPERT_SIZES, "expert_count": "n_routed_experts",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_group_count": "n_group", "expert_group_used_count": "topk_group", "moe_latent_size": "moe_latent_size",
    },
    floats={"attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "expert_weights_scale": "routed_scaling_factor"},
    constants={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_bias": False, "mlp_bias": False},
    top={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
    vectors={**mamba_vectors("mixer"), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    by_layer=("attention.head_count_kv", "feed_forward_length"),
    rules=("nemotron_layers",),
)  # fmt: skip
_QWEN35 = Architecture(
    "qwen3_5_text",
    tensors={
        **names.ATTENTION, **names.QK_NORMS, **names.MLP, "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_out": "linear_attn.out_proj",
    },
    ints={
        **names.SIZES_AND_HEAD, "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    },
    constants={**names.SILU, "attention_bias": False},
    vectors={
        "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_norm.weight": "linear_attn.norm.weight",
    },
    tiled={
        "attn_qkv": "last rows", "ssm_conv1d": "last rows", "attn_gate": "rows", "ssm_alpha": "heads", "ssm_beta": "heads",
        "ssm_a": "heads", "ssm_dt": "heads", "ssm_out": "columns",
    },
    norms_plus_one=True,
    rules=("delta_layers", "partial_rotary", "rope_scaling"),
)  # fmt: skip

_QWEN35MOE = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    tensors={
        **_QWEN35.tensors, "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"{name}_shexp": own.replace("mlp", "mlp.shared_expert") for name, own in names.MLP.items()},
    },
    per_index=experts("mlp"),
    ints={**_QWEN35.ints, **names.EXPERT_SIZES, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    by_layer=("feed_forward_length",),
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    MIXTRAL: replace(
        _LLAMA,
        model_type="mixtral",
        tensors={**names.COMMON_TENSORS, "ffn_gate_inp": "block_sparse_moe.gate"},
        per_index=experts("block_sparse_moe", "w1", "w3", "w2"),
        ints={**names.SIZES_AND_HEAD, **names.EXPERTS_USED, "expert_count": "num_local_experts"},
        constants={**names.SILU, "sliding_window": None},
        flags={},
        rules=("llama_head_dim", "full_rotary", "rope_scaling"),
    ),
    "qwen2": Architecture("qwen2", constants={**names.SILU, **names.NO_WINDOW}),
    "qwen3": _QWEN3,
    "qwen3moe": replace(
        _QWEN3,
        model_type="qwen3_moe",
        tensors={**names.COMMON_TENSORS, "ffn_gate_inp": "mlp.gate"},
        per_index=experts("mlp"),
        ints={**names.SIZES_AND_HEAD, **names.EXPERT_SIZES},
        # llama.cpp always normalises the chosen experts' weights, and every layer has experts.
        constants={**names.SILU, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **names.NO_WINDOW},
        fixed={"expert_weights_norm": True},
        rules=("full_rotary", "rope_scaling"),
    ),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma-embedding": replace(
        _GEMMA3,
        top={**names.TOP_TENSORS, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"},
        floats={**names.RMS, "rope.freq_base_swa": "rope_local_base_freq"},
        constants={**names.GEMMA3, "use_bidirectional_attention": True},
    ),
    "gemma4": Architecture(
        "gemma4_text",
        tensors={
            **names.GEMMA_TENSORS, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        per_index={
            "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
            "ffn_gate_exps": "experts.{}.gate_proj", "ffn_up_exps": "experts.{}.up_proj",
            "ffn_down_exps": "experts.{}.down_proj",
        },
        ints={
            **names.SIZES, **names.WINDOW, "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input", **names.EXPERT_SIZES,
            "expert_used_count": "top_k_experts",
        },
        floats={**names.RMS, **names.FINAL_CAP},
        constants=names.GEMMA,
        top={
            **names.TOP_TENSORS, "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        vectors={
            "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        by_layer=("attention.head_count_kv", "feed_forward_length", "attention.key_length", "attention.value_length"),
        rules=("gemma4_layers", "gemma4_ropes", "rope_scaling"),
    ),
    "gemma": Architecture(
        "gemma",
        constants={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
        norms_plus_one=True,
        rules=("full_rotary",),
    ),
    "arcee": replace(
        _LLAMA,
        model_type="arcee",
        constants={"hidden_act": "relu2"},
    ),
    "exaone4": Architecture(
        "exaone4",
        tensors=_OLMO2.tensors,
        ints={**names.SIZES_AND_HEAD, **names.WINDOW},
        rules=("full_rotary", "rope_scaling", "rope_factors", "layer_types"),
    ),
    "cohere2": Architecture(
        "cohere2",
        ints={**names.SIZES_AND_HEAD, **names.WINDOW},
        floats={**names.LAYER_NORM, "logit_scale": "logit_scale"},
        constants={**names.SILU, "attention_bias": False},
        rules=("full_rotary", "rope_scaling", "layer_types"),
    ),
    "ernie4_5": Architecture("ernie4_5", flags={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        tensors={
            **names.COMMON_TENSORS, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
        },
        flags=names.ATTENTION_BIAS,
    ),
    "granitemoe": replace(
        _GRANITE,
        model_type="granitemoe",
        tensors={**names.COMMON_TENSORS, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        per_index=experts("block_sparse_moe"),
        ints={**names.SIZES, **names.EXPERTS_USED, "expert_count": "num_local_experts"},
        flags=names.ATTENTION_BIAS,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        tensors={
            **names.ATTENTION, "attn_sinks": "self_attn.sinks", "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
        },
        per_index=experts("mlp"),
        ints={
            **names.SIZES_AND_HEAD, **names.WINDOW, **names.EXPERTS_USED, "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        # The SwiGLU numbers are constants in llama.cpp's graph; the window is HF's default.
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "sliding_window": 128, names.PERIOD: 2},
        flags=names.ATTENTION_BIAS,
        bare=("attn_sinks",),
        rules=("full_rotary", "rope_scaling", "layer_types", "gpt_oss_yarn"),
    ),
    "gpt2": Architecture(
        "gpt2",
        tensors={
            "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
        },
        ints={**names.SIZES, "feed_forward_length": "n_inner"},
        floats={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        constants={"activation_function": "gelu_new"},
        top={
            "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block="transformer.h.{}.",
        rules=(),
    ),
    "phi3": Architecture(
        "phi3",
        tensors={**names.COMMON_TENSORS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ints={**names.SIZES, **names.WINDOW},
        rules=("partial_rotary", "phi3_rope"),
    ),
    "olmo2": _OLMO2,
    # Mistral Small 3 and later, and Ministral 3.
    "mistral3": Architecture(
        "ministral3",
        constants={**names.SILU, "sliding_window": None},
        permuted=names.LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling", "mistral3_ropes"),
    ),
    "smollm3": replace(
        _LLAMA,
        model_type="smollm3",
        constants={**names.SILU, **names.NO_WINDOW},
        rules=("full_rotary", "rope_scaling", "smollm3_layers"),
    ),
    "granite": _GRANITE,
    OLMO3: replace(
        _OLMO2,
        model_type="olmo3",
        ints={**names.SIZES, **names.WINDOW},
        rules=("full_rotary", "rope_scaling", "layer_types", "olmo3_ropes"),
    ),
    "stablelm": Architecture(
        "stablelm",
        per_index={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        ints=names.SIZES,
        floats=names.LAYER_NORM,
        flags={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        rules=("partial_rotary", "stablelm_residual"),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        tensors={**names.COMMON_TENSORS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ints=names.SIZES,
        floats={**names.ROPE, "attention.layer_norm_epsilon": "norm_epsilon"},
        # The converter drops sliding_window, which llama.cpp does not implement.
        constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        flags={"use_bias": "attn_q.bias"},
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        tensors={**_LFM2.tensors, "ffn_gate_inp": "feed_forward.gate"},
        per_index=experts("feed_forward", "w1", "w3", "w2"),
        ints={**_LFM2.ints, **names.EXPERT_SIZES, "leading_dense_block_count": "num_dense_layers"},
        # llama.cpp always has the bias, and normalises the chosen experts' weights.
        constants={"conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True},
        vectors={"exp_probs_b.bias": "feed_forward.expert_bias"},
        fixed={"expert_gating_func": 2},  # the sigmoid in llama.cpp's enum
        rules=("lfm2_layers", "full_rotary", "rope_scaling"),
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        tensors={
            **names.ATTENTION, **mamba("mamba"), "attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        ints={**names.SIZES_AND_HEAD, **names.SSM, "ssm.inner_size": "mamba_d_ssm"},
        # The converter has already multiplied the weights by the config's multipliers.
        constants={
            **names.SILU, **dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), False),
            "mamba_norm_before_gate": False,
        },
        flags={"mamba_rms_norm": "ssm_norm.weight", "mamba_conv_bias": "ssm_conv1d.bias"},
        top={**names.TOP_TENSORS, "output_norm": "model.final_layernorm"},
        vectors=mamba_vectors("mamba"),
        rules=("mamba_heads", "full_rotary", "rope_scaling"),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        tensors={
            **names.ATTENTION, **mamba("mamba"), **names.PRE_NORMS, "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down": "shared_mlp.output_linear", "ffn_down_shexp": "shared_mlp.output_linear",
        },
        per_index=experts("block_sparse_moe"),
        ints={
            **names.SIZES_BY_LAYER, **names.SSM, **names.EXPERTS_USED, "expert_count": "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        floats=names.GRANITE_FLOATS,
        constants={**names.SILU, "attention_bias": False, "mamba_proj_bias": False, "position_embedding_type": "nope"},
        permuted=names.LLAMA_PERMUTED,
        vectors=mamba_vectors("mamba"),
        joined=dict.fromkeys((("ffn_gate", "ffn_up"), ("ffn_gate_shexp", "ffn_up_shexp")), "shared_mlp.input_linear"),
        by_layer=("attention.head_count_kv",),
        rules=("granite_layers", "mamba_heads"),
    ),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35MOE,
    # Qwen3-Next is Qwen 3.5 MoE with fused projections, which the converter splits.
    "qwen3next": replace(
        _QWEN35MOE,
        by_layer=(),
        tiled={},
        grouped={
            "ssm_ba": {"linear_attn.in_proj_b": "h", "linear_attn.in_proj_a": "h"},
            # In files from before the converter split it.
            "ssm_in": {"linear_attn.in_proj_qkv": "kkv", "linear_attn.in_proj_z": "v"},
        },
    ),
    # GLM-4.7-Flash is read as DeepSeek V3, from which only names of config keys differ.
    "deepseek2": V3,
    DEEPSEEK2: V2,
}  # fmt: skip


def architecture_names() -> list[str]:
    return [name for name in ARCHITECTURES if name not in (MIXTRAL, OLMO3, DEEPSEEK2)]
