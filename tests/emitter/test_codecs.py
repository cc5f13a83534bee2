"""Dequantisation against the `gguf` package."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, dequantise, row_bytes, with_scale
from castiron.emitter.codecs.finite import are_finite
from castiron.emitter.codecs.iq_blocks import grid
from castiron.pipelines.checkpoints.gguf.gguf_file import GGML_TYPE

gguf = pytest.importorskip("gguf")
BLOCKED = [name for name, codec in CODECS.items() if codec.quantised]


def rows_of(codec: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Return rows of random bytes: scales may be huge, negative, infinite or NaN."""
    shape = (rows, blocks * CODECS[codec].block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# Types that `gguf.quants` cannot dequantise yet; `expected` has their definitions.
SIMPLE = {"q1_0": (1, lambda code: 2 * code - 1), "q2_0": (2, lambda code: code - 1)}


def expected(codec: str, raw: np.ndarray) -> np.ndarray:
    """Return rows dequantised by `gguf`, or for a type of SIMPLE by its definition in ggml."""
    if codec not in SIMPLE:
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[codec.upper()])
    bits, value = SIMPLE[codec]
    blocks = raw.reshape(-1, 18)
    fields = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), -1, bits)
    codes = value((fields << np.arange(bits)).sum(axis=2)).astype(np.float32)
    return (np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32) * codes).reshape(len(raw), -1)


@pytest.mark.parametrize("codec", GGML_TYPE)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 9), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_dequantise_is_bit_equal_to_gguf(codec, rows, blocks, seed):
    raw = rows_of(codec, rows, blocks, seed)
    with np.errstate(all="ignore"):
        ours = dequantise(codec, raw)
        theirs = expected(codec, raw) if rows else ours
    assert ours.dtype == np.float32 and ours.shape == (rows, blocks * CODECS[codec].block)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("codec", ["iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"])
def test_grids_are_those_of_gguf(codec):
    peer = getattr(gguf.quants, codec.upper())
    peer.init_grid()
    assert np.array_equal(grid(codec), peer.grid.reshape(peer.grid_shape))


@pytest.mark.parametrize("codec", GGML_TYPE)
def test_block_sizes_are_those_of_ggml(codec):
    # `gguf` does not have Q2_0 yet.
    block, size = (64, 18) if codec == "q2_0" else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[codec.upper()]]
    assert (CODECS[codec].block, CODECS[codec].block_bytes) == (block, size)
    assert row_bytes(codec, 3 * block) == 3 * size


@pytest.mark.parametrize("codec", BLOCKED)
def test_rejects_partial_blocks(codec):
    with pytest.raises(ValueError, match=f"not a multiple of the {codec} block size: .*; use a multiple of"):
        row_bytes(codec, CODECS[codec].block + 1)
    with pytest.raises(ValueError, match=f"do not consist of complete {codec} blocks; use a multiple of"):
        dequantise(codec, np.zeros((2, CODECS[codec].block_bytes + 1), np.uint8))


def test_the_scale_of_an_nvfp4_tensor_multiplies_its_values():
    """A power of two exactly, and any other scale with the two roundings of f32 products."""
    raw = rows_of("nvfp4", 6, 3, 0).reshape(2, 3, -1)
    for scale in np.array([[[1.0]], [[0.25]]], np.float32), np.array([[[3e-4]], [[-0.7]]], np.float32):
        scaled, want = dequantise("nvfp4_scaled", with_scale(raw, scale)), dequantise("nvfp4", raw).astype(np.float64) * scale
        assert (np.abs(scaled - want) <= 2.0**-23 * np.abs(want) * (scale != np.exp2(np.round(np.log2(np.abs(scale)))))).all()


def test_unknown_codec_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown weight type: 'q1_k'; use one of f32, f16, .*q6_k"):
        row_bytes("q1_k", 256)


def test_dequantise_takes_strided_rows_and_leading_axes():
    raw = rows_of("q4_0", 8, 6, 0)
    with np.errstate(all="ignore"):
        all_rows = dequantise("q4_0", raw)
        np.testing.assert_array_equal(dequantise("q4_0", raw[::2]), all_rows[::2])
        np.testing.assert_array_equal(dequantise("q4_0", raw.reshape(2, 4, -1)), all_rows.reshape(2, 4, -1))


@pytest.mark.parametrize("name", CODECS)
def test_finds_blocks_with_infinities_or_nan(name):
    """Every two bytes of a block in turn: `are_finite` reads only those that can make one."""
    for at in range(max(CODECS[name].block_bytes - 1, 1)):
        for pair in (0x7F, 0xFF), (0xFF, 0x7F), (0xFF, 0x7B), (0, 0xFC):
            raw = np.full((2, CODECS[name].block_bytes), 0x77, np.uint8)
            raw[1, at : at + 2] = pair
            with np.errstate(all="ignore"):
                expected = np.isfinite(dequantise(name, raw)).all()
            assert are_finite(name, raw) == expected, (at, pair)
