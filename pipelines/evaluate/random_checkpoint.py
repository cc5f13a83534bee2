"""Write GGUF files with random weights in the shapes of known models to the cache.

llama.cpp can read these files too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.codecs import codec_of, row_bytes
from castiron.emitter.codecs.scaled import SCALED, join
from castiron.emitter.graph.types import DTYPES, from_f32
from castiron.emitter.models import build, read_config
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, Tensor
from castiron.pipelines.checkpoints.gguf import export, gguf_file
from castiron.pipelines.compile.weight_codecs import codecs_of
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import require_free_space
from castiron.pipelines.terminal import megabytes, print_message
from castiron.vmfb.atomic_write import replace_file
from castiron.vmfb.cache_folder import cache_folder, cache_path, claim
from castiron.vmfb.file_errors import naming

KIND = "shapes"
DEFAULT_CODEC = "q4_k"

# Bytes of random blocks before they repeat: more than the caches of a core, but quick to generate.
TILE_BYTES = 1 << 22
# By codec: the scale of a block, about that of trained weights, and the scale's byte offset in the block (0 if not listed).
SCALES = {
    "q2_k": 0.002, "q3_k": 0.001, "tq1_0": 0.05, "tq2_0": 0.05, "iq4_nl": 0.001, "iq4_xs": 0.00003, "q1_0": 0.05, "q2_0": 0.05,
    "iq1_s": 0.005, "iq1_m": 0.005, "iq2_xxs": 0.001, "iq2_xs": 0.001, "iq2_s": 0.001, "iq3_xxs": 0.0004, "iq3_s": 0.0004,
}  # fmt: skip
SCALE_OFFSETS = {"q2_k": 80, "q3_k": 108, "q6_k": 208, "tq1_0": 52, "tq2_0": 64}

Progress = Callable[[str, float], None]


_QWEN35 = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
# The config.json of each model on the hub, without keys that do not affect its shapes.
SHAPES: dict[str, dict[str, Any]] = {
    # meta-llama/Llama-3.2-1B
    "llama-3.2-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    # Qwen/Qwen3-8B
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    # Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    # Qwen/Qwen3.5-0.8B
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True, **_QWEN35,
    },
    # Qwen/Qwen3.5-27B, also the shape of Bonsai 27B
    "qwen3.5-27b": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "tie_word_embeddings": False, **_QWEN35,
    },
}  # fmt: skip


def random_checkpoint(name: str, codec: str, progress: Progress) -> Path:
    """Return the path of a cached GGUF file with random weights; write the file if it is absent.

    name: a key of SHAPES. codec: of every matrix; with "q4_k", the mix of llama.cpp's Q4_K_M.
    """
    if (config := SHAPES.get(name)) is None:
        raise PipelineError(
            f"unknown shape of a model: {name}; use one of {', '.join(SHAPES)}, or add --kernel NAME if "
            "it is the shape of a kernel"
        )
    if codec not in gguf_file.GGML_TYPE:
        raise PipelineError(f"unknown codec: {codec}; --codec takes {', '.join(gguf_file.GGML_TYPE)}")
    header, tensors = gguf_parts(checkpoint_of(name, config), "q4_k_m" if codec == "q4_k" else codec)
    return _write(f"{name}.{codec}.gguf", header, tensors, progress)


def checkpoint_of(name: str, config: dict[str, Any]) -> Checkpoint:
    """Return a checkpoint with the names and shapes of a model's tensors, in bf16, but no data."""
    weights = build(dict(config), lambda weight: "bf16", 1, ()).weights.values()
    shapes = {tensor: shape for weight in weights for tensor, shape in weight.tensors}
    return Checkpoint(Path(name), "hf", config, {t: Tensor(t, shape, "bf16", t, bytes) for t, shape in shapes.items()})


def gguf_parts(checkpoint: Checkpoint, weights: str) -> tuple[bytes, list[Tensor]]:
    """Return the header of a GGUF file, and its tensors with random data.

    The vocabulary has a size but no tokens, so llama.cpp generates placeholder tokens.
    """
    (architecture, _), config = export.architecture_for(checkpoint), export.flat_config(checkpoint.config)
    vocab = read_config(checkpoint.config).vocab
    metadata = {"general.architecture": architecture, f"{architecture}.vocab_size": vocab}
    metadata |= export.export_metadata(checkpoint, config) | export.export_tokenizer(checkpoint, vocab)
    read = lambda name, codec, columns: _tensor(name, checkpoint.tensors[name].shape, codec).read()
    tensors = export.export_tensors(checkpoint, config, codecs_of(checkpoint, weights), read)
    entries = [gguf_file.metadata_entry(key, value) for key, value in metadata.items()]
    return gguf_file.header(entries, tensors), tensors


def _tensor(name: str, shape: tuple[int, ...], codec: str) -> Tensor:
    def read() -> np.ndarray:
        if len(shape) == 1:
            return np.ascontiguousarray(from_f32(np.ones(shape, np.float32), DTYPES[codec])).view(np.uint8)
        return tiled_rows(codec, prod(shape[:-1]), shape[-1]).reshape(*shape[:-1], -1)

    return Tensor(name, shape, codec, name, read)


def _write(file: str, header: bytes, tensors: Sequence[Tensor], progress: Progress) -> Path:
    path = cache_path(KIND) / file
    size = len(header) + sum(gguf_file.padded(tensor.nbytes) for tensor in tensors)
    if path.is_file() and path.stat().st_size == size and path.open("rb").read(len(header)) == header:
        return path
    path = cache_folder(KIND) / file
    claim(path)
    what = f"a random checkpoint of {megabytes(size)} with its bundle"
    require_free_space(path, 2 * size, what)
    print_message(f"writing {what}: {path}")
    with naming(path), replace_file(path) as out:
        out.write(header)
        for tensor in tensors:
            out.write(np.ascontiguousarray(tensor.read()))
            out.write(bytes(gguf_file.padded(tensor.nbytes) - tensor.nbytes))
            progress(f"making {file}", min(1.0, out.tell() / size))
    return path


def raw_rows(codec_name: str, rows: int, in_features: int, seed: int) -> np.ndarray:
    """Return a random matrix in a codec, u8 [rows, bytes of a row], with scales as trained."""
    codec, rng = codec_of(codec_name), np.random.default_rng(seed)
    if not codec.quantised:
        values = (rng.standard_normal((rows, in_features)) * 0.05).astype(np.float32)
        return np.ascontiguousarray(from_f32(values, DTYPES[codec_name])).view(np.uint8)
    if codec_name in SCALED:
        shape = rows * in_features // codec.block, codec.block
        codes = rng.integers(0, 1 << codec.bits, shape).astype(np.uint8)
        if codec.e4m3:
            codes[codes & 0x7F == 0x7F] = 0  # NaN
        d = (rng.standard_normal(len(codes)) * (0.01 if codec.bits == 4 else 0.0002)).astype(np.float32)
        m = rng.integers(0, 16, len(codes)).astype(np.int8) if codec.zeros else None
        return join(codec, codes, from_f32(d, DTYPES[codec_name.rpartition("_")[2]]), m).reshape(rows, -1)
    blocks = rng.integers(0, 256, (rows, in_features // codec.block, codec.block_bytes), dtype=np.uint8)

    def put(at: int, size: float) -> None:
        halves = (rng.standard_normal(blocks.shape[:2]) * size).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)

    small, offset = codec.block == 32, SCALE_OFFSETS.get(codec_name, 0)
    if codec.exponents:
        blocks[:, :, 0] = rng.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    if codec.small_floats:
        blocks[:, :, :4] = rng.integers(0x04, 0x18, (*blocks.shape[:2], 4))
        if codec.block_bytes > 36:
            blocks[:, :, 36:] = np.array([0.7], "<f4").view(np.uint8)
        return blocks.reshape(rows, -1)
    if codec_name == "iq1_m":  # the highest four bits of each 16-bit word of scales are a part of d
        bits = (rng.standard_normal(blocks.shape[:2]) * SCALES[codec_name]).astype(np.float16).view(np.uint16)
        for part in range(4):
            high = blocks[:, :, 49 + 2 * part]
            high[...] = high & 15 | (bits >> 4 * part & 15) << 4
        return blocks.reshape(rows, -1)
    put(offset, SCALES.get(codec_name, 0.01 if small else 0.0002))
    if codec.minimum:
        put(offset + 2, 0.05 if small else 0.005 if codec_name == "q2_k" else 0.0005)
    return blocks.reshape(rows, -1)


@cache
def random_tile(codec_name: str) -> np.ndarray:
    """Return about TILE_BYTES of random weights, u8 [bytes], which large tensors repeat.

    The number of quantisation blocks is odd, so that few rows of a tensor are equal.
    """
    codec = codec_of(codec_name)
    blocks = TILE_BYTES // codec.block_bytes | 1
    return raw_rows(codec_name, 1, blocks * codec.block, seed=0)[0]


def tiled_rows(codec_name: str, rows: int, in_features: int) -> np.ndarray:
    """Return a matrix of repeated random bytes in a codec, u8 [rows, bytes of a row]."""
    return np.resize(random_tile(codec_name), (rows, row_bytes(codec_name, in_features)))
