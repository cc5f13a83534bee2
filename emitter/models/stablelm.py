"""StableLM 2 (arXiv:2402.17834) as in HF `StableLmForCausalLM`.

It is Llama with LayerNorm, and with a rotary embedding on a part of each head.
"""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add
from castiron.emitter.layers import attention, gated_mlp, head_norms, layer_norm, linear, qkv_heads, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder


class Config(DecoderConfig):
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


def read(c: ConfigReader) -> Config:
    c.unused("num_heads")
    return c.read(
        Config,
        positions=4096,
        partial=0.25,
        head_dim=c.take("hidden_size") // c.take("num_attention_heads"),
        eps=c.number("layer_norm_eps", 1e-5),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.use_qkv_bias)
    if c.qk_layernorm:
        q, k = head_norms(step, q, "q_layernorm", c.eps), head_norms(step, k, "k_layernorm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = layer_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    if not c.use_parallel_residual:
        h = layer_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, norm=layer_norm)
