"""StarCoder2 (arXiv:2402.19173) as in HF `Starcoder2ForCausalLM`: LayerNorm, biases, no gate."""

from castiron.emitter.ir import Value
from castiron.emitter.layers import activation, attention, layer_norm, linear, qkv_heads, rope
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, pre_norm_block
from castiron.emitter.step import Step


class Config(DecoderConfig):
    use_bias: bool = True


def read(c: ConfigReader) -> Config:
    c.unused("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    c.require("norm_type", "layer_norm")
    c.require("mlp_type", "default")
    c.require("scale_attn_weights", True)
    return c.read(
        Config,
        positions=4096,
        eps=c.number("norm_epsilon", 1e-5),
        hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
        tied=c.flag("tie_word_embeddings", True),
        windows=[c.nullable("sliding_window", None)] * c.take("num_hidden_layers"),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.use_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.use_bias)


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    h = activation(linear(step, x, "c_fc", c.intermediate, c.use_bias), c.hidden_act)
    return linear(step, h, "c_proj", c.hidden, c.use_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, pre_norm_block(self_attention, mlp, layer_norm), layer_norm)
