"""ModernBERT (arXiv:2412.13663), an encoder, as in HF `ModernBertModel`.

In most layers, a token attends to a window of earlier and later tokens.
"""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add, multiply
from castiron.emitter.layers import activation, attention, embedding, layer_norm, linear, linear_parts, rope, split_heads
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import SlidingConfig


class Config(SlidingConfig):
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False


def read(c: ConfigReader) -> Config:
    # Keys of training, of kernels, and of the heads after the hidden states.
    c.unused("initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "deterministic_flash_attn")
    c.unused("decoder_bias", "classifier_pooling", "classifier_dropout", "classifier_bias", "classifier_activation")
    c.unused("sparse_prediction", "sparse_pred_ignore_index", "tie_word_embeddings", "cls_token_id", "reference_compile")
    hidden, heads, layers = c.take("hidden_size"), c.take("num_attention_heads"), c.take("num_hidden_layers")
    every = c.take("global_attn_every_n_layers", 3)
    # HF's window counts earlier and later tokens; castiron's counts one side and the token itself.
    window = c.take("local_attention", 128) // 2 + 1
    thetas = ({"rope_theta": c.number(*key)} for key in (("global_rope_theta", 160000.0), ("local_rope_theta", 10000.0)))
    full, sliding = c.rotaries([hidden // heads] * 2, c.take("max_position_embeddings", 8192), *thetas)
    return c.read(
        Config,
        kv_heads=heads,
        head_dim=hidden // heads,
        bidirectional=True,
        tied=False,
        eps=c.number("norm_eps", 1e-5),
        hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu"),
        windows=c.windows(layers, window, lambda layer: layer % every != 0),
        rotary=full,
        sliding_rotary=sliding,
    )


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
    # The first layer has no norm, because the embeddings are normalised already.
    h = norm(step, c, x, "attn_norm") if layer else x
    with scope("attn"):
        x = add(x, attn(step, c, layer, h, tables))
    h = norm(step, c, x, "mlp_norm")
    with scope("mlp"):
        return add(x, mlp(step, c, h))


def forward(step: Step, c: Config) -> Value:
    tables = c.tables(step)
    with scope("embeddings"):
        x = norm(step, c, embedding(step, "tok_embeddings", c.vocab, c.hidden), "norm")
    for layer in range(c.layers):
        with scope(f"layers.{layer}"):
            x = block(step, c, layer, x, tables[layer])
    step.hidden = x = norm(step, c, x, "final_norm")
    return x
