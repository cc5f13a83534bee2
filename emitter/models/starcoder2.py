"""StarCoder2 (arXiv:2402.19173) as in HF `Starcoder2ForCausalLM`.

It is Llama with LayerNorm, with biases, and with an MLP without a gate.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import activation, layer_norm, linear
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, residual_block
from castiron.emitter.models.llama import self_attention


def read(c: ConfigReader) -> DecoderConfig:
    c.unused("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    c.require("norm_type", "layer_norm")
    c.require("mlp_type", "default")
    c.require("scale_attn_weights", True)
    bias = c.flag("use_bias", True)
    return c.read(
        DecoderConfig,
        attention_bias=bias,
        mlp_bias=bias,
        positions=4096,
        eps=c.number("norm_epsilon", 1e-5),
        hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
        tied=c.flag("tie_word_embeddings", True),
        windows=[c.nullable("sliding_window", None)] * c.take("num_hidden_layers"),
    )


def mlp(step: Step, c: DecoderConfig, layer: int, x: Value) -> Value:
    h = activation(linear(step, x, "c_fc", c.intermediate, c.mlp_bias), c.hidden_act)
    return linear(step, h, "c_proj", c.hidden, c.mlp_bias)


def forward(step: Step, c: DecoderConfig) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp, norm=layer_norm), layer_norm)
