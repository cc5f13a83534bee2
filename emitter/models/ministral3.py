"""Ministral 3 (arXiv:2601.08584) as in HF `Ministral3ForCausalLM`: Mistral with scaled queries."""

import numpy as np

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, qkv_heads, rms_norm, rope, rotary_tables
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step
from castiron.emitter.types import EmitError

# cos and sin for queries, and for keys.
Tables = tuple[tuple[Value, Value], tuple[Value, Value]]

# The default of HF.
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
    """The config. beta, original: parameters of the queries' scale.

    A query at position p is multiplied by 1 + beta * log(1 + p // original).
    """

    windows: list[int | None]
    beta: float
    original: int

    def growth(self, positions: np.ndarray) -> np.ndarray:
        """Return the factors f32 by which queries at `positions` are multiplied."""
        growth = np.log(1.0 + positions // self.original).astype(np.float32)
        return np.float32(1) + np.float32(self.beta) * growth


def read(c: ConfigReader) -> Config:
    positions = c.take("max_position_embeddings", 262144)
    entry = {**(c.take("rope_scaling", None, dict) or c.take("rope_parameters", _ROPE, dict))}
    beta = entry.pop("llama_4_scaling_beta", None)
    if not isinstance(beta, int | float):
        raise EmitError("the ministral3 config lacks 'llama_4_scaling_beta' in its 'rope_parameters'")
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


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: Tables) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim)
    q, k = rope(step, q, tables[0]), rope(step, k, tables[1])
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: Tables) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    of_keys = rotary_tables(step, c.rotary)
    # A context that nothing grows in has one pair of tables, and q, k and v are one kernel.
    of_queries = of_keys if step.context <= c.original else rotary_tables(step, c.rotary, "rotary.queries", c.growth)
    return decoder(step, c, block, (of_queries, of_keys))
