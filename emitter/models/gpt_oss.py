"""gpt-oss (arXiv:2508.10925) as in HF `GptOssForCausalLM`: clamped SwiGLU experts, and sinks.

Every other layer has a sliding window.
"""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import ClampedSwiGLU, attention, experts, linear, qkv_heads, rope, route
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, residual_block

# HF's default for `rope_parameters`.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class Config(DecoderConfig):
    """The config of gpt-oss; `intermediate` is the width of an expert's hidden layer."""

    attention_bias: bool = True
    experts: int
    num_experts_per_tok: int = 4
    glu: ClampedSwiGLU


def read(c: ConfigReader) -> Config:
    c.unused("hidden_act")
    if c.config.get("quantization_config") is not None:
        method = c.take("quantization_config", kinds=dict).get("quant_method")
        if method != "mxfp4":
            raise EmitError(f"'quantization_config' in the gpt_oss config names {method!r}; only 'mxfp4' is supported")
    if c.take("rope_scaling", None, dict) is None:
        c.config["rope_parameters"] = c.take("rope_parameters", _ROPE, dict)
    return c.read(
        Config,
        positions=131072,
        theta=150000.0,
        head_dim=c.nullable("head_dim", 64) or c.take("hidden_size") // c.take("num_attention_heads"),
        kv_heads=c.nullable("num_key_value_heads", 8) or c.take("num_attention_heads"),
        eps=c.number("rms_norm_eps", 1e-5),
        hidden_act="silu",
        windows=c.windows(c.take("num_hidden_layers"), c.nullable("sliding_window", 128), lambda layer: (layer + 1) % 2 != 0),
        experts=c.take("num_local_experts"),
        glu=ClampedSwiGLU(c.number("swiglu_alpha", 1.702), c.number("swiglu_limit", 7.0)),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    sinks = step.vector("sinks", (c.heads,))
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer], sinks=sinks)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    # HF's softmax over the chosen logits equals a softmax over all logits, divided by its sum over the chosen ones.
    routing = route(linear(step, x, "router", c.experts, bias=True), c.num_experts_per_tok, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.glu, bias=True)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
