"""Gemma 2 (arXiv:2408.00118) as in HF `Gemma2ForCausalLM`.

It is Gemma with soft caps, with norms before and after attention and MLP, and with a sliding window
in every other layer.
"""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    attention,
    gated_mlp,
    linear,
    qkv_heads,
    rms_norm_plus_one,
    rope,
    rotary_tables,
    softcapped,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


class Config(DecoderConfig):
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
    windows: list[int | None]
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None


def read(c: ConfigReader) -> Config:
    c.unused("hidden_act")
    c.require("use_bidirectional_attention", False)
    layers = c.take("num_hidden_layers")
    return c.read(
        Config,
        positions=8192,
        head_dim=c.take("head_dim", 256),
        hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
        tied=c.flag("tie_word_embeddings", True),
        windows=c.windows(layers, c.nullable("sliding_window", 4096), lambda layer: layer % 2 == 0),
        attn_logit_softcapping=c.nullable("attn_logit_softcapping", 50.0, (int, float)),
        final_logit_softcapping=c.nullable("final_logit_softcapping", 30.0, (int, float)),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    scale = c.query_pre_attn_scalar**-0.5
    out = attention(step, layer, q, k, v, scale, c.windows[layer], c.attn_logit_softcapping)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm_plus_one(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        h = self_attention(step, c, layer, h, tables)
    x = add(x, rms_norm_plus_one(step, h, "post_attention_layernorm", c.eps))
    h = rms_norm_plus_one(step, x, "pre_feedforward_layernorm", c.eps)
    with scope("mlp"):
        h = gated_mlp(step, h, c.intermediate, c.hidden_act)
    return add(x, rms_norm_plus_one(step, h, "post_feedforward_layernorm", c.eps))


def forward(step: Step, c: Config) -> Value:
    logits = decoder(step, c, block, rotary_tables(step, c.rotary), rms_norm_plus_one, embedding_scale=c.hidden**0.5)
    return softcapped(logits, c.final_logit_softcapping)
