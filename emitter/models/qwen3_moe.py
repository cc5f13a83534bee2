"""Qwen3 with experts (arXiv:2505.09388) as in HF `Qwen3MoeForCausalLM`: Qwen3 whose MLP is a few experts out of many."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, experts, gated_mlp, linear, rms_norm, rope, rotary_tables, route, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    attention_bias: bool
    windows: list[int | None]
    sparse: list[bool]
    experts: int
    experts_per_token: int
    moe_intermediate: int
    norm_topk_prob: bool

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.unused("max_window_layers")
        layers = c.take("num_hidden_layers")
        window = c.nullable("sliding_window", 4096)
        read = cls(
            **c.decoder(max_positions=32768),
            attention_bias=c.flag("attention_bias", False),
            windows=[window if c.flag("use_sliding_window", False) else None] * layers,
            sparse=sparse_layers(c, layers),
            # Saved by transformers 5 under the name that Mixtral gives it.
            experts=c.take("num_experts", c.take("num_local_experts", 128)),
            experts_per_token=c.take("num_experts_per_tok", 8),
            moe_intermediate=c.take("moe_intermediate_size", 768),
            norm_topk_prob=c.flag("norm_topk_prob", False),
        )
        c.finish()
        return read


def sparse_layers(c: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has experts: every `decoder_sparse_step`-th, those of `mlp_only_layers` excepted."""
    dense, step = c.take("mlp_only_layers", [], list), c.take("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def sparse_moe_block(step: Step, c: Config, x: Value) -> Value:
    routing = route(linear(step, x, "gate", c.experts), c.experts_per_token, c.norm_topk_prob)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.moe_intermediate, c.hidden_act)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, sparse_moe_block(step, c, h) if c.sparse[layer] else gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    return decoder(step, c, block, rotary_tables(step, c.rotary))
