"""ModernBERT (arXiv:2412.13663) as in HF `ModernBertModel`: attention both ways, most layers near alone, a gated MLP.

It encodes texts and has no head.
"""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    activation,
    attention,
    embedding,
    layer_norm,
    linear,
    linear_parts,
    rope,
    rotary_tables,
    split_heads,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.ops import add, multiply
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config:
    """rotary: of full layers. sliding_rotary: of those with a window."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    windows: list[int | None]
    rotary: Rotary
    sliding_rotary: Rotary
    bidirectional: bool = True

    @property
    def max_positions(self) -> int:
        return min(self.rotary.positions, self.sliding_rotary.positions)

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        # Of training, of kernels, and of the heads that stand after the states.
        c.unused("initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "deterministic_flash_attn")
        c.unused("decoder_bias", "classifier_pooling", "classifier_dropout", "classifier_bias", "classifier_activation")
        c.unused("sparse_prediction", "sparse_pred_ignore_index", "tie_word_embeddings", "cls_token_id", "reference_compile")
        hidden, heads, layers = c.take("hidden_size"), c.take("num_attention_heads"), c.take("num_hidden_layers")
        every = c.take("global_attn_every_n_layers", 3)
        # All that is seen, of which one half is before a token and one after it, and the token itself.
        window = c.take("local_attention", 128) // 2 + 1
        thetas = c.number("global_rope_theta", 160000.0), c.number("local_rope_theta", 10000.0)
        full, sliding = c.rotaries(hidden // heads, c.take("max_position_embeddings", 8192), *thetas)
        read = cls(
            vocab=c.take("vocab_size"),
            hidden=hidden,
            intermediate=c.take("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            eps=c.number("norm_eps", 1e-5),
            hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu"),
            attention_bias=c.flag("attention_bias", False),
            mlp_bias=c.flag("mlp_bias", False),
            norm_bias=c.flag("norm_bias", False),
            windows=c.windows(layers, window, lambda layer: layer % every != 0),
            rotary=full,
            sliding_rotary=sliding,
        )
        c.finish()
        return read


def norm(step: Step, c: Config, x: Value, name: str) -> Value:
    return layer_norm(step, x, name, c.eps, c.norm_bias)


def attn(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    parts = linear_parts(step, x, "Wqkv", dict.fromkeys(("q", "k", "v"), c.hidden), c.attention_bias)
    q, k, v = (split_heads(part, c.heads) for part in parts)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, c.head_dim**-0.5, c.windows[layer], bidirectional=True)
    return linear(step, out, "Wo", c.hidden, c.attention_bias)


def mlp(step: Step, c: Config, x: Value) -> Value:
    h, gate = linear_parts(step, x, "Wi", dict.fromkeys(("input", "gate"), c.intermediate), c.mlp_bias)
    return linear(step, multiply(activation(h, c.hidden_act), gate), "Wo", c.hidden, c.mlp_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    # The embeddings are normed already.
    h = norm(step, c, x, "attn_norm") if layer else x
    with scope("attn"):
        x = add(x, attn(step, c, layer, h, tables))
    h = norm(step, c, x, "mlp_norm")
    with scope("mlp"):
        return add(x, mlp(step, c, h))


def forward(step: Step, c: Config) -> Value:
    """Hidden states [T, hidden] of the step's tokens."""
    full = rotary_tables(step, c.rotary, "rotary.full")
    sliding = rotary_tables(step, c.sliding_rotary, "rotary.sliding")
    with scope("embeddings"):
        x = norm(step, c, embedding(step, "tok_embeddings", c.vocab, c.hidden), "norm")
    for layer in range(c.layers):
        with scope(f"layers.{layer}"):
            x = block(step, c, layer, x, sliding if c.windows[layer] else full)
    step.hidden = x = norm(step, c, x, "final_norm")
    return x
