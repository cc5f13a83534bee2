"""Gemma 4 text as in HF `Gemma4ForCausalLM`: full layers have larger heads than sliding ones, the last layers attend to the
keys and values of earlier ones, each layer takes an embedding of its own, and some models have experts beside the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
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
    rotary_tables,
    route,
    scaled,
    softcapped,
    split_heads,
    values,
    wanted_rows,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import DecoderConfig
from castiron.emitter.ops import add, broadcast_in_dim, gather_rows, multiply, reshape, slice_
from castiron.emitter.rotary import Rotary
from castiron.emitter.states import State, kv_cache, ring
from castiron.emitter.step import Step
from castiron.emitter.types import EmitError


@dataclass(frozen=True, eq=False)
class Experts:
    count: int
    per_token: int
    intermediate: int


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    """rotary, kv_heads, head_dim: of full layers; those of sliding ones begin with sliding_.

    own: how many layers have keys and values of their own. per_layer: features of a layer's embedding, or 0.
    """

    windows: list[int | None]
    sliding_rotary: Rotary
    sliding_kv_heads: int
    sliding_head_dim: int
    own: int
    keys_are_values: bool
    wide_mlp: bool
    attention_bias: bool
    per_layer: int
    per_layer_vocab: int
    experts: Experts | None
    final_logit_softcapping: float | None

    @property
    def max_positions(self) -> int:
        return min(self.rotary.positions, self.sliding_rotary.positions)

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.require("use_bidirectional_attention", "vision")
        layers, head_dim, kv_heads = c.take("num_hidden_layers"), c.take("head_dim", 256), c.take("num_key_value_heads")
        # HF makes the last layer a full one.
        windows = [*c.windows(layers, c.take("sliding_window", 512), lambda layer: (layer + 1) % 6 != 0)[:-1], None]
        keys_are_values = c.flag("attention_k_eq_v", False)
        full = full_heads(c, windows, keys_are_values)
        full_rotary, sliding_rotary = rotaries(c, full.get("head_dim", head_dim), head_dim)
        own = layers - c.take("num_kv_shared_layers", 0, least=0)
        if {bool(window) for window in windows[:own]} != {bool(window) for window in windows}:
            raise EmitError("'num_kv_shared_layers' in the gemma4_text config leaves a kind of layer without keys and values")
        per_layer = c.take("hidden_size_per_layer_input", 256, least=0)
        read = cls(
            **c.decoder(
                rotary=full_rotary,
                head_dim=full.get("head_dim", head_dim),
                kv_heads=full.get("num_key_value_heads", kv_heads),
                hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
                tied=c.flag("tie_word_embeddings", True),
            ),
            windows=windows,
            sliding_rotary=sliding_rotary,
            sliding_kv_heads=kv_heads,
            sliding_head_dim=head_dim,
            own=own,
            keys_are_values=keys_are_values,
            wide_mlp=c.flag("use_double_wide_mlp", False),
            attention_bias=c.flag("attention_bias", False),
            per_layer=per_layer,
            per_layer_vocab=c.take("vocab_size_per_layer_input", 262144),
            experts=read_experts(c),
            final_logit_softcapping=c.nullable("final_logit_softcapping", None, (int, float)),
        )
        c.finish()
        return read

    def heads_of(self, layer: int) -> tuple[int, int]:
        """How many keys and values a layer's token has, and how long they are."""
        return (self.sliding_kv_heads, self.sliding_head_dim) if self.windows[layer] else (self.kv_heads, self.head_dim)

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: itself, or the last of its kind that has its own."""
        kind = self.windows[layer] is None
        return layer if layer < self.own else max(i for i in range(self.own) if (self.windows[i] is None) == kind)

    def slot(self, layer: int) -> tuple[int, str]:
        """Where a layer's keys and values are: its number among those of its kind, and what their states end in."""
        source = self.source(layer)
        kind = self.windows[source] is None
        return sum((w is None) == kind for w in self.windows[:source]), "" if kind else "_sliding"


def read_experts(c: ConfigReader) -> Experts | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if c.flag("enable_moe_block", False):
        return Experts(*map(c.take, names))
    c.unused(*names)
    return None


def full_heads(c: ConfigReader, windows: list[int | None], keys_are_values: bool) -> dict[str, int]:
    """What full layers have for `head_dim` and `num_key_value_heads`, where it is not what all have."""
    kv_heads, head_dim = c.take("num_global_key_value_heads", None), c.take("global_head_dim", 512)
    if "per_layer_config" not in c.config:
        return {"head_dim": head_dim, **({"num_key_value_heads": kv_heads} if keys_are_values and kv_heads else {})}
    stated = {int(layer): own for layer, own in c.take("per_layer_config", kinds=dict).items()}
    full = [layer for layer, window in enumerate(windows) if window is None]
    first = stated.get(full[0], {})
    if stated != ({layer: first for layer in full} if first else {}) or set(first) - {"head_dim", "num_key_value_heads"}:
        raise EmitError(
            "'per_layer_config' in the gemma4_text config must give every full layer, and none else, the same 'head_dim' and "
            "'num_key_value_heads'"
        )
    return first


def rotaries(c: ConfigReader, full: int, sliding: int) -> tuple[Rotary, Rotary]:
    """Of full and of sliding layers, whose heads are so long."""
    default = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    entries, positions = c.take("rope_parameters", default, dict), c.take("max_position_embeddings", 131072)
    if set(entries) != set(default):
        raise EmitError("'rope_parameters' in the gemma4_text config must hold 'full_attention' and 'sliding_attention' alone")
    of_full = c.frequencies(entries["full_attention"], full, positions, 10000.0)
    return of_full, c.frequencies(entries["sliding_attention"], sliding, positions, 10000.0)


def states(c: Config, context: int) -> tuple[State, ...]:
    """Keys and values of full and of sliding layers, whose heads differ in size."""
    sliding = sum(window is not None for window in c.windows[: c.own])
    full = kv_cache(c.own - sliding, context, c.kv_heads, c.head_dim)
    if not sliding:
        return full
    window = next(window for window in c.windows if window)
    rows = kv_cache(sliding, context, c.sliding_kv_heads, c.sliding_head_dim)
    return *full, *(ring(state, window) for state in rows)


def unscaled_norm(step: Step, x: Value, eps: float) -> Value:
    """An RMS norm without a weight."""
    return rms_norm(step, x, None, eps)


class Tables:
    """What blocks share: cos and sin of both kinds of layers, embeddings of each layer, and keys and values by layer."""

    def __init__(self, step: Step, c: Config) -> None:
        self.full = rotary_tables(step, c.rotary, "rotary.full")
        self.sliding = rotary_tables(step, c.sliding_rotary, "rotary.sliding")
        self.keys: dict[int, tuple[Value, Value]] = {}


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: Tables) -> Value:
    kv_heads, d = c.heads_of(layer)
    turn = tables.sliding if c.windows[layer] else tables.full
    q = split_heads(linear(step, x, "q_proj", c.heads * d, c.attention_bias), c.heads)
    q = rope(step, rms_norm(step, q, "q_norm", c.eps), turn)
    source = c.source(layer)
    if source == layer:
        k = v = split_heads(linear(step, x, "k_proj", kv_heads * d, c.attention_bias), kv_heads)
        if not c.keys_are_values or c.windows[layer]:
            v = split_heads(linear(step, x, "v_proj", kv_heads * d, c.attention_bias), kv_heads)
        k = rope(step, rms_norm(step, k, "k_norm", c.eps), turn)
        tables.keys[layer] = k, unscaled_norm(step, v, c.eps)
    # A layer without its own writes those of its source again, where they are.
    k, v = tables.keys[source]
    slot, ending = c.slot(layer)
    out = attention(step, slot, q, k, v, 1.0, c.windows[layer], cache=(f"k{ending}", f"v{ending}"))
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mixed(step: Step, c: Config, e: Experts, x: Value, dense: Value) -> Value:
    """The dense MLP's result and that of a few experts, each with a norm of its own."""
    with scope("router"):
        h = multiply(unscaled_norm(step, x, c.eps), along_rows(values(step, "scale", (c.hidden,)), x))
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


def along_rows(vector: Value, x: Value) -> Value:
    return broadcast_in_dim(vector, x.shape, (1,))


def block(step: Step, c: Config, layer: int, x: Value, tables: Tables, own: Value | None) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        h = self_attention(step, c, layer, h, tables)
    x = add(x, rms_norm(step, h, "post_attention_layernorm", c.eps))
    h = rms_norm(step, x, "pre_feedforward_layernorm", c.eps)
    with scope("mlp"):
        h = gated_mlp(step, h, c.intermediate * (2 if c.wide_mlp and layer >= c.own else 1), c.hidden_act)
    if c.experts is not None:
        h = mixed(step, c, c.experts, x, h)
    x = add(x, rms_norm(step, h, "post_feedforward_layernorm", c.eps))
    if own is not None:
        h = multiply(activation(linear(step, x, "per_layer_input_gate", c.per_layer), c.hidden_act), own)
        h = linear(step, h, "per_layer_projection", c.hidden)
        x = add(x, rms_norm(step, h, "post_per_layer_input_norm", c.eps))
    return multiply(x, broadcast_in_dim(values(step, "layer_scalar", (1,)), x.shape, (1,)))


def layer_embeddings(step: Step, c: Config, x: Value) -> list[Value | None]:
    """Of each layer, [T, per_layer]: an embedding of the token and a projection of x, the sum over the root of two."""
    if not c.per_layer:
        return [None] * c.layers
    tokens, width = x.shape[0], c.layers * c.per_layer
    own = embedding(step, "embed_tokens_per_layer", c.per_layer_vocab, width, c.per_layer**0.5)
    projected = split_heads(scaled(linear(step, x, "per_layer_model_projection", width), c.hidden**-0.5), c.layers)
    projected = rms_norm(step, projected, "per_layer_projection_norm", c.eps)
    both = reshape(scaled(add(projected, split_heads(own, c.layers)), 2.0**-0.5), (tokens, width))
    return [slice_(both, (0, i * c.per_layer), (tokens, (i + 1) * c.per_layer)) for i in range(c.layers)]


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    tables = Tables(step, c)
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden, c.hidden**0.5)
        for layer, own in enumerate(layer_embeddings(step, c, x)):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables, own)
        x = rms_norm(step, wanted_rows(step, x), "norm", c.eps)
    return softcapped(lm_head(step, x, c.vocab, c.tied), c.final_logit_softcapping)
