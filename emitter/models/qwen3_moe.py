"""Qwen3 MoE (arXiv:2505.09388) as in HF `Qwen3MoeForCausalLM`: Qwen3 with experts."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    attention,
    experts,
    gated_mlp,
    linear,
    qkv_heads,
    rms_norm,
    rope,
    rotary_tables,
    route,
)
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


class Config(DecoderConfig):
    attention_bias: bool = False
    windows: list[int | None]
    sparse: list[bool]
    experts: int
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False


def read(c: ConfigReader) -> Config:
    c.unused("max_window_layers")
    layers = c.take("num_hidden_layers")
    window = c.nullable("sliding_window", 4096)
    return c.read(
        Config,
        positions=32768,
        windows=[window if c.flag("use_sliding_window", False) else None] * layers,
        sparse=sparse_layers(c, layers),
        experts=c.take("num_experts", c.take("num_local_experts", 128)),
    )


def sparse_layers(c: ConfigReader, layers: int) -> list[bool]:
    """Return for each layer whether it has experts.

    Every `decoder_sparse_step`-th layer has experts, except the layers in `mlp_only_layers`.
    """
    dense, step = c.take("mlp_only_layers", [], list), c.take("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def sparse_moe_block(step: Step, c: Config, x: Value) -> Value:
    routing = route(linear(step, x, "gate", c.experts), c.num_experts_per_tok, c.norm_topk_prob)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.moe_intermediate_size, c.hidden_act)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, sparse_moe_block(step, c, h) if c.sparse[layer] else gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, rotary_tables(step, c.rotary))
