"""Quantisation: blocks are read as they are written, with errors at most those of ggml's quantisers."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.codecs.quantise import ENCODERS, convert, encode

ROWS, FEATURES = 48, 512

TENSORS = ("normal", "heavy", "columns")
# Mean square errors of llama.cpp's quantiser for each tensor: ggml_quantize_chunk of llama-cpp-python 0.3.36, without
# importance, and with `importance()`, which then weighs the squares.
LLAMA_CPP = {
    "q4_0": ((2.9560e-06, 6.5450e-06), (1.1773e-05, 2.9534e-05), (6.0920e-05, 1.6413e-04)),
    "q4_1": ((2.4250e-06, 3.8459e-06), (7.3694e-06, 1.2745e-05), (5.0657e-05, 6.8138e-05)),
    "q5_0": ((7.2651e-07, 1.5937e-06), (2.9330e-06, 7.3588e-06), (1.9427e-05, 4.6107e-05)),
    "q5_1": ((5.6223e-07, 9.0749e-07), (1.7326e-06, 2.9976e-06), (1.1392e-05, 1.6684e-05)),
    "q8_0": ((1.1452e-08, 3.5761e-08), (4.6249e-08, 1.5096e-07), (4.0938e-07, 9.7804e-07)),
    "q4_k": ((2.0203e-06, 4.0101e-06), (6.3636e-06, 1.3657e-05), (3.5657e-05, 7.8375e-05)),
    "q5_k": ((5.1522e-07, 1.0969e-06), (1.6212e-06, 3.9423e-06), (1.0183e-05, 2.2024e-05)),
    "q6_k": ((1.2627e-07, 2.7382e-07), (4.4239e-07, 1.1135e-06), (3.1908e-06, 7.8389e-06)),
}


def tensor(name: str) -> np.ndarray:
    """[ROWS, FEATURES] f32: normal, with rare large numbers, or with columns of many scales."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((ROWS, FEATURES)) * 0.02
    heavy = rng.standard_t(4, (ROWS, FEATURES)) * 0.02
    found = {"normal": normal, "heavy": heavy, "columns": normal * np.exp(rng.standard_normal(FEATURES))}
    return found[name].astype(np.float32)


def importance() -> np.ndarray:
    return np.exp(1.5 * np.random.default_rng(8).standard_normal(FEATURES)).astype(np.float32)


def error(codec: str, raw: np.ndarray, values: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    return float(np.mean(weights * np.square(dequantise(codec, raw).astype(np.float64) - values)))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("codec", LLAMA_CPP)
def test_no_larger_error_than_llama_cpp(codec, name):
    values, (plain, weighed) = tensor(name), LLAMA_CPP[codec][TENSORS.index(name)]
    ours = error(codec, encode(codec, values), values)
    assert plain / 2 < ours <= plain, "less than half of their error would be a mistake of the test"
    assert error(codec, encode(codec, values, importance()), values, importance()) <= weighed


@pytest.mark.parametrize("codec", ENCODERS)
def test_importance_moves_the_error_to_where_it_counts_less(codec):
    values, weights = tensor("normal"), importance()
    weighted, plain = encode(codec, values, weights), encode(codec, values)
    assert error(codec, weighted, values, weights) < 0.97 * error(codec, plain, values, weights)
    # Uniform importance equals no importance.
    assert error(codec, encode(codec, values, np.full(FEATURES, 3, np.float32)), values) == pytest.approx(
        error(codec, plain, values), rel=1e-3
    )


@pytest.mark.parametrize("codec", ENCODERS)
def test_constant_rows_and_zero_rows_are_encoded(codec):
    values = np.zeros((4, FEATURES), np.float32)
    values[1], values[2] = 0.375, -3.0
    values[3, 17] = 2.0
    found = dequantise(codec, encode(codec, values))
    np.testing.assert_allclose(found, values, rtol=2e-3, atol=0.02 * (CODECS[codec].block == 256))
    assert not found[0].any()


@pytest.mark.parametrize("codec", ENCODERS)
def test_columns_with_almost_no_importance_stay_finite(codec):
    """Columns with importance keep a small error."""
    values, weights = tensor("normal"), np.full(FEATURES, 1e-30, np.float32)
    weights[::64] = 1.0
    found = dequantise(codec, encode(codec, values, weights))
    assert np.isfinite(found).all()
    assert np.abs(found - values)[:, ::64].max() < 0.02


@pytest.mark.parametrize("codec", ENCODERS)
def test_rejects_values_that_a_block_cannot_store(codec):
    values = tensor("normal")
    for bad in (np.inf, np.nan):
        spoilt = values.copy()
        spoilt[3, 5] = bad
        with pytest.raises(ValueError, match=f"{codec} cannot store infinity or NaN"):
            encode(codec, spoilt)
    with pytest.raises(ValueError, match="the scale overflows"):
        encode(codec, values * np.float32(1e30))


@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "q8_0"])
def test_conversion_dequantises_and_encodes(source):
    """Tensors of any rank are converted in parts on several threads, with the same result."""
    raw = convert("f32", np.tile(tensor("heavy"), (9, 1)).view(np.uint8), source).reshape(3, 144, -1)
    values = dequantise(source, raw)
    found = convert(source, raw, "q4_k")
    assert found.shape == (3, 144, FEATURES // 256 * 144)
    assert np.array_equal(found.reshape(432, -1), encode("q4_k", values.reshape(432, -1)))
    assert np.array_equal(convert(source, raw, "f32").view(np.float32), values)


def test_rejects_partial_blocks():
    with pytest.raises(ValueError, match="q4_k block size: 288 elements; use a multiple of 256"):
        convert("f32", np.zeros((2, 288 * 4), np.uint8), "q4_k")
