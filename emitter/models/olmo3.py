"""OLMo 3 (arXiv:2512.13961) as in HF `Olmo3ForCausalLM`: OLMo 2 with sliding windows.

Every fourth layer has full attention; only those layers have a rope scaling.
"""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, rms_norm, rope, rotary_tables, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


class Config(DecoderConfig):
    """The config. rotary: frequencies of layers with full attention.

    sliding_rotary: frequencies of layers with a sliding window.
    """

    attention_bias: bool = False
    windows: list[int | None]
    sliding_rotary: Rotary


def read(c: ConfigReader) -> Config:
    heads = c.take("num_attention_heads")
    head_dim = c.take("head_dim", c.take("hidden_size") // heads)
    # HF uses `rope_theta` only in layers with full attention.
    theta = c.number("rope_theta", 500000.0)
    full, sliding = c.rotaries(head_dim, c.take("max_position_embeddings", 2048), theta, 500000.0)
    return c.read(
        Config,
        rotary=full,
        head_dim=head_dim,
        kv_heads=c.take("num_key_value_heads", heads),
        eps=c.number("rms_norm_eps", 1e-5),
        windows=c.windows(c.take("num_hidden_layers"), c.nullable("sliding_window", 4096), lambda layer: (layer + 1) % 4 != 0),
        sliding_rotary=sliding,
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = rms_norm(step, linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), "q_norm", c.eps)
    k = rms_norm(step, linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), "k_norm", c.eps)
    q, k = split_heads(q, c.heads), split_heads(k, c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: list[tuple[Value, Value]]) -> Value:
    with scope("self_attn"):
        h = self_attention(step, c, layer, x, tables[layer])
    x = add(x, rms_norm(step, h, "post_attention_layernorm", c.eps))
    with scope("mlp"):
        h = gated_mlp(step, x, c.intermediate, c.hidden_act)
    return add(x, rms_norm(step, h, "post_feedforward_layernorm", c.eps))


def forward(step: Step, c: Config) -> Value:
    full = rotary_tables(step, c.rotary, "rotary.full")
    sliding = rotary_tables(step, c.sliding_rotary, "rotary.sliding")
    return decoder(step, c, block, [sliding if window else full for window in c.windows])
