"""GGUF files: valid ones read as gguf's own reader reads them; malformed ones are one-line errors."""

from __future__ import annotations

import os
import struct

import gguf
import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, dequantise
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf.gguf_file import CODEC_OF_GGML_TYPE, read_gguf
from tests.support.tiny_gguf import entry, raw_gguf, string, tensor_info, write_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
ARCHITECTURE = entry("general.architecture", STRING, string("llama"))
BIG = 1 << 62


def test_reads_what_gguf_wrote(tmp_path):
    """Names, shapes and bytes of several codecs are those of gguf's reader."""
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
        assert np.array_equal(dequantise(ours.codec, ours.data), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_codec_table_agrees_with_gguf():
    for number, codec in CODEC_OF_GGML_TYPE.items():
        # `gguf` does not have Q2_0 yet; its number is that of ggml.h.
        assert codec == ("q2_0" if number == 42 else gguf.GGMLQuantizationType(number).name.lower())
    assert set(CODEC_OF_GGML_TYPE.values()) == set(CODECS) - {"nvfp4_scaled"}


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
    assert np.array_equal(file.tensors["x"].data.view(np.float32), values)


MALFORMED = {
    "empty": (b"", "is empty"),
    "wrong magic": (raw_gguf(magic=b"GGML"), "is not a GGUF file"),
    "only the magic": (b"GGUF", "ends inside its header"),
    "version 1": (raw_gguf(version=struct.pack("<I", 1)), "GGUF version 1"),
    "big-endian": (raw_gguf(version=struct.pack(">I", 3)), "big-endian"),
    "absurd tensor count": (raw_gguf(tensor_count=BIG), "states 4611686018427387904 tensors"),
    "one entry too many": (raw_gguf((ARCHITECTURE,), entry_count=2, data=b"\0" * 32), "a metadata key is empty"),
    "key longer than the file": (raw_gguf((struct.pack("<Q", BIG) + b"x" * 40,)), "ends inside a metadata key"),
    "string not UTF-8": (raw_gguf((entry("k", STRING, string(b"\xc3")),)), "'k' is not UTF-8"),
    "key twice": (raw_gguf((ARCHITECTURE, ARCHITECTURE)), "'general.architecture' appears twice"),
    "unknown value type": (raw_gguf((entry("k", 13, b"\0" * 8),)), "unsupported value type 13"),
    "boolean of 2": (raw_gguf((entry("k", BOOL, b"\2"),)), "has the boolean value 2"),
    "array of booleans of 2": (
        raw_gguf((entry("k", ARRAY, struct.pack("<IQ", BOOL, 1) + b"\2"),)),
        "has the boolean value 2",
    ),
    "array of arrays": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + b"\0" * 20),)), "value type 9"),
    "absurd array": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", U8, BIG)),)), "numbers in 'k'"),
    "absurd array of strings": (raw_gguf((entry("k", ARRAY, struct.pack("<IQ", STRING, BIG)),)), "strings in 'k'"),
    "alignment 48": (raw_gguf((entry("general.alignment", U32, struct.pack("<I", 48)),)), "must be a 32-bit power of two"),
    "alignment of 64 bits": (
        raw_gguf((entry("general.alignment", U64, struct.pack("<Q", 32)),)),
        "must be a 32-bit power of two",
    ),
    "tensor name not UTF-8": (raw_gguf((), (tensor_info(b"\xff", (4,)),), b"\0" * 16), "not UTF-8"),
    "tensor twice": (raw_gguf((), (tensor_info("x", (4,)),) * 2, b"\0" * 64), "'x' appears twice"),
    "no dimensions": (raw_gguf((), (tensor_info("x", ()),), b"\0" * 64), "0 dimensions"),
    "five dimensions": (raw_gguf((), (tensor_info("x", (1,) * 5),), b"\0" * 64), "5 dimensions"),
    "an empty dimension": (raw_gguf((), (tensor_info("x", (4, 0)),), b"\0" * 64), "no elements: its shape is"),
    "product of dimensions overflows": (raw_gguf((), (tensor_info("x", (BIG, 4, 4)),), b"\0" * 64), "ends past"),
    "unknown ggml type": (raw_gguf((), (tensor_info("x", (256,), 9999),), b"\0" * 64), "unsupported type 9999"),
    "removed ggml type": (raw_gguf((), (tensor_info("x", (256,), 4),), b"\0" * 64), "unsupported type 4"),
    "unsupported ggml type": (raw_gguf((), (tensor_info("x", (256,), 24),), b"\0" * 512), "unsupported type I8"),
    "half a block": (raw_gguf((), (tensor_info("x", (48, 2), 8),), b"\0" * 512), "q8_0.s block of 32"),
    "unaligned data": (raw_gguf((), (tensor_info("x", (4,), offset=8),), b"\0" * 64), "not a multiple of 32"),
    "data past the end": (raw_gguf((), (tensor_info("x", (16,), offset=32),), b"\0" * 64), "ends past"),
    "overlapping data": (
        raw_gguf((), (tensor_info("x", (16,)), tensor_info("y", (4,), offset=32)), b"\0" * 64),
        "'x' and of 'y' overlap",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_end_in_one_line(name, tmp_path):
    content, message = MALFORMED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        read_gguf(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_pipes_and_sparse_files_are_rejected_quickly(tmp_path):
    """A sparse file can be as long as it states without using disk space, and so can its strings."""
    pipe, holes = tmp_path / "pipe.gguf", tmp_path / "holes.gguf"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_gguf(pipe)
    for head in (struct.pack("<IIQ", ARRAY, STRING, 10**9), struct.pack("<IQ", STRING, 8 * 10**9)):
        holes.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("tokenizer.ggml.tokens") + head)
        os.truncate(holes, 9 * 10**9)
        with pytest.raises(CheckpointError, match="its strings exceed 200 MB at "):
            read_gguf(holes)
