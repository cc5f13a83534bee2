"""Rotary frequencies and their tables, for every `rope_scaling` that is understood (HF `modeling_rope_utils`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from emitter.types import EmitError


@dataclass(frozen=True, eq=False)
class Rotary:
    """Inverse frequencies f32[rotary_dim / 2] and the factor on cos and sin (yarn, longrope)."""

    inv_freq: np.ndarray
    attention_factor: float = 1.0

    def table(self, positions: int, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """cos or sin of position * frequency, f32[positions, rotary_dim / 2]; the angle is rounded to f32, as HF does."""
        angle = np.arange(positions, dtype=np.float32)[:, None] * self.inv_freq[None, :]
        return (function(angle.astype(np.float64)).astype(np.float32) * np.float32(self.attention_factor)).astype(np.float32)


def _base(theta: float, dim: int) -> np.ndarray:
    exponent = np.arange(0, dim, 2, dtype=np.int64).astype(np.float32) / np.float32(dim)
    return (np.float32(1.0) / np.power(np.float32(theta), exponent)).astype(np.float32)


def _default(theta: float, dim: int, scaling: Mapping, context: int) -> Rotary:
    return Rotary(_base(theta, dim))


def _linear(theta: float, dim: int, scaling: Mapping, context: int) -> Rotary:
    return Rotary(_base(theta, dim) / np.float32(scaling["factor"]))


def _llama3(theta: float, dim: int, scaling: Mapping, context: int) -> Rotary:
    """Llama 3.1: long wavelengths are slowed, short ones kept, those between interpolated."""
    inv_freq = _base(theta, dim)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / inv_freq
    slowed = np.where(wavelength > original / low, inv_freq / np.float32(factor), inv_freq)
    smooth = ((original / wavelength - low) / (high - low)).astype(np.float32)
    between = ((1 - smooth) * slowed / np.float32(factor) + smooth * slowed).astype(np.float32)
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return Rotary(np.where(medium, between, slowed).astype(np.float32))


def _yarn(theta: float, dim: int, scaling: Mapping, context: int) -> Rotary:
    """YaRN (arXiv:2309.00071), with the attention factor of its section 3.4."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or context

    def mscale(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            attention_factor = mscale(factor, scaling["mscale"]) / mscale(factor, scaling["mscale_all_dim"])
        else:
            attention_factor = mscale(factor)

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    keep = (1 - np.clip(ramp, 0, 1)).astype(np.float32)
    base = _base(theta, dim)
    return Rotary((base / np.float32(factor) * (1 - keep) + base * keep).astype(np.float32), attention_factor)


# kind: (builder, keys it needs, keys it may have)
_KINDS: dict[str, tuple[Callable[..., Rotary], frozenset[str], frozenset[str]]] = {
    "default": (_default, frozenset(), frozenset()),
    "linear": (_linear, frozenset({"factor"}), frozenset()),
    "llama3": (
        _llama3,
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        _yarn,
        frozenset({"factor"}),
        frozenset(
            {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"}
            | {"mscale_all_dim", "truncate"}
        ),
    ),
}


def rotary(theta: float, rotary_dim: int, scaling: Mapping | None, max_positions: int) -> Rotary:
    """Frequencies for a `rope_scaling` / `rope_parameters` entry; None is the default kind.

    max_positions: the config's `max_position_embeddings`. Raises EmitError for a kind or key that is not understood.
    """
    scaling = {key: value for key, value in (scaling or {}).items() if value is not None}
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    for redundant in ("type", "rope_theta", "partial_rotary_factor"):
        scaling.pop(redundant, None)
    if kind not in _KINDS:
        raise EmitError(f"rope scaling {kind!r} is not supported; supported are {', '.join(_KINDS)}")
    build, needed, optional = _KINDS[kind]
    missing, unknown = needed - set(scaling), set(scaling) - needed - optional
    if missing or unknown:
        problem = f"lacks {', '.join(sorted(missing))}" if missing else f"has the unknown key {', '.join(sorted(unknown))}"
        raise EmitError(f"rope scaling {kind!r} {problem}")
    return build(float(theta), rotary_dim, scaling, max_positions)
