"""Encoders: blocks written as they are read, and errors no larger than those of ggml's own quantisers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.quantise import ENCODERS, convert, encode

ROWS, FEATURES = 48, 512
GGUF_QUANTISES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")

# Mean squares that llama.cpp's quantiser leaves of `tensor(name)`: ggml_quantize_chunk of llama-cpp-python 0.3.36, without
# importance and with that of `importance()`, which weighs the squares then.
LLAMA_CPP = {
    ("q4_0", "normal"): (2.9560e-06, 6.5450e-06),
    ("q4_0", "heavy"): (1.1773e-05, 2.9534e-05),
    ("q4_0", "columns"): (6.0920e-05, 1.6413e-04),
    ("q4_1", "normal"): (2.4250e-06, 3.8459e-06),
    ("q4_1", "heavy"): (7.3694e-06, 1.2745e-05),
    ("q4_1", "columns"): (5.0657e-05, 6.8138e-05),
    ("q5_0", "normal"): (7.2651e-07, 1.5937e-06),
    ("q5_0", "heavy"): (2.9330e-06, 7.3588e-06),
    ("q5_0", "columns"): (1.9427e-05, 4.6107e-05),
    ("q5_1", "normal"): (5.6223e-07, 9.0749e-07),
    ("q5_1", "heavy"): (1.7326e-06, 2.9976e-06),
    ("q5_1", "columns"): (1.1392e-05, 1.6684e-05),
    ("q8_0", "normal"): (1.1452e-08, 3.5761e-08),
    ("q8_0", "heavy"): (4.6249e-08, 1.5096e-07),
    ("q8_0", "columns"): (4.0938e-07, 9.7804e-07),
    ("q4_k", "normal"): (2.0203e-06, 4.0101e-06),
    ("q4_k", "heavy"): (6.3636e-06, 1.3657e-05),
    ("q4_k", "columns"): (3.5657e-05, 7.8375e-05),
    ("q5_k", "normal"): (5.1522e-07, 1.0969e-06),
    ("q5_k", "heavy"): (1.6212e-06, 3.9423e-06),
    ("q5_k", "columns"): (1.0183e-05, 2.2024e-05),
    ("q6_k", "normal"): (1.2627e-07, 2.7382e-07),
    ("q6_k", "heavy"): (4.4239e-07, 1.1135e-06),
    ("q6_k", "columns"): (3.1908e-06, 7.8389e-06),
}


def tensor(name: str) -> np.ndarray:
    """[ROWS, FEATURES] f32: of one width, with rare large numbers, or with columns of many widths."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((ROWS, FEATURES)) * 0.02
    heavy = rng.standard_t(4, (ROWS, FEATURES)) * 0.02
    return {"normal": normal, "heavy": heavy, "columns": normal * np.exp(rng.standard_normal(FEATURES))}[name].astype(
        np.float32
    )


def importance() -> np.ndarray:
    return np.exp(1.5 * np.random.default_rng(8).standard_normal(FEATURES)).astype(np.float32)


def error(codec: str, raw: np.ndarray, values: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    return float(np.mean(weights * np.square(dequantise(codec, raw).astype(np.float64) - values)))


@pytest.mark.parametrize("codec", ENCODERS)
def test_blocks_are_written_as_they_are_read(codec):
    """Any bytes at all come back from the parts that they are taken apart into."""
    blocks = np.random.default_rng(0).integers(0, 256, (300, CODECS[codec].block_bytes), dtype=np.uint8)
    assert np.array_equal(ENCODERS[codec].join(CODECS[codec].split(blocks)), blocks)


def test_encoders_are_of_codecs_that_are_read():
    assert set(ENCODERS) < {name for name, codec in CODECS.items() if codec.quantised}


@pytest.mark.parametrize("name", ["normal", "heavy", "columns"])
@pytest.mark.parametrize("codec", GGUF_QUANTISES)
def test_no_larger_error_than_gguf(codec, name):
    values = tensor(name)
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[codec.upper()])
    assert error(codec, encode(codec, values), values) <= error(codec, theirs, values)


@pytest.mark.parametrize(("codec", "name"), LLAMA_CPP)
def test_no_larger_error_than_llama_cpp(codec, name):
    values, (plain, weighed) = tensor(name), LLAMA_CPP[codec, name]
    ours = error(codec, encode(codec, values), values)
    assert ours <= plain and ours > plain / 2, "half of their error would be a mistake of the test"
    assert error(codec, encode(codec, values, importance()), values, importance()) <= weighed


@pytest.mark.parametrize("codec", ENCODERS)
def test_importance_moves_the_error_to_where_it_counts_less(codec):
    values, weights = tensor("normal"), importance()
    told, untold = encode(codec, values, weights), encode(codec, values)
    assert error(codec, told, values, weights) < 0.97 * error(codec, untold, values, weights)
    # As much everywhere is as good as none.
    assert error(codec, encode(codec, values, np.full(FEATURES, 3, np.float32)), values) == pytest.approx(
        error(codec, untold, values), rel=1e-3
    )


@pytest.mark.parametrize("codec", ENCODERS)
def test_rows_of_one_number_and_of_none(codec):
    values = np.zeros((4, FEATURES), np.float32)
    values[1], values[2] = 0.375, -3.0
    values[3, 17] = 2.0
    found = dequantise(codec, encode(codec, values))
    np.testing.assert_allclose(found, values, rtol=2e-3, atol=0.02 * (CODECS[codec].block == 256))
    assert not found[0].any()


@pytest.mark.parametrize("codec", ENCODERS)
def test_columns_that_count_for_nothing(codec):
    """An importance of almost nothing nearly everywhere leaves numbers that are finite, and right where it is not."""
    values, weights = tensor("normal"), np.full(FEATURES, 1e-30, np.float32)
    weights[::64] = 1.0
    found = dequantise(codec, encode(codec, values, weights))
    assert np.isfinite(found).all()
    assert np.abs(found - values)[:, ::64].max() < 0.02


@pytest.mark.parametrize("codec", ENCODERS)
def test_numbers_that_no_block_can_hold_are_refused(codec):
    values = tensor("normal")
    for bad in (np.inf, np.nan):
        spoilt = values.copy()
        spoilt[3, 5] = bad
        with pytest.raises(ValueError, match=f"{codec} has no code for it"):
            encode(codec, spoilt)
    with pytest.raises(ValueError, match="past the scales"):
        encode(codec, values * np.float32(1e30))


@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "q8_0"])
def test_conversion_goes_through_the_values(source):
    """Rows in pieces on several threads are what they are at once, of tensors of any rank."""
    raw = convert("f32", np.tile(tensor("heavy"), (9, 1)).view(np.uint8), source).reshape(3, 144, -1)
    values = dequantise(source, raw)
    found = convert(source, raw, "q4_k")
    assert found.shape == (3, 144, FEATURES // 256 * 144)
    assert np.array_equal(found.reshape(432, -1), encode("q4_k", values.reshape(432, -1)))
    assert np.array_equal(convert(source, raw, "f32").view(np.float32), values)


def test_rows_that_are_no_whole_number_of_blocks_are_refused():
    with pytest.raises(ValueError, match="a q4_k row has 288 elements: it takes a multiple of 256"):
        convert("f32", np.zeros((2, 288 * 4), np.uint8), "q4_k")
