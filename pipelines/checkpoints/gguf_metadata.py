"""Read the metadata of GGUF files with type checks, and map GGUF's names to HF's names."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from castiron.emitter.shorten import shorten
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf_file import GgufFile

# Keys that `unread` does not list, because they repeat the tensors' shapes, do not change the logits
# of a text, or are read by `gguf_config.encoding_of`.
_SILENT_KEYS = {"vocab_size", "tensor_data_layout", "pooling_type", "expert_shared_count"}
_SILENT_KEYS |= {"rope.scaling.finetuned", "rope.dimension_sections"}
_SILENT_KEYS |= {f"dense_{n}_feat_{end}" for n in (2, 3) for end in ("in", "out")}


class Metadata:
    """Reads the metadata of a GGUF file whose keys start with a prefix, and checks their types.

    The default prefix is the name of the file's architecture, such as `llama.`. The methods take
    keys without the prefix: `context_length` for `llama.context_length`.
    """

    def __init__(self, file: GgufFile, prefix: str | None = None):
        self.file = file
        self.prefix = prefix or architecture_name(file) + "."
        self._read: set[str] = set()  # `unread` lists the other keys

    def error(self, message: str) -> CheckpointError:
        """Return the error `<path of the file>: <message>`."""
        return CheckpointError(f"{self.file.path}: {message}")

    def invalid(self, key: str, wanted: str) -> CheckpointError:
        """Return the error `<key> is <its value>, not <wanted>`; wanted: what a valid value is."""
        value = self.get(key)
        stated = shorten(value.tolist() if isinstance(value, np.ndarray) else value, 40)
        return self.error(f"{self.prefix}{key} is {stated}, not {wanted}; convert the model again")

    def get(self, key: str, default=None):
        """Return the value of a key without a check; `default` if the file lacks the key."""
        self._read.add(key)
        return self.file.metadata.get(self.prefix + key, default)

    def _typed(self, key: str, type_: type, wanted: str, default):
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # a number per layer, all equal
        if value is not None and (not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool)):
            raise self.invalid(key, wanted)
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        """Return the non-negative integer under a key; `default` if the file lacks the key.

        An array of equal integers counts as one integer.
        """
        value = self._typed(key, numbers.Integral, "an integer", default)
        if value is not None and value < 0:
            raise self.invalid(key, "an integer of at least 0")
        return value

    def real(self, key: str, default: float | None = None) -> float | None:
        """Return the finite number under a key; `default` if the file lacks the key.

        An array of equal numbers counts as one number.
        """
        value = self._typed(key, numbers.Real, "a number", default)
        if value is not None and not math.isfinite(value):
            raise self.invalid(key, "a finite number")
        return None if value is None else float(value)

    def string(self, key: str, default: str | None = None) -> str | None:
        """Return the string under a key; `default` if the file lacks the key."""
        return self._typed(key, str, "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under a key; `default` if the file lacks the key."""
        return self._typed(key, bool, "true or false", default)

    def required(self, key: str) -> int:
        """Return the positive integer under a key; CheckpointError if the file lacks the key."""
        value = self.integer(key)
        if not value:
            raise self.error(f"metadata key {self.prefix}{key} is {'missing' if value is None else 0}; download the file again")
        return value

    def by_layer(self, key: str) -> list[int]:
        """Return the numbers under a key, one for each layer.

        If the file has a single number, it applies to all layers.
        """
        blocks, stated = self.required("block_count"), self.get(key)
        found = [stated] * blocks if isinstance(stated, int) else np.asarray(stated).tolist()
        if not isinstance(found, list) or len(found) != blocks or not all(isinstance(n, int) and n >= 0 for n in found):
            raise self.invalid(key, f"an integer of at least 0 for each of {blocks} blocks")
        return found

    def has(self, layer: int, leaf: str) -> bool:
        """Return whether the file has a tensor `blk.<layer>.<leaf>`, as in `blk.0.attn_q.bias`."""
        return f"blk.{layer}.{leaf}" in self.file.tensors

    def unread(self) -> list[str]:
        """Return the metadata keys that have not been read with `get` or another method.

        A model with such keys is rejected, because they may change the logits. A few keys that need
        no such check are not returned.
        """
        own = (key for key in self.file.metadata if key.startswith(self.prefix))
        return sorted(key for key in own if key.removeprefix(self.prefix) not in self._read | _SILENT_KEYS)


def architecture_name(file: GgufFile) -> str:
    """Return the file's `general.architecture`; CheckpointError if it has none."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path} has no general.architecture; give a model's GGUF file")
    return name


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
    """Return the names of expert matrices: {GGUF name: HF name of one expert's matrix}.

    A GGUF tensor has the matrices of all experts; `{}` in an HF name stands for the expert's index.

    parent: HF's name of the module that has the experts, such as "mlp".
    gate, up, down: HF's names of an expert's three matrices.
    """
    leaves = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {leaf: f"{parent}.experts.{{}}.{own}" for leaf, own in leaves.items()}


def mamba(parent: str) -> Names:
    """Return {GGUF name: HF name} of the matrices of a Mamba layer.

    parent: HF's name of the layer, with which the HF names in the result start.
    """
    return {"ssm_in": f"{parent}.in_proj", "ssm_conv1d": f"{parent}.conv1d", "ssm_out": f"{parent}.out_proj"}


def mamba_vectors(parent: str) -> Names:
    """Return {GGUF name: HF name} of the vectors of a Mamba layer.

    parent: HF's name of the layer, with which the HF names in the result start.
    """
    leaves = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_norm.weight": "norm.weight"}
    return {leaf: f"{parent}.{own}" for leaf, own in leaves.items()}


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

# Config key for n, if every n-th layer has full attention; `gguf_rules.layer_types` replaces it by a list.
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
    """The rules that convert metadata and tensors of one GGUF architecture to HF's.

    A leaf is a tensor's name without its block and ending: GGUF's `attn_q` in
    `blk.0.attn_q.weight`, HF's `self_attn.q_proj` in `model.layers.0.self_attn.q_proj.weight`. A
    metadata key is without the architecture's prefix. The default values fit most architectures.

    Attributes:
        model_type: HF's model_type.
        tensors: {GGUF leaf: HF leaf}.
        per_index: {GGUF leaf of a tensor with the matrices of all experts: HF leaf of one expert's
            matrix, with `{}` for its index}. If there are several HF leaves, the rows of each
            expert are divided equally between them.
        ints, floats: {metadata key: config key}, for values to copy.
        constants: {config key: value}, for values that all models of the architecture have.
        fixed: {metadata key: the only supported value}.
        flags: {config key: name of a tensor in block 0}. The config value is whether the file has
            this tensor.
        permuted: {GGUF leaf of a Q or K weight: config key of its number of heads}, if llama.cpp
            reorders its rows for interleaved rotary embeddings.
        bare: GGUF leaves whose HF name has no ".weight".
        top: {GGUF name: HF name}, for tensors outside blocks.
        block: prefix of HF's tensor names in a block; `{}` stands for the block's index.
        vectors: {GGUF leaf, with ".bias" or ".weight" if it has one: HF leaf}, for tensors that are
            read as f32 vectors.
        joined: {several GGUF leaves: HF leaf}. The HF tensor is the concatenation of their rows.
        absorbed: {(GGUF leaf of keys, GGUF leaf of values): HF leaf}, for latent attention (MLA),
            where HF has one matrix for both.
        by_layer: metadata keys that only `rules` read, such as those with a number for each layer.
        tiled: {GGUF leaf of a linear-attention tensor: "heads", "rows", "last rows" or "columns"}:
            what is in another order in GGUF. HF has all value heads of the first key head, then
            those of the next. GGUF has the first value head of every key head, then the second.
        grouped: {GGUF leaf: {HF leaf: letters}}, for linear-attention tensors that contain several
            HF tensors. The rows are in one group for each key head. Each letter stands for
            consecutive rows of a group: "k", the features of a key; "v", the features of all
            values; "h", one row for each value head.
        norms_plus_one: whether GGUF stores the weights of norms plus 1.
        rules: names of the functions in gguf_rules that set the other config values.
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
