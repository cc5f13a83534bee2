"""Gemma 3 (arXiv:2503.19786) as in HF `Gemma3ForCausalLM`: two rotary bases, norms on q and k.

EmbeddingGemma (arXiv:2509.20354) is the same with bidirectional attention.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm_plus_one, rope, softcapped
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import SANDWICH_NORM, SlidingConfig, decoder, mlp, residual_block


class Config(SlidingConfig):
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
    final_logit_softcapping: float | None


def read(c: ConfigReader) -> Config:
    layers, head_dim = c.take("num_hidden_layers"), c.take("head_dim", 256)
    # HF reads this key, but its attention does not use it.
    c.require("attn_logit_softcapping")
    pattern = c.take("sliding_window_pattern", c.take("_sliding_window_pattern", 6))
    thetas = ({"rope_theta": c.number(*key)} for key in (("rope_theta", 1000000.0), ("rope_local_base_freq", 10000.0)))
    bidirectional, window = c.flag("use_bidirectional_attention", False), c.nullable("sliding_window", 4096)
    if bidirectional and window is not None:
        # HF's window counts earlier and later tokens; castiron's counts one side and the token itself.
        window = window // 2 + 1
    full, sliding = c.rotaries([head_dim] * 2, c.take("max_position_embeddings", 131072), *thetas)
    return c.read(
        Config,
        rotary=full,
        head_dim=head_dim,
        hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
        tied=c.flag("tie_word_embeddings", True),
        windows=c.windows(layers, window, lambda layer: (layer + 1) % pattern != 0),
        final_logit_softcapping=c.nullable("final_logit_softcapping", None, (int, float)),
        sliding_rotary=sliding,
        bidirectional=bidirectional,
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rms_norm_plus_one(step, q, "q_norm", c.eps), rms_norm_plus_one(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    scale, window = c.query_pre_attn_scalar**-0.5, c.windows[layer]
    out = attention(step, layer, q, k, v, scale, window, bidirectional=c.bidirectional)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: Config) -> Value:
    block = residual_block(self_attention, mlp, SANDWICH_NORM, rms_norm_plus_one)
    logits = decoder(step, c, block, rms_norm_plus_one, embedding_scale=c.hidden**0.5)
    return softcapped(logits, c.final_logit_softcapping)
