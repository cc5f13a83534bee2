"""Faults in codecs, in packing and in quantising."""

from tests.mutants.mutant import Mutant

CODECS, PACKING = "emitter/codecs.py", "emitter/kernels/weights/packing.py"
QUANTISE = "emitter/quantise.py"


def _decoded(*codecs: str) -> tuple[str, ...]:
    return tuple(f"tests/emitter/test_codecs.py::test_dequantise_is_bit_equal_to_gguf[{codec}]" for codec in codecs)


def _packed(*codecs: str) -> tuple[str, ...]:
    return tuple(f"tests/emitter/test_packing.py::test_unpack_of_pack_is_dequantise[{codec}]" for codec in codecs)


FAULTS = (
    Mutant("nibble order", CODECS, "[runs & 15, runs >> 4], axis=2", "[runs >> 4, runs & 15], axis=2", _decoded("q4_0")),
    Mutant("fifth bits from the other end", CODECS, 'bitorder="little") << 4', 'bitorder="big") << 4', _decoded("q5_1")),
    Mutant(
        "top bits of six-bit scales swapped",
        CODECS,
        "scales = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)",
        "scales = np.concatenate([low & 63, high & 15 | middle >> 2 & 48], axis=1)",
        _decoded("q4_k"),
    ),
    Mutant(
        "sign of a minimum",
        CODECS,
        'Codec("q4_k", 256, 144, _split_q4_k, bits=4, group=32, minimum=-1)',
        'Codec("q4_k", 256, 144, _split_q4_k, bits=4, group=32, minimum=+1)',
        _decoded("q4_k"),
    ),
    Mutant(
        "offset of codes off by one", CODECS, "_fifth_bits(b[:, 2:6]), 16)", "_fifth_bits(b[:, 2:6]), 15)", _decoded("q5_0")
    ),
    Mutant(
        "scale of the group before",
        CODECS,
        "scale = scale * parts.scales.astype(np.float32)",
        "scale = scale * np.roll(parts.scales, 1, axis=1).astype(np.float32)",
        _decoded("q6_k"),
    ),
    Mutant("one number of a table", CODECS, "(-127, -104, -83, -65, -49", "(-127, -104, -83, -65, -48", _decoded("iq4_nl")),
    Mutant(
        "exponents one too large",
        CODECS,
        "exponents.astype(np.int32) - 128)",
        "exponents.astype(np.int32) - 127)",
        _decoded("mxfp4"),
    ),
    Mutant(
        "infinite scale not noticed",
        CODECS,
        '"q4_0": (0,), "q4_1": (0, 2)',
        '"q4_0": (0,), "q4_1": (0,)',
        ("tests/emitter/test_codecs.py::test_finite_is_what_stands_for_finite_numbers[q4_1]",),
    ),
    Mutant("a top code's third bit one off", PACKING, "(4, 28, 12), (2, 27, 16)", "(4, 28, 12), (2, 26, 16)", _packed("q5_0")),
    Mutant(
        "lanes in reverse",
        PACKING,
        "data[..., lane] = by_lane[:, lane]",
        "data[..., -1 - lane] = by_lane[:, lane]",
        _packed("q8_0"),
    ),
    Mutant(
        "up before gate",
        PACKING,
        "for rows in (gate, up)]",
        "for rows in (up, gate)]",
        ("tests/emitter/test_packing.py::test_interleave_alternates_blocks_of_16",),
    ),
    Mutant(
        "filling rows not zero",
        PACKING,
        "[(0, rest if axis == at else 0) for at in (0, 1)])",
        '[(0, rest if axis == at else 0) for at in (0, 1)], mode="edge")',
        ("tests/emitter/test_packing.py::test_filling_rows_are_zero",),
    ),
    Mutant(
        "pieces of a large weight overlap",
        PACKING,
        "raw[start * LANES : (start + step) * LANES]",
        "raw[max(0, start - 1) * LANES : (max(0, start - 1) + step) * LANES]",
        ("tests/emitter/test_packing.py::test_a_large_weight_is_packed_in_pieces_like_a_small_one",),
    ),
    Mutant(
        "bytes truncated instead of rounded",
        "emitter/rounding.py",
        "numbers = np.rint(",
        "numbers = np.trunc(",
        ("tests/emitter/test_bytes.py::test_rounded_x_is_within_half_a_step",),
    ),
    Mutant(
        "importance ignored",
        QUANTISE,
        "weights = None if importance is None else _columns(codec, np.broadcast_to(importance, values.shape))",
        "weights = None",
        ("tests/emitter/test_quantise.py::test_importance_moves_the_error_to_where_it_counts_less[q4_0]",),
    ),
    Mutant(
        "scale not fitted to its codes",
        QUANTISE,
        "np.copyto(scale, found, where=better)\n    return scale\n",
        "np.copyto(scale, largest / (encoder.low - step), where=better)\n    return scale\n",
        ("tests/emitter/test_quantise.py::test_no_larger_error_than_gguf",),
    ),
)
