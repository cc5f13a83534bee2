"""Unpack blocks of ggml's IQ1, IQ2 and IQ3 types, whose codes come from a fixed grid.

A grid is a list of vectors of four or eight values; a block stores the indices of vectors.
`iq_grids.json` has ggml's grids (ggml-common.h) in base64, each value as an index in `_LEVELS` of
two or four bits (`_BITS`), the first one in the lowest bits of a byte.
"""

import json
from base64 import b64decode
from functools import cache
from pathlib import Path

import numpy as np

from castiron.emitter.codecs.codec import Parts

_LEVELS = {
    "iq1_s": (-1, 0, 1),
    "iq2_xxs": (8, 25, 43),
    "iq2_xs": (8, 25, 43),
    "iq2_s": (8, 25, 43),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
}
_BITS = {3: 2, 8: 4}  # by number of levels


@cache
def grid(name: str) -> np.ndarray:
    """Return the grid of an IQ type such as "iq2_xs": i8 [vectors, 4 or 8]."""
    levels = np.array(_LEVELS[name], np.int8)
    packed = b64decode(json.loads((Path(__file__).parent / "iq_grids.json").read_text())[name])
    bits = _BITS[len(levels)]
    fields = np.frombuffer(packed, np.uint8)[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1
    return levels[fields].reshape(-1, 4 if name.startswith("iq3") else 8)


def _entries(name: str, indices: np.ndarray) -> np.ndarray:
    return grid(name)[indices].reshape(len(indices), -1)


def _signed(codes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return codes [n, 256], negated where bit i of byte j of u8 [n, 32] is 1 for code 8 j + i."""
    return np.where(np.unpackbits(signs, axis=1, bitorder="little"), -codes, codes)


def _eight_signs(seven: np.ndarray) -> np.ndarray:
    """Add the eighth sign bit, which ggml does not store: the parity of the seven bits."""
    seven = seven & 127
    return (seven | (np.bitwise_count(seven) & 1) << 7).astype(np.uint8)


@np.errstate(invalid="ignore")  # `finite.are_finite` finds infinities and NaN
def _d(columns: np.ndarray, factor: float) -> np.ndarray:
    return np.ascontiguousarray(columns).view("<f2")[:, 0].astype(np.float32) * np.float32(factor)


def _fields(numbers: np.ndarray, shifts: tuple[int, ...], mask: int) -> np.ndarray:
    return (numbers[:, :, None] >> np.array(shifts, numbers.dtype) & numbers.dtype.type(mask)).reshape(len(numbers), -1)


def _words(columns: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(columns).view(kind)


def _odd(scales: np.ndarray) -> np.ndarray:
    return (2 * scales + 1).astype(np.int8)


def _with_high(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high.astype(np.uint16) << 8


def _iq2_xxs(b: np.ndarray) -> Parts:
    words = _words(b[:, 2:], "<u4")
    packed = np.ascontiguousarray(words[:, 1::2])
    codes = _entries("iq2_xxs", np.ascontiguousarray(words[:, ::2]).view(np.uint8))
    signs = _eight_signs(_fields(packed, (0, 7, 14, 21), 127))
    return Parts(_signed(codes, signs), _d(b[:, :2], 1 / 8), scales=_odd(packed >> 28))


def _iq2_xs(b: np.ndarray) -> Parts:
    words = _words(b[:, 2:66], "<u2")
    codes = _signed(_entries("iq2_xs", words & 511), _eight_signs(words >> 9))
    return Parts(codes, _d(b[:, :2], 1 / 8), scales=_odd(_fields(b[:, 66:], (0, 4), 15)))


def _iq2_s(b: np.ndarray) -> Parts:
    indices = _with_high(b[:, 2:34], _fields(b[:, 66:74], (0, 2, 4, 6), 3))
    codes = _signed(_entries("iq2_s", indices), b[:, 34:66])
    return Parts(codes, _d(b[:, :2], 1 / 8), scales=_odd(_fields(b[:, 74:], (0, 4), 15)))


def _iq3_xxs(b: np.ndarray) -> Parts:
    packed = _words(b[:, 66:], "<u4")
    signs = _eight_signs(_fields(packed, (0, 7, 14, 21), 127))
    return Parts(_signed(_entries("iq3_xxs", b[:, 2:66]), signs), _d(b[:, :2], 1 / 4), scales=_odd(packed >> 28))


def _iq3_s(b: np.ndarray) -> Parts:
    indices = _with_high(b[:, 2:66], _fields(b[:, 66:74], tuple(range(8)), 1))
    codes = _signed(_entries("iq3_s", indices), b[:, 74:106])
    return Parts(codes, _d(b[:, :2], 1), scales=_odd(_fields(b[:, 106:], (0, 4), 15)))


def _shifted(indices: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """Return the codes of n IQ1 blocks, i8 [n, 256]: 8 * (grid value), plus or minus 1."""
    return 8 * _entries("iq1_s", indices) + np.where(np.repeat(minus, 256 // minus.shape[1], axis=1), -1, 1).astype(np.int8)


def _iq1_s(b: np.ndarray) -> Parts:
    high = _words(b[:, 34:], "<u2")
    indices = _with_high(b[:, 2:34], _fields(high, (0, 3, 6, 9), 7))
    return Parts(_shifted(indices, high >> 15), _d(b[:, :2], 1 / 8), scales=_odd(high >> 12 & 7))


def _iq1_m(b: np.ndarray) -> Parts:
    high, scales = _fields(b[:, 32:48], (0, 4), 15), _words(b[:, 48:], "<u2")
    # The bits of d are in four parts.
    parts = (scales & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1)[:, None].view(np.uint8)
    codes = _shifted(_with_high(b[:, :32], high & 7), high & 8)
    return Parts(codes, _d(d, 1 / 8), scales=_odd(_fields(scales, (0, 3, 6, 9), 7)))


SPLITTERS = {
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
}
