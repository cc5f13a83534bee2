"""Model families: one file each, which reads like its paper and is named as HF names things.

A family offers `Config.read(config.json as a dict)`, `forward(step, config) -> logits`, and `states(config, context)` if they
are not a KV cache of every layer, where the config's `windows`, if it has them, say which layers may have rings. Adding a
family is adding its file and its row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from castiron.emitter import ops
from castiron.emitter.ir import Value, current_function
from castiron.emitter.layers import argmax
from castiron.emitter.models.config import Noted
from castiron.emitter.pooling import Pooling
from castiron.emitter.shown import shown, shown_list
from castiron.emitter.states import ROLES, State, cut_to_rings, kv_cache, layer_caches, ring_rows, stored_as
from castiron.emitter.step import ModelModule, Step
from castiron.emitter.types import EmitError

# HF model types; each is the name of its file.
FAMILIES = (
    "arcee",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4_moe_lite",
    "gpt2",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "stablelm",
    "starcoder2",
)


# And those that encode texts and never generate: their `forward` gives hidden states.
ENCODERS = ("bert", "modernbert")


def family(config: dict) -> ModuleType:
    """The family module of a config, or EmitError with the list of those there are."""
    model_type = config.get("model_type")
    if model_type not in (known := (*FAMILIES, *ENCODERS)):
        raise EmitError(f"model type {shown(model_type)} is not supported; supported are {shown_list(known, most=150)}")
    return import_module(f"castiron.emitter.models.{model_type}")


def ignored_keys(config: dict) -> tuple[str, ...]:
    """Keys of a config that change nothing and are passed over, bookkeeping apart; EmitError for one that is not understood."""
    noted = Noted(config)
    family(config).Config.read(noted)
    return noted.ignored


def build(
    config: dict,
    codecs: Callable[[str], str],
    context: int,
    widths: Sequence[int],
    verify: Sequence[int] = (),
    batches: Sequence[int] = (),
    embeds: Sequence[int] = (),
    cache: str = "f32",
    pooling: Pooling | None = None,
) -> ModelModule:
    """The layer-operation module of a model, over states that are the family's `states(config, context)`, or where it has
    none a KV cache; rings keep what these functions need (`states.cut_to_rings`).

    decode_step(token, position, *states): one token. prefill_T(tokens, start, length, *states) for each T of `widths`: a
    chunk. verify_T(tokens, start, *states) for each T of `verify`: T tokens, with argmax [T] and logits [T, vocab] at every
    position. decode_batch_B(tokens, positions, *states) for each B of `batches`: one token of B sequences, whose states
    stand one after another along dimension 0; argmax [B], logits [B, vocab]; a sequence whose position is negative is left
    alone, and its results mean nothing. embed_T(tokens, start, length, *states) for each T of `embeds`: a chunk's hidden
    states after the last norm, [T, hidden], and no logits.

    With `pooling` the model encodes texts and has nothing but encode_T(tokens, start, length, *states) for each T of `embeds`:
    the vector [features] of the text up to here, or of the whole text, from position 0 on, of a model that attends both ways.

    config: config.json as a dict. codecs: stored codec by tensor name. context: how many positions there are. cache: how
    states that are not recurrent are stored, a key of `caches.CACHES`.
    Raises EmitError for a config or a cache that is not understood, for a context past the model's limit, and for a model that
    attends both ways without `pooling`.
    """
    model = family(config)
    c = model.Config.read(config)
    if not 1 <= context <= c.max_positions:
        cut = c.max_positions < config.get("max_position_embeddings", 0)
        why = ", past which its rotary scaling would change the frequencies of every token" if cut else ""
        raise EmitError(f"a context of {context} is outside what the model allows (1 to {c.max_positions} positions{why})")
    module = ModelModule("model", codecs)
    whole = attends_both_ways(c)
    if whole and pooling is None:
        raise EmitError(
            "this model attends to later tokens too, so it encodes texts and generates none, and nothing says how its states "
            "become a vector: give the directory with its modules.json"
        )
    most = max([1, *widths, *verify, *embeds])
    # Of a kind that no layer is of there is no state.
    held = [state for state in _states(model, c, context, most, pooling) if state.shape[0]]
    states = stored_as(cut_to_rings(held, most), cache)
    widths_of = {"decode": (1,), "prefill": widths, "verify": verify, "batch": batches, "embed": embeds}
    if pooling is not None:
        widths_of = {"encode": embeds}
    for role, width in [(role, width) for role, widths in widths_of.items() for width in widths]:
        with module.step(role, width, states, context) as step:
            logits = model.forward(step, c)
            if pooling is not None:
                _carry_on({"embedding": pooling.pool(step, _hidden(step), not whole)}, step)
            else:
                _finish(step, logits)
    if pooling is not None:
        _forget_head(module)
    return module


def _forget_head(module: ModelModule) -> None:
    """Leaves out the weights that no function reads: encoders have no head, and many have none in their files."""
    read = [op.attrs["weight"] for f in module.functions.values() for op in f.ops if op.kind == "weight"]
    names = {weight.name for weight in read} | {name for weight in read for name, _ in weight.tensors}
    module.weights = {name: weight for name, weight in module.weights.items() if name in names}


def attends_both_ways(c: Any) -> bool:
    """Whether a family's config is of a model that sees later tokens too, which takes a text in one call."""
    return getattr(c, "bidirectional", False)


def _states(model: ModuleType, c: Any, context: int, most: int, pooling: Pooling | None) -> list[State]:
    """The states of the family, or a KV cache, with rows for the whole context; calls take `most` tokens. A text that comes at
    once needs the rows of one layer alone, which the next writes over."""
    if attends_both_ways(c):
        return [*kv_cache(1, context, c.kv_heads, c.head_dim)]
    further = pooling.states(c.hidden) if pooling else ()
    if hasattr(model, "states"):
        return [*model.states(c, context), *further]
    # Layers whose rings would have all positions are like the others.
    windows = [w if w and ring_rows(w, most) < context else None for w in getattr(c, "windows", ())]
    return [*layer_caches(windows or [None] * c.layers, context, c.kv_heads, c.head_dim), *further]


def _finish(step: Step, logits: Value) -> None:
    """Return argmax and logits, of one row or of each, or hidden states, and the states, which live on in the buffers they
    came in."""
    _carry_on({"hidden": _hidden(step)} if step.role == "embed" else _chosen(step, logits), step)


def _carry_on(results: dict[str, Value], step: Step) -> None:
    function = current_function()
    inputs = {v.name: v for v in function.inputs}
    storage = {i: inputs[name] for i, name in enumerate(step.states, len(results))}
    function.returns(storage, **results, **step.states)


def _chosen(step: Step, logits: Value) -> dict[str, Value]:
    if not ROLES[step.role][1]:
        logits = ops.reshape(logits, logits.shape[-1:])
    return {"argmax": argmax(logits), "logits": logits}


def _hidden(step: Step) -> Value:
    """What the head was given; the operations after it, which are the head's, are taken back."""
    hidden, made = step.hidden, current_function().ops
    if hidden is None:
        raise EmitError("this family gives no hidden states: its forward does not end in layers.lm_head")
    last = next(i for i, op in enumerate(made) if hidden in op.results)
    del made[last + 1 :]
    return hidden
