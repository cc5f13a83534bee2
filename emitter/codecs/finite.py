"""Check that stored weights are finite; for most formats, the scales of the blocks are enough."""

import numpy as np

from castiron.emitter.codecs import codec_of, rows_at_once, values
from castiron.emitter.codecs.codec import Codec

# _EXPONENTS: the exponent bits, all set in infinities and NaN. _HALVES: byte offsets of the f16 numbers in a block, if
# they are its only floats.
_EXPONENTS = {"f32": ("<u4", 0x7F800000), "f16": ("<u2", 0x7C00), "bf16": ("<u2", 0x7F80)}
_HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
    "q2_k": (80, 82), "q3_k": (108,), "iq4_nl": (0,), "iq4_xs": (0,), "tq1_0": (52,), "tq2_0": (64,), "mxfp4": (),
    "nvfp4": (), "q1_0": (0,), "q2_0": (0,), "iq1_s": (0,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,),
    "iq3_s": (0,),
}  # fmt: skip
# With a larger exponent, the largest value of E2M1's table, 12, times the power of two overflows f32.
_LARGEST_EXPONENT = 252


def are_finite(codec_name: str, raw: np.ndarray) -> bool:
    """Return whether all weights in `raw` u8 [..., row_bytes] of a codec are finite."""
    codec = codec_of(codec_name)
    rows = raw.reshape(-1, raw.shape[-1])
    step = rows_at_once(raw.shape[-1])
    return all(_are_finite(codec, rows[start : start + step]) for start in range(0, len(rows), step))


def _are_finite(codec: Codec, rows: np.ndarray) -> bool:
    if not codec.quantised:
        kind, exponent = _EXPONENTS[codec.name]
        return not ((np.ascontiguousarray(rows).view(kind) & exponent) == exponent).any()
    blocks = np.ascontiguousarray(rows).reshape(-1, codec.block_bytes)
    if codec.exponents:
        return blocks[:, 0].max() <= _LARGEST_EXPONENT
    if codec.name not in _HALVES:
        with np.errstate(all="ignore"):
            return bool(np.isfinite(values(codec, codec.split(blocks))).all())
    kind, exponent = _EXPONENTS["f16"]
    return not any(((blocks[:, at : at + 2].view(kind) & exponent) == exponent).any() for at in _HALVES[codec.name])
