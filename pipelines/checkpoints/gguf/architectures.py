"""The table of GGUF architectures, for reading and writing GGUF files.

Sources: llama.cpp's convert_hf_to_gguf.py for metadata keys and rearranged tensors,
gguf.tensor_mapping for GGUF's names, llama.cpp's src/models for constants, HF's config classes for
HF's names. To add an architecture, add a row. If a row is not enough, add a rule to config_rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Tables from GGUF's names to HF's. Several architectures share the tables below.
Names = Mapping[str, str]

# Tensors: from GGUF's name to HF's; "token_embd_norm" is LFM2's final norm.
TOP_TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "token_embd_norm": "model.embedding_norm",
}  # fmt: skip
ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
# The names in most architectures; a file need not have all of them.
COMMON_TENSORS = {**ATTENTION, **MLP, **PRE_NORMS, **QK_NORMS}
GEMMA_TENSORS = {**COMMON_TENSORS, **POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}


def experts(parent: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Names:
    """Return HF's names of expert matrices in the module `parent`, for `Architecture.per_index`."""
    leaves = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {leaf: f"{parent}.experts.{{}}.{projection}" for leaf, projection in leaves.items()}


def mamba(parent: str) -> Names:
    return {"ssm_in": f"{parent}.in_proj", "ssm_conv1d": f"{parent}.conv1d", "ssm_out": f"{parent}.out_proj"}


def mamba_vectors(parent: str) -> Names:
    leaves = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_norm.weight": "norm.weight"}
    return {leaf: f"{parent}.{parameter}" for leaf, parameter in leaves.items()}


# Numbers: from GGUF's key to HF's.
SIZES_BY_LAYER = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
SIZES = {**SIZES_BY_LAYER, "attention.head_count_kv": "num_key_value_heads"}
SIZES_AND_HEAD = {**SIZES, "attention.key_length": "head_dim"}
EXPERTS_USED = {"expert_used_count": "num_experts_per_tok"}
EXPERT_SIZES = {**EXPERTS_USED, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
WINDOW = {"attention.sliding_window": "sliding_window"}
FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
ROPE = {"rope.freq_base": "rope_theta"}
RMS = {**ROPE, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = {**ROPE, "attention.layer_norm_epsilon": "layer_norm_eps"}
SSM = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip
GRANITE_FLOATS = {
    **RMS, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip

# Config key for n, if every n-th layer has full attention; `config_rules.layer_types` replaces it by a list.
PERIOD = "sliding_window_pattern"
SILU = {"hidden_act": "silu"}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
# The window and the base are llama.cpp's defaults.
GEMMA2 = {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 4096, PERIOD: 2}
GEMMA3 = {
    **GEMMA2, "sliding_window": None, PERIOD: 6, "use_bidirectional_attention": False, "rope_local_base_freq": 10000.0,
}  # fmt: skip
LLAMA_PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
LLAMA_FLAGS = {**ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"}


@dataclass(frozen=True)
class Architecture:
    """How metadata and tensors of one GGUF architecture become HF's.

    A leaf is a name without block and suffix: GGUF's `attn_q` in `blk.0.attn_q.weight`, HF's
    `self_attn.q_proj`. A metadata key is without the architecture's prefix.

    tensors, top: HF's leaf by GGUF's, in blocks and outside. block: HF's prefix in a block.
    per_index: HF's leaf, with `{}` for the expert, by GGUF leaf of all experts' matrices. Several
        leaves divide the rows of each expert equally.
    ints, floats: config key by metadata key, for values to copy.
    constants: config values of all models of the architecture.
    fixed: the only supported value, by metadata key.
    flags: by config key, the tensor of block 0 whose presence is the value.
    permuted: by GGUF leaf, the config key of the number of heads, if llama.cpp reorders the rows
        of Q and K for interleaved rotary embeddings.
    bare: GGUF leaves whose HF name has no suffix.
    vectors: HF's leaf by GGUF's with its suffix, for tensors that are read as f32 vectors.
    joined: HF's leaf by GGUF leaves whose rows it concatenates.
    absorbed: HF's leaf by GGUF's (keys, values), for latent attention (MLA).
    by_layer: metadata keys that only `rules` read.
    tiled: by GGUF leaf, what has another order: "heads", "rows", "last rows" or "columns". HF has
        the value heads of the first key head first, GGUF the first value head of each key head.
    grouped: for a GGUF leaf with several HF tensors, {HF leaf: letters}. Its rows are in groups,
        one for each key head. A letter is consecutive rows of a group: "k", the features of a
        key; "v", those of all its values; "h", one for each value head.
    norms_plus_one: whether GGUF stores the weights of norms plus 1.
    rules: functions of config_rules that set the other config values.
    """

    model_type: str
    tensors: Names = field(default_factory=lambda: COMMON_TENSORS)
    per_index: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    ints: Names = field(default_factory=lambda: SIZES_AND_HEAD)
    floats: Names = field(default_factory=lambda: RMS)
    constants: Mapping[str, object] = field(default_factory=lambda: SILU)
    fixed: Mapping[str, object] = field(default_factory=dict)
    flags: Names = field(default_factory=dict)
    permuted: Names = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    top: Names = field(default_factory=lambda: TOP_TENSORS)
    block: str = "model.layers.{}."
    vectors: Names = field(default_factory=dict)
    joined: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    absorbed: Mapping[tuple[str, str], str] = field(default_factory=dict)
    by_layer: tuple[str, ...] = ()
    tiled: Names = field(default_factory=dict)
    grouped: Mapping[str, Names] = field(default_factory=dict)
    norms_plus_one: bool = False
    rules: tuple[str, ...] = ("full_rotary", "rope_scaling")


# Keys of rows for files that need another row than their architecture's: "llama" files with experts
# are Mixtral models, "olmo2" files with a sliding window OLMo 3 models. "deepseek2" files whose
# experts are chosen by a softmax are DeepSeek V2 models, the others DeepSeek V3 or GLM-4.7-Flash.
MIXTRAL, OLMO3, DEEPSEEK2 = "llama with experts", "olmo2 with a window", "deepseek2 with softmax"

_LLAMA = Architecture(
    "llama", flags=LLAMA_FLAGS, permuted=LLAMA_PERMUTED, rules=("llama_head_dim", "full_rotary", "rope_scaling", "rope_factors")
)
_GEMMA2 = Architecture(
    "gemma2",
    tensors=GEMMA_TENSORS,
    ints={**SIZES_AND_HEAD, **WINDOW},
    floats={**RMS, "attn_logit_softcapping": "attn_logit_softcapping", **FINAL_CAP},
    constants=GEMMA2,
    norms_plus_one=True,
    rules=("full_rotary", "gemma_scale", "layer_types"),
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    floats={**RMS, "rope.freq_base_swa": "rope_local_base_freq", **FINAL_CAP},
    constants=GEMMA3,
    rules=("full_rotary", "gemma_scale", "layer_types", "rope_scaling"),
)
_GRANITE = Architecture("granite", ints=SIZES, floats=GRANITE_FLOATS, flags=LLAMA_FLAGS, permuted=LLAMA_PERMUTED)
_OLMO2 = Architecture(
    "olmo2", tensors={**ATTENTION, **MLP, **POST_NORMS, **QK_NORMS}, ints=SIZES, constants={**SILU, "attention_bias": False}
)
_QWEN3 = Architecture("qwen3", constants={**SILU, **NO_WINDOW}, flags=ATTENTION_BIAS)
_LFM2 = Architecture(
    "lfm2",
    tensors={
        **ATTENTION, "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
        "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
    },
    # The number of key-value heads is 0 in convolution layers, so a rule reads it by layer.
    ints={**SIZES_BY_LAYER, "shortconv.l_cache": "conv_L_cache"},
    floats={**ROPE, "attention.layer_norm_rms_epsilon": "norm_eps"},
    constants={"conv_bias": False, "block_auto_adjust_ff_dim": False},
    rules=("lfm2_layers", "full_rotary", "rope_scaling"),
)  # fmt: skip
_NEMOTRON_H = Architecture(
    "nemotron_h",
    tensors={
        **{leaf: own.replace("self_attn", "mixer") for leaf, own in ATTENTION.items()}, **mamba("mixer"),
        "attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    per_index={"ffn_up_exps": "mixer.experts.{}.up_proj", "ffn_down_exps": "mixer.experts.{}.down_proj"},
    ints={
        "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
        "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads", **EXPERT_SIZES, "expert_count": "n_routed_experts",
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
        **ATTENTION, **QK_NORMS, **MLP, "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_out": "linear_attn.out_proj",
    },
    ints={
        **SIZES_AND_HEAD, "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    },
    constants={**SILU, "attention_bias": False},
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
        **{f"{name}_shexp": own.replace("mlp", "mlp.shared_expert") for name, own in MLP.items()},
    },
    per_index=experts("mlp"),
    ints={**_QWEN35.ints, **EXPERT_SIZES, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    by_layer=("feed_forward_length",),
)  # fmt: skip

_DEEPSEEK3 = Architecture(
    "deepseek_v3",
    tensors={
        **MLP, **PRE_NORMS, "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj", "attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.gate",
        **{f"{name}_shexp": own.replace("mlp", "mlp.shared_experts") for name, own in MLP.items()},
    },
    per_index=experts("mlp"),
    ints={
        **SIZES, **EXPERT_SIZES, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace", "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group", "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
    },
    floats={**RMS, "expert_weights_scale": "routed_scaling_factor"},
    constants={
        **SILU, "attention_bias": False, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    vectors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    absorbed={("attn_k_b", "attn_v_b"): "self_attn.kv_b_proj"},
    by_layer=("attention.key_length", "attention.value_length"),
    rules=("latent_attention", "latent_experts", "rope_scaling", "latent_yarn"),
)  # fmt: skip
_DEEPSEEK2 = replace(_DEEPSEEK3, model_type="deepseek_v2", constants={**_DEEPSEEK3.constants, "mlp_bias": False})

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    MIXTRAL: replace(
        _LLAMA,
        model_type="mixtral",
        tensors={**COMMON_TENSORS, "ffn_gate_inp": "block_sparse_moe.gate"},
        per_index=experts("block_sparse_moe", "w1", "w3", "w2"),
        ints={**SIZES_AND_HEAD, **EXPERTS_USED, "expert_count": "num_local_experts"},
        constants={**SILU, "sliding_window": None},
        flags={},
        rules=("llama_head_dim", "full_rotary", "rope_scaling"),
    ),
    "qwen2": Architecture("qwen2", constants={**SILU, **NO_WINDOW}),
    "qwen3": _QWEN3,
    "qwen3moe": replace(
        _QWEN3,
        model_type="qwen3_moe",
        tensors={**COMMON_TENSORS, "ffn_gate_inp": "mlp.gate"},
        per_index=experts("mlp"),
        ints={**SIZES_AND_HEAD, **EXPERT_SIZES},
        # llama.cpp always normalises the chosen experts' weights, and every layer has experts.
        constants={**SILU, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **NO_WINDOW},
        fixed={"expert_weights_norm": True},
        rules=("full_rotary", "rope_scaling"),
    ),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma-embedding": replace(
        _GEMMA3,
        top={**TOP_TENSORS, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"},
        floats={**RMS, "rope.freq_base_swa": "rope_local_base_freq"},
        constants={**GEMMA3, "use_bidirectional_attention": True},
    ),
    "gemma4": Architecture(
        "gemma4_text",
        tensors={
            **GEMMA_TENSORS, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
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
            **SIZES, **WINDOW, "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input", **EXPERT_SIZES,
            "expert_used_count": "top_k_experts",
        },
        floats={**RMS, **FINAL_CAP},
        constants=GEMMA,
        top={
            **TOP_TENSORS, "per_layer_token_embd": "model.embed_tokens_per_layer",
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
        ints={**SIZES_AND_HEAD, **WINDOW},
        rules=("full_rotary", "rope_scaling", "rope_factors", "layer_types"),
    ),
    "cohere2": Architecture(
        "cohere2",
        ints={**SIZES_AND_HEAD, **WINDOW},
        floats={**LAYER_NORM, "logit_scale": "logit_scale"},
        constants={**SILU, "attention_bias": False},
        rules=("full_rotary", "rope_scaling", "layer_types"),
    ),
    "ernie4_5": Architecture("ernie4_5", flags={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        tensors={
            **COMMON_TENSORS, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
        },
        flags=ATTENTION_BIAS,
    ),
    "granitemoe": replace(
        _GRANITE,
        model_type="granitemoe",
        tensors={**COMMON_TENSORS, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        per_index=experts("block_sparse_moe"),
        ints={**SIZES, **EXPERTS_USED, "expert_count": "num_local_experts"},
        flags=ATTENTION_BIAS,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        tensors={
            **ATTENTION, "attn_sinks": "self_attn.sinks", "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
        },
        per_index=experts("mlp"),
        ints={
            **SIZES_AND_HEAD, **WINDOW, **EXPERTS_USED, "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        # The SwiGLU numbers are constants in llama.cpp's graph; the window is HF's default.
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "sliding_window": 128, PERIOD: 2},
        flags=ATTENTION_BIAS,
        bare=("attn_sinks",),
        rules=("full_rotary", "rope_scaling", "layer_types", "gpt_oss_yarn"),
    ),
    "gpt2": Architecture(
        "gpt2",
        tensors={
            "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
        },
        ints={**SIZES, "feed_forward_length": "n_inner"},
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
        tensors={**COMMON_TENSORS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ints={**SIZES, **WINDOW},
        rules=("partial_rotary", "phi3_rope"),
    ),
    "olmo2": _OLMO2,
    # Mistral Small 3 and later, and Ministral 3.
    "mistral3": Architecture(
        "ministral3",
        constants={**SILU, "sliding_window": None},
        permuted=LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling", "mistral3_ropes"),
    ),
    "smollm3": replace(
        _LLAMA,
        model_type="smollm3",
        constants={**SILU, **NO_WINDOW},
        rules=("full_rotary", "rope_scaling", "smollm3_layers"),
    ),
    "granite": _GRANITE,
    OLMO3: replace(
        _OLMO2,
        model_type="olmo3",
        ints={**SIZES, **WINDOW},
        rules=("full_rotary", "rope_scaling", "layer_types", "olmo3_ropes"),
    ),
    "stablelm": Architecture(
        "stablelm",
        per_index={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        ints=SIZES,
        floats=LAYER_NORM,
        flags={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        rules=("partial_rotary", "stablelm_residual"),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        tensors={**COMMON_TENSORS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ints=SIZES,
        floats={**ROPE, "attention.layer_norm_epsilon": "norm_epsilon"},
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
        ints={**_LFM2.ints, **EXPERT_SIZES, "leading_dense_block_count": "num_dense_layers"},
        # llama.cpp always has the bias, and normalises the chosen experts' weights.
        constants={"conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True},
        vectors={"exp_probs_b.bias": "feed_forward.expert_bias"},
        fixed={"expert_gating_func": 2},  # the sigmoid in llama.cpp's enum
        rules=("lfm2_layers", "full_rotary", "rope_scaling"),
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        tensors={
            **ATTENTION, **mamba("mamba"), "attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        ints={**SIZES_AND_HEAD, **SSM, "ssm.inner_size": "mamba_d_ssm"},
        # The converter has already multiplied the weights by the config's multipliers.
        constants={
            **SILU, **dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), False),
            "mamba_norm_before_gate": False,
        },
        flags={"mamba_rms_norm": "ssm_norm.weight", "mamba_conv_bias": "ssm_conv1d.bias"},
        top={**TOP_TENSORS, "output_norm": "model.final_layernorm"},
        vectors=mamba_vectors("mamba"),
        rules=("mamba_heads", "full_rotary", "rope_scaling"),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        tensors={
            **ATTENTION, **mamba("mamba"), **PRE_NORMS, "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down": "shared_mlp.output_linear", "ffn_down_shexp": "shared_mlp.output_linear",
        },
        per_index=experts("block_sparse_moe"),
        ints={
            **SIZES_BY_LAYER, **SSM, **EXPERTS_USED, "expert_count": "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        floats=GRANITE_FLOATS,
        constants={**SILU, "attention_bias": False, "mamba_proj_bias": False, "position_embedding_type": "nope"},
        permuted=LLAMA_PERMUTED,
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
    "deepseek2": _DEEPSEEK3,
    DEEPSEEK2: _DEEPSEEK2,
}  # fmt: skip


def architecture_names() -> list[str]:
    return [name for name in ARCHITECTURES if name not in (MIXTRAL, OLMO3, DEEPSEEK2)]
