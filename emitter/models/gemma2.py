"""Gemma 2 (arXiv:2408.00118) as in HF `Gemma2ForCausalLM`.

It is Gemma with soft caps, four norms in a block, and a sliding window in every other layer.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm_plus_one, rope, softcapped
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import SANDWICH_NORM, DecoderConfig, decoder, mlp, residual_block


class Config(DecoderConfig):
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
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


def forward(step: Step, c: Config) -> Value:
    block = residual_block(self_attention, mlp, SANDWICH_NORM, rms_norm_plus_one)
    logits = decoder(step, c, block, rms_norm_plus_one, embedding_scale=c.hidden**0.5)
    return softcapped(logits, c.final_logit_softcapping)
