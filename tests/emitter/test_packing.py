"""Packing is lossless: unpacked weights have the bits of the dequantised rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.kernels.weights.packing import LANES, TOP_CODES, interleave_rows, layout, pack, packed_shape, unpack
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


def plain_record(codec: str, rows: np.ndarray) -> bytes:
    """Return the record of 16 rows [16, block_bytes] of one codec block, written code by code."""
    kind, record = CODECS[codec], layout(CODECS[codec])
    parts = kind.split(rows)
    given = (parts.d[:, None], parts.m, parts.scales, parts.minima)
    head = b"".join(part.reshape(LANES, -1).T.tobytes() for part in given if part is not None)
    if kind.bits == 8:
        return head + parts.codes.T.tobytes()
    words = np.zeros((record.groups, record.words, LANES), np.uint32)
    for lane, group, k in np.ndindex(LANES, record.groups, kind.group):
        code = int(parts.codes[lane, group * kind.group + k])
        code = kind.table.index(code) if kind.table else code + kind.offset
        if k < record.in_fields:
            word, field = record.field(k)
            words[group, word, lane] |= code << field * kind.bits
            continue
        for word, shift, mask in TOP_CODES[kind.bits][k - record.in_fields]:
            words[group, word, lane] |= (code & mask) << shift
    return head + words.tobytes()


@pytest.mark.parametrize("codec", [codec for codec in CODECS if CODECS[codec].quantised])
def test_records_are_laid_out_as_described(codec):
    raw, size = rows_of(codec, 48, 3, 7), CODECS[codec].block_bytes
    raw[0] = 255
    packed = pack(codec, raw)
    for block, record in np.ndindex(3, 3):
        rows = np.ascontiguousarray(raw[16 * block : 16 * block + 16, record * size : (record + 1) * size])
        assert packed[block, record].tobytes() == plain_record(codec, rows), (block, record)


@pytest.mark.parametrize("codec", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("inner", [6, 7])
def test_floats_are_stored_k_by_k(codec, inner):
    element, at_once = CODECS[codec].block_bytes, layout(CODECS[codec]).elements
    raw = np.random.default_rng(1).integers(0, 256, (32, inner * element), dtype=np.uint8)
    padded = np.zeros((32, -(-inner // at_once) * at_once * element), np.uint8)
    padded[:, : raw.shape[1]] = raw
    step = at_once * element
    want = [padded[16 * b + lane, k : k + step] for b in (0, 1) for k in range(0, padded.shape[1], step) for lane in range(16)]
    assert pack(codec, raw).tobytes() == b"".join(part.tobytes() for part in want)


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


def test_interleave_alternates_blocks_of_16():
    gate, up = np.full((20, 18), 1, np.uint8), np.full((20, 18), 2, np.uint8)
    rows = interleave_rows(gate, up)[:, 0].reshape(4, 16)
    assert rows.tolist() == [[1] * 16, [2] * 16, [1] * 4 + [0] * 12, [2] * 4 + [0] * 12]


def test_rejects_partial_blocks():
    with pytest.raises(ValueError, match="q8_0 row has 33 elements"):
        packed_shape("q8_0", 16, 33)
    with pytest.raises(ValueError, match="q8_0 row has 35 bytes"):
        pack("q8_0", np.zeros((16, 35), np.uint8))
