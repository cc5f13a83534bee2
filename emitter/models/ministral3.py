"""Ministral 3 (arXiv:2601.08584) as in HF `Ministral3ForCausalLM`: Mistral with scaled queries."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import attention, linear, qkv_heads, rope, rotary_tables
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block

# HF's default for `rope_parameters`.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Config(DecoderConfig):
    """A query at position p is multiplied by 1 + beta * log(1 + p // original)."""

    beta: float
    original: int

    def growth(self, positions: np.ndarray) -> np.ndarray:
        """Return the factors, f32 [n], by which queries at `positions` [n] are multiplied."""
        growth = np.log(1.0 + positions // self.original).astype(np.float32)
        return np.float32(1) + np.float32(self.beta) * growth

    def tables(self, step: Step) -> Sequence[Any]:
        """Return the rotary tables of each layer: (cos, sin) of queries, and (cos, sin) of keys."""
        of_keys = rotary_tables(step, self.rotary)
        # If all factors are 1, one pair of tables for both lets a single kernel compute q, k and v.
        grows = step.context > self.original
        of_queries = rotary_tables(step, self.rotary, "rotary.queries", self.growth) if grows else of_keys
        return [(of_queries, of_keys)] * self.layers


def read(c: ConfigReader) -> Config:
    positions = c.take("max_position_embeddings", 262144)
    entry = {**(c.take("rope_scaling", None, dict) or c.take("rope_parameters", _ROPE, dict))}
    beta = entry.pop("llama_4_scaling_beta", None)
    if not isinstance(beta, int | float):
        raise EmitError("the ministral3 config lacks the number 'llama_4_scaling_beta' in its 'rope_parameters'")
    entry.pop("max_position_embeddings", None)
    c.config |= {"rope_scaling": None, "rope_parameters": entry}
    head_dim = c.nullable("head_dim", 128) or c.take("hidden_size") // c.take("num_attention_heads")
    return c.read(
        Config,
        head_dim=head_dim,
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=c.rotary(head_dim, positions),
        windows=[c.nullable("sliding_window", None)] * c.take("num_hidden_layers"),
        beta=float(beta),
        original=entry.get("original_max_position_embeddings") or positions,
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: Sequence[tuple[Value, Value]]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim)
    q, k = rope(step, q, tables[0]), rope(step, k, tables[1])
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
