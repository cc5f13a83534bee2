"""OLMo 3 (arXiv:2512.13961) as in HF `Olmo3ForCausalLM`: OLMo 2 with sliding windows.

Every fourth layer has full attention; only those layers have a rope scaling.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers.step import Step
from castiron.emitter.models import olmo2
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import POST_NORM, SlidingConfig, decoder, mlp, residual_block
from castiron.emitter.models.olmo2 import self_attention


class Config(olmo2.Config, SlidingConfig):
    """The config of OLMo 3, which is that of OLMo 2 plus sliding windows."""


def read(c: ConfigReader) -> Config:
    heads = c.take("num_attention_heads")
    head_dim = c.take("head_dim", c.take("hidden_size") // heads)
    # HF uses `rope_theta` only in layers with full attention.
    thetas = {"rope_theta": c.number("rope_theta", 500000.0)}, {"rope_theta": 500000.0}
    full, sliding = c.rotaries([head_dim] * 2, c.take("max_position_embeddings", 2048), *thetas)
    return c.read(
        Config,
        rotary=full,
        head_dim=head_dim,
        kv_heads=c.take("num_key_value_heads", heads),
        eps=c.number("rms_norm_eps", 1e-5),
        windows=c.windows(c.take("num_hidden_layers"), c.nullable("sliding_window", 4096), lambda layer: (layer + 1) % 4 != 0),
        sliding_rotary=sliding,
    )


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp, POST_NORM))
