"""What the families share: the sizes of a decoder and its loop over blocks. Block and attention stand in each family's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import embedding, lm_head, rms_norm, wanted_rows
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderConfig:
    """What every family has; its `Config` adds what is its own. `ConfigReader.decoder` reads these fields.

    eps: of the norms. hidden_act: one of `layers.ACTIVATIONS`. tied: whether the head is the embedding's weight.
    bidirectional: whether attention sees later tokens too, so that the model encodes whole texts and generates none.
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
    tied: bool
    rotary: Rotary
    bidirectional: bool = False

    @property
    def max_positions(self) -> int:
        """How many positions the model holds for."""
        return self.rotary.positions


@dataclass(frozen=True, eq=False, kw_only=True)
class HybridConfig(DecoderConfig):
    """A decoder whose layers are of several kinds; `layer_types` names that of each."""

    layer_types: tuple[str, ...]

    def count(self, kind: str) -> int:
        """How many layers of a kind there are, which is how many its states have."""
        return self.layer_types.count(kind)

    def place(self, layer: int) -> int:
        """Which of the layers of its kind a layer is, from 0 on."""
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
    last_norm: str = "norm",
) -> Value:
    """Logits [rows, vocab] of the rows that the step wants: HF's `...ForCausalLM` around the blocks of a family.

    `block(step, c, layer, x, tables)` gives x [T, hidden] after a layer, inside the layer's scope; `tables` are handed to
    each as they are. norm: the last one, called `last_norm`. embedding_scale: what embeddings are multiplied by.
    """
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden, embedding_scale)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables)
        x = norm(step, wanted_rows(step, x), last_norm, c.eps)
    return lm_head(step, x, c.vocab, c.tied)
