"""Arcee AFM as in HF `ArceeForCausalLM`: Llama whose MLP has squared ReLU and no gate."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import activation, linear
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import decoder, residual_block
from castiron.emitter.models.llama import Config, self_attention


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=4096,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        eps=c.number("rms_norm_eps", 1e-5),
        hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "relu2"),
    )


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    h = activation(linear(step, x, "up_proj", c.intermediate, c.mlp_bias), c.hidden_act)
    return linear(step, h, "down_proj", c.hidden, c.mlp_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
