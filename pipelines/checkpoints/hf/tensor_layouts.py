"""Rename and rearrange the tensors of HF directories and adapters for castiron's model code.

The code of a family (`emitter.models`) reads matrices as [out, in], and one tensor for each expert;
HF's `conversion_mapping` and modules show how checkpoints store them. Of a model with vision or
audio, only the text part is read.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from castiron.emitter.shorten import shorten_list
from castiron.pipelines.checkpoints.checkpoint import EMBEDDINGS, HEAD, Tensor

# From the type of a multimodal model to the type of its text part, if the config of that part has no
# type. For text, multi-dimensional rotary embeddings equal plain ones.
TEXT_PARTS = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "idefics3": "llama", "lfm2_vl": "lfm2", "lfm3_vl": "lfm3",
    "mistral3": "mistral", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl": "qwen3",
    "smolvlm": "llama",
}  # fmt: skip
# Config values that published configs leave out.
_DEFAULTS = {"gemma3": {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}}
# From the model_type of a text part to the name of its family, where they differ.
_SAME = {"qwen3_vl_text": "qwen3"}
# Text models whose tensors transformers saves with the names of the multimodal model.
_TEXT_ONLY = ("qwen3_5_text", "qwen3_5_moe_text")

# From prefixes of tensor names in a multimodal model's text part to prefixes in a text model.
_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    # A model that was saved or adapted without its output head.
    "language_model.": "model.",
    "text_model.": "model.",
}
# Prefixes of the tensors of other parts, which may follow "model.".
_OTHERS = (
    *("visual.", "vision_tower.", "vision_model.", "embed_vision.", "multi_modal_projector.", "connector."),
    *("audio_tower.", "embed_audio.", "mtp."),
)


def text_config(config: dict, names: Collection[str]) -> dict:
    """Return the config of a multimodal model's text part; of another model, `config` itself.

    names: of the tensors; without tie_word_embeddings, a model without lm_head.weight is tied.
    """
    inner, complete = config.get("text_config"), config["model_type"]
    if complete not in TEXT_PARTS or not isinstance(inner, dict):
        return config
    model_type = inner["model_type"] if isinstance(inner.get("model_type"), str) else TEXT_PARTS[complete]
    stated = [own["tie_word_embeddings"] for own in (config, inner) if own.get("tie_word_embeddings") is not None]
    tied = any(stated) if stated else not any(name.endswith("lm_head.weight") for name in names)
    own = {"model_type": _SAME.get(model_type, model_type), "tie_word_embeddings": tied}
    return {**_DEFAULTS.get(complete, {}), **inner, **own}


def text_tensors(model_type: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the text tensors with the names of a text model, and counts of others by prefix."""
    return text_part(tensors) if model_type in (*TEXT_PARTS, *_TEXT_ONLY) else (dict(tensors), {})


def text_part(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return what `text_tensors` returns for a multimodal model."""
    text: dict[str, Tensor] = {}
    left_out: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if other := next((other for other in _OTHERS if name.removeprefix("model.").startswith(other)), None):
            left_out[name[: name.index(other)] + other.removesuffix(".")] += 1
        else:
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
            text_name = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            text[text_name] = replace(tensor, name=text_name)
    return text, dict(left_out)


def base_names(tensors: Mapping[str, Tensor], prefixes: tuple[str, ...] = ("embed_tokens.weight",)) -> dict[str, Tensor]:
    """Add `model.` to names that lack it; a name starting with one of `prefixes` shows this."""
    if not any(name.startswith(prefixes) for name in tensors):
        return dict(tensors)
    named = {name: name if name.startswith(("lm_head.", "model.")) else f"model.{name}" for name in tensors}
    return {named[name]: replace(tensor, name=named[name]) for name, tensor in tensors.items()}


def with_embedding(tensors: Mapping[str, Tensor], config: Mapping) -> dict[str, Tensor]:
    """Return the tensors with an embedding; a tied model may store only the output head."""
    if HEAD not in tensors or config.get("tie_word_embeddings") is False or any(name in tensors for name in EMBEDDINGS):
        return dict(tensors)
    embedding = next(name for name in EMBEDDINGS if name.startswith("transformer.") is (config.get("model_type") == "gpt2"))
    return {
        **{name: tensor for name, tensor in tensors.items() if name != HEAD},
        embedding: replace(tensors[HEAD], name=embedding),
    }


def in_words(left_out: Mapping[str, int]) -> str:
    """Return `Checkpoint.left_out` as text: `12 tensors of model.visual, 1 tensor of mtp`."""
    return shorten_list([f"{count} tensor{'s' * (count != 1)} of {part}" for part, count in left_out.items()], max_length=500)


# Max experts in a stacked tensor; a tensor with more is not split.
MAX_EXPERTS = 4096

# A function from the number of rows of a stored tensor to the slice of rows in one of its parts.
Rows = Callable[[int], slice]
_ALL: Rows = lambda rows: slice(rows)
_FIRST: Rows = lambda rows: slice(rows // 2)
_SECOND: Rows = lambda rows: slice(rows // 2, rows)
_EVEN: Rows = lambda rows: slice(0, rows, 2)
_ODD: Rows = lambda rows: slice(1, rows, 2)


@dataclass(frozen=True)
class Layout:
    """A rule that splits, renames or drops each stored tensor whose name matches `pattern`.

    parts: by name of a new tensor, which may refer to groups of the pattern and have `{}` for an
        expert, the rows of it. Without parts, the stored tensor is dropped.
    transposed: whether the stored matrix is [in, out].
    scales: for weights in MXFP4, the name of the tensor with the exponents of their blocks.
    """

    pattern: str
    parts: Mapping[str, Rows]
    transposed: bool = False
    scales: str | None = None

    def matches(self, tensor: Tensor, scales: Tensor | None) -> bool:
        """Return whether the shapes of a stored tensor and of its MXFP4 scales fit this rule."""
        stacked = any("{}" in name for name in self.parts)
        if self.scales and (scales is None or len(tensor.shape) != 4 or scales.shape != tensor.shape[:-1]):
            return False
        return len(tensor.shape) > stacked + self.transposed and (not stacked or tensor.shape[0] <= MAX_EXPERTS)


_DOWN = {r"\1.{}.down_proj.weight": _ALL}
_INTERLEAVED = {r"\1.{}.gate_proj.weight": _EVEN, r"\1.{}.up_proj.weight": _ODD}
_GRANITE = (
    Layout(
        r"(.*\.block_sparse_moe)\.input_linear\.weight",
        {r"\1.experts.{}.gate_proj.weight": _FIRST, r"\1.experts.{}.up_proj.weight": _SECOND},
    ),
    Layout(r"(.*\.block_sparse_moe)\.output_linear\.weight", {r"\1.experts.{}.down_proj.weight": _ALL}),
)
# Stacks of experts as HF's modules save them.
_STACKED = (
    Layout(r"(.*\.experts)\.gate_up_proj", {r"\1.{}.gate_proj.weight": _FIRST, r"\1.{}.up_proj.weight": _SECOND}),
    Layout(r"(.*\.experts)\.down_proj", _DOWN),
)
# Drops layers of multi-token prediction, which castiron does not run.
_FURTHER = Layout(r"mtp\..*", {})

# By model type: layouts of tensors that have another name or form than castiron reads.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    # Old checkpoints have other names for LayerNorms.
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
    "deepseek_v2": _STACKED,
    # Layers after the last one are for multi-token prediction; HF drops them by their numbers, too.
    "deepseek_v3": (*_STACKED, Layout(r"model\.layers\.61\..*", {})),
    "glm4_moe_lite": (*_STACKED, Layout(r"model\.layers\.47\..*", {})),
    # Old checkpoints have causal masks, and names without "transformer.".
    "gpt2": (
        Layout(r".*\bh\.\d+\.attn\.(bias|masked_bias)", {}),
        Layout(r"(?:transformer\.)?(h\..*\.c_(?:attn|proj|fc)\.weight)", {r"transformer.\1": _ALL}, transposed=True),
        Layout(r"(?:transformer\.)?((?:h|wte|wpe|ln_f)\..*)", {r"transformer.\1": _ALL}),
    ),
    "gpt_oss": (
        Layout(r"(.*\.mlp\.experts)\.gate_up_proj", _INTERLEAVED, transposed=True),
        Layout(r"(.*\.mlp\.experts)\.down_proj", _DOWN, transposed=True),
        Layout(r"(.*\.mlp\.experts)\.gate_up_proj_bias", {r"\1.{}.gate_proj.bias": _EVEN, r"\1.{}.up_proj.bias": _ODD}),
        Layout(r"(.*\.mlp\.experts)\.down_proj_bias", {r"\1.{}.down_proj.bias": _ALL}),
        Layout(r"(.*\.mlp\.experts)\.gate_up_proj_blocks", _INTERLEAVED, scales=r"\1.gate_up_proj_scales"),
        Layout(r"(.*\.mlp\.experts)\.down_proj_blocks", _DOWN, scales=r"\1.down_proj_scales"),
    ),
}


def family_tensors(model_type: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert stored tensors to the names and shapes of this model type."""
    converted: dict[str, Tensor] = {}
    replaced: set[str] = set()
    for tensor in tensors.values():
        for layout in LAYOUTS.get(model_type, ()):
            if (match := re.fullmatch(layout.pattern, tensor.name)) is None:
                continue
            scales = tensors.get(match.expand(layout.scales)) if layout.scales else None
            if layout.matches(tensor, scales):
                converted.update((part.name, part) for part in _parts(layout, match, tensor, scales))
                replaced |= {stored.name for stored in (tensor, scales) if stored is not None}
                break
    return {name: tensor for name, tensor in tensors.items() if tensor.name not in replaced} | converted


def is_transposed(model_type: str, name: str) -> bool:
    """Return whether HF's modules have the matrix `name` as [in, out]."""
    return any(layout.transposed and re.fullmatch(layout.pattern, name) for layout in LAYOUTS.get(model_type, ()))


def adapter_tensors(model_type: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Convert an adapter's tensors to the base's names; count those of a model's other parts."""
    text, left_out = text_part(base_names(tensors, ("embed_tokens.", "layers.")))
    converted: dict[str, Tensor] = {}
    for name, tensor in text.items():
        # A rule that drops tensors of a checkpoint must not drop a change that was trained.
        converted |= family_tensors(model_type, {name: tensor}) or {name: tensor}
    return converted, left_out


def _parts(layout: Layout, match: re.Match, tensor: Tensor, scales: Tensor | None) -> Iterator[Tensor]:
    for template, rows in layout.parts.items():
        name = match.expand(template)
        for index in range(tensor.shape[0]) if "{}" in name else (None,):
            if scales is None:
                yield _part(name.format(index), tensor, index, rows, layout.transposed)
            else:
                yield _blocks(name.format(index), tensor, scales, index, rows)


def _part(name: str, tensor: Tensor, index: int | None, rows: Rows, transposed: bool) -> Tensor:
    shape = tensor.shape if index is None else tensor.shape[1:]
    shape = shape[::-1] if transposed else shape
    taken = rows(shape[0])

    def read() -> np.ndarray:
        rows_read = tensor.data if index is None else tensor.data[index]
        if transposed:
            rows_read = rows_read.reshape(shape[1], shape[0], -1).swapaxes(0, 1)
        rows_read = rows_read.reshape(shape[0], -1)[taken]
        return rows_read.reshape(len(rows_read), *shape[1:-1], -1) if len(shape) > 1 else rows_read.reshape(-1)

    return Tensor(name, (len(range(*taken.indices(shape[0]))), *shape[1:]), tensor.codec, tensor.source, read)


def _blocks(name: str, blocks: Tensor, scales: Tensor, index: int, rows: Rows) -> Tensor:
    """Convert rows of one expert's MXFP4 matrix to GGUF's: exponent, bytes of codes i and i + 16.

    blocks: u8 [experts, rows, groups, 16]; byte i has the codes 2 i and 2 i + 1.
    scales: exponents, u8 [experts, rows, groups].
    """
    _, count, groups, width = blocks.shape
    taken = rows(count)

    def read() -> np.ndarray:
        pairs, exponents = blocks.data[index][taken], scales.data[index][taken]
        codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(*exponents.shape, 2, width)
        packed = np.concatenate([exponents[..., None], codes[..., 0, :] | codes[..., 1, :] << 4], -1)
        return packed.reshape(len(packed), -1)

    return Tensor(name, (len(range(*taken.indices(count))), groups * width * 2), "mxfp4", blocks.source, read)
