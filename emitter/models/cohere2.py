"""Command R7B and Command A (arXiv:2504.00698) as in HF `Cohere2ForCausalLM`.

One norm feeds attention and MLP in parallel; every fourth layer has full attention without rope.
"""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add
from castiron.emitter.layers import attention, gated_mlp, layer_norm, linear, qkv_heads, rope, scaled
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder


class Config(DecoderConfig):
    attention_bias: bool = False
    logit_scale: float = 0.0625


def read(c: ConfigReader) -> Config:
    pattern = c.take("sliding_window_pattern", 4)
    heads = c.take("num_attention_heads")
    return c.read(
        Config,
        positions=8192,
        kv_heads=c.take("num_key_value_heads", heads),
        eps=c.number("layer_norm_eps", 1e-5),
        tied=c.flag("tie_word_embeddings", True),
        windows=c.windows(
            c.take("num_hidden_layers"), c.nullable("sliding_window", 4096), lambda layer: (layer + 1) % pattern != 0
        ),
    )


def norm(step: Step, x: Value, name: str, eps: float) -> Value:
    return layer_norm(step, x, name, eps, bias=False)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    if c.windows[layer]:
        q, k = rope(step, q, tables, interleaved=True), rope(step, k, tables, interleaved=True)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    return scaled(decoder(step, c, block, norm), c.logit_scale)
