"""What `--weights` says: the codec that each tensor of a checkpoint is stored in.

Where a type is a mix (`q4_k_m`), and where a row is no whole number of a type's blocks, it is as llama.cpp has it
(src/llama-quant.cpp), so that a bundle is as large and as good as the file of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from castiron.emitter.codecs import CODECS
from castiron.emitter.quantise import ENCODERS
from castiron.pipelines.checkpoints import Checkpoint, CheckpointError, Tensor

FLOATS = ("f32", "bf16", "f16")
# Of each mix the type of most matrices.
MIXES = {"q4_k_m": "q4_k", "q5_k_m": "q5_k"}
QUANTISED = (*ENCODERS, *MIXES)
WEIGHTS = ("native", *FLOATS, *QUANTISED)

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.weight", "transformer.wte.weight")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d{1,9})\.")
# A router chooses experts by small differences, positions and what mixes embeddings into layers are added as they are; all are
# small, and llama.cpp leaves them alone.
_KEPT = re.compile(
    r".*\.(gate|router|router\.layer|shared_expert_gate|wpe|(position|token_type)_embeddings|per_layer_model_projection)\.weight"
)
_VALUES, _DOWN = (
    re.compile(r".*\.(v_proj|qkv_proj)\.weight"),
    re.compile(r".*\.(down_proj|w2|mlp\.c_proj|output_linear)(\.weight)?"),
)
_KEYS, _OUT = re.compile(r".*\.k_proj\.weight"), re.compile(r".*\.o_proj\.weight")
# The type that experts were trained in stays, whatever the others are quantised to.
_TRAINED = "mxfp4"
# What takes the place of a type whose blocks do not fill a row, by the elements of its blocks.
_SMALLER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def codecs_of(checkpoint: Checkpoint, weights: str) -> dict[str, str]:
    """The codec of every tensor by name. CheckpointError for a checkpoint that is quantised already, where `weights` quantises.

    Vectors keep their own, and so do what the types have no blocks for, small matrices that choose or add, and experts that
    were trained in MXFP4.
    """
    tensors = checkpoint.tensors
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
    codecs = {tensor.name: tensor.codec for tensor in tensors.values()}
    if weights in FLOATS:
        return codecs | {tensor.name: weights for tensor in matrices}
    if weights == "native":
        return codecs
    matrices = [tensor for tensor in matrices if tensor.codec != _TRAINED]
    if held := sorted({tensor.codec for tensor in matrices if CODECS[tensor.codec].quantised}):
        raise CheckpointError(
            f"{checkpoint.path} holds {', '.join(held)} already, and quantising that again would add to its error: "
            f"give the checkpoint in f32, bf16 or f16, or leave --weights {weights} out"
        )
    wanted = {tensor.name: weights for tensor in matrices}
    if weights in MIXES:
        wanted = dict(_mixed(checkpoint, matrices, weights))
    for tensor in matrices:
        if _quantisable(tensor):
            codecs[tensor.name] = _fitting(tensor, wanted[tensor.name])
    return codecs


def use_more_bits(layer: int, layers: int) -> bool:
    """Whether a mix spends more bits on a layer (llama.cpp, src/llama-quant.cpp): the first and the last eighth, and every
    third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _quantisable(tensor: Tensor) -> bool:
    """A matrix, or one for each expert, that a product or an embedding reads."""
    experts = len(tensor.shape) == 3 and ".experts." in tensor.name
    return (len(tensor.shape) == 2 or experts) and not _KEPT.fullmatch(tensor.name)


def _fitting(tensor: Tensor, codec: str) -> str:
    features = tensor.shape[-1]
    if features % CODECS[codec].block:
        codec = _SMALLER.get(codec, codec)
    return tensor.codec if features % CODECS[codec].block else codec


def _mixed(checkpoint: Checkpoint, matrices: list[Tensor], mix: str) -> Iterator[tuple[str, str]]:
    """Name and codec of each matrix, before it is seen whether that fits."""
    most = MIXES[mix]
    config = checkpoint.config
    eight = (config.get("num_local_experts") or config.get("num_experts")) == 8
    tied = config.get("tie_word_embeddings") or _HEAD not in checkpoint.tensors
    heads = _EMBEDDINGS if tied else (_HEAD,)
    # Layers are counted among those that have such a tensor: a hybrid model has values in some alone.
    with_values, with_down = _layers_with(matrices, _VALUES), _layers_with(matrices, _DOWN)
    for tensor in matrices:
        name, layer = tensor.name, _layer_of(tensor)
        codec = most
        if name in heads:
            codec = "q6_k"
        elif _VALUES.fullmatch(name):
            more = use_more_bits(with_values.index(layer), len(with_values))
            codec = "q8_0" if eight else "q6_k" if more else most
        elif _DOWN.fullmatch(name):
            codec = "q6_k" if use_more_bits(with_down.index(layer), len(with_down)) else most
        elif eight and _KEYS.fullmatch(name):
            codec = "q8_0"
        elif eight and _OUT.fullmatch(name):
            codec = "q5_k"
        yield name, codec


def _layer_of(tensor: Tensor) -> int:
    found = _LAYER.match(tensor.name)
    return int(found[1]) if found else -1


def _layers_with(matrices: list[Tensor], pattern: re.Pattern) -> list[int]:
    return sorted({_layer_of(tensor) for tensor in matrices if pattern.fullmatch(tensor.name)})
