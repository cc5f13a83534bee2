"""Write small GGUF files: valid ones with gguf's own writer, malformed ones byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 96, 64, 2, 4, 2, 96
HEAD_DIM = HIDDEN // HEADS

LLAMA_SIZES = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


def write_gguf(path: Path, arch: str, metadata: dict, tensors: dict) -> Path:
    """Write a GGUF file with integers as u32, and negative ones as i32.

    tensors: name -> f32 array, or (array, gguf quantisation type); a u8 array has that type already.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        integer = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
        scalars = {bool: writer.add_bool, int: integer, float: writer.add_float32, str: writer.add_string}
        add = scalars.get(type(value), lambda key, value: writer.add_array(key, list(value)))
        add(key, value)
    for name, tensor in tensors.items():
        values, kind = tensor if isinstance(tensor, tuple) else (tensor, gguf.GGMLQuantizationType.F32)
        raw = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random f32 tensors of a tied llama, in GGUF's names."""
    random = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    square, kv, up = (HIDDEN, HIDDEN), (KV_HEADS * HEAD_DIM, HIDDEN), (INNER, HIDDEN)
    block = {"attn_norm": (HIDDEN,), "attn_q": square, "attn_k": kv, "attn_v": kv, "attn_output": square}
    block |= {"ffn_norm": (HIDDEN,), "ffn_gate": up, "ffn_up": up, "ffn_down": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{leaf}.weight": shape for leaf, shape in block.items()}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_llama(path: Path, metadata: dict | None = None, tensors: dict | None = None) -> Path:
    """Write a tied llama without a tokenizer; `metadata` and `tensors` add or replace its own."""
    return write_gguf(path, "llama", LLAMA_SIZES | (metadata or {}), llama_tensors() | (tensors or {}))


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor_info(name: str | bytes, dims: tuple[int, ...], ggml_type: int = 0, offset: int = 0) -> bytes:
    """Return a tensor's entry in the header; dims in GGUF's order, the fastest dimension first."""
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", ggml_type, offset)


def raw_gguf(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    tensor_count: int | None = None,
    entry_count: int | None = None,
) -> bytes:
    """Return a file of these pieces, valid or not; the data starts at a multiple of 32."""
    counts = struct.pack(
        "<QQ",
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head = magic + version + counts + b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data
