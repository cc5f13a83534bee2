"""StableLM 2 (arXiv:2402.17834) as in HF `StableLmForCausalLM`: LayerNorm, and rotary embedding on part of a head."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    activation,
    attention,
    embedding,
    head_norms,
    layer_norm,
    linear,
    lm_head,
    rope,
    rotary_tables,
    split_heads,
    wanted_rows,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.ops import add, multiply
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config:
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    hidden_act: str
    use_qkv_bias: bool
    qk_layernorm: bool
    use_parallel_residual: bool
    tied: bool
    rotary: Rotary

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.unused("num_heads")
        hidden, heads = c.take("hidden_size"), c.take("num_attention_heads")
        head_dim = hidden // heads
        rotary = c.rotary(head_dim, c.take("max_position_embeddings", 4096), partial=0.25)
        read = cls(
            vocab=c.take("vocab_size"),
            hidden=hidden,
            intermediate=c.take("intermediate_size"),
            layers=c.take("num_hidden_layers"),
            heads=heads,
            kv_heads=c.take("num_key_value_heads"),
            head_dim=head_dim,
            max_positions=rotary.positions,
            eps=c.number("layer_norm_eps", 1e-5),
            hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "silu"),
            use_qkv_bias=c.flag("use_qkv_bias", False),
            qk_layernorm=c.flag("qk_layernorm", False),
            use_parallel_residual=c.flag("use_parallel_residual", False),
            tied=c.flag("tie_word_embeddings", False),
            rotary=rotary,
        )
        c.finish()
        return read


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.use_qkv_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.use_qkv_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.use_qkv_bias), c.kv_heads)
    if c.qk_layernorm:
        q, k = head_norms(step, q, "q_layernorm", c.eps), head_norms(step, k, "k_layernorm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden)


def mlp(step: Step, c: Config, x: Value) -> Value:
    gate = activation(linear(step, x, "gate_proj", c.intermediate), c.hidden_act)
    up = linear(step, x, "up_proj", c.intermediate)
    return linear(step, multiply(gate, up), "down_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = layer_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    if not c.use_parallel_residual:
        h = layer_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, mlp(step, c, h))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    tables = rotary_tables(step, c.rotary)
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables)
        x = layer_norm(step, wanted_rows(step, x), "norm", c.eps)
    return lm_head(step, x, c.vocab, c.tied)
