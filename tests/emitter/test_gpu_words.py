"""Weights in words for GPUs have the values of the checkpoint, and are as small as its blocks."""

import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, SCALED, codec_of, dequantise, row_bytes
from castiron.emitter.kernels.gpu.words import NATIVE, layout_of, weight_values, widened

ROWS, INNER = 5, 512


def rows_of(codec: str, inner: int = INNER) -> np.ndarray:
    """Return rows of random blocks, or of random floats, as u8."""
    rng = np.random.default_rng(3)
    if codec_of(codec).quantised:
        return rng.integers(0, 256, (ROWS, row_bytes(codec, inner)), dtype=np.uint8)
    floats = rng.normal(size=(ROWS, inner)).astype(np.float32)
    stored = {"f32": floats, "f16": floats.astype(np.float16), "bf16": (floats.view(np.uint32) >> 16).astype(np.uint16)}
    return stored[codec].view(np.uint8)


@pytest.mark.parametrize("codec", [*CODECS, *SCALED])
@np.errstate(all="ignore")
def test_values_are_those_of_the_checkpoint(codec):
    layout, raw = layout_of(codec), rows_of(codec)
    words, want = layout.pack(raw, INNER), dequantise(codec, raw)
    assert words.shape == (ROWS, layout.row_words(INNER))
    got = weight_values(layout, words, INNER)
    finite = np.isfinite(want)
    assert finite.mean() > 0.5
    assert np.array_equal(got[finite], want[finite])


@pytest.mark.parametrize("codec", NATIVE)
def test_native_codecs_take_up_to_six_percent_more_than_their_blocks(codec):
    inner = 4096
    assert layout_of(codec).row_words(inner) * 4 <= 1.06 * row_bytes(codec, inner)
    assert widened(codec) is None


def test_other_codecs_report_how_they_are_stored():
    assert widened("q5_1") == "8-bit codes with an f32 scale and minimum for each group of 32"
    assert widened("q3_k") == "4-bit codes with an f32 scale for each group of 16"
    assert widened("nf4_64_f32") == "f32"


@pytest.mark.parametrize("codec", ["f32", "f16", "bf16"])
def test_a_row_of_any_length_is_padded(codec):
    layout, raw = layout_of(codec), rows_of(codec, 61)
    assert np.array_equal(weight_values(layout, layout.pack(raw, 61), 61), dequantise(codec, raw))
