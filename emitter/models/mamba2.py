"""Mamba 2 (arXiv:2405.21060), as several model families use it: sizes, states, and the scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value, append, current_path
from castiron.emitter.graph.ops import broadcast_in_dim, maximum, minimum, multiply, reshape, slice_
from castiron.emitter.graph.types import EmitError, is_number
from castiron.emitter.layers import activation, linear_parts, rms_norm, split_heads
from castiron.emitter.layers.recurrences import causal_conv, selective_scan
from castiron.emitter.layers.step import Step, Weight
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.shorten import shorten


@dataclass(frozen=True)
class Mamba:
    """The sizes and options of Mamba 2.

    groups: the heads of a group use the same B and C. state: features of B, and of C (d_state).
    positions: the kernel size of the convolution (d_conv). limit: min and max time step.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    positions: int
    conv_bias: bool
    proj_bias: bool
    limit: tuple[float, float] = (0.0, inf)

    def __post_init__(self) -> None:
        if self.limit[0] < 0:
            low = self.limit[0]
            raise EmitError(f"the config's min time step ('mamba_dt_min', 'time_step_min') is {low}; it must be at least 0")

    @classmethod
    def read(cls, c: ConfigReader, features: int | None = None) -> Mamba:
        """Return the sizes of the keys `mamba_...`.

        features: heads * head_dim; default: `mamba_expand` times the hidden size.
        """
        # The chunk size changes results by rounding only.
        c.unused("mamba_chunk_size")
        heads, expanded = c.take("mamba_n_heads", 128), c.take("mamba_expand", 2) * c.take("hidden_size")
        features = features or expanded
        stated = c.take("mamba_d_head", "auto", (int, str))
        head_dim = features // heads if stated == "auto" else stated
        if head_dim * heads != features:
            raise EmitError(
                f"the {c.model_type} config is inconsistent: {heads} Mamba heads ('mamba_n_heads') of size {shorten(stated)} "
                f"('mamba_d_head') have {head_dim * heads} features, not {features}"
            )
        return cls(
            heads,
            head_dim,
            c.take("mamba_n_groups", 1),
            c.take("mamba_d_state", 256),
            c.take("mamba_d_conv", 4, minimum=2),
            c.flag("mamba_conv_bias", True),
            c.flag("mamba_proj_bias", False),
            time_step_limit(c),
        )

    @property
    def features(self) -> int:
        """Return the width of x, which is also that of the gate: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Return the width of B, which is also that of C: groups * state."""
        return self.groups * self.state

    def states(self, layers: Sequence[int]) -> tuple[State, State]:
        """Return the states of the convolution ("conv") and of the recurrence ("scan")."""
        count, indices = len(layers), tuple(layers)
        conv = State("conv", (count, self.positions - 1, self.features + 2 * self.shared), "recurrent", layers=indices)
        return conv, State("scan", (count, self.heads, self.head_dim, self.state), "recurrent", layers=indices)


def time_step_limit(c: ConfigReader) -> tuple[float, float]:
    stated = c.take("time_step_limit", (0.0, inf), (list, tuple))
    # transformers writes infinity as this object, because JSON has no number for it.
    numbers = [inf if n == {"__float__": "Infinity"} else n for n in stated]
    if len(numbers) != 2 or not all((is_number(n) or n == inf) and n >= 0 for n in numbers) or numbers[0] > numbers[1]:
        raise EmitError(
            f"'time_step_limit' in the {c.model_type} config is {shorten(stated)}; it must be [min, max] with 0 <= min <= max"
        )
    return float(numbers[0]), float(numbers[1])


def limited(step: Step, dt: Value, limit: tuple[float, float]) -> Value:
    """Return dt [T, heads], in prefill clamped so that softplus(dt + dt_bias) is in `limit`."""
    for bound, nearer, free in ((limit[0], maximum, 0.0), (limit[1], minimum, inf)):
        if bound != free and step.mode == "prefill":
            at = bound + float(np.log(-np.expm1(-bound))) if bound else -inf
            name, full = f"{current_path()}.dt_{nearer.__name__}", ((f"{current_path()}.dt_bias", dt.shape[1:]),)
            value = step.module.weight(Weight(name, dt.shape[1:], transform=partial(np.subtract, np.float32(at)), parts=full))
            border = append("values", (value,), (value.type,))[0]
            dt = nearer(dt, broadcast_in_dim(border, dt.shape, (1,)))
    return dt


def scan(step: Step, m: Mamba, layer: int, rows: Value, dt: Value, function: str) -> Value:
    """Apply Mamba's convolution, an activation and the scan; return [T, m.features].

    rows: x, B and C, concatenated, before the convolution, [T, m.features + 2 * m.shared].
    dt: the time steps before bias and softplus, [T, heads].
    """
    rows, tokens = activation(causal_conv(step, layer, rows, "conv1d", m.conv_bias), function), rows.shape[0]
    x = split_heads(slice_(rows, (0, 0), (tokens, m.features)), m.heads)
    firsts = m.features, m.features + m.shared
    b, c = (split_heads(slice_(rows, (0, first), (tokens, first + m.shared)), m.groups) for first in firsts)
    dt = limited(step, dt, m.limit)
    return reshape(selective_scan(step, layer, x, dt, b, c), (tokens, m.features))


def gated_scan(step: Step, m: Mamba, layer: int, x: Value, function: str, eps: float) -> Value:
    """Apply a Mamba 2 layer without `out_proj` to x [T, hidden]; return [T, m.features]."""
    sizes = {"gate": m.features, "conv_in": m.features + 2 * m.shared, "dt": m.heads}
    gate, rows, dt = linear_parts(step, x, "in_proj", sizes, m.proj_bias)
    out = multiply(scan(step, m, layer, rows, dt, function), activation(gate, "silu"))
    return rms_norm(step, out, "norm", eps, groups=m.groups)
