"""Gemma 4 as in HF `Gemma4ForCausalLM`.

Full attention has larger heads, the last layers use keys and values of earlier ones, each layer has
an embedding of the tokens, and some models have experts in parallel with the MLP.
"""

from dataclasses import dataclass

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add, broadcast_in_dim, gather_rows, multiply, reshape, slice_
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import (
    activation,
    attention,
    embedding,
    experts,
    gated_mlp,
    linear,
    lm_head,
    rms_norm,
    rope,
    route,
    scaled,
    softcapped,
    split_heads,
    values,
    wanted_rows,
)
from castiron.emitter.layers.kv_cache import layer_caches
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import SlidingConfig
from castiron.emitter.shorten import shorten, shorten_list

# HF's defaults for `rope_parameters`: of layers with full attention, and of those with a sliding window.
_ROPES = (
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    {"rope_type": "default", "rope_theta": 10000.0},
)


@dataclass(frozen=True, eq=False)
class Experts:
    count: int
    per_token: int
    intermediate: int


class Config(SlidingConfig):
    """The config of Gemma 4; rotary, kv_heads and head_dim are those of full attention.

    own: the number of layers that compute keys and values; later ones use those of `source(layer)`.
    keys_are_values: whether layers with full attention use the projected keys as values too.
    per_layer: size of the separate token embedding of each layer; 0 if the model has none.
    """

    sliding_kv_heads: int
    sliding_head_dim: int
    own: int
    keys_are_values: bool
    use_double_wide_mlp: bool = False
    attention_bias: bool = False
    per_layer: int
    vocab_size_per_layer_input: int = 262144
    experts: Experts | None
    final_logit_softcapping: float | None

    def heads_of(self, layer: int) -> tuple[int, int]:
        return (self.sliding_kv_heads, self.sliding_head_dim) if self.windows[layer] else (self.kv_heads, self.head_dim)

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values `layer` uses: itself, or the last of its type."""
        kind = self.windows[layer] is None
        return layer if layer < self.own else max(i for i in range(self.own) if (self.windows[i] is None) == kind)


def read(c: ConfigReader) -> Config:
    c.require("use_bidirectional_attention", "vision")
    layers, head_dim, kv_heads = c.take("num_hidden_layers"), c.take("head_dim", 256), c.take("num_key_value_heads")
    # In HF the last layer always has full attention.
    windows = [*c.windows(layers, c.take("sliding_window", 512), lambda layer: (layer + 1) % 6 != 0)[:-1], None]
    keys_are_values = c.flag("attention_k_eq_v", False)
    full = full_heads(c, windows, keys_are_values)
    head_dims = full.get("head_dim", head_dim), head_dim
    full_rotary, sliding_rotary = c.rotaries(head_dims, c.take("max_position_embeddings", 131072), *_ROPES)
    shared = c.take("num_kv_shared_layers", 0, minimum=0)
    own = layers - shared
    if {bool(window) for window in windows[:own]} != {bool(window) for window in windows}:
        raise EmitError(
            f"the gemma4_text config is inconsistent: 'num_kv_shared_layers' is {shared}, which leaves all full-attention or "
            "all sliding-window layers without a KV cache"
        )
    per_layer = c.take("hidden_size_per_layer_input", 256, minimum=0)
    return c.read(
        Config,
        rotary=full_rotary,
        head_dim=head_dims[0],
        kv_heads=full.get("num_key_value_heads", kv_heads),
        hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
        tied=c.flag("tie_word_embeddings", True),
        windows=windows,
        sliding_rotary=sliding_rotary,
        sliding_kv_heads=kv_heads,
        sliding_head_dim=head_dim,
        own=own,
        keys_are_values=keys_are_values,
        per_layer=per_layer,
        experts=read_experts(c),
        final_logit_softcapping=c.nullable("final_logit_softcapping", None, (int, float)),
    )


def read_experts(c: ConfigReader) -> Experts | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if c.flag("enable_moe_block", False):
        return Experts(*map(c.take, names))
    c.unused(*names)
    return None


def full_heads(c: ConfigReader, windows: list[int | None], keys_are_values: bool) -> dict[str, int]:
    """Return the config's `head_dim` and `num_key_value_heads` of full attention, if any."""
    kv_heads, head_dim = c.take("num_global_key_value_heads", None), c.take("global_head_dim", 512)
    if "per_layer_config" not in c.config:
        return {"head_dim": head_dim, **({"num_key_value_heads": kv_heads} if keys_are_values and kv_heads else {})}
    stated = {int(layer): own for layer, own in c.take("per_layer_config", kinds=dict).items()}
    full = [layer for layer, window in enumerate(windows) if window is None]
    first = stated.get(full[0], {})
    if stated != ({layer: first for layer in full} if first else {}):
        differ = any(own != first for own in stated.values())
        problem = "different entries" if differ else f"entries for layers {shorten_list(map(str, stated))}"
        raise EmitError(
            f"'per_layer_config' in the gemma4_text config has {problem}; it must have the same entry for each "
            f"full-attention layer ({shorten_list(map(str, full))}) and none for other layers"
        )
    if unknown := set(first) - {"head_dim", "num_key_value_heads"}:
        raise EmitError(
            f"'per_layer_config' in the gemma4_text config has the unknown key {shorten(min(unknown))}; only 'head_dim' and "
            "'num_key_value_heads' are supported"
        )
    return first


def states(c: Config, context: int) -> tuple[State, ...]:
    windows = dict(enumerate(c.windows[: c.own]))
    full = layer_caches(windows, context, c.kv_heads, c.head_dim)
    sliding = layer_caches(windows, context, c.sliding_kv_heads, c.sliding_head_dim)
    return *(s for s in full if s.kind == "positional"), *(s for s in sliding if s.kind == "window")


# The keys and values of each layer that computes them.
Shared = dict[int, tuple[Value, Value]]


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value], shared: Shared) -> Value:
    kv_heads, d = c.heads_of(layer)
    q = split_heads(linear(step, x, "q_proj", c.heads * d, c.attention_bias), c.heads)
    q = rope(step, rms_norm(step, q, "q_norm", c.eps), tables)
    source = c.source(layer)
    if source == layer:
        k = v = split_heads(linear(step, x, "k_proj", kv_heads * d, c.attention_bias), kv_heads)
        if not c.keys_are_values or c.windows[layer]:
            v = split_heads(linear(step, x, "v_proj", kv_heads * d, c.attention_bias), kv_heads)
        k = rope(step, rms_norm(step, k, "k_norm", c.eps), tables)
        shared[layer] = k, rms_norm(step, v, None, c.eps)
    # A layer without keys and values writes those of `source` again, into the same rows.
    k, v = shared[source]
    out = attention(step, source, q, k, v, 1.0, c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mixed(step: Step, c: Config, e: Experts, x: Value, dense: Value) -> Value:
    """Return norm(dense, the MLP's output) + norm(experts' output), [T, hidden]."""
    with scope("router"):
        h = multiply(rms_norm(step, x, None, c.eps), broadcast_in_dim(values(step, "scale", (c.hidden,)), x.shape, (1,)))
        chosen, weights = route(linear(step, scaled(h, c.hidden**-0.5), "proj", e.count), e.per_token, normalised=True)
        scales = gather_rows(
            reshape(values(step, "per_expert_scale", (e.count,)), (e.count, 1)), reshape(chosen, (chosen.type.elements,))
        )
        weights = multiply(weights, reshape(scales, weights.shape))
    h = rms_norm(step, x, "pre_feedforward_layernorm_2", c.eps)
    with scope("experts"):
        h = experts(step, h, (chosen, weights), e.count, e.intermediate, c.hidden_act)
    h = rms_norm(step, h, "post_feedforward_layernorm_2", c.eps)
    return add(rms_norm(step, dense, "post_feedforward_layernorm_1", c.eps), h)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value], shared: Shared, own: Value | None) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        h = self_attention(step, c, layer, h, tables, shared)
    x = add(x, rms_norm(step, h, "post_attention_layernorm", c.eps))
    h = rms_norm(step, x, "pre_feedforward_layernorm", c.eps)
    with scope("mlp"):
        h = gated_mlp(step, h, c.intermediate * (2 if c.use_double_wide_mlp and layer >= c.own else 1), c.hidden_act)
    if c.experts is not None:
        h = mixed(step, c, c.experts, x, h)
    x = add(x, rms_norm(step, h, "post_feedforward_layernorm", c.eps))
    if own is not None:
        h = multiply(activation(linear(step, x, "per_layer_input_gate", c.per_layer), c.hidden_act), own)
        h = linear(step, h, "per_layer_projection", c.hidden)
        x = add(x, rms_norm(step, h, "post_per_layer_input_norm", c.eps))
    return multiply(x, broadcast_in_dim(values(step, "layer_scalar", (1,)), x.shape, (1,)))


def layer_embeddings(step: Step, c: Config, x: Value) -> list[Value | None]:
    """Return each layer's separate token embedding [T, per_layer], or None.

    It is (an embedding of the token + a projection of x) / sqrt(2).
    """
    if not c.per_layer:
        return [None] * c.layers
    tokens, width = x.shape[0], c.layers * c.per_layer
    embedded = embedding(step, "embed_tokens_per_layer", c.vocab_size_per_layer_input, width, c.per_layer**0.5)
    projected = split_heads(scaled(linear(step, x, "per_layer_model_projection", width), c.hidden**-0.5), c.layers)
    projected = rms_norm(step, projected, "per_layer_projection_norm", c.eps)
    both = reshape(scaled(add(projected, split_heads(embedded, c.layers)), 2.0**-0.5), (tokens, width))
    return [slice_(both, (0, i * c.per_layer), (tokens, (i + 1) * c.per_layer)) for i in range(c.layers)]


def forward(step: Step, c: Config) -> Value:
    shared: Shared = {}
    tables = c.tables(step)
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden, c.hidden**0.5)
        for layer, own in enumerate(layer_embeddings(step, c, x)):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables[layer], shared, own)
        x = rms_norm(step, wanted_rows(step, x), "norm", c.eps)
    return softcapped(lm_head(step, x, c.vocab, c.tied), c.final_logit_softcapping)
