"""SmolLM3 as in HF `SmolLM3ForCausalLM`: Llama with some layers without rope (arXiv:2501.18795)."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import attention, linear, qkv_heads, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models import llama
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder, mlp, residual_block
from castiron.emitter.shorten import shorten


class Config(llama.Config):
    turns: list[bool]


def read(c: ConfigReader) -> Config:
    c.unused("pretraining_tp", "max_window_layers")
    layers = c.take("num_hidden_layers")
    turns = rotary_layers(c, layers)
    window = c.nullable("sliding_window", None)
    slides = c.flag("use_sliding_window", False) and window is not None
    return c.read(
        Config,
        positions=32768,
        theta=2000000.0,
        tied=c.flag("tie_word_embeddings", True),
        turns=turns,
        windows=c.windows(layers, window, lambda layer: slides and not turns[layer]),
    )


def rotary_layers(c: ConfigReader, layers: int) -> list[bool]:
    """Return for each layer whether it has a rotary embedding: 1 in `no_rope_layers`."""
    interval = c.take("no_rope_layer_interval", 4)
    flags = c.take("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(layers)], list)
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise EmitError(
            f"'no_rope_layers' in the smollm3 config is {shorten(flags)}; it must have 0 or 1 for each of {layers} layers"
        )
    return [bool(flag) for flag in flags[:layers]]


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    if c.turns[layer]:
        q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
