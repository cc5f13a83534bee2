"""Mixtral (arXiv:2401.04088) as in HF `MixtralForCausalLM`: Mistral with experts."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, experts, linear, qkv_heads, rms_norm, rope, rotary_tables, route
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


class Config(DecoderConfig):
    experts: int
    num_experts_per_tok: int = 2
    windows: list[int | None]


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=131072,
        theta=1000000.0,
        eps=c.number("rms_norm_eps", 1e-5),
        experts=c.take("num_local_experts"),
        windows=[c.nullable("sliding_window", None)] * c.take("num_hidden_layers"),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def block_sparse_moe(step: Step, c: Config, x: Value) -> Value:
    routing = route(linear(step, x, "gate", c.experts), c.num_experts_per_tok, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.hidden_act, names=("w1", "w3", "w2"))


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("block_sparse_moe"):
        return add(x, block_sparse_moe(step, c, h))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, rotary_tables(step, c.rotary))
