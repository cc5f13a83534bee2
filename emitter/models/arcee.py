"""Arcee AFM as in HF `ArceeForCausalLM`: Llama with an MLP of ReLU squared and no gate."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import activation, attention, linear, qkv_heads, rms_norm, rope, rotary_tables
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


class Config(DecoderConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=4096,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        eps=c.number("rms_norm_eps", 1e-5),
        hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "relu2"),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mlp(step: Step, c: Config, x: Value) -> Value:
    h = activation(linear(step, x, "up_proj", c.intermediate, c.mlp_bias), c.hidden_act)
    return linear(step, h, "down_proj", c.hidden, c.mlp_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, mlp(step, c, h))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, rotary_tables(step, c.rotary))
