"""Tensors of HF directories, renamed and rearranged for castiron's model families
(castiron.emitter.models).

Models with vision or audio are reduced to their text part. Families read matrices as [out, in] and
one tensor for each expert; HF's `conversion_mapping` and modules define what is stored instead.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from castiron.emitter.shorten import shorten_list
from castiron.pipelines.checkpoints.checkpoint import Tensor


@dataclass(frozen=True)
class TextPart:
    """The language model inside a multimodal model.

    model_type: type of the text part, used if its config has no model_type. defaults: sizes that
    published configs leave out.
    """

    model_type: str
    defaults: Mapping[str, int] = field(default_factory=dict)


_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
# By the multimodal model's type. For text, multi-dimensional rotary embeddings are plain ones.
TEXT_PARTS: dict[str, TextPart] = {
    "gemma3": TextPart("gemma3_text", _GEMMA3),
    "gemma4": TextPart("gemma4_text"),
    "idefics3": TextPart("llama"),
    "lfm2_vl": TextPart("lfm2"),
    "lfm3_vl": TextPart("lfm3"),
    "mistral3": TextPart("mistral"),
    "qwen3_5": TextPart("qwen3_5_text"),
    "qwen3_5_moe": TextPart("qwen3_5_moe_text"),
    "qwen3_vl": TextPart("qwen3"),
    "smolvlm": TextPart("llama"),
}
# model_type of a text part -> its family, where they differ.
_SAME = {"qwen3_vl_text": "qwen3"}
# Text models that transformers saves under the names of the multimodal model.
_TEXT_ONLY = ("qwen3_5_text", "qwen3_5_moe_text")

# Prefixes of a text part's tensors -> those of a text model.
_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Prefixes of other parts, with or without "model.".
_OTHERS = (
    *("visual.", "vision_tower.", "vision_model.", "embed_vision.", "multi_modal_projector.", "connector."),
    *("audio_tower.", "embed_audio.", "mtp."),
)


def text_config(config: dict, names: Collection[str]) -> dict:
    """Return the config of the text part, or the config itself for a text model.

    names: the tensors' names. The output head is tied to the embedding if either config states it,
    or if neither states anything and no lm_head.weight is stored.
    """
    inner, part = config.get("text_config"), TEXT_PARTS.get(config.get("model_type", ""))
    if part is None or not isinstance(inner, dict):
        return config
    model_type = inner.get("model_type") or part.model_type
    stated = [own["tie_word_embeddings"] for own in (config, inner) if own.get("tie_word_embeddings") is not None]
    tied = any(stated) if stated else not any(name.endswith("lm_head.weight") for name in names)
    return {**part.defaults, **inner, "model_type": _SAME.get(model_type, model_type), "tie_word_embeddings": tied}


def text_tensors(model_type: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors of the text part, and the number of dropped tensors by prefix of their
    names."""
    if model_type not in (*TEXT_PARTS, *_TEXT_ONLY):
        return dict(tensors), {}
    found: dict[str, Tensor] = {}
    left_out: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if other := next((other for other in _OTHERS if name.removeprefix("model.").startswith(other)), None):
            left_out[name[: name.index(other)] + other.removesuffix(".")] += 1
        else:
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
            own = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            found[own] = replace(tensor, name=own)
    return found, dict(left_out)


def in_words(left_out: Mapping[str, int]) -> str:
    """Return the result of `text_tensors` as text: `12 tensors of model.visual, 1 tensor of mtp`."""
    return shorten_list([f"{count} tensor{'s' * (count != 1)} of {part}" for part, count in left_out.items()], max_length=500)


# A tensor with more experts is not split.
MAX_EXPERTS = 4096

# Functions from a number of rows to the slice of them that a part has.
_ALL: Callable[[int], slice] = lambda rows: slice(rows)
_FIRST: Callable[[int], slice] = lambda rows: slice(rows // 2)
_SECOND: Callable[[int], slice] = lambda rows: slice(rows // 2, rows)
_EVEN: Callable[[int], slice] = lambda rows: slice(0, rows, 2)
_ODD: Callable[[int], slice] = lambda rows: slice(1, rows, 2)


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores the tensors whose names match `pattern`, and which tensors families
    read instead.

    parts: name of a tensor that families read -> function from the number of stored rows to the
    slice of rows that belong to it. The name is a template with the groups of the match; if the
    stored tensor stacks all experts, `{}` is an expert's number. If there are no parts, the stored
    tensor is dropped.
    transposed: whether the stored matrix is [in, out].
    scales: if the stored tensor has MXFP4 blocks, template of the name of the tensor with their
    exponents.
    """

    pattern: str
    parts: Mapping[str, Callable[[int], slice]]
    transposed: bool = False
    scales: str | None = None

    def matches(self, tensor: Tensor, scales: Tensor | None) -> bool:
        """Return whether the stored tensor has the rank of this layout, and its scales the shape
        they need."""
        stacked = any("{}" in name for name in self.parts)
        if self.scales and (scales is None or len(tensor.shape) != 4 or scales.shape != tensor.shape[:-1]):
            return False
        return len(tensor.shape) > stacked + self.transposed and (not stacked or tensor.shape[0] <= MAX_EXPERTS)


_GRANITE = (
    Layout(
        r"(.*\.block_sparse_moe)\.input_linear\.weight",
        {r"\1.experts.{}.gate_proj.weight": _FIRST, r"\1.experts.{}.up_proj.weight": _SECOND},
    ),
    Layout(r"(.*\.block_sparse_moe)\.output_linear\.weight", {r"\1.experts.{}.down_proj.weight": _ALL}),
)
# As HF's modules save them.
_STACKED = (
    Layout(r"(.*\.experts)\.gate_up_proj", {r"\1.{}.gate_proj.weight": _FIRST, r"\1.{}.up_proj.weight": _SECOND}),
    Layout(r"(.*\.experts)\.down_proj", {r"\1.{}.down_proj.weight": _ALL}),
)
# Layers of multi-token prediction, which castiron doesn't run.
_FURTHER = Layout(r"mtp\..*", {})

# By model type.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    # The first checkpoints have other names for LayerNorms.
    "bert": (
        Layout(r"(?:bert\.)?pooler\..*|cls\..*|classifier\..*", {}),
        Layout(r"(?:bert\.)?((?:embeddings|encoder)\..*LayerNorm)\.gamma", {r"\1.weight": _ALL}),
        Layout(r"(?:bert\.)?((?:embeddings|encoder)\..*LayerNorm)\.beta", {r"\1.bias": _ALL}),
        Layout(r"(?:bert\.)?((?:embeddings|encoder)\..*)", {r"\1": _ALL}),
    ),
    "modernbert": (
        Layout(r"(?:head|decoder|classifier)\..*", {}),
        Layout(r"(?:model\.)?((?:embeddings|layers|final_norm)\..*)", {r"\1": _ALL}),
    ),
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "gemma4_text": _STACKED,
    "qwen3_5_moe_text": _STACKED,
    "qwen3_next": (*_STACKED, _FURTHER),
    "lfm3": (Layout(r"(.*\.self_attn)\.gate_proj\.weight", {r"\1.g_proj.weight": _ALL}),),
    "nemotron_h": (
        _FURTHER,
        Layout(r"backbone\.(.*\.experts)\.(up|down)_proj", {r"model.\1.{}.\2_proj.weight": _ALL}),
        Layout(r"backbone\.(.*)", {r"model.\1": _ALL}),
    ),
    # The layer after the last one is for multi-token prediction; HF drops it by its number.
    "glm4_moe_lite": (Layout(r"model\.layers\.47\..*", {}),),
    # The first checkpoints have causal masks, and names without "transformer.".
    "gpt2": (
        Layout(r".*\bh\.\d+\.attn\.(bias|masked_bias)", {}),
        Layout(r"(?:transformer\.)?(h\..*\.c_(?:attn|proj|fc)\.weight)", {r"transformer.\1": _ALL}, transposed=True),
        Layout(r"(?:transformer\.)?((?:h|wte|wpe|ln_f)\..*)", {r"transformer.\1": _ALL}),
    ),
    "gpt_oss": (
        Layout(
            r"(.*\.mlp\.experts)\.gate_up_proj",
            {r"\1.{}.gate_proj.weight": _EVEN, r"\1.{}.up_proj.weight": _ODD},
            transposed=True,
        ),
        Layout(r"(.*\.mlp\.experts)\.down_proj", {r"\1.{}.down_proj.weight": _ALL}, transposed=True),
        Layout(r"(.*\.mlp\.experts)\.gate_up_proj_bias", {r"\1.{}.gate_proj.bias": _EVEN, r"\1.{}.up_proj.bias": _ODD}),
        Layout(r"(.*\.mlp\.experts)\.down_proj_bias", {r"\1.{}.down_proj.bias": _ALL}),
        Layout(
            r"(.*\.mlp\.experts)\.gate_up_proj_blocks",
            {r"\1.{}.gate_proj.weight": _EVEN, r"\1.{}.up_proj.weight": _ODD},
            scales=r"\1.gate_up_proj_scales",
        ),
        Layout(r"(.*\.mlp\.experts)\.down_proj_blocks", {r"\1.{}.down_proj.weight": _ALL}, scales=r"\1.down_proj_scales"),
    ),
}


def family_tensors(model_type: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names and in the shapes that the model's family reads.

    Data is rearranged when a tensor is read.
    """
    found: dict[str, Tensor] = {}
    replaced: set[str] = set()
    for tensor in tensors.values():
        for layout in LAYOUTS.get(model_type, ()):
            if (match := re.fullmatch(layout.pattern, tensor.name)) is None:
                continue
            scales = tensors.get(match.expand(layout.scales)) if layout.scales else None
            if layout.matches(tensor, scales):
                found.update((part.name, part) for part in _parts(layout, match, tensor, scales))
                replaced |= {stored.name for stored in (tensor, scales) if stored is not None}
                break
    return {name: tensor for name, tensor in tensors.items() if tensor.name not in replaced} | found


def _parts(layout: Layout, match: re.Match, tensor: Tensor, scales: Tensor | None) -> Iterator[Tensor]:
    """Yield the tensors into which a layout divides one stored tensor."""
    for template, rows in layout.parts.items():
        name = match.expand(template)
        for index in range(tensor.shape[0]) if "{}" in name else (None,):
            if scales is None:
                yield _part(name.format(index), tensor, index, rows, layout.transposed)
            else:
                yield _blocks(name.format(index), tensor, scales, index, rows)


def _part(name: str, tensor: Tensor, index: int | None, rows: Callable[[int], slice], transposed: bool) -> Tensor:
    """Return a tensor made of some rows of a stored matrix, or of some elements of a vector.

    rows: function from the number of rows to the slice to take. index: the expert, if the stored
    tensor stacks all experts.
    """
    shape = tensor.shape if index is None else tensor.shape[1:]
    shape = shape[::-1] if transposed else shape
    taken = rows(shape[0])

    def read() -> np.ndarray:
        own = tensor.data if index is None else tensor.data[index]
        if transposed:
            own = own.reshape(shape[1], shape[0], -1).swapaxes(0, 1)
        own = own.reshape(shape[0], -1)[taken]
        return own.reshape(len(own), *shape[1:-1], -1) if len(shape) > 1 else own.reshape(-1)

    return Tensor(name, (len(range(*taken.indices(shape[0]))), *shape[1:]), tensor.codec, tensor.source, read)


def _blocks(name: str, blocks: Tensor, scales: Tensor, index: int, rows: Callable[[int], slice]) -> Tensor:
    """Return some rows of expert `index`'s MXFP4 matrix as GGUF's blocks of 32 elements.

    A GGUF block is the exponent, then 16 bytes with codes i and i + 16 in byte i. `blocks` is u8
    [experts, rows, groups, 16] with codes 2 i and 2 i + 1 in byte i, `scales` the exponents, u8
    [experts, rows, groups].
    """
    _, count, groups, width = blocks.shape
    taken = rows(count)

    def read() -> np.ndarray:
        pairs, exponents = blocks.data[index][taken], scales.data[index][taken]
        codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(*exponents.shape, 2, width)
        packed = np.concatenate([exponents[..., None], codes[..., 0, :] | codes[..., 1, :] << 4], -1)
        return packed.reshape(len(packed), -1)

    return Tensor(name, (len(range(*taken.indices(count))), groups * width * 2), "mxfp4", blocks.source, read)
