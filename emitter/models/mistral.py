"""Mistral (arXiv:2310.06825) as in HF `MistralForCausalLM`: Llama with a sliding window."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block
from castiron.emitter.models.llama import self_attention


def read(c: ConfigReader) -> DecoderConfig:
    return c.read(DecoderConfig, positions=131072, windows=[c.nullable("sliding_window", 4096)] * c.take("num_hidden_layers"))


def forward(step: Step, c: DecoderConfig) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
