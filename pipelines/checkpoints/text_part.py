"""The text part of a model that also sees: its config and its tensors, under the names that a model of text has for them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from castiron.pipelines.checkpoints.checkpoint import Tensor


@dataclass(frozen=True)
class TextPart:
    """Where a type's text part stands: what its tensors' names begin with, and those of other parts, which are left out."""

    prefix: str
    others: tuple[str, ...]


_QWEN = TextPart("model.language_model.", ("model.visual.", "mtp."))
# By the text part's model type; transformers saves one that stands alone under the whole's names too.
TEXT_PARTS: dict[str, TextPart] = {"qwen3_5_text": _QWEN, "qwen3_5_moe_text": _QWEN}


def text_config(config: dict) -> dict:
    """The config of the text part of a type that is known here, else the config itself.

    The head is tied where either says so: models of text ask the part, others the whole.
    """
    inner, name = config.get("text_config"), f"{config.get('model_type')}_text"
    if name not in TEXT_PARTS or not isinstance(inner, dict):
        return config
    tied = config.get("tie_word_embeddings") or inner.get("tie_word_embeddings") or False
    return {"model_type": name, **inner, "tie_word_embeddings": tied}


def text_tensors(model_type: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors of the text part, and how many of others were left out, by what their names begin with."""
    part = TEXT_PARTS.get(model_type)
    if part is None:
        return dict(tensors), {}
    found: dict[str, Tensor] = {}
    left_out: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if other := next((other for other in part.others if name.startswith(other)), None):
            left_out[other.removesuffix(".")] += 1
        else:
            own = "model." + name.removeprefix(part.prefix) if name.startswith(part.prefix) else name
            found[own] = replace(tensor, name=own)
    return found, dict(left_out)


def in_words(left_out: Mapping[str, int]) -> str:
    """`12 tensors of model.visual, 1 tensor of mtp`."""
    return ", ".join(f"{count} tensor{'s' * (count != 1)} of {part}" for part, count in left_out.items())
