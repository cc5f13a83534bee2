"""BERT (arXiv:1810.04805), an encoder, as in HF `BertModel`.

The caller adds the vocabulary size to ids of the second token type.
"""

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add
from castiron.emitter.graph.types import I32
from castiron.emitter.layers import activation, attention, embedding, layer_norm, linear, positions, split_heads
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import ModelConfig


class Config(ModelConfig):
    type_vocab_size: int = 2
    max_positions: int


def read(c: ConfigReader) -> Config:
    c.require("is_decoder", False)
    c.require("add_cross_attention", False)
    c.require("position_embedding_type", "absolute")
    c.unused("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "tie_word_embeddings")
    heads = c.take("num_attention_heads")
    return c.read(
        Config,
        kv_heads=heads,
        head_dim=c.take("hidden_size") // heads,
        max_positions=c.take("max_position_embeddings", 512),
        eps=c.number("layer_norm_eps", 1e-12),
        bidirectional=True,
        hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "gelu"),
    )


def embeddings(step: Step, c: Config) -> Value:
    first, vocab = ops.constant(0, I32, step.tokens.shape), ops.constant(c.vocab, I32, step.tokens.shape)
    second = ops.compare("GE", step.tokens, vocab)
    types = ops.select(second, ops.constant(min(1, c.type_vocab_size - 1), I32, step.tokens.shape), first)
    ids = ops.subtract(step.tokens, ops.select(second, vocab, first))
    x = embedding(step, "word_embeddings", c.vocab, c.hidden, ids=ids)
    x = add(x, embedding(step, "token_type_embeddings", c.type_vocab_size, c.hidden, ids=types))
    x = add(x, embedding(step, "position_embeddings", c.max_positions, c.hidden, ids=positions(step)))
    return layer_norm(step, x, "LayerNorm", c.eps)


def self_attention(step: Step, c: Config, layer: int, x: Value) -> Value:
    q, k, v = (split_heads(linear(step, x, name, c.hidden, bias=True), c.heads) for name in ("query", "key", "value"))
    return attention(step, layer, q, k, v, c.head_dim**-0.5, bidirectional=True)


def output(step: Step, c: Config, x: Value, h: Value) -> Value:
    with scope("output"):
        return layer_norm(step, add(x, linear(step, h, "dense", c.hidden, bias=True)), "LayerNorm", c.eps)


def block(step: Step, c: Config, layer: int, x: Value) -> Value:
    with scope("attention"):
        with scope("self"):
            h = self_attention(step, c, layer, x)
        x = output(step, c, x, h)
    with scope("intermediate"):
        h = activation(linear(step, x, "dense", c.intermediate, bias=True), c.hidden_act)
    return output(step, c, x, h)


def forward(step: Step, c: Config) -> Value:
    with scope("embeddings"):
        x = embeddings(step, c)
    for layer in range(c.layers):
        with scope(f"encoder.layer.{layer}"):
            x = block(step, c, layer, x)
    step.hidden = x
    return x
