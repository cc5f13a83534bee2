"""Model families: one file each, which reads like its paper and is named as HF names things.

A family offers `Config.read(config.json as a dict)` and `forward(step, config) -> logits`. Adding a family is adding
its file and its row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from castiron.emitter import ops
from castiron.emitter.ir import current_function
from castiron.emitter.layers import ModelModule, Step, argmax
from castiron.emitter.types import F32, I32, EmitError, TensorType

# HF model types; each is the name of its file.
FAMILIES = (
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
)


def family(config: dict) -> ModuleType:
    """The family module of a config, or EmitError with the list of those there are."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise EmitError(f"model type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return import_module(f"castiron.emitter.models.{model_type}")


def build(
    config: dict,
    codecs: Callable[[str], str],
    context: int,
    widths: Sequence[int],
    verify: Sequence[int] = (),
    batches: Sequence[int] = (),
) -> ModelModule:
    """The layer-operation module of a model, caches `[layers, context, kv_heads, head_dim]`.

    decode_step(token, pos, k, v): one token. prefill_T(tokens, start, length, k, v) for each T of `widths`: a chunk.
    verify_T(tokens, start, k, v) for each T of `verify`: T tokens, with argmax [T] and logits [T, vocab] at every
    position. decode_batch_B(tokens, pos, k, v) for each B of `batches`: one token of B sequences, whose caches stand one
    after another in `[B * layers, context, kv_heads, head_dim]`; argmax [B], logits [B, vocab].

    config: config.json as a dict. codecs: stored codec by tensor name. context: positions of the cache.
    Raises EmitError for a config that is not understood and for a context past the model's limit.
    """
    model = family(config)
    c = model.Config.read(config)
    if not 1 <= context <= c.max_positions:
        cut = c.max_positions < config.get("max_position_embeddings", 0)
        why = ", past which its rotary scaling would change the frequencies of every token" if cut else ""
        raise EmitError(f"a context of {context} is outside what the model allows (1 to {c.max_positions} positions{why})")
    module = ModelModule("model", codecs)
    scalar = TensorType((), I32)

    def caches(sequences: int = 1) -> dict[str, TensorType]:
        return dict.fromkeys("kv", TensorType((sequences * c.layers, context, c.kv_heads, c.head_dim), F32))

    with module.function("decode_step", token=scalar, pos=scalar, **caches()) as (token, pos, k, v):
        _forward(model, c, Step(module, ops.reshape(token, (1,)), pos, None, k, v))
    for width in widths:
        types = {"tokens": TensorType((width,), I32), "start": scalar, "length": scalar, **caches()}
        with module.function(f"prefill_{width}", **types) as (tokens, start, length, k, v):
            _forward(model, c, Step(module, tokens, start, length, k, v))
    for width in verify:
        types = {"tokens": TensorType((width,), I32), "start": scalar, **caches()}
        with module.function(f"verify_{width}", **types) as (tokens, start, k, v):
            _forward(model, c, Step(module, tokens, start, None, k, v, every=True))
    for size in batches:
        rows = TensorType((size,), I32)
        with module.function(f"decode_batch_{size}", tokens=rows, pos=rows, **caches(size)) as (tokens, pos, k, v):
            _forward(model, c, Step(module, tokens, pos, None, k, v))
    return module


def _forward(model: ModuleType, config, step: Step) -> None:
    caches = step.k, step.v
    logits = model.forward(step, config)
    if not (step.batched or step.every):
        logits = ops.reshape(logits, logits.shape[-1:])
    outputs = {"argmax": argmax(logits), "logits": logits, "k": step.k, "v": step.v}
    current_function().returns({2: caches[0], 3: caches[1]}, **outputs)
