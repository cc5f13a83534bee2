"""GPT-2 (Radford et al., 2019) as in HF `GPT2LMHeadModel`: learnt positions, fused q, k, v."""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add
from castiron.emitter.layers import (
    activation,
    attention,
    embedding,
    layer_norm,
    linear,
    linear_parts,
    lm_head,
    positions,
    split_heads,
    wanted_rows,
)
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import ModelConfig


class Config(ModelConfig):
    max_positions: int
    tied: bool
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


def read(c: ConfigReader) -> Config:
    # Keys of heads other than the language model head, and of rotary embeddings.
    c.unused("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
    c.unused("attn_pdrop", "reorder_and_upcast_attn", "n_ctx", "head_dim", "rope_theta")
    c.require("add_cross_attention", False)

    def either(name: str, other: str) -> int:
        return c.take(other if other in c.config else name)

    hidden, heads = either("n_embd", "hidden_size"), either("n_head", "num_attention_heads")
    return c.read(
        Config,
        hidden=hidden,
        intermediate=c.take("n_inner", 4 * hidden),
        layers=either("n_layer", "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=either("n_positions", "max_position_embeddings"),
        eps=c.number("layer_norm_epsilon", 1e-5),
        hidden_act=c.choice("activation_function", ACTIVATION_NAMES, "gelu_new"),
        tied=c.flag("tie_word_embeddings", True),
    )


def attn(step: Step, c: Config, layer: int, x: Value) -> Value:
    q, k, v = linear_parts(step, x, "c_attn", dict.fromkeys(("q", "k", "v"), c.hidden), bias=True)
    q, k, v = (split_heads(part, c.heads) for part in (q, k, v))
    scale = (c.head_dim**-0.5 if c.scale_attn_weights else 1.0) / (layer + 1 if c.scale_attn_by_inverse_layer_idx else 1)
    return linear(step, attention(step, layer, q, k, v, scale), "c_proj", c.hidden, bias=True)


def mlp(step: Step, c: Config, x: Value) -> Value:
    h = activation(linear(step, x, "c_fc", c.intermediate, bias=True), c.hidden_act)
    return linear(step, h, "c_proj", c.hidden, bias=True)


def block(step: Step, c: Config, layer: int, x: Value) -> Value:
    h = layer_norm(step, x, "ln_1", c.eps)
    with scope("attn"):
        x = add(x, attn(step, c, layer, h))
    h = layer_norm(step, x, "ln_2", c.eps)
    with scope("mlp"):
        return add(x, mlp(step, c, h))


def forward(step: Step, c: Config) -> Value:
    with scope("transformer"):
        x = embedding(step, "wte", c.vocab, c.hidden)
        x = add(x, embedding(step, "wpe", c.max_positions, c.hidden, ids=positions(step)))
        for layer in range(c.layers):
            with scope(f"h.{layer}"):
                x = block(step, c, layer, x)
        x = layer_norm(step, wanted_rows(step, x), "ln_f", c.eps)
    return lm_head(step, x, c.vocab, c.tied, "transformer.wte")
