"""Code that families share: base classes of configs, and a decoder's loop over its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import embedding, lm_head, rms_norm, scaled, wanted_rows
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True)
@dataclass(frozen=True, eq=False, kw_only=True)
class ModelConfig:
    """The fields of every family's config. Subclasses are dataclasses; `ConfigReader.read` fills them.

    eps: epsilon of the norms. hidden_act: one of `layer_operations.ACTIVATIONS`. bidirectional:
    attention includes later tokens, so that the model encodes complete texts and cannot generate
    text.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    hidden_act: str
    bidirectional: bool

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False, kw_only=True)(cls)


class DecoderConfig(ModelConfig):
    """The config of a decoder. tied: whether the head uses the embedding's weight."""

    tied: bool
    rotary: Rotary

    @property
    def max_positions(self) -> int:
        """Return the max number of positions that all rotary frequencies allow."""
        return min(value.positions for value in vars(self).values() if isinstance(value, Rotary))


class HybridConfig(DecoderConfig):
    """The config of a decoder with layers of several types. layer_types: the type of each layer."""

    layer_types: tuple[str, ...]

    def count(self, kind: str) -> int:
        """Return the number of layers of a type, which is dimension 0 of their states."""
        return self.layer_types.count(kind)

    def slot(self, layer: int) -> int:
        """Return the index of a layer among the layers of its type."""
        return self.layer_types[:layer].count(self.layer_types[layer])


C = TypeVar("C", bound=DecoderConfig)
Tables = TypeVar("Tables")


def decoder(
    step: Step,
    c: C,
    block: Callable[[Step, C, int, Value, Tables], Value],
    tables: Tables,
    norm: Callable[[Step, Value, str, float], Value] = rms_norm,
    embedding_scale: float = 1.0,
    embedding_multiplier: float = 1.0,
    last_norm: str = "norm",
) -> Value:
    """Apply embedding, blocks, last norm and head, as HF's `...ForCausalLM`; return logits.

    The logits are [rows, vocab], for the rows of `wanted_rows`. block: maps x [T, hidden] before a
    layer to x after it, in the layer's scope; gets `tables` unchanged. embedding_scale: a factor in
    `embed_tokens`, as in Gemma. embedding_multiplier: a factor after `embed_tokens`.
    """
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden, embedding_scale)
        x = scaled(x, embedding_multiplier)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables)
        x = norm(step, wanted_rows(step, x), last_norm, c.eps)
    return lm_head(step, x, c.vocab, c.tied)
