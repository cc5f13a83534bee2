"""The container: what is sound reads as gguf's own reader reads it, what is not ends in one sentence."""

from __future__ import annotations

import os
import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, dequantise
from castiron.pipelines.checkpoints import CheckpointError, open_checkpoint
from castiron.pipelines.checkpoints.gguf_file import CODEC_OF_GGML_TYPE, read_gguf
from tests.pipelines.tiny_gguf import entry, raw_gguf, string, tensor_info, write_gguf, write_llama

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
ARCHITECTURE = entry("general.architecture", STRING, string("llama"))
BIG = 1 << 62


def test_reads_what_gguf_wrote(tmp_path):
    """Every codec, against gguf's own reader: names, shapes, bytes."""
    random = np.random.default_rng(0)
    quantised = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16", "f32")
    tensors = {
        f"t.{codec}": (random.standard_normal((3, 5, 64), np.float32), gguf.GGMLQuantizationType[codec.upper()])
        for codec in quantised
    }
    path = write_gguf(tmp_path / "all.gguf", "llama", {}, tensors)
    file = read_gguf(path)
    peer = gguf.GGUFReader(path)
    assert [tensor.name for tensor in peer.tensors] == list(file.tensors)
    for tensor in peer.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == (3, 5, 64)
        assert ours.codec == tensor.tensor_type.name.lower()
        assert np.array_equal(dequantise(ours.codec, file.rows(ours)), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_codec_table_agrees_with_gguf():
    for number, codec in CODEC_OF_GGML_TYPE.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name.lower() == codec
        assert gguf.GGML_QUANT_SIZES[kind] == (CODECS[codec].block, CODECS[codec].block_bytes)
    assert set(CODEC_OF_GGML_TYPE.values()) == set(CODECS)


def test_metadata_of_every_type(tmp_path):
    values = {
        "a": ("uint8", 200), "b": ("int8", -7), "c": ("uint16", 60000), "d": ("int16", -300),
        "e": ("uint32", 1 << 31), "f": ("int32", -(1 << 30)), "g": ("float32", 0.5), "h": ("bool", True),
        "i": ("string", "grüße 日本"), "j": ("uint64", 1 << 60), "k": ("int64", -(1 << 60)), "l": ("float64", 0.1),
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    for key, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(key, value)
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "all.gguf").metadata
    assert {key: metadata[key] for key in values} == {key: value for key, (_, value) in values.items()}
    assert metadata["words"] == ["a", "", "ü"]
    assert metadata["numbers"].tolist() == [1, -2, 3]
    assert metadata["flags"].tolist() == [True, False]


def test_version_2_and_a_wider_alignment(tmp_path):
    info = tensor_info("x", (4,))
    aligned = entry("general.alignment", U32, struct.pack("<I", 64))
    head = raw_gguf((ARCHITECTURE, aligned), (info,), version=struct.pack("<I", 2))
    values = np.arange(4, dtype=np.float32)
    path = tmp_path / "two.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 64) + values.tobytes())
    file = read_gguf(path)
    assert file.version == 2
    assert np.array_equal(file.rows(file.tensors["x"]).view(np.float32), values)


MALFORMED = {
    "empty": (b"", "is empty"),
    "wrong magic": (raw_gguf(magic=b"GGML"), "does not start with the letters GGUF"),
    "only the magic": (b"GGUF", "ends inside its header"),
    "version 1": (raw_gguf(version=struct.pack("<I", 1)), "GGUF version 1"),
    "version 0": (raw_gguf(version=struct.pack("<I", 0)), "GGUF version 0"),
    "version 4": (raw_gguf(version=struct.pack("<I", 4)), "GGUF version 4"),
    "big-endian": (raw_gguf(version=struct.pack(">I", 3)), "big-endian"),
    "absurd tensor count": (raw_gguf(tensor_count=BIG), "announces 4611686018427387904 tensors"),
    "absurd entry count": (raw_gguf(entry_count=BIG), "announces 4611686018427387904 metadata entries"),
    "one entry too many": (raw_gguf((ARCHITECTURE,), entry_count=2, data=b"\0" * 32), "a metadata key is empty"),
    "key longer than the file": (raw_gguf((struct.pack("<Q", BIG) + b"x" * 40,)), "ends inside a metadata key"),
    "key not UTF-8": (raw_gguf((entry(b"\xff\xfe", U8, b"\1"),)), "not UTF-8"),
    "string not UTF-8": (raw_gguf((entry("k", STRING, string(b"\xc3")),)), "'k' is not UTF-8"),
    "key twice": (raw_gguf((ARCHITECTURE, ARCHITECTURE)), "'general.architecture' appears twice"),
    "unknown value type": (raw_gguf((entry("k", 13, b"\0" * 8),)), "unknown value type 13"),
    "boolean of 2": (raw_gguf((entry("k", BOOL, b"\2"),)), "boolean with the value 2"),
    "array of booleans of 2": (
        raw_gguf((entry("k", ARRAY, struct.pack("<IQ", BOOL, 1) + b"\2"),)),
        "array of booleans with the value 2",
    ),
    "array of arrays": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + b"\0" * 20),)), "value type 9"),
    "array of unknown type": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", 99, 1) + b"\0" * 20),)), "value type 99"),
    "absurd array": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", U8, BIG)),)), "numbers in 'k'"),
    "absurd array of strings": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", STRING, BIG)),)), "strings in 'k'"),
    "alignment 0": (raw_gguf((entry("general.alignment", U32, b"\0" * 4),)), "must be a 32-bit power of two"),
    "alignment 48": (raw_gguf((entry("general.alignment", U32, struct.pack("<I", 48)),)), "must be a 32-bit power of two"),
    "alignment of 64 bits": (
        raw_gguf((entry("general.alignment", U64, struct.pack("<Q", 32)),)),
        "must be a 32-bit power of two",
    ),
    "tensor name not UTF-8": (raw_gguf((), (tensor_info(b"\xff", (4,)),), b"\0" * 16), "not UTF-8"),
    "tensor twice": (raw_gguf((), (tensor_info("x", (4,)),) * 2, b"\0" * 64), "'x' appears twice"),
    "no dimensions": (raw_gguf((), (tensor_info("x", ()),), b"\0" * 64), "0 dimensions"),
    "five dimensions": (raw_gguf((), (tensor_info("x", (1,) * 5),), b"\0" * 64), "5 dimensions"),
    "an empty dimension": (raw_gguf((), (tensor_info("x", (4, 0)),), b"\0" * 64), "empty shape"),
    "product of dimensions overflows": (raw_gguf((), (tensor_info("x", (BIG, 4, 4)),), b"\0" * 64), "ends past"),
    "unknown ggml type": (raw_gguf((), (tensor_info("x", (256,), 9999),), b"\0" * 64), "unknown ggml type 9999"),
    "removed ggml type": (raw_gguf((), (tensor_info("x", (256,), 4),), b"\0" * 64), "unknown ggml type 4"),
    "unsupported ggml type": (raw_gguf((), (tensor_info("x", (256,), 16),), b"\0" * 512), "stored as IQ2_XXS"),
    "half a block": (raw_gguf((), (tensor_info("x", (48, 2), 8),), b"\0" * 512), "q8_0.s block of 32"),
    "unaligned data": (raw_gguf((), (tensor_info("x", (4,), offset=8),), b"\0" * 64), "not a multiple of 32"),
    "data past the end": (raw_gguf((), (tensor_info("x", (16,), offset=32),), b"\0" * 64), "ends past"),
    "offset past the end": (raw_gguf((), (tensor_info("x", (4,), offset=BIG),), b"\0" * 64), "ends past"),
    "overlapping data": (
        raw_gguf((), (tensor_info("x", (16,)), tensor_info("y", (4,), offset=32)), b"\0" * 64),
        "'x' and of 'y' overlap",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_end_in_a_sentence(name, tmp_path):
    content, sentence = MALFORMED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence) as error:
        read_gguf(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    metadata = {
        "general.languages": ["en", "de"],
        "llama.rope.dimension_count": 16,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<u>", "<s>", "</s>", "a", "b", "ab", "\u2581"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    return write_llama(tmp_path_factory.mktemp("sound") / "x.gguf", metadata).read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_refused(data, sound, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(sound[: data.draw(st.integers(0, len(sound) - 32))])
    with pytest.raises(CheckpointError):
        read_gguf(path)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_damage_to_the_header_escapes_as_another_error(data, sound, tmp_path):
    """Whatever is overwritten: a sound reading inside the file, or a CheckpointError."""
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 3000))
        small_number = st.integers(0, 20).map(lambda number: struct.pack("<I", number))
        replacement = data.draw(st.binary(min_size=1, max_size=8) | small_number)
        damaged[at : at + len(replacement)] = replacement
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(damaged))
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    for tensor in checkpoint.tensors.values():
        assert tensor.dequantise().shape == tensor.shape


def test_what_is_no_file_and_what_has_holes_takes_neither_time_nor_memory(tmp_path):
    """A file with a hole is as long as it says and takes no room: so are its strings."""
    pipe, holes = tmp_path / "pipe.gguf", tmp_path / "holes.gguf"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="is no ordinary file"):
        read_gguf(pipe)
    for head in (struct.pack("<IIQ", ARRAY, STRING, 10**9), struct.pack("<IQ", STRING, 8 * 10**9)):
        holes.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("tokenizer.ggml.tokens") + head)
        os.truncate(holes, 9 * 10**9)
        with pytest.raises(CheckpointError, match="it holds more text than any, with "):
            read_gguf(holes)
