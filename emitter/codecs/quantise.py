"""Quantise weights to a GGUF format with the smallest (weighted) squared error.

1. Round the elements of a group to codes with several candidate scales.
2. For the codes of each candidate, compute the best scale and minimum in closed form; take the
   best.
3. In K-quants, round the scales to multiples of one scale of the block, then fit and round minima.
4. Round the elements again, with scales and minima as they are stored.

The search is that of ggml's `make_qx_quants` and `make_qkx2_quants`, but without an importance
matrix all elements have the same weight, which minimises the mean square error. Elements are stored
as [group, n], a column for each group, so that every step reads contiguous memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from castiron.emitter.codecs import codec_of, dequantise, in_features_of, row_bytes
from castiron.emitter.codecs.codec import Codec, Parts
from castiron.emitter.graph.types import DTYPES, from_f32

_ELEMENTS_AT_ONCE = 1 << 16  # elements converted at a time: temporaries stay in a core's caches
_MAX_THREADS = 16
# The minimum of variance / mean square of a group's codes; below it, rounding errors dominate the fitted scale.
_MIN_SPREAD = 1e-5
_SIX_BITS = 63


@dataclass(frozen=True)
class Encoder:
    """How weights are quantised to one format.

    low, high: smallest and largest code.
    steps: f32 [k]; for each s the search tries the scale (max - min) / (high + s) if groups have a
        minimum, else x / (low - s) for the element x of largest magnitude.
    join: packs codes and scales of n blocks, u8 [n, block_bytes].
    """

    low: int
    high: int
    steps: np.ndarray
    join: Callable[[Parts], np.ndarray]


def convert(source: str, raw: np.ndarray, target: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Convert rows u8 [..., row_bytes] from one codec to another, on several threads.

    importance: positive f32 [in], the weight of squared errors in each column; None: all 1. Raises
        ValueError for numbers that the target codec cannot store.
    """
    features = in_features_of(codec_of(source), raw)
    rows = raw.reshape(-1, raw.shape[-1])
    result = np.empty((len(rows), row_bytes(target, features)), np.uint8)
    step = max(1, _ELEMENTS_AT_ONCE // max(1, features))

    def some(start: int) -> None:
        values = dequantise(source, rows[start : start + step])
        result[start : start + step] = encode(target, values, importance)

    # NumPy releases the interpreter lock while it works.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(some, range(0, len(rows), step)):
            pass
    return result.reshape(*raw.shape[:-1], -1)


def encode(codec_name: str, values: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Quantise values f32 [rows, in] to rows u8 [rows, row_bytes]; `importance` as in `convert`."""
    codec, (rows, features) = codec_of(codec_name), values.shape
    if not codec.quantised:
        stored = np.ascontiguousarray(from_f32(values, DTYPES[codec_name]))
        return stored.view(np.uint8).reshape(rows, -1)
    length = row_bytes(codec_name, features)
    if not np.isfinite(values).all():
        raise ValueError(f"{codec_name} cannot store infinity or NaN; use finite weights")
    x = _columns(codec, values)
    weights = None if importance is None else _columns(codec, np.broadcast_to(importance, values.shape))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        parts = (_with_minima if codec.minimum else _without_minima)(codec, ENCODERS[codec_name], x, weights)
    if not all(np.isfinite(part).all() for part in (parts.d, parts.m) if part is not None):
        raise ValueError(f"{codec_name} cannot store a weight of {np.abs(values).max():.3g}: the scale overflows; use bf16")
    return ENCODERS[codec_name].join(parts).reshape(rows, length)


def _columns(codec: Codec, values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.reshape(-1, codec.group).T, np.float32)


def _quotient(a, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(b.shape, np.float32), where=b != 0)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("gn,gn->n", a, b)


def _codes(encoder: Encoder, x: np.ndarray, inverse: np.ndarray, out: np.ndarray) -> np.ndarray:
    np.multiply(x, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, encoder.low, encoder.high, out=out)


def _scales(encoder: Encoder, x: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Return the scale of each column of x [group, n] with the least error of scale * code."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    weighted = x if weights is None else weights * x
    best, scale = np.zeros(x.shape[1], np.float32), np.zeros(x.shape[1], np.float32)
    codes, heavy = np.empty_like(x), np.empty_like(x)
    for step in encoder.steps:
        _codes(encoder, x, _quotient(np.float32(encoder.low - step), largest), codes)
        xl = _dot(weighted, codes)
        ll = _dot(codes if weights is None else np.multiply(weights, codes, out=heavy), codes)
        candidate = _quotient(xl, ll)
        better = candidate * xl > best
        np.copyto(best, candidate * xl, where=better)
        np.copyto(scale, candidate, where=better)
    return scale


def _scales_and_minima(
    encoder: Encoder, x: np.ndarray, weights: np.ndarray | None, negative: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best scales and minima of the columns of x [group, n]; `negative`: minima <= 0."""
    low, high = x.min(axis=0), x.max(axis=0)
    if negative:
        np.minimum(low, 0, out=low)
    x, reach = x - low, high - low  # far from 0, the sums below would lose precision
    weighted = x if weights is None else weights * x
    w, wx = (np.float32(len(x)) if weights is None else weights.sum(axis=0)), weighted.sum(axis=0)
    best = np.full(x.shape[1], -np.inf, np.float32)
    scale, minimum = reach / np.float32(encoder.high), np.zeros(x.shape[1], np.float32)
    codes, heavy = np.empty_like(x), np.empty_like(x)
    for step in encoder.steps:
        _codes(encoder, x, _quotient(np.float32(encoder.high + step), reach), codes)
        weighed = codes if weights is None else np.multiply(weights, codes, out=heavy)
        wl, xl, ll = weighed.sum(axis=0), _dot(weighted, codes), _dot(weighed, codes)
        spread = w * ll - wl * wl
        s, m = _quotient(w * xl - wx * wl, spread), _quotient(ll * wx - wl * xl, spread)
        if negative:
            np.copyto(s, _quotient(xl + low * wl, ll), where=m > -low)
            np.minimum(m, -low, out=m)
        gain = 2 * (s * xl + m * wx - s * m * wl) - s * s * ll - m * m * w
        better = (gain > best) & (spread > np.float32(_MIN_SPREAD) * w * ll)
        for best_so_far, found in ((best, gain), (scale, s), (minimum, m)):
            np.copyto(best_so_far, found, where=better)
    return scale, minimum + low


def _as_factors(values: np.ndarray, groups: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round [n] to d * factor; return d f16 [blocks], factors [blocks, groups], d * factor."""
    by_block = values.reshape(-1, groups)
    largest = np.take_along_axis(by_block, np.abs(by_block).argmax(axis=1)[:, None], axis=1)
    d = (largest / np.float32(high)).astype(np.float16)
    wide = d.astype(np.float32)
    factors = np.clip(np.rint(by_block * _quotient(np.float32(1), wide)), min(high, 0), max(high, -high - 1))
    return d[:, 0], factors, (wide * factors).reshape(-1)


def _rounded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    stored = values.astype(np.float16)
    return stored, stored.astype(np.float32)


def _by_block(codec: Codec, codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes.astype(np.int8).T).reshape(-1, codec.block)


def _without_minima(codec: Codec, encoder: Encoder, x: np.ndarray, weights: np.ndarray | None) -> Parts:
    scale, factors = _scales(encoder, x, weights), None
    if codec.block == codec.group:
        d, scale = _rounded(scale)
    else:
        d, signed, scale = _as_factors(scale, codec.block // codec.group, -128)
        factors = signed.astype(np.int8)
    codes = _codes(encoder, x, _quotient(np.float32(1), scale), np.empty_like(x))
    return Parts(_by_block(codec, codes), d, scales=factors)


def _with_minima(codec: Codec, encoder: Encoder, x: np.ndarray, weights: np.ndarray | None) -> Parts:
    groups = codec.block // codec.group
    scale, minimum = _scales_and_minima(encoder, x, weights, negative=groups > 1)
    scales = minima = None
    codes = np.empty_like(x)
    if groups == 1:
        (d, scale), (m, minimum) = _rounded(scale), _rounded(minimum)
    else:
        d, scales, scale = _as_factors(scale, groups, _SIX_BITS)
        inverse = _quotient(np.float32(1), scale)
        rest = x - scale * _codes(encoder, x - minimum, inverse, codes)
        minimum = rest.mean(axis=0) if weights is None else _quotient(_dot(weights, rest), weights.sum(axis=0))
        m, minima, minimum = _as_factors(np.maximum(-minimum, 0), groups, _SIX_BITS)
        minimum = -minimum
        scales, minima = scales.astype(np.uint8), minima.astype(np.uint8)
    _codes(encoder, x - minimum, _quotient(np.float32(1), scale), codes)
    return Parts(_by_block(codec, codes), d, m, scales, minima)


def _halves(*numbers: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(n, "<f2")[:, None].view(np.uint8) for n in numbers]


def _planes(codes: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Pack codes u8 [n, k] into bytes [n, k * bits / 8], the inverse of `unpack_fields`."""
    fields = codes.reshape(len(codes), -1, 8 // bits, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(fields << shifts, axis=2).reshape(len(codes), -1)


def _unsigned(codes: np.ndarray, offset: int) -> np.ndarray:
    return (codes + np.int8(offset)).view(np.uint8)


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    (s, s_top), (m, m_top) = ((part[:, :4], part[:, 4:]) for part in (scales, minima))
    return np.concatenate([s | s_top >> 4 << 6, m | m_top >> 4 << 6, s_top & 15 | m_top << 4], axis=1)


def _join_32(offset: int, bits: int) -> Callable[[Parts], np.ndarray]:

    def join(parts: Parts) -> np.ndarray:
        codes = _unsigned(parts.codes, offset)
        fifth = [np.packbits(codes >> 4, axis=1, bitorder="little")] if bits == 5 else []
        halves = _halves(parts.d) if parts.m is None else _halves(parts.d, parts.m)
        return np.concatenate([*halves, *fifth, _planes(codes & 15, 16, 4)], axis=1)

    return join


def _join_q8_0(parts: Parts) -> np.ndarray:
    return np.concatenate([*_halves(parts.d), parts.codes.view(np.uint8)], axis=1)


def _join_q45_k(bits: int) -> Callable[[Parts], np.ndarray]:
    def join(parts: Parts) -> np.ndarray:
        codes = parts.codes.view(np.uint8)
        assert parts.m is not None and parts.scales is not None and parts.minima is not None
        fifth = [_planes(codes >> 4, 32, 1)] if bits == 5 else []
        scales = _six_bits(parts.scales, parts.minima)
        return np.concatenate([*_halves(parts.d, parts.m), scales, *fifth, _planes(codes & 15, 32, 4)], axis=1)

    return join


def _join_q6_k(parts: Parts) -> np.ndarray:
    codes = _unsigned(parts.codes, 32)
    assert parts.scales is not None
    scales = parts.scales.view(np.uint8)
    return np.concatenate([_planes(codes & 15, 64, 4), _planes(codes >> 4, 32, 2), scales, *_halves(parts.d)], axis=1)


# Steps of the grids (`Encoder.steps`). Wider or more grids reduce the mean square error by less than 1 %.
_STEPS = np.linspace(-2, 1, 13, dtype=np.float32)
_STEPS_OF_8_BITS = np.linspace(-0.5, 0.5, 3, dtype=np.float32)
_STEPS_OF_6_BITS = np.linspace(-4, 1, 13, dtype=np.float32)

ENCODERS: dict[str, Encoder] = {
    "q4_0": Encoder(-8, 7, _STEPS, _join_32(8, 4)),
    "q4_1": Encoder(0, 15, _STEPS, _join_32(0, 4)),
    "q5_0": Encoder(-16, 15, _STEPS, _join_32(16, 5)),
    "q5_1": Encoder(0, 31, _STEPS, _join_32(0, 5)),
    "q8_0": Encoder(-127, 127, _STEPS_OF_8_BITS, _join_q8_0),
    "q4_k": Encoder(0, 15, _STEPS, _join_q45_k(4)),
    "q5_k": Encoder(0, 31, _STEPS, _join_q45_k(5)),
    "q6_k": Encoder(-32, 31, _STEPS_OF_6_BITS, _join_q6_k),
}
