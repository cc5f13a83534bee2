"""Choose the codec of each weight for a value of --weights; convert and pack the weights.

A mix, such as `q4_k_m`, gives weights different codecs, as in llama.cpp (src/llama-quant.cpp). So a
bundle is as large and as accurate as a GGUF file of the same type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from castiron.emitter.abi import FLOATS, MIXES
from castiron.emitter.codecs import codec_of, row_bytes
from castiron.emitter.codecs.quantise import convert
from castiron.emitter.graph.ir import Module, Param
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from castiron.vmfb.bundle.irpa import write_irpa

Importance = Mapping[str, np.ndarray]
UNIFORM: Importance = MappingProxyType({})

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.weight", "transformer.wte.weight")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d{1,9})\.")
# Matrices that are not quantised, as in llama.cpp: routers and small matrices.
_UNQUANTISED = re.compile(
    r".*\.(gate|router|router\.layer|shared_expert_gate|wpe|(position|token_type)_embeddings|per_layer_model_projection)\.weight"
)
_VALUES = re.compile(r".*\.(v_proj|qkv_proj)\.weight")
_DOWN = re.compile(r".*\.(down_proj|w2|mlp\.c_proj|output_linear)(\.weight)?")
_KEYS, _OUT = re.compile(r".*\.k_proj\.weight"), re.compile(r".*\.o_proj\.weight")
# Experts that were trained in this codec are not requantised.
_TRAINED = "mxfp4"
# Replacements for codecs whose blocks of 256 don't divide a row.
_SMALLER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def codecs_of(checkpoint: Checkpoint, weights: str, requantise: bool = False) -> dict[str, str]:
    """Return the codec of each tensor in the bundle.

    Vectors keep theirs. With a quantisation, so do routers, other small matrices, experts trained
    in MXFP4, and matrices that no suitable block divides.

    requantise: whether to quantise quantised matrices again, if they become smaller.
    """
    matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1]
    codecs = {tensor.name: tensor.codec for tensor in checkpoint.tensors.values()}
    if weights in FLOATS:
        return codecs | {tensor.name: weights for tensor in matrices}
    if weights == "native":
        return codecs
    matrices = [tensor for tensor in matrices if tensor.codec != _TRAINED]
    quantised = sorted({tensor.codec for tensor in matrices if codec_of(tensor.codec).quantised})
    if quantised and not requantise:
        raise CheckpointError(
            f"{checkpoint.path} is already quantised to {', '.join(quantised)}; give the checkpoint in f32, bf16 or f16, "
            f"leave --weights {weights} out, or add --requantise, which loses accuracy"
        )
    wanted = _mixed(checkpoint, matrices, weights) if weights in MIXES else {}
    for tensor in matrices:
        # A convolution's filter has three dimensions, as a stack of all experts has.
        is_matrix = len(tensor.shape) == 2 or (len(tensor.shape) == 3 and ".experts." in tensor.name)
        if is_matrix and not _UNQUANTISED.fullmatch(tensor.name):
            codec, features = _fitting_codec(tensor, wanted.get(tensor.name, weights)), tensor.shape[-1]
            if row_bytes(codec, features) < row_bytes(tensor.codec, features):
                codecs[tensor.name] = codec
    return codecs


def _fitting_codec(tensor: Tensor, codec: str) -> str:
    """Return the codec, one with smaller blocks, or the tensor's: the first that divides a row."""
    features = tensor.shape[-1]
    if features % codec_of(codec).block:
        codec = _SMALLER.get(codec, codec)
    return tensor.codec if features % codec_of(codec).block else codec


def _mixed(checkpoint: Checkpoint, matrices: list[Tensor], mix: str) -> dict[str, str]:
    base, config = MIXES[mix], checkpoint.config
    eight_experts = (config.get("num_local_experts") or config.get("num_experts")) == 8
    tied = config.get("tie_word_embeddings") or _HEAD not in checkpoint.tensors
    heads = _EMBEDDINGS if tied else (_HEAD,)
    # Count only layers with such a tensor, because in a hybrid model only some have value projections.
    layers_with = {
        pattern: sorted({_layer_of(m.name) for m in matrices if pattern.fullmatch(m.name)}) for pattern in (_VALUES, _DOWN)
    }

    def more_bits(name: str, pattern: re.Pattern) -> bool:
        layer, layers = layers_with[pattern].index(_layer_of(name)), len(layers_with[pattern])
        return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2

    def mixed_codec(name: str) -> str:
        if name in heads:
            return "q6_k"
        if _VALUES.fullmatch(name):
            return "q8_0" if eight_experts else "q6_k" if more_bits(name, _VALUES) else base
        if _DOWN.fullmatch(name):
            return "q6_k" if more_bits(name, _DOWN) else base
        if eight_experts and _KEYS.fullmatch(name):
            return "q8_0"
        return "q5_k" if eight_experts and _OUT.fullmatch(name) else base

    return {tensor.name: mixed_codec(tensor.name) for tensor in matrices}


def _layer_of(name: str) -> int:
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def convert_tensor(tensor: Tensor, codec: str, path: Path, importance: np.ndarray | None = None) -> np.ndarray:
    """Return the data of a tensor of the checkpoint `path` in a codec."""
    if tensor.codec == codec:
        return tensor.data
    try:
        return convert(tensor.codec, tensor.data, codec, importance)
    except ValueError as error:
        raise CheckpointError(f"cannot convert {tensor.name} of {path} to {codec}: {error}") from None


def write_parameters(
    path: Path,
    checkpoint: Checkpoint,
    module: Module,
    importance: Importance,
    progress: Callable[[float], None],
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> str:
    """Write a module's packed parameters and `more` arrays to an IRPA file; return its SHA-256."""
    params = sorted(module.params.values(), key=lambda param: param.name)
    pack = lambda param: lambda: pack_parameter(checkpoint, param, importance)
    packed = [(param.name, pack(param), (param.type.shape, param.type.dtype.numpy)) for param in params]
    added = [(name, lambda array=array: array, (array.shape, array.dtype)) for name, array in more.items()]
    return write_irpa(path, [*packed, *added], lambda done, total: progress(done / total))


def pack_parameter(checkpoint: Checkpoint, param: Param, importance: Importance = UNIFORM) -> np.ndarray:
    """Convert and pack the weights of one parameter into the array that functions read."""
    # A parameter may name a tensor several times. Convert it only once, because quantising is slow.
    read = {
        (name, codec): convert_tensor(checkpoint.tensors[name], codec, checkpoint.path, importance.get(name))
        for name, codec in dict.fromkeys(param.source.tensors)
    }
    return np.ascontiguousarray(param.source.pack(*(read[source] for source in param.source.tensors)))
