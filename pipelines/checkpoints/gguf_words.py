"""In what words `gguf_architectures` and `gguf_hybrids` say what llama.cpp's GGUF files hold: a record, and what rows share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TOP_TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    # of LFM2, whose last norm it is all the same
    "token_embd_norm": "model.embedding_norm",
}  # fmt: skip

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
LLAMA_TENSORS = {**ATTENTION, **MLP, **PRE_NORMS}
GEMMA_TENSORS = {
    **ATTENTION,
    **MLP,
    **POST_NORMS,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
SIZES_AND_HEAD = {**SIZES, "attention.key_length": "head_dim"}
EXPERTS_USED = {"expert_used_count": "num_experts_per_tok"}
WINDOW = {"attention.sliding_window": "sliding_window"}
FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
ROPE = {"rope.freq_base": "rope_theta"}
RMS = {**ROPE, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}

SSM = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
NUMBERED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
SIZES_BY_LAYER = {key: name for key, name in SIZES.items() if key != "attention.head_count_kv"}


def mamba(scope: str) -> dict[str, str]:
    return {"ssm_in": f"{scope}.in_proj", "ssm_conv1d": f"{scope}.conv1d", "ssm_out": f"{scope}.out_proj"}


def mamba_vectors(scope: str) -> dict[str, str]:
    leaves = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_norm.weight": "norm.weight"}
    return {leaf: f"{scope}.{own}" for leaf, own in leaves.items()}


GRANITE_FLOATS = {
    **RMS,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GPT2_SIZES = {"feed_forward_length": "n_inner"}

SILU = {"hidden_act": "silu"}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
LLAMA_PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
LLAMA_FLAGS = {**ATTENTION_BIAS, "mlp_bias": "ffn_gate.bias"}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`; what a row does not say is as most have it.

    tensors: leaf of a block's tensor -> HF's leaf; per_index: the same for tensors stacked along their first axis,
    which HF keeps apart ("{}" takes the index), or each one's rows under several names, as many under each. ints, floats:
    metadata key without its prefix -> config key. constants: config keys that the architecture implies. flags: config key ->
    leaf whose presence makes it true.
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
    tensors: Mapping[str, str] = field(default_factory=lambda: LLAMA_TENSORS)
    per_index: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    ints: Mapping[str, str] = field(default_factory=lambda: SIZES_AND_HEAD)
    floats: Mapping[str, str] = field(default_factory=lambda: RMS)
    constants: Mapping[str, object] = field(default_factory=lambda: SILU)
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
