"""Hunyuan (dense) as in HF `HunYuanDenseV1ForCausalLM`: Llama with norms on q and k after their rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, rms_norm, rope, rotary_tables, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    attention_bias: bool

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.unused("eod_token_id", "pretraining_tp")
        heads = c.take("num_attention_heads")
        head_dim = c.take("head_dim", c.take("hidden_size") // heads)
        read = cls(
            **c.decoder(
                head_dim=head_dim,
                kv_heads=c.take("num_key_value_heads", heads),
                eps=c.number("rms_norm_eps", 1e-5),
                rotary=rotary(c, head_dim, c.take("max_position_embeddings", 2048)),
            ),
            attention_bias=c.flag("attention_bias", False),
        )
        c.finish()
        return read


def rotary(c: ConfigReader, head_dim: int, max_positions: int) -> Rotary:
    """Frequencies; "dynamic" with an `alpha` is a longer base once and for all, and its other numbers are not read."""
    entry = c.take("rope_scaling", None, dict) or c.take("rope_parameters", {}, dict)
    if (entry.get("rope_type") or entry.get("type")) == "dynamic" and entry.get("alpha"):
        theta = entry.get("rope_theta") or c.number("rope_theta", 10000.0)
        longer = theta * entry["alpha"] ** (head_dim / (head_dim - 2))
        c.config |= {"rope_scaling": None, "rope_parameters": {"rope_theta": longer}}
    return c.rotary(head_dim, max_positions)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    q, k = rms_norm(step, q, "query_layernorm", c.eps), rms_norm(step, k, "key_layernorm", c.eps)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    return decoder(step, c, block, rotary_tables(step, c.rotary))
