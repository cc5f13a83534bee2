"""Whether a checkpoint has exactly the tensors that its model calls for."""

import re
from collections.abc import Mapping

import numpy as np

from castiron.pipelines.checkpoints.checkpoint import Checkpoint

# Tensors of some checkpoints that hold nothing of the model: buffers that are computed from the config.
IGNORABLE = (
    re.compile(r".*\.rotary_emb\.inv_freq"),
    re.compile(r".*\.rotary_emb\.(cos|sin)_cached"),
    re.compile(r".*\.(attn|self_attn|attention)\.(masked_bias|causal_mask)"),
)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
        if name == _HEAD and _EMBEDDING in required and _EMBEDDING in tensors:
            if not _equal(tensors[_HEAD], tensors[_EMBEDDING]):
                violations.append(f"{_HEAD} differs from {_EMBEDDING}, to which the config ties it")
            continue
        violations.append(f"{name} {_shape(tensors[name].shape)} is left over")
    return violations


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _equal(one, other) -> bool:
    return one.shape == other.shape and one.codec == other.codec and np.array_equal(one.data, other.data)
