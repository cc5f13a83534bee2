"""The model families: one Python module for each `model_type` of HF, such as `llama`.

A family's module has these members, in which layers and sizes have the names of HF:
- `Config`: a dataclass with the model's sizes and options.
- `read(c: ConfigReader) -> Config`: reads config.json.
- `forward(step, config)`: adds the model's operations to the graph of one function; returns logits
  [rows, vocab], in prefill those of the last token. An encoder returns hidden states [T, hidden].
- `states(config, context)`: the KV caches and recurrent states; by default one KV cache per layer,
  a ring buffer where a sliding window saves memory.

To add a family, add its file, and its name to `FAMILIES` or `ENCODERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

from castiron.emitter.abi import ROLES, State, functions, ring_rows
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Graph, Value, current_function
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import argmax
from castiron.emitter.layers.kv_cache import cut_to_rings, layer_caches, stored_as
from castiron.emitter.layers.pooling import Pooling
from castiron.emitter.layers.step import ModelModule, Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.shorten import shorten, shorten_list

# HF model types; each is the name of its file.
FAMILIES = tuple(
    """
    arcee cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 falcon_h1 gemma gemma2 gemma3_text gemma4_text glm4_moe_lite
    gpt2 gpt_oss granite granitemoe granitemoehybrid hunyuan_v1_dense lfm2 lfm2_moe lfm3 llama ministral3 mistral mixtral
    nemotron_h olmo2 olmo3 phi3 qwen2 qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next smollm3 stablelm starcoder2
    """.split()
)
# Models that encode texts and never generate: their `forward` returns hidden states.
ENCODERS = ("bert", "modernbert")


def family(config: dict) -> ModuleType:
    """Return the Python module for a config.json's `model_type`; raise EmitError if unknown."""
    model_type = config.get("model_type")
    if model_type not in (known := (*FAMILIES, *ENCODERS)):
        names = shorten_list(known, max_length=150)
        raise EmitError(f"model type {shorten(model_type)} is not supported; supported are {names}")
    return import_module(f"castiron.emitter.models.{model_type}")


def _read(config: dict) -> tuple[Any, tuple[str, ...]]:
    c = ConfigReader(config)
    return family(config).read(c), c.finish()


def read_config(config: dict) -> Any:
    """Convert a config.json to its family's `Config`; EmitError for unknown keys or values."""
    return _read(config)[0]


def ignored_keys(config: dict) -> tuple[str, ...]:
    """Return the unused keys of a config.json, without well-known ones such as `torch_dtype`."""
    return _read(config)[1]


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
    orders: Mapping[str, str] = MappingProxyType({}),
) -> ModelModule:
    """Build the graphs of a model's functions (`emitter.abi`); EmitError for an unsupported config.

    codecs: maps a checkpoint tensor's name to the codec in which the bundle stores it.
    context: the max number of positions.
    widths, verify, batches, embeds: token counts T of functions prefill_T, verify_T and so on.
    pooling: None to generate; else the module has only functions encode_T, for each T in `embeds`.
    orders: from a weight with permuted columns to the name of a tensor f32 [in], whose element i is
        the input feature that column i of the weight multiplies.
    """
    model, c = family(config), read_config(config)
    if not 1 <= context <= c.max_positions:
        is_cut = c.max_positions < config.get("max_position_embeddings", 0)
        why = ", because rotary scaling for a longer context would change the frequencies of every token" if is_cut else ""
        raise EmitError(f"context is {context}; this model supports 1 to {c.max_positions} positions{why}")
    module = ModelModule("model", codecs, orders)
    if c.bidirectional and pooling is None:
        raise EmitError(
            "a bidirectional model can only compute embeddings, but the checkpoint defines no pooling for embeddings; "
            "use a checkpoint directory with modules.json"
        )
    max_width = max([1, *widths, *verify, *embeds])
    present = [state for state in _states(model, c, context, max_width, pooling) if state.shape[0]]
    states = stored_as(cut_to_rings(present, max_width), cache)
    widths_of = {"decode": (1,), "prefill": widths, "verify": verify, "batch": batches, "embed": embeds}
    with_long = c.original_context is not None and context > c.original_context
    for entry in functions(widths_of if pooling is None else {"encode": embeds}, with_long):
        with module.step(entry, states, context) as step:
            results = _results(step, model, c, pooling)
            function = current_function()
            inputs = {v.name: v for v in function.inputs}
            storage = {i: inputs[name] for i, name in enumerate(step.states, len(results))}
            function.returns(storage, **results, **step.states)
        _check_signature(function, c.vocab)
    if pooling is not None:
        _drop_unread_weights(module)
    if unread := sorted(orders.keys() - module.reordered):
        raise EmitError(f"cannot apply the column orders of weights {shorten_list(unread)}")
    return module


def _states(model: ModuleType, c: Any, context: int, max_width: int, pooling: Pooling | None) -> list[State]:
    if c.bidirectional:
        # A complete text needs the rows of one layer only, which the next layer overwrites.
        return [*layer_caches({0: None}, context, c.kv_heads, c.head_dim)]
    of_pooling = pooling.states(c.hidden) if pooling else ()
    if hasattr(model, "states"):
        return [*model.states(c, context), *of_pooling]
    # A ring buffer with a row for every position saves no memory, so such a layer gets a positional cache.
    windows = {i: w if w and ring_rows(w, max_width) < context else None for i, w in enumerate(c.windows)}
    return [*layer_caches(windows, context, c.kv_heads, c.head_dim), *of_pooling]


def _results(step: Step, model: ModuleType, c: Any, pooling: Pooling | None) -> dict[str, Value]:
    logits = model.forward(step, c)
    if pooling is not None:
        return {"embedding": pooling.pool(step, _hidden(step, model), not c.bidirectional)}
    if step.role == "embed":
        return {"hidden": _hidden(step, model)}
    if not ROLES[step.role].every_token:
        logits = ops.reshape(logits, logits.shape[-1:])
    return {"argmax": argmax(logits), "logits": logits}


def _hidden(step: Step, model: ModuleType) -> Value:
    """Return the hidden states [T, hidden] before the LM head, which is deleted from the graph."""
    hidden, made = step.hidden, current_function().ops
    if hidden is None:
        raise EmitError(f"{model.__name__}: `forward` records no hidden states; compute the logits with layers.lm_head")
    last = next(i for i, op in enumerate(made) if hidden in op.results)
    del made[last + 1 :]
    return hidden


def _check_signature(function: Graph, vocab: int) -> None:
    assert function.entry is not None, "a model's function has a role"
    features = next(iter(function.outputs[0].shape[::-1]), 0)
    signature = function.entry.signature(function.states, vocab, features)
    for value, tensor in zip((*function.inputs, *function.outputs), (*signature.operands, *signature.results), strict=True):
        if str(value.type) != f"tensor<{tensor}>":
            raise EmitError(f"{function.name}: {tensor.name} has type {value.type}, not tensor<{tensor}>; correct `forward`")


def _drop_unread_weights(module: ModelModule) -> None:
    # Such as the output head's: many checkpoints of encoders lack the head.
    read = [op.attrs["weight"] for f in module.functions.values() for op in f.ops if op.kind == "weight"]
    names = {weight.name for weight in read} | {name for weight in read for name, _ in weight.tensors}
    module.weights = {name: weight for name, weight in module.weights.items() if name in names}
