"""The text part of a model that also sees or hears: its config and its tensors, under the names that a model of text has for
them."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from castiron.emitter.shown import shown_list
from castiron.pipelines.checkpoints.checkpoint import Tensor


@dataclass(frozen=True)
class TextPart:
    """model_type: the text part's, where its config names none or another. defaults: sizes that HF's class gives it, and
    published configs leave out."""

    model_type: str
    defaults: Mapping[str, int] = field(default_factory=dict)


_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
# By the whole's model type. For text alone the rotary embeddings of images' rows and columns are plain ones.
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
# What text parts call themselves that are of a family for all that.
_SAME = {"qwen3_vl_text": "qwen3"}
# Text parts that transformers saves under the whole's names even where they stand alone.
_ALONE = ("qwen3_5_text", "qwen3_5_moe_text")

# What the names of a text part's tensors begin with, and begin with in a model of text.
_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# And those of other parts, which may stand in a "model." of their own.
_OTHERS = (
    *("visual.", "vision_tower.", "vision_model.", "embed_vision.", "multi_modal_projector.", "connector."),
    *("audio_tower.", "embed_audio.", "mtp."),
)


def text_config(config: dict, names: Collection[str]) -> dict:
    """The config of the text part of a type that is known here, else the config itself.

    names: of the tensors. The head is tied where either says so, and where neither says anything if there is none: models
    of text ask the part, others the whole.
    """
    inner, part = config.get("text_config"), TEXT_PARTS.get(config.get("model_type", ""))
    if part is None or not isinstance(inner, dict):
        return config
    model_type = inner.get("model_type") or part.model_type
    stated = [own["tie_word_embeddings"] for own in (config, inner) if own.get("tie_word_embeddings") is not None]
    tied = any(stated) if stated else not any(name.endswith("lm_head.weight") for name in names)
    return {**part.defaults, **inner, "model_type": _SAME.get(model_type, model_type), "tie_word_embeddings": tied}


def text_tensors(model_type: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors of the text part of a whole of this type, and how many of others were left out, by what their names begin
    with; all of them of a type that is no whole."""
    if model_type not in (*TEXT_PARTS, *_ALONE):
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
    """`12 tensors of model.visual, 1 tensor of mtp`."""
    return shown_list([f"{count} tensor{'s' * (count != 1)} of {part}" for part, count in left_out.items()], most=500)
