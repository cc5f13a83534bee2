"""Code that model families share: base classes of configs, blocks, and the loop over blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, dataclass_transform

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add
from castiron.emitter.layers import embedding, gated_mlp, lm_head, rms_norm, rotary_tables, scaled, wanted_rows
from castiron.emitter.layers.rotary import Rotary
from castiron.emitter.layers.step import Step


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True)
@dataclass(frozen=True, eq=False, kw_only=True)
class ModelConfig:
    """The config fields that all models have; `ConfigReader.read` fills them from config.json.

    windows: each layer's sliding window in tokens, None for full attention.
    bidirectional: attention includes later tokens, so the model encodes texts and generates none.
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

    @property
    def original_context(self) -> int | None:
        """Return the length past which HF rotates a sequence by other frequencies; None without."""
        return None

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False, kw_only=True)(cls)


class DecoderConfig(ModelConfig):
    """The fields of decoders; biases are read from config.json if the subclass has a default."""

    tied: bool
    attention_bias: bool
    mlp_bias: bool
    rotary: Rotary

    @property
    def max_positions(self) -> int:
        """Return the max sequence length for which the rotary frequencies equal those of HF."""
        return min(value.positions for value in vars(self).values() if isinstance(value, Rotary))

    def tables(self, step: Step) -> Sequence[Any]:
        """Return the rotary tables (cos, sin) of each layer, each f32 [context, rotary_dim / 2]."""
        return [rotary_tables(step, self.rotary)] * self.layers


class SlidingConfig(DecoderConfig):
    """A decoder whose layers with a sliding window have rotary frequencies of their own."""

    sliding_rotary: Rotary

    def tables(self, step: Step) -> Sequence[Any]:
        full = rotary_tables(step, self.rotary, "rotary.full")
        sliding = rotary_tables(step, self.sliding_rotary, "rotary.sliding")
        return [sliding if window else full for window in self.windows]


class HybridConfig(DecoderConfig):
    """A decoder with layers of several types, such as attention and Mamba 2."""

    layer_types: tuple[str, ...]

    def of_type(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for layer, own in enumerate(self.layer_types) if own == kind)


C = TypeVar("C", bound=DecoderConfig)
# A function from (step, config, layer, x [T, hidden], tables) to [T, hidden]: a block, or the attention in it.
Block: TypeAlias = Callable[[Step, C, int, Value, Any], Value]
# A function from (step, config, layer, x [T, hidden]) to [T, hidden].
Mlp: TypeAlias = Callable[[Step, C, int, Value], Value]
# A function from (step, x, the norm's name, eps) to the normalised x.
Norm: TypeAlias = Callable[[Step, Value, str, float], Value]


def mlp(step: Step, c: DecoderConfig, layer: int, x: Value) -> Value:
    """Apply Llama's gated MLP to x [T, hidden]; return [T, hidden]."""
    return gated_mlp(step, x, c.intermediate, c.hidden_act, c.mlp_bias)


# Names of the four norms of a block: before attention, after it, before the MLP, after it. A missing norm is None.
Norms: TypeAlias = tuple[str | None, str | None, str | None, str | None]
PRE_NORM: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORM: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH_NORM: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip


def residual_block(
    mixers: Block[C] | Mapping[str, tuple[str, Block[Any]]],
    mlp: Mlp[C],
    norms: Norms = PRE_NORM,
    norm: Norm = rms_norm,
    mlp_name: str = "mlp",
) -> Block[C]:
    """Return a function that computes a transformer block: h = x + attention(x); h + mlp(h).

    mixers: the attention, in the module `self_attn`; or {layer type: (module name, function)}.
    norms: before attention, after it, before the MLP, after it; None for no norm.
    """

    def residual(step: Step, c: C, x: Value, name: str, branch: Callable[[Value], Value], names: Sequence[str | None]) -> Value:
        before, after = names
        h = x if before is None else norm(step, x, before, c.eps)
        with scope(name):
            h = branch(h)
            if after is None:
                return add(x, h)
        return add(x, norm(step, h, after, c.eps))

    def block(step: Step, c: Any, layer: int, x: Value, tables: Any) -> Value:
        name, mixer = mixers[c.layer_types[layer]] if isinstance(mixers, Mapping) else ("self_attn", mixers)
        x = residual(step, c, x, name, lambda h: mixer(step, c, layer, h, tables), norms[:2])
        return residual(step, c, x, mlp_name, lambda h: mlp(step, c, layer, h), norms[2:])

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
    """Apply embedding, blocks, last norm and head; return the logits [rows, vocab].

    embedding_scale: applied within the module `embed_tokens`; embedding_multiplier: after it.
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
