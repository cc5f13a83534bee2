"""Packing is lossless: unpacked weights have the bits of the dequantised rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.kernels.weights.packing import pack, packed_shape, unpack
from tests.emitter.test_codecs import rows_of


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


def test_padding_rows_are_zero():
    raw = rows_of("q5_1", 17, 2, 3)
    with np.errstate(all="ignore"):
        filled = unpack("q5_1", pack("q5_1", raw), 32, 64)
    assert not filled[17:].any()


def test_a_large_weight_packed_in_parts_equals_small_ones():
    raw = rows_of("q4_1", 40_000, 18, 5)
    packed = pack("q4_1", raw)
    np.testing.assert_array_equal(packed[1000:1010], pack("q4_1", raw[16_000:16_160]))
    np.testing.assert_array_equal(packed[-1:], pack("q4_1", raw[-16:]))


def test_row_blocks_of_two_weights_alternate():
    gate, up = rows_of("q4_1", 20, 2, 1), rows_of("q4_1", 20, 2, 2)
    packed = pack("q4_1", gate, up)
    np.testing.assert_array_equal(packed[::2], pack("q4_1", gate))
    np.testing.assert_array_equal(packed[1::2], pack("q4_1", up))
