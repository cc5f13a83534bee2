"""Phi-3 to Phi-4-mini (arXiv:2404.14219) as in HF `Phi3ForCausalLM`.

It is Llama with fused projections: one for q, k and v, and one for the MLP's gate and up.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.ops import multiply
from castiron.emitter.layers import activation, attention, linear, linear_parts, rope, split_heads
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, residual_block


class Config(DecoderConfig):
    """Phi-3's config; with LongRoPE, HF computes the cache again once a sequence is longer."""

    @property
    def max_positions(self) -> int:
        return (self.rotary.long or self.rotary).positions

    @property
    def original_context(self) -> int | None:
        return self.rotary.positions if self.rotary.long else None


def read(c: ConfigReader) -> Config:
    c.require("attention_bias", False)
    c.require("mlp_bias", False)
    c.require("lm_head_bias", False)
    c.unused("full_attn_mod", "interpolate_factor")
    # HF's default, which also replaces the value in `rope_scaling`.
    c.config.setdefault("original_max_position_embeddings", 4096)
    return c.read(
        Config,
        positions=4096,
        partial=1.0,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        eps=c.number("rms_norm_eps", 1e-5),
        windows=[c.nullable("sliding_window", None)] * c.take("num_hidden_layers"),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    kv = c.kv_heads * c.head_dim
    q, k, v = linear_parts(step, x, "qkv_proj", {"q_proj": c.heads * c.head_dim, "k_proj": kv, "v_proj": kv})
    q, k, v = split_heads(q, c.heads), split_heads(k, c.kv_heads), split_heads(v, c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    gate, up = linear_parts(step, x, "gate_up_proj", {"gate_proj": c.intermediate, "up_proj": c.intermediate})
    return linear(step, multiply(activation(gate, c.hidden_act), up), "down_proj", c.hidden)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
