"""What families of Mamba 2 (arXiv:2405.21060) share: the sizes of its layers, their states, and what is between projections."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from castiron.emitter.ir import Value
from castiron.emitter.layers import activation, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.ops import reshape, slice_
from castiron.emitter.recurrences import causal_conv, selective_scan
from castiron.emitter.states import State
from castiron.emitter.step import Step
from castiron.emitter.types import EmitError


@dataclass(frozen=True)
class Mamba:
    """positions: of a filter of its convolution. proj_bias: of the projection in front."""

    heads: int
    head_dim: int
    groups: int
    state: int
    positions: int
    conv_bias: bool
    proj_bias: bool

    @classmethod
    def read(cls, c: ConfigReader, features: int | None = None) -> Mamba:
        """The keys that begin with `mamba_`. features: of all heads, else those of the config's expansion."""
        # HF's chunks would clamp the steps of time, its single tokens would not.
        c.require("time_step_limit", [0.0, inf], (0.0, inf), [0.0, {"__float__": "Infinity"}])
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


def scan(step: Step, m: Mamba, place: int, rows: Value, dt: Value, function: str) -> Value:
    """x, B and C, rows [T, features + 2 shared], convolved and activated by `function`, and scanned with dt [T, heads]:
    [T, features]."""
    rows, tokens = activation(causal_conv(step, place, rows, "conv1d", m.conv_bias), function), rows.shape[0]
    x = split_heads(slice_(rows, (0, 0), (tokens, m.features)), m.heads)
    firsts = m.features, m.features + m.shared
    b, c = (split_heads(slice_(rows, (0, first), (tokens, first + m.shared)), m.groups) for first in firsts)
    return reshape(selective_scan(step, place, x, dt, b, c), (tokens, m.features))
