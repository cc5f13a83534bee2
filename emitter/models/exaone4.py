"""EXAONE 4.0 (arXiv:2507.11407) as in HF `Exaone4ForCausalLM`: norms after attention and MLP; in the hybrid form most layers
slide, and only those have a rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, rms_norm, rope, rotary_tables, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    """hybrid: whether there is a window, so that layers without it have no rotary embedding."""

    windows: list[int | None]
    hybrid: bool

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        window, pattern = c.nullable("sliding_window", 4096), c.take("sliding_window_pattern", 4, (int, str))
        if window is None or isinstance(pattern, str):
            # HF counts layers by a number, and only under a window.
            c.take("layer_types", kinds=list)
            pattern = 1
        read = cls(
            **c.decoder(max_positions=2048, eps=c.number("rms_norm_eps", 1e-5)),
            windows=c.windows(c.take("num_hidden_layers"), window, lambda layer: (layer + 1) % pattern != 0),
            hybrid=window is not None,
        )
        c.finish()
        return read


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim), c.kv_heads)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    if c.windows[layer] or not c.hybrid:
        q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    with scope("self_attn"):
        h = self_attention(step, c, layer, x, tables)
    x = add(x, rms_norm(step, h, "post_attention_layernorm", c.eps))
    with scope("mlp"):
        h = gated_mlp(step, x, c.intermediate, c.hidden_act)
    return add(x, rms_norm(step, h, "post_feedforward_layernorm", c.eps))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    return decoder(step, c, block, rotary_tables(step, c.rotary))
