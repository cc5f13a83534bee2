"""What families of Mamba 2 (arXiv:2405.21060) share: the sizes of its layers, their states, and what is between projections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from castiron.emitter.ir import Value, append, current_path
from castiron.emitter.layers import activation, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.ops import broadcast_in_dim, maximum, minimum, reshape, slice_
from castiron.emitter.recurrences import causal_conv, selective_scan
from castiron.emitter.shown import shown
from castiron.emitter.states import State
from castiron.emitter.step import Step, Weight
from castiron.emitter.types import EmitError, is_number


@dataclass(frozen=True)
class Mamba:
    """positions: of a filter of its convolution. proj_bias: of the projection in front. limit: of steps of time."""

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
            raise EmitError(f"the least step of time in the config is {self.limit[0]}, which is below 0")

    @classmethod
    def read(cls, c: ConfigReader, features: int | None = None) -> Mamba:
        """The keys that begin with `mamba_`. features: of all heads, else those of the config's expansion."""
        # Changes no result but by rounding.
        c.unused("mamba_chunk_size")
        heads, expanded = c.take("mamba_n_heads", 128), c.take("mamba_expand", 2) * c.take("hidden_size")
        features = features or expanded
        stated = c.take("mamba_d_head", "auto", (int, str))
        head_dim = features // heads if stated == "auto" else stated
        if head_dim * heads != features:
            raise EmitError(f"the {c.model_type} config has {heads} Mamba heads of {stated} for {features} features")
        return cls(
            heads,
            head_dim,
            c.take("mamba_n_groups", 1),
            c.take("mamba_d_state", 256),
            c.take("mamba_d_conv", 4, least=2),
            c.flag("mamba_conv_bias", True),
            c.flag("mamba_proj_bias", False),
            time_step_limit(c),
        )

    @property
    def features(self) -> int:
        """Of x, and of its gate."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Features of B, and of C."""
        return self.groups * self.state

    def states(self, layers: int) -> tuple[State, State]:
        conv = State("conv", (layers, self.positions - 1, self.features + 2 * self.shared), kind="recurrent")
        return conv, State("scan", (layers, self.heads, self.head_dim, self.state), kind="recurrent")


def time_step_limit(c: ConfigReader) -> tuple[float, float]:
    """The least and the longest step of time."""
    stated = c.take("time_step_limit", (0.0, inf), (list, tuple))
    # As transformers writes what JSON has no number for.
    numbers = [inf if n == {"__float__": "Infinity"} else n for n in stated]
    if len(numbers) != 2 or not all((is_number(n) or n == inf) and n >= 0 for n in numbers) or numbers[0] > numbers[1]:
        raise EmitError(
            f"'time_step_limit' in the {c.model_type} config is {shown(stated)}, not the least and the longest step"
        )
    return float(numbers[0]), float(numbers[1])


def limited(step: Step, dt: Value, limit: tuple[float, float]) -> Value:
    """dt [T, heads] for which softplus(dt + dt_bias) is within the limit; HF asks for that in prompts alone, and lets single
    tokens be."""
    for bound, nearer, free in ((limit[0], maximum, 0.0), (limit[1], minimum, inf)):
        if bound != free and step.mode == "prefill":
            at = bound + float(np.log(-np.expm1(-bound))) if bound else -inf
            name, whole = f"{current_path()}.dt_{nearer.__name__}", ((f"{current_path()}.dt_bias", dt.shape[1:]),)
            value = step.module.weight(Weight(name, dt.shape[1:], transform=partial(np.subtract, np.float32(at)), parts=whole))
            border = append("values", (value,), (value.type,))[0]
            dt = nearer(dt, broadcast_in_dim(border, dt.shape, (1,)))
    return dt


def scan(step: Step, m: Mamba, place: int, rows: Value, dt: Value, function: str) -> Value:
    """x, B and C, rows [T, features + 2 shared], convolved and activated by `function`, and scanned with dt [T, heads]:
    [T, features]."""
    rows, tokens = activation(causal_conv(step, place, rows, "conv1d", m.conv_bias), function), rows.shape[0]
    x = split_heads(slice_(rows, (0, 0), (tokens, m.features)), m.heads)
    firsts = m.features, m.features + m.shared
    b, c = (split_heads(slice_(rows, (0, first), (tokens, first + m.shared)), m.groups) for first in firsts)
    dt = limited(step, dt, m.limit)
    return reshape(selective_scan(step, place, x, dt, b, c), (tokens, m.features))
