"""Model families: one file each, which reads like its paper and is named as HF names things.

A family offers `Config.read(config.json as a dict)`, `forward(step, config) -> logits`, and `states(config, context)` if they
are not a KV cache of every layer. Adding a family is adding its file and its row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from castiron.emitter import ops
from castiron.emitter.ir import Value, current_function
from castiron.emitter.layers import argmax
from castiron.emitter.models.config import Noted
from castiron.emitter.shown import shown, shown_list
from castiron.emitter.states import ROLES, kv_cache, stored_as
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
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
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


def family(config: dict) -> ModuleType:
    """The family module of a config, or EmitError with the list of those there are."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise EmitError(f"model type {shown(model_type)} is not supported; supported are {shown_list(FAMILIES, most=150)}")
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
) -> ModelModule:
    """The layer-operation module of a model, over states that are the family's `states(config, context)`, or where it has
    none a KV cache.

    decode_step(token, position, *states): one token. prefill_T(tokens, start, length, *states) for each T of `widths`: a
    chunk. verify_T(tokens, start, *states) for each T of `verify`: T tokens, with argmax [T] and logits [T, vocab] at every
    position. decode_batch_B(tokens, positions, *states) for each B of `batches`: one token of B sequences, whose states
    stand one after another along dimension 0; argmax [B], logits [B, vocab]; a sequence whose position is negative is left
    alone, and its results mean nothing. embed_T(tokens, start, length, *states) for each T of `embeds`: a chunk's hidden
    states after the last norm, [T, hidden], and no logits.

    config: config.json as a dict. codecs: stored codec by tensor name. context: how many positions there are. cache: how
    positional states are stored, a key of `caches.CACHES`.
    Raises EmitError for a config or a cache that is not understood and for a context past the model's limit.
    """
    model = family(config)
    c = model.Config.read(config)
    if not 1 <= context <= c.max_positions:
        cut = c.max_positions < config.get("max_position_embeddings", 0)
        why = ", past which its rotary scaling would change the frequencies of every token" if cut else ""
        raise EmitError(f"a context of {context} is outside what the model allows (1 to {c.max_positions} positions{why})")
    module = ModelModule("model", codecs)
    states = model.states(c, context) if hasattr(model, "states") else kv_cache(c.layers, context, c.kv_heads, c.head_dim)
    # Of a kind that no layer is of there is no state.
    states = stored_as([state for state in states if state.shape[0]], cache)
    widths_of = {"decode": (1,), "prefill": widths, "verify": verify, "batch": batches, "embed": embeds}
    for role, width in [(role, width) for role, widths in widths_of.items() for width in widths]:
        with module.step(role, width, states, context) as step:
            _finish(step, model.forward(step, c))
    return module


def _finish(step: Step, logits: Value) -> None:
    """Return argmax and logits, of one row or of each, or hidden states, and the states, which live on in the buffers they
    came in."""
    function = current_function()
    results = {"hidden": _hidden(step)} if step.role == "embed" else _chosen(step, logits)
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
