"""What llama.cpp's GGUF files say, in HF's words: one row an architecture.

Sources: llama.cpp's convert_hf_to_gguf.py (what is written, and changed on the way), gguf.tensor_mapping (names),
llama.cpp's src/models (what is implied and written nowhere), the HF config classes (what it is called there).
Adding an architecture is adding a row; what a table cannot say is a function in gguf_config.py.
"""

from castiron.pipelines.checkpoints.gguf_hybrids import HYBRIDS
from castiron.pipelines.checkpoints.gguf_words import (
    ATTENTION,
    ATTENTION_BIAS,
    EXPERTS_USED,
    FINAL_CAP,
    GEMMA,
    GEMMA_TENSORS,
    GPT2_SIZES,
    GRANITE_FLOATS,
    LLAMA_FLAGS,
    LLAMA_PERMUTED,
    LLAMA_TENSORS,
    MLP,
    NO_WINDOW,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    RMS,
    ROPE,
    SILU,
    SIZES,
    SIZES_AND_HEAD,
    TOP_TENSORS,
    WINDOW,
    Architecture,
)

# "llama" files with experts are Mixtral, "olmo2" files with a window OLMo 3: gguf_config.architecture_of sends them here.
_MIXTRAL, _OLMO3 = "llama with experts", "olmo2 with a window"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        flags=LLAMA_FLAGS,
        permuted=LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling", "rope_factors"),
    ),
    _MIXTRAL: Architecture(
        "mixtral",
        tensors={**ATTENTION, **PRE_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        per_index={
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        },
        ints={**SIZES_AND_HEAD, **EXPERTS_USED, "expert_count": "num_local_experts"},
        constants={**SILU, "sliding_window": None},
        permuted=LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling"),
    ),
    "qwen2": Architecture("qwen2", constants={**SILU, **NO_WINDOW}),
    "qwen3": Architecture(
        "qwen3",
        tensors={**LLAMA_TENSORS, **QK_NORMS},
        constants={**SILU, **NO_WINDOW},
        flags=ATTENTION_BIAS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        tensors={**ATTENTION, **QK_NORMS, **PRE_NORMS, "ffn_gate_inp": "mlp.gate"},
        per_index={
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
        },
        ints={
            **SIZES_AND_HEAD,
            **EXPERTS_USED,
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # llama.cpp's graph always normalises the chosen experts' weights and knows no dense layers between
        constants={**SILU, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **NO_WINDOW},
        flags=ATTENTION_BIAS,
        rules=("full_rotary", "rope_scaling", "normalised_experts"),
    ),
    "gemma2": Architecture(
        "gemma2",
        tensors=GEMMA_TENSORS,
        ints={**SIZES_AND_HEAD, **WINDOW},
        floats={**RMS, "attn_logit_softcapping": "attn_logit_softcapping", **FINAL_CAP},
        constants=GEMMA,
        norms_plus_one=True,
        rules=("full_rotary", "gemma_scale", "gemma2_layers"),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        tensors={**GEMMA_TENSORS, **QK_NORMS},
        ints={**SIZES_AND_HEAD, **WINDOW},
        floats={**RMS, "rope.freq_base_swa": "rope_local_base_freq", **FINAL_CAP},
        constants={**GEMMA, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
        norms_plus_one=True,
        rules=("full_rotary", "gemma_scale", "gemma3_layers", "rope_scaling"),
    ),
    "gemma-embedding": Architecture(
        "gemma3_text",
        tensors={**GEMMA_TENSORS, **QK_NORMS},
        top={**TOP_TENSORS, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"},
        ints={**SIZES_AND_HEAD, **WINDOW},
        floats={**RMS, "rope.freq_base_swa": "rope_local_base_freq"},
        constants={**GEMMA, "attn_logit_softcapping": None, "use_bidirectional_attention": True},
        norms_plus_one=True,
        rules=("full_rotary", "gemma_scale", "gemma3_layers", "rope_scaling"),
    ),
    "gemma4": Architecture(
        "gemma4_text",
        tensors={
            **GEMMA_TENSORS,
            **QK_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        per_index={
            "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
            "ffn_gate_exps": "experts.{}.gate_proj",
            "ffn_up_exps": "experts.{}.up_proj",
            "ffn_down_exps": "experts.{}.down_proj",
        },
        ints={
            **SIZES,
            **WINDOW,
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        floats={**RMS, **FINAL_CAP},
        constants=GEMMA,
        top={
            **TOP_TENSORS,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        vectors={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        by_layer=(
            "attention.head_count_kv",
            "feed_forward_length",
            "attention.key_length",
            "attention.value_length",
        ),
        rules=("gemma4_layers", "gemma4_ropes", "rope_scaling"),
    ),
    "gemma": Architecture(
        "gemma",
        constants={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
        norms_plus_one=True,
        rules=("full_rotary",),
    ),
    "arcee": Architecture(
        "arcee",
        tensors={name: own for name, own in LLAMA_TENSORS.items() if name != "ffn_gate"},
        constants={"hidden_act": "relu2"},
        flags={**ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"},
        permuted=LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling", "rope_factors"),
    ),
    "exaone4": Architecture(
        "exaone4",
        tensors={**ATTENTION, **MLP, **POST_NORMS, **QK_NORMS},
        ints={**SIZES_AND_HEAD, **WINDOW},
        rules=("full_rotary", "rope_scaling", "rope_factors", "every_fourth_full"),
    ),
    "cohere2": Architecture(
        "cohere2",
        tensors={**ATTENTION, **MLP, "attn_norm": "input_layernorm"},
        ints={**SIZES_AND_HEAD, **WINDOW},
        floats={**ROPE, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        constants={**SILU, "attention_bias": False},
        rules=("full_rotary", "rope_scaling", "every_fourth_full"),
    ),
    "ernie4_5": Architecture("ernie4_5", flags={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        tensors={
            **LLAMA_TENSORS,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        flags=ATTENTION_BIAS,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        tensors={**ATTENTION, **PRE_NORMS, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        per_index={
            "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
            "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
            "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
        },
        ints={**SIZES, **EXPERTS_USED, "expert_count": "num_local_experts"},
        floats=GRANITE_FLOATS,
        flags=ATTENTION_BIAS,
        permuted=LLAMA_PERMUTED,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        tensors={
            **ATTENTION,
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
            **SIZES_AND_HEAD,
            **WINDOW,
            **EXPERTS_USED,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        # what llama.cpp's graph has as numbers
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        flags=ATTENTION_BIAS,
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
        ints={key: GPT2_SIZES.get(key, name) for key, name in SIZES.items()},
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
            **PRE_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        ints={**SIZES, **WINDOW},
        rules=("partial_rotary", "phi3_rope"),
    ),
    "olmo2": Architecture(
        "olmo2",
        tensors={**ATTENTION, **MLP, **POST_NORMS, **QK_NORMS},
        ints=SIZES,
        constants={**SILU, "attention_bias": False},
    ),
    # of Mistral Small 3 and later, and of Ministral 3
    "mistral3": Architecture(
        "ministral3",
        constants={**SILU, "sliding_window": None},
        permuted=LLAMA_PERMUTED,
        rules=("llama_head_dim", "full_rotary", "rope_scaling", "mistral3_ropes"),
    ),
    "smollm3": Architecture(
        "smollm3",
        constants={**SILU, **NO_WINDOW},
        flags=LLAMA_FLAGS,
        permuted=LLAMA_PERMUTED,
        rules=("full_rotary", "rope_scaling", "smollm3_layers"),
    ),
    "granite": Architecture(
        "granite",
        ints=SIZES,
        floats=GRANITE_FLOATS,
        flags=LLAMA_FLAGS,
        permuted=LLAMA_PERMUTED,
    ),
    _OLMO3: Architecture(
        "olmo3",
        tensors={**ATTENTION, **MLP, **POST_NORMS, **QK_NORMS},
        ints={**SIZES, **WINDOW},
        constants={**SILU, "attention_bias": False},
        rules=("full_rotary", "rope_scaling", "every_fourth_full", "olmo3_ropes"),
    ),
    "stablelm": Architecture(
        "stablelm",
        per_index={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        ints=SIZES,
        floats={**ROPE, "attention.layer_norm_epsilon": "layer_norm_eps"},
        flags={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        rules=("partial_rotary", "stablelm_residual"),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        tensors={**ATTENTION, **PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ints=SIZES,
        floats={**ROPE, "attention.layer_norm_epsilon": "norm_epsilon"},
        # the converter drops sliding_window, and llama.cpp computes none
        constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        flags={"use_bias": "attn_q.bias"},
    ),
    **HYBRIDS,
}


def architecture_row(name: str, experts: int, windowed: bool = False) -> Architecture | None:
    """The row of `general.architecture`; `experts` is the file's expert count, 0 for a dense model, and `windowed` says
    whether it has the length of a window."""
    special = {"llama": experts and _MIXTRAL, "olmo2": windowed and _OLMO3}.get(name)
    return ARCHITECTURES.get(special or name)


def architecture_names() -> list[str]:
    """The values of `general.architecture` that are read."""
    return [name for name in ARCHITECTURES if name not in (_MIXTRAL, _OLMO3)]
