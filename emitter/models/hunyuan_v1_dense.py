"""Hunyuan (dense) as in HF `HunYuanDenseV1ForCausalLM`: Llama with norms of q and k after rope."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm, rope
from castiron.emitter.layers.rotary import Rotary
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block


class Config(DecoderConfig):
    attention_bias: bool = False


def read(c: ConfigReader) -> Config:
    c.unused("eod_token_id", "pretraining_tp")
    heads = c.take("num_attention_heads")
    head_dim = c.take("head_dim", c.take("hidden_size") // heads)
    return c.read(
        Config,
        head_dim=head_dim,
        kv_heads=c.take("num_key_value_heads", heads),
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=rotary(c, head_dim, c.take("max_position_embeddings", 2048)),
    )


def rotary(c: ConfigReader, head_dim: int, max_positions: int) -> Rotary:
    """Return the config's frequencies; the type "dynamic" with a key `alpha` only increases theta.

    The factor is alpha ** (head_dim / (head_dim - 2)).
    """
    entry = c.take("rope_scaling", None, dict) or c.take("rope_parameters", {}, dict)
    if (entry.get("rope_type") or entry.get("type")) == "dynamic" and entry.get("alpha"):
        theta = entry.get("rope_theta") or c.number("rope_theta", 10000.0)
        longer = theta * entry["alpha"] ** (head_dim / (head_dim - 2))
        c.config |= {"rope_scaling": None, "rope_parameters": {"rope_theta": longer}}
    return c.rotary(head_dim, max_positions)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    q, k = rms_norm(step, q, "query_layernorm", c.eps), rms_norm(step, k, "key_layernorm", c.eps)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
