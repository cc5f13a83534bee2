"""What llama.cpp's GGUF files say, in HF's words: one row an architecture.

Sources: llama.cpp's convert_hf_to_gguf.py (what is written, and changed on the way), gguf.tensor_mapping (names),
llama.cpp's src/models (what is implied and written nowhere), the HF config classes (what it is called there).
Adding an architecture is adding a row; what a table cannot say is a function in gguf_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

TOP_TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    # of LFM2, whose last norm it is all the same
    "token_embd_norm": "model.embedding_norm",
}  # fmt: skip

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LLAMA_TENSORS = {**_ATTENTION, **_MLP, **_PRE_NORMS}
_GEMMA_TENSORS = {
    **_ATTENTION,
    **_MLP,
    **_POST_NORMS,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_SIZES_AND_HEAD = {**_SIZES, "attention.key_length": "head_dim"}
_EXPERTS_USED = {"expert_used_count": "num_experts_per_tok"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_ROPE = {"rope.freq_base": "rope_theta"}
_RMS = {**_ROPE, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}

_SSM = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_NUMBERED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_SIZES_BY_LAYER = {key: name for key, name in _SIZES.items() if key != "attention.head_count_kv"}


def _mamba(scope: str) -> dict[str, str]:
    return {"ssm_in": f"{scope}.in_proj", "ssm_conv1d": f"{scope}.conv1d", "ssm_out": f"{scope}.out_proj"}


def _mamba_vectors(scope: str) -> dict[str, str]:
    leaves = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_norm.weight": "norm.weight"}
    return {leaf: f"{scope}.{own}" for leaf, own in leaves.items()}


_GRANITE_FLOATS = {
    **_RMS,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GPT2_SIZES = {"feed_forward_length": "n_inner"}

_SILU = {"hidden_act": "silu"}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
_LLAMA_PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_LLAMA_FLAGS = {**_ATTENTION_BIAS, "mlp_bias": "ffn_gate.bias"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`; what a row does not say is as most have it.

    tensors: leaf of a block's tensor -> HF's leaf; per_index: the same for tensors stacked along their first axis,
    which HF keeps apart ("{}" takes the index). ints, floats: metadata key without its prefix -> config key.
    constants: config keys that the architecture implies. flags: config key -> leaf whose presence makes it true.
    permuted: leaf -> config key of its number of heads, where the converter reordered rows for the interleaved
    rotary form. bare: leaves whose HF name has no ".weight". top, block: what tensors outside of blocks are called, and what
    names in a block begin with. filters: leaves of convolutions, [features, n] here and [features, 1, n] in HF.
    vectors: leaf with its ending, if it has one -> HF's whole name in a block, of numbers that HF has in a vector; of A_log
    the file has -exp. joined: leaves whose rows, in order, are those of one of HF's -> HF's leaf. by_layer: keys of ints that
    differ from layer to layer, which a rule reads. tiled: leaf -> "heads", "rows", "last rows" or "columns", where what is of
    heads of values stands with the first of each head of keys before the second of each, and not head of keys by head of keys.
    norms_plus_one: norms are stored as w + 1. rules: names of functions in gguf_config.RULES.
    """

    model_type: str
    tensors: Mapping[str, str] = field(default_factory=lambda: _LLAMA_TENSORS)
    per_index: Mapping[str, str] = field(default_factory=dict)
    ints: Mapping[str, str] = field(default_factory=lambda: _SIZES_AND_HEAD)
    floats: Mapping[str, str] = field(default_factory=lambda: _RMS)
    constants: Mapping[str, object] = field(default_factory=lambda: _SILU)
    flags: Mapping[str, str] = field(default_factory=dict)
    permuted: Mapping[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    top: Mapping[str, str] = field(default_factory=lambda: TOP_TENSORS)
    block: str = "model.layers.{}."
    filters: tuple[str, ...] = ()
    vectors: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    by_layer: tuple[str, ...] = ()
    tiled: Mapping[str, str] = field(default_factory=dict)
    norms_plus_one: bool = False
    rules: tuple[str, ...] = ("full_rotary", "rope_scaling")

    @property
    def written(self) -> bool:
        """Whether `hf_as_gguf` writes files of it: it renames tensors, and changes nothing else of them."""
        return not (self.vectors or self.joined or self.tiled)


# "llama" files with experts are Mixtral, "olmo2" files with a window OLMo 3: gguf_config.architecture_of sends them here.
_MIXTRAL, _OLMO3 = "llama with experts", "olmo2 with a window"

_QWEN35 = {
    **_ATTENTION,
    **_QK_NORMS,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35_VECTORS = {
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_norm.weight": "linear_attn.norm.weight",
}  # fmt: skip
_QWEN35_INTS = {
    **_SIZES_AND_HEAD,
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_QWEN35_TILED = {
    "attn_qkv": "last rows", "ssm_conv1d": "last rows", "attn_gate": "rows", "ssm_alpha": "heads", "ssm_beta": "heads",
    "ssm_a": "heads", "ssm_dt": "heads", "ssm_out": "columns",
}  # fmt: skip
_LFM2 = {
    **_ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_INTS = {**_SIZES_BY_LAYER, "shortconv.l_cache": "conv_L_cache"}
_LFM2_FLOATS = {**_ROPE, "attention.layer_norm_rms_epsilon": "norm_eps"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        flags=_LLAMA_FLAGS,
        permuted=_LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling", "rope_factors"),
    ),
    _MIXTRAL: Architecture(
        "mixtral",
        tensors={**_ATTENTION, **_PRE_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        per_index={
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        },
        ints={**_SIZES_AND_HEAD, **_EXPERTS_USED, "expert_count": "num_local_experts"},
        constants={**_SILU, "sliding_window": None},
        permuted=_LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling"),
    ),
    "qwen2": Architecture("qwen2", constants={**_SILU, **_NO_WINDOW}),
    "qwen3": Architecture(
        "qwen3",
        tensors={**_LLAMA_TENSORS, **_QK_NORMS},
        constants={**_SILU, **_NO_WINDOW},
        flags=_ATTENTION_BIAS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        tensors={**_ATTENTION, **_QK_NORMS, **_PRE_NORMS, "ffn_gate_inp": "mlp.gate"},
        per_index={
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
        },
        ints={
            **_SIZES_AND_HEAD,
            **_EXPERTS_USED,
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # llama.cpp's graph always normalises the chosen experts' weights and knows no dense layers between
        constants={**_SILU, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **_NO_WINDOW},
        flags=_ATTENTION_BIAS,
        rules=("full_rotary", "rope_scaling", "normalised_experts"),
    ),
    "gemma2": Architecture(
        "gemma2",
        tensors=_GEMMA_TENSORS,
        ints={**_SIZES_AND_HEAD, **_WINDOW},
        floats={**_RMS, "attn_logit_softcapping": "attn_logit_softcapping", **_FINAL_CAP},
        constants=_GEMMA,
        norms_plus_one=True,
        rules=("full_rotary", "gemma_scale", "gemma2_layers"),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        tensors={**_GEMMA_TENSORS, **_QK_NORMS},
        ints={**_SIZES_AND_HEAD, **_WINDOW},
        floats={**_RMS, "rope.freq_base_swa": "rope_local_base_freq", **_FINAL_CAP},
        constants={**_GEMMA, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
        norms_plus_one=True,
        rules=("full_rotary", "gemma_scale", "gemma3_layers", "rope_scaling"),
    ),
    "gemma": Architecture(
        "gemma",
        constants={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
        norms_plus_one=True,
        rules=("full_rotary",),
    ),
    "arcee": Architecture(
        "arcee",
        tensors={name: own for name, own in _LLAMA_TENSORS.items() if name != "ffn_gate"},
        constants={"hidden_act": "relu2"},
        flags={**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"},
        permuted=_LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling", "rope_factors"),
    ),
    "exaone4": Architecture(
        "exaone4",
        tensors={**_ATTENTION, **_MLP, **_POST_NORMS, **_QK_NORMS},
        ints={**_SIZES_AND_HEAD, **_WINDOW},
        rules=("full_rotary", "rope_scaling", "rope_factors", "every_fourth_full"),
    ),
    "cohere2": Architecture(
        "cohere2",
        tensors={**_ATTENTION, **_MLP, "attn_norm": "input_layernorm"},
        ints={**_SIZES_AND_HEAD, **_WINDOW},
        floats={**_ROPE, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        constants={**_SILU, "attention_bias": False},
        rules=("full_rotary", "rope_scaling", "every_fourth_full"),
    ),
    "ernie4_5": Architecture("ernie4_5", flags={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        tensors={
            **_LLAMA_TENSORS,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        flags=_ATTENTION_BIAS,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        tensors={**_ATTENTION, **_PRE_NORMS, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        per_index={
            "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
            "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
            "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
        },
        ints={**_SIZES, **_EXPERTS_USED, "expert_count": "num_local_experts"},
        floats=_GRANITE_FLOATS,
        flags=_ATTENTION_BIAS,
        permuted=_LLAMA_PERMUTED,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        tensors={
            **_ATTENTION,
            "attn_sinks": "self_attn.sinks",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        per_index={
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
        },
        ints={
            **_SIZES_AND_HEAD,
            **_WINDOW,
            **_EXPERTS_USED,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        # what llama.cpp's graph has as numbers
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        flags=_ATTENTION_BIAS,
        bare=("attn_sinks",),
        rules=("full_rotary", "rope_scaling", "gpt_oss_layers"),
    ),
    "gpt2": Architecture(
        "gpt2",
        tensors={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        ints={key: _GPT2_SIZES.get(key, name) for key, name in _SIZES.items()},
        floats={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        constants={"activation_function": "gelu_new"},
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        block="transformer.h.{}.",
        rules=(),
    ),
    "phi3": Architecture(
        "phi3",
        tensors={
            **_PRE_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        ints={**_SIZES, **_WINDOW},
        rules=("partial_rotary", "phi3_rope"),
    ),
    "olmo2": Architecture(
        "olmo2",
        tensors={**_ATTENTION, **_MLP, **_POST_NORMS, **_QK_NORMS},
        ints=_SIZES,
        constants={**_SILU, "attention_bias": False},
    ),
    "smollm3": Architecture(
        "smollm3",
        constants={**_SILU, **_NO_WINDOW},
        flags=_LLAMA_FLAGS,
        permuted=_LLAMA_PERMUTED,
        rules=("full_rotary", "rope_scaling", "smollm3_layers"),
    ),
    "granite": Architecture(
        "granite",
        ints=_SIZES,
        floats=_GRANITE_FLOATS,
        flags=_LLAMA_FLAGS,
        permuted=_LLAMA_PERMUTED,
    ),
    "lfm2": Architecture(
        "lfm2",
        tensors=_LFM2,
        # the number of key-value heads of each layer, none of those that convolve, is read by a rule
        ints=_LFM2_INTS,
        floats=_LFM2_FLOATS,
        constants={"conv_bias": False, "block_auto_adjust_ff_dim": False},
        filters=("shortconv.conv",),
        rules=("lfm2_layers", "full_rotary", "rope_scaling"),
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        tensors={**_LFM2, "ffn_gate_inp": "feed_forward.gate"},
        per_index={
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
        },
        ints={
            **_LFM2_INTS,
            **_EXPERTS_USED,
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        floats=_LFM2_FLOATS,
        # llama.cpp's graph always has the bias, and normalises the chosen experts' weights
        constants={"conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True},
        filters=("shortconv.conv",),
        vectors={"exp_probs_b.bias": "feed_forward.expert_bias"},
        rules=("lfm2_layers", "full_rotary", "rope_scaling", "sigmoid_experts"),
    ),
    _OLMO3: Architecture(
        "olmo3",
        tensors={**_ATTENTION, **_MLP, **_POST_NORMS, **_QK_NORMS},
        ints={**_SIZES, **_WINDOW},
        constants={**_SILU, "attention_bias": False},
        rules=("full_rotary", "rope_scaling", "every_fourth_full", "olmo3_ropes"),
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        tensors={
            **_ATTENTION,
            **_mamba("mamba"),
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        ints={**_SIZES_AND_HEAD, **_SSM, "ssm.inner_size": "mamba_d_ssm"},
        # the converter multiplies weights by the multipliers
        constants={
            **_SILU,
            **dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), False),
            "mamba_norm_before_gate": False,
        },
        flags={"mamba_rms_norm": "ssm_norm.weight", "mamba_conv_bias": "ssm_conv1d.bias"},
        top={**TOP_TENSORS, "output_norm": "model.final_layernorm"},
        filters=("ssm_conv1d",),
        vectors=_mamba_vectors("mamba"),
        rules=("mamba_heads", "full_rotary", "rope_scaling"),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        tensors={
            **_ATTENTION,
            **_mamba("mamba"),
            **_PRE_NORMS,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        per_index={leaf: f"block_sparse_moe.experts.{{}}.{own}" for leaf, own in _NUMBERED.items()},
        ints={
            **_SIZES_BY_LAYER,
            **_SSM,
            **_EXPERTS_USED,
            "expert_count": "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        floats=_GRANITE_FLOATS,
        constants={**_SILU, "attention_bias": False, "mamba_proj_bias": False, "position_embedding_type": "nope"},
        permuted=_LLAMA_PERMUTED,
        filters=("ssm_conv1d",),
        vectors=_mamba_vectors("mamba"),
        joined=dict.fromkeys((("ffn_gate", "ffn_up"), ("ffn_gate_shexp", "ffn_up_shexp")), "shared_mlp.input_linear"),
        by_layer=("attention.head_count_kv",),
        rules=("granite_layers", "mamba_heads"),
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        tensors={
            **{leaf: own.replace("self_attn", "mixer") for leaf, own in _ATTENTION.items()},
            **_mamba("mixer"),
            "attn_norm": "norm",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        per_index={"ffn_up_exps": "mixer.experts.{}.up_proj", "ffn_down_exps": "mixer.experts.{}.down_proj"},
        ints={
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "attention.head_count": "num_attention_heads",
            "attention.key_length": "head_dim",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
            **_EXPERTS_USED,
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        },
        floats={"attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "expert_weights_scale": "routed_scaling_factor"},
        constants={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_bias": False, "mlp_bias": False},
        top={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
        filters=("ssm_conv1d",),
        vectors={**_mamba_vectors("mixer"), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        by_layer=("attention.head_count_kv", "feed_forward_length"),
        rules=("nemotron_layers",),
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        tensors={**_QWEN35, **_MLP},
        ints=_QWEN35_INTS,
        constants={**_SILU, "attention_bias": False},
        filters=("ssm_conv1d",),
        vectors=_QWEN35_VECTORS,
        tiled=_QWEN35_TILED,
        norms_plus_one=True,
        rules=("delta_layers", "partial_rotary", "rope_scaling"),
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        tensors={
            **_QWEN35,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        per_index={leaf: f"mlp.experts.{{}}.{own}" for leaf, own in _NUMBERED.items()},
        ints={
            **_QWEN35_INTS,
            **_EXPERTS_USED,
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        constants={**_SILU, "attention_bias": False},
        filters=("ssm_conv1d",),
        vectors=_QWEN35_VECTORS,
        by_layer=("feed_forward_length",),
        tiled=_QWEN35_TILED,
        norms_plus_one=True,
        rules=("delta_layers", "partial_rotary", "rope_scaling"),
    ),
    "stablelm": Architecture(
        "stablelm",
        per_index={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        ints=_SIZES,
        floats={**_ROPE, "attention.layer_norm_epsilon": "layer_norm_eps"},
        flags={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        rules=("partial_rotary", "stablelm_residual"),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        tensors={**_ATTENTION, **_PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ints=_SIZES,
        floats={**_ROPE, "attention.layer_norm_epsilon": "norm_epsilon"},
        # the converter drops sliding_window, and llama.cpp computes none
        constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        flags={"use_bias": "attn_q.bias"},
    ),
}


# One set of weights under two names.
ARCHITECTURES["nemotron_h_moe"] = ARCHITECTURES["nemotron_h"]


def architecture_row(name: str, experts: int, windowed: bool = False) -> Architecture | None:
    """The row of `general.architecture`; `experts` is the file's expert count, 0 for a dense model, and `windowed` says
    whether it has the length of a window."""
    special = {"llama": experts and _MIXTRAL, "olmo2": windowed and _OLMO3}.get(name)
    return ARCHITECTURES.get(special or name)


def architecture_names() -> list[str]:
    """The values of `general.architecture` that are read."""
    return [name for name in ARCHITECTURES if name not in (_MIXTRAL, _OLMO3)]
