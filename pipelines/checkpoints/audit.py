"""Whether a checkpoint has exactly the tensors that its model calls for, and whether its sizes are possible at all."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from castiron.emitter.shown import shown_text
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor

# Tensors of some checkpoints that hold nothing of the model: buffers that are computed from the config.
IGNORABLE = (
    re.compile(r".*\.rotary_emb\.inv_freq"),
    re.compile(r"(.*\.)?embeddings\.position_ids"),
    re.compile(r".*\.rotary_emb\.(cos|sin)_cached"),
    re.compile(r".*\.(attn|self_attn|attention)\.(masked_bias|causal_mask)"),
)

# Of a config, what cannot be more than the tensors show: layers and experts are counted, the rest is an extent of some.
_LAYERS, _EXPERTS = ("num_hidden_layers", "n_layer"), ("num_local_experts", "num_experts", "num_experts_per_tok")
_EXTENTS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_size_per_layer_input", "n_embd", "n_head", "n_inner", "n_positions",
)  # fmt: skip

_KEY_OR_VALUE = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.(?:k_proj|v_proj|k_norm)\.(?:weight|bias)")
_EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def refuse_impossible_sizes(path: Path, config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError, naming `path`, for a config (HF's keys) of more layers, experts or elements than the tensors have.

    shapes: by the tensors' names, HF's or GGUF's. What is built after this is no larger than what was read.
    """
    numbers = [[part for part in name.split(".") if part.isdecimal()] for name in shapes]
    # model.layers.3.mlp.experts.7.up_proj.weight, or one tensor [experts, out, in] for all.
    layers = len({found[0] for found in numbers if found})
    stacked = max((shape[0] for shape in shapes.values() if len(shape) == 3), default=0)
    experts = max(stacked, len({found[1] for found in numbers if len(found) > 1}))
    extent = max((size for shape in shapes.values() for size in shape), default=0)
    for keys, most, what in (
        (_LAYERS, layers, f"has tensors of {layers} layers"),
        (_EXPERTS, experts, f"has tensors of {experts} experts"),
        (_EXTENTS, extent, f"has no tensor longer than {extent}"),
    ):
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and value > most:
                said = str(value) if value < 10**20 else "more than 10^20"
                raise CheckpointError(f"{path} gives {key} as {said} and {what}: fetch the checkpoint again")


def without_shared(tensors: dict[str, Tensor], config: Mapping) -> dict[str, Tensor]:
    """Without the keys and values of Gemma 4's layers that attend to those of earlier ones: checkpoints hold them, and no model
    has them."""
    layers, shared = config.get("num_hidden_layers"), config.get("num_kv_shared_layers")
    if config.get("model_type") != "gemma4_text" or not isinstance(layers, int) or not isinstance(shared, int):
        return tensors
    others = range(layers - shared, layers)
    # Only whole numbers are looked for in a range at once.
    left = {name for name in tensors if (match := _KEY_OR_VALUE.fullmatch(name)) and int(match[1]) in others}
    return {name: tensor for name, tensor in tensors.items() if name not in left}


def missing_and_left_over(required: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> list[str]:
    """Every way in which the checkpoint's tensors differ from `required` (HF name -> shape), a sentence each.

    An output head that is stored although the model ties it is in order if it equals the embedding.
    """
    tensors = checkpoint.tensors
    violations = []
    for name, shape in required.items():
        if name not in tensors:
            violations.append(f"{name} {_shape(shape)} is missing")
        elif tuple(tensors[name].shape) != tuple(shape):
            violations.append(f"{name} is {_shape(tensors[name].shape)}, the config calls for {_shape(shape)}")
    for name in tensors:
        if name in required or any(pattern.fullmatch(name) for pattern in IGNORABLE):
            continue
        if name == HEAD and _EMBEDDING in required and _EMBEDDING in tensors:
            if not _equal(tensors[HEAD], tensors[_EMBEDDING]):
                violations.append(f"{HEAD} differs from {_EMBEDDING}, to which the config ties it")
            continue
        violations.append(f"{shown_text(name, 60)} {_shape(tensors[name].shape)} is left over")
    return violations


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _equal(one, other) -> bool:
    return one.shape == other.shape and one.codec == other.codec and np.array_equal(one.data, other.data)
