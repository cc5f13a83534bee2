"""Code that families share: base classes of configs, and a decoder's loop over its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, dataclass_transform

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import embedding, gated_mlp, lm_head, rms_norm, rotary_tables, scaled, wanted_rows
from castiron.emitter.ops import add
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True)
@dataclass(frozen=True, eq=False, kw_only=True)
class ModelConfig:
    """The fields of every family's config, which `ConfigReader.read` fills.

    Subclasses are dataclasses too.
    eps: epsilon of the norms. hidden_act: one of `layer_operations.ACTIVATIONS`. windows: each
    layer's sliding window, None for full attention. bidirectional: attention includes later tokens,
    so that the model encodes complete texts and cannot generate text.
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
    windows: list[int | None]
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

    def tables(self, step: Step) -> Sequence[Any]:
        """Return the `tables` that each layer's block gets: the rotary tables cos and sin."""
        return [rotary_tables(step, self.rotary)] * self.layers


class SlidingConfig(DecoderConfig):
    """The config of a decoder whose layers with a sliding window have other rotary frequencies.

    rotary: frequencies of layers with full attention. sliding_rotary: of those with a window.
    """

    sliding_rotary: Rotary

    def tables(self, step: Step) -> Sequence[Any]:
        full = rotary_tables(step, self.rotary, "rotary.full")
        sliding = rotary_tables(step, self.sliding_rotary, "rotary.sliding")
        return [sliding if window else full for window in self.windows]


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
H = TypeVar("H", bound=HybridConfig)
# A function from (step, config, layer, x [T, hidden], tables) to [T, hidden]: a block, or the attention in it.
Block: TypeAlias = Callable[[Step, C, int, Value, Any], Value]
# A function from (step, config, layer, x [T, hidden]) to [T, hidden].
Mlp: TypeAlias = Callable[[Step, C, int, Value], Value]
# A function from (step, x, the norm's name, eps) to the normalised x.
Norm: TypeAlias = Callable[[Step, Value, str, float], Value]


def mlp(step: Step, c: DecoderConfig, layer: int, x: Value) -> Value:
    """Apply Llama's gated MLP, without biases."""
    return gated_mlp(step, x, c.intermediate, c.hidden_act)


def pre_norm_block(self_attention: Block[C], mlp: Mlp[C], norm: Norm = rms_norm, mlp_name: str = "mlp") -> Block[C]:
    """Return a block with norms before attention and MLP, as in Llama."""

    def block(step: Step, c: C, layer: int, x: Value, tables: Any) -> Value:
        h = norm(step, x, "input_layernorm", c.eps)
        with scope("self_attn"):
            x = add(x, self_attention(step, c, layer, h, tables))
        h = norm(step, x, "post_attention_layernorm", c.eps)
        with scope(mlp_name):
            return add(x, mlp(step, c, layer, h))

    return block


def post_norm_block(self_attention: Block[C], mlp: Mlp[C]) -> Block[C]:
    """Return a block with norms after attention and MLP, as in OLMo 2."""

    def block(step: Step, c: C, layer: int, x: Value, tables: Any) -> Value:
        with scope("self_attn"):
            h = self_attention(step, c, layer, x, tables)
        x = add(x, rms_norm(step, h, "post_attention_layernorm", c.eps))
        with scope("mlp"):
            h = mlp(step, c, layer, x)
        return add(x, rms_norm(step, h, "post_feedforward_layernorm", c.eps))

    return block


def sandwich_norm_block(self_attention: Block[C], mlp: Mlp[C], norm: Norm) -> Block[C]:
    """Return a block with norms before and after attention and MLP, as in Gemma 2."""

    def block(step: Step, c: C, layer: int, x: Value, tables: Any) -> Value:
        h = norm(step, x, "input_layernorm", c.eps)
        with scope("self_attn"):
            h = self_attention(step, c, layer, h, tables)
        x = add(x, norm(step, h, "post_attention_layernorm", c.eps))
        h = norm(step, x, "pre_feedforward_layernorm", c.eps)
        with scope("mlp"):
            h = mlp(step, c, layer, h)
        return add(x, norm(step, h, "post_feedforward_layernorm", c.eps))

    return block


def hybrid_block(
    mixers: Mapping[str, tuple[str, Block[H]]],
    mlp: Mlp[H],
    norm: Norm = rms_norm,
    names: tuple[str, str, str] = ("input_layernorm", "post_attention_layernorm", "mlp"),
) -> Block[H]:
    """Return a block with norms before mixer and MLP, in which the layer's type selects the mixer.

    mixers: maps a layer's type to the name and function of its attention or recurrence. names: of
    the first norm, the second norm and the MLP.
    """

    def block(step: Step, c: H, layer: int, x: Value, tables: Any) -> Value:
        mixer_name, mixer = mixers[c.layer_types[layer]]
        h = norm(step, x, names[0], c.eps)
        with scope(mixer_name):
            x = add(x, mixer(step, c, layer, h, tables))
        h = norm(step, x, names[1], c.eps)
        with scope(names[2]):
            return add(x, mlp(step, c, layer, h))

    return block


def decoder(
    step: Step,
    c: C,
    block: Block[C],
    norm: Norm = rms_norm,
    embedding_scale: float = 1.0,
    embedding_multiplier: float = 1.0,
    last_norm: str = "norm",
) -> Value:
    """Apply embedding, blocks, last norm and head, as HF's `...ForCausalLM`; return logits.

    The logits are [rows, vocab], for the rows of `wanted_rows`. block: maps a layer's input
    [T, hidden] to its output [T, hidden]. embedding_scale: a factor inside `embed_tokens`, as in
    Gemma. embedding_multiplier: a factor after `embed_tokens`. last_norm: the last norm's name.
    """
    tables = c.tables(step)
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden, embedding_scale)
        x = scaled(x, embedding_multiplier)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables[layer])
        x = norm(step, wanted_rows(step, x), last_norm, c.eps)
    return lm_head(step, x, c.vocab, c.tied)
