"""Gemma (arXiv:2403.08295) as in HF `GemmaForCausalLM`: Llama with `1 + w` norms and GELU."""

from castiron.emitter.ir import Value
from castiron.emitter.layers import rms_norm_plus_one
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block
from castiron.emitter.models.llama import self_attention
from castiron.emitter.step import Step


class Config(DecoderConfig):
    attention_bias: bool = False


def read(c: ConfigReader) -> Config:
    # HF computes the tanh form for both names.
    c.require("hidden_act", "gelu", "gelu_pytorch_tanh")
    c.require("hidden_activation", "gelu_pytorch_tanh")
    c.require("use_bidirectional_attention", False)
    return c.read(
        Config,
        positions=8192,
        head_dim=c.take("head_dim", 256),
        hidden_act="gelu_tanh",
        tied=c.flag("tie_word_embeddings", True),
    )


def forward(step: Step, c: Config) -> Value:
    block = residual_block(self_attention, mlp, norm=rms_norm_plus_one)
    return decoder(step, c, block, rms_norm_plus_one, embedding_scale=c.hidden**0.5)
