"""How a model's makers want its tokens chosen: the generation_config that its bundle carries, as a `Sampling`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.sampling import Sampling
from castiron.vmfb.record import short

# What bends the logits of a model that draws, by HF's names, which are Sampling's too.
DRAWING = ("temperature", "top_k", "top_p", "min_p")
PENALTY = "repetition_penalty"
_LARGEST = sys.float_info.max


def model_sampling(generation: Mapping[str, Any]) -> Sampling | None:
    """The Sampling that a generation_config.json states, None if it states none; PipelineError for values out of range.

    As HF's generate reads it, do_sample false is greedy. Without do_sample a file that states any of `DRAWING` means it,
    where HF warns and passes it over. What is not stated leaves the logits alone: HF's top_k of 50 is no model's own. The
    repetition penalty sees REPEAT_WINDOW tokens, where HF's sees all.
    """
    stated: dict[str, Any] = {name: value for name in DRAWING if (value := _number(generation, name)) is not None}
    draws = generation.get("do_sample")
    penalty = _number(generation, PENALTY)
    if not stated and penalty is None and draws is None:
        return None
    if draws is False or not (draws or stated):
        stated = {}
    else:
        stated.setdefault("temperature", 1.0)
    if "top_k" in stated:
        # Some write -1 for all.
        stated["top_k"] = max(0, int(stated["top_k"]))
    try:
        return Sampling(**stated, repeat_penalty=1.0 if penalty is None else penalty)
    except PipelineError as error:
        raise PipelineError(
            f"the model's generation_config is out of range ({error}): mend generation_config.json and compile it again"
        ) from None


def _number(generation: Mapping[str, Any], name: str) -> float | None:
    value = generation.get(name)
    if value is None:
        return None
    # A whole number may be larger than any of 64 bits.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise PipelineError(
            f"the model's generation_config has {short(repr(value))} as {name}, which is no number: mend "
            "generation_config.json and compile it again"
        )
    return value


def settings(sampling: Sampling) -> dict[str, float]:
    """What a server tells of its defaults: temperature 0 is greedy."""
    return {name: getattr(sampling, name) for name in (*DRAWING, "repeat_penalty")}


def in_words(sampling: Sampling) -> str:
    """For people: "greedy", or what bends the logits, such as "temperature 0.6, top-k 20"."""
    usual = Sampling()
    parts = [] if sampling.temperature else ["greedy"]
    for name, value in settings(sampling).items():
        counts = sampling.temperature or name == "repeat_penalty"
        if counts and value != getattr(usual, name):
            parts.append(f"{name.replace('_', '-')} {value:g}")
    return ", ".join(parts)
