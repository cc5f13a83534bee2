"""Rotary frequencies and tables for every supported `rope_scaling` (HF `modeling_rope_utils`).

Frequencies are computed in f32, as in HF. They differ from HF's by at most one or two units in the
last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.emitter.graph.types import EmitError, is_number, is_positive
from castiron.emitter.shorten import shorten, shorten_list


@dataclass(frozen=True, eq=False)
class Rotary:
    """The frequencies of a rotary embedding.

    inv_freq: radians per position, f32 [rotary_dim / 2].
    positions: the max sequence length for which these frequencies are valid.
    attention_factor: the number by which cos and sin are multiplied (YaRN, LongRoPE).
    long: the frequencies of all tokens of a longer sequence (LongRoPE); None if there are none.
    """

    inv_freq: np.ndarray
    positions: int
    attention_factor: float = 1.0
    long: Rotary | None = None

    def table(self, positions: int, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the table of cos or sin, f32 [positions, rotary_dim / 2].

        function: np.cos or np.sin. An entry is `function(position * frequency) * attention_factor`,
        with the angle rounded to f32, as in HF. Rows that only a longer sequence has are those of
        `long`.
        """
        if self.long and positions > self.positions:
            own, longer = self.table(self.positions, function), self.long.table(positions, function)
            return np.concatenate([own, longer[self.positions :]])
        angle = np.arange(positions, dtype=np.float32)[:, None] * self.inv_freq[None, :]
        return (function(angle.astype(np.float64)).astype(np.float32) * np.float32(self.attention_factor)).astype(np.float32)


def check_entry(entry: Mapping) -> None:
    """Raise EmitError if a value in a config's `rope_scaling` is invalid, also if it is nested."""
    for key, value in entry.items():
        if isinstance(value, Mapping) and key not in _VALUES:
            check_entry(value)
        elif key in _LAYERS:
            raise EmitError(f"{key!r} in a rope scaling is {shorten(value)}; it must be an object")
        elif key in _VALUES and value is not None:
            is_valid, words = _VALUES[key]
            if not is_valid(value):
                raise EmitError(f"{key!r} in a rope scaling is {shorten(value)}; it must be {words}")


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 2 <= value < 1 << 31


def _are_factors(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_positive, value))


_POSITIVE_KEYS = """
    rope_theta partial_rotary_factor factor alpha low_freq_factor high_freq_factor attention_factor beta_fast beta_slow
""".split()
_LONGEST = 1 << 16
# Types of layers for which `rope_parameters` may have a nested entry.
_LAYERS = ("full_attention", "sliding_attention")
# For each key: the condition on its values, and its description in words.
_VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("rope_type", "type"), (lambda value: isinstance(value, str), "a string")),
    **dict.fromkeys(_POSITIVE_KEYS, (is_positive, "a number above 0")),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), (is_number, "a number")),
    **dict.fromkeys(("short_factor", "long_factor"), (_are_factors, "a list of numbers above 0")),
    "truncate": (lambda value: isinstance(value, bool), "true or false"),
    "original_max_position_embeddings": (_is_length, "an integer of at least 2"),
}


def _wavelengths(theta: float, dim: int) -> np.ndarray:
    """Return theta ** (2i / dim) for i = 0, 1, 2, ..., as f32 [ceil(dim / 2)]."""
    exponent = np.arange(0, dim, 2, dtype=np.int64).astype(np.float32) / np.float32(dim)
    # In f64, so that every machine rounds to the same f32.
    return np.power(np.float64(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)


def _base(theta: float, dim: int) -> np.ndarray:
    return np.float32(1.0) / _wavelengths(theta, dim)


def _default(theta: float, dim: int, scaling: Mapping, positions: int) -> Rotary:
    return Rotary(_base(theta, dim), positions)


def _linear(theta: float, dim: int, scaling: Mapping, positions: int) -> Rotary:
    return Rotary(_base(theta, dim) / np.float32(scaling["factor"]), positions)


def _llama3(theta: float, dim: int, scaling: Mapping, positions: int) -> Rotary:
    # Low frequencies are divided by `factor`, and medium ones are interpolated.
    inv_freq = _base(theta, dim)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    if low >= high:
        raise EmitError(f"low_freq_factor of rope scaling 'llama3' is {low}; it must be below high_freq_factor {high}")
    one = np.float32(1.0)
    # torch computes number / tensor as the tensor's reciprocal times the number.
    wavelength = one / inv_freq * np.float32(2 * math.pi)
    slowed = np.where(wavelength > original / low, inv_freq / np.float32(factor), inv_freq)
    smooth = (one / wavelength * np.float32(original) - np.float32(low)) / np.float32(high - low)
    between = (one - smooth) * slowed / np.float32(factor) + smooth * slowed
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return Rotary(np.where(medium, between, slowed), positions)


def _yarn(theta: float, dim: int, scaling: Mapping, positions: int) -> Rotary:
    """Return YaRN's frequencies (arXiv:2309.00071), with the attention factor of section 3.4."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

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
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low if high != low else 0.001)
    keep = 1 - np.clip(ramp, 0, 1)
    wavelengths = _wavelengths(theta, dim)
    slowed = np.float32(1.0) / (np.float32(factor) * wavelengths)
    return Rotary(slowed * (1 - keep) + np.float32(1.0) / wavelengths * keep, positions, attention_factor)


def _longrope(theta: float, dim: int, scaling: Mapping, positions: int) -> Rotary:
    """Return LongRoPE's frequencies (arXiv:2402.13753): number i is divided by `short_factor[i]`.

    In a sequence longer than the original length, it is divided by `long_factor[i]` instead.
    """
    original = scaling["original_max_position_embeddings"]
    short, long = (np.array(scaling[f"{length}_factor"], np.float32) for length in ("short", "long"))
    wavelengths = _wavelengths(theta, dim)
    if short.shape != wavelengths.shape or long.shape != wavelengths.shape:
        raise EmitError(
            f"rope scaling 'longrope' has {short.size} numbers in 'short_factor' and {long.size} in 'long_factor'; each must "
            f"have {wavelengths.size}"
        )
    factor, attention_factor = scaling.get("factor"), scaling.get("attention_factor")
    if attention_factor is None:
        factor = positions / original if factor is None else factor
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    one = np.float32(1.0)
    if positions <= original or np.array_equal(short, long):
        return Rotary(one / (short * wavelengths), positions, attention_factor)
    longer = Rotary(one / (long * wavelengths), positions, attention_factor)
    return Rotary(one / (short * wavelengths), original, attention_factor, longer)


def proportional(theta: float, dim: int, share: float, factor: float, positions: int) -> Rotary:
    """Return the frequencies of Gemma 4's "proportional" rope, which rotates a part of each head.

    Frequency i is theta ** (-2i / dim) / factor if i < share * dim / 2. All other frequencies are
    0, so their features are not rotated.
    dim: number of features of a head. share: the fraction of them that is rotated, 0 to 1.
    positions: the model's max sequence length.
    """
    _check_base(theta, dim)
    inv_freq = np.where(np.arange(dim // 2) < int(share * dim // 2), _base(theta, dim), np.float32(0))
    return Rotary(inv_freq / np.float32(factor), positions)


_ORIGINAL = "original_max_position_embeddings"
# kind: (builder, keys it needs, keys it may have)
_KINDS: dict[str, tuple[Callable[..., Rotary], frozenset[str], frozenset[str]]] = {
    kind: (build, frozenset(needed.split()), frozenset(optional.split()))
    for kind, build, needed, optional in (
        ("default", _default, "", ""),
        ("linear", _linear, "factor", ""),
        # HF changes frequencies only beyond `max_position_embeddings`, which is the limit here.
        ("dynamic", _default, "factor", ""),
        ("llama3", _llama3, f"factor low_freq_factor high_freq_factor {_ORIGINAL}", ""),
        ("yarn", _yarn, f"factor {_ORIGINAL}", "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"),
        ("longrope", _longrope, f"short_factor long_factor {_ORIGINAL}", "factor attention_factor"),
        # The name of this kind in Phi-3's first configs.
        ("su", _longrope, f"short_factor long_factor {_ORIGINAL}", "factor attention_factor"),
    )
}
WITH_ORIGINAL_LENGTH = frozenset(kind for kind, (_, needed, _) in _KINDS.items() if _ORIGINAL in needed)


def rotary(theta: float, rotary_dim: int, scaling: Mapping | None, max_positions: int) -> Rotary:
    """Return the frequencies of a rotary embedding over `rotary_dim` features of each head.

    theta: base of the frequencies (the config's `rope_theta`).
    scaling: the config's `rope_scaling` or `rope_parameters`, None if it has neither.
    max_positions: the config's `max_position_embeddings`, which is also the default of
        `original_max_position_embeddings`.
    Raises EmitError for an unknown or incomplete scaling.
    """
    check_entry(scaling or {})
    _check_base(theta, rotary_dim)
    scaling = {key: value for key, value in (scaling or {}).items() if value is not None}
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    # M-RoPE uses three positions per token; in text, all three are equal.
    for elsewhere in ("type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        scaling.pop(elsewhere, None)
    if kind not in _KINDS:
        raise EmitError(f"rope scaling {shorten(kind)} is not supported; supported are {', '.join(_KINDS)}")
    build, needed, optional = _KINDS[kind]
    if kind in WITH_ORIGINAL_LENGTH:
        scaling.setdefault(_ORIGINAL, max_positions)
    missing, unknown = needed - set(scaling), set(scaling) - needed - optional
    if missing:
        raise EmitError(f"rope scaling {kind!r} lacks {', '.join(sorted(missing))}; add it to the config")
    if unknown:
        raise EmitError(f"rope scaling {kind!r} has the unknown key {shorten_list(sorted(unknown))}; remove it from the config")
    with np.errstate(all="ignore"):
        frequencies = build(float(theta), rotary_dim, scaling, max_positions)
    every = [frequencies.inv_freq, *([frequencies.long.inv_freq] if frequencies.long else [])]
    if not np.isfinite(every).all() or not is_positive(frequencies.attention_factor):
        raise EmitError(
            f"rope scaling {kind!r} with the base {theta} gives infinite or NaN frequencies; correct its parameters"
        )
    return frequencies


def _check_base(theta: float, rotary_dim: int) -> None:
    # Frequencies are falling powers of theta, and YaRN divides by its logarithm.
    if not is_positive(theta) or theta <= 1:
        raise EmitError(f"'rope_theta' is {shorten(theta)}; it must be a number above 1")
    if rotary_dim > _LONGEST:
        raise EmitError(
            f"number of rotated features in a head is above {_LONGEST}: {rotary_dim}; correct 'head_dim' "
            "or 'partial_rotary_factor' in the config"
        )
    if rotary_dim < 1:
        raise EmitError("rotary_dim is 0; increase 'partial_rotary_factor'")
