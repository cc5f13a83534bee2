"""Packed weights lose nothing: what comes back is what the rows stood for, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.kernels.weights.packing import interleave_rows, pack, packed_shape, unpack


def rows_of(codec: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    shape = (rows, blocks * CODECS[codec].block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 50), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_unpack_of_pack_is_dequantise(codec, rows, blocks, seed):
    raw = rows_of(codec, rows, blocks, seed)
    in_features = blocks * CODECS[codec].block
    packed = pack(codec, raw)
    assert packed.dtype == np.uint8 and packed.shape == packed_shape(codec, rows, in_features)
    with np.errstate(all="ignore"):
        back = unpack(codec, packed, rows, in_features)
        want = dequantise(codec, raw)
    np.testing.assert_array_equal(back.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("codec", CODECS)
def test_packing_adds_nothing_to_whole_blocks(codec):
    rows, in_features = 32, 512
    raw = rows_of(codec, rows, in_features // CODECS[codec].block, 0)
    six_bit_scales = 4 * raw.size // CODECS[codec].block_bytes if codec in ("q4_k", "q5_k") else 0
    assert pack(codec, raw).nbytes == raw.nbytes + six_bit_scales


def test_filling_rows_are_zero():
    raw = rows_of("q5_1", 17, 2, 3)
    with np.errstate(all="ignore"):
        filled = unpack("q5_1", pack("q5_1", raw), 32, 64)
    assert not filled[17:].any()


def test_a_large_weight_is_packed_in_pieces_like_a_small_one():
    raw = rows_of("q4_1", 40_000, 18, 5)
    packed = pack("q4_1", raw)
    np.testing.assert_array_equal(packed[1000:1010], pack("q4_1", raw[16_000:16_160]))
    np.testing.assert_array_equal(packed[-1:], pack("q4_1", raw[-16:]))


def test_interleave_alternates_blocks_of_16():
    gate, up = np.full((20, 18), 1, np.uint8), np.full((20, 18), 2, np.uint8)
    rows = interleave_rows(gate, up)[:, 0].reshape(4, 16)
    assert (rows[0] == 1).all() and (rows[1] == 2).all()
    assert (rows[2] == [1] * 4 + [0] * 12).all() and (rows[3] == [2] * 4 + [0] * 12).all()
    with pytest.raises(ValueError, match="gate has the shape"):
        interleave_rows(gate, up[:5])


def test_partial_blocks_are_refused():
    with pytest.raises(ValueError, match="q8_0 row has 33 elements"):
        packed_shape("q8_0", 16, 33)
    with pytest.raises(ValueError, match="q8_0 row has 35 bytes"):
        pack("q8_0", np.zeros((16, 35), np.uint8))
