"""Random checkpoints with the shapes of known models, cached: GGUF files for castiron and
llama.cpp, or HF directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from castiron.emitter.codecs import CODECS, codec_of, row_bytes
from castiron.emitter.models import build
from castiron.emitter.types import DTYPES, from_f32
from castiron.pipelines.checkpoints import gguf_file
from castiron.pipelines.checkpoints.gguf_rules import llama3_factors
from castiron.pipelines.checkpoints.hf_directory import CONFIG
from castiron.pipelines.compile.weights import WEIGHTS, use_more_bits
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import megabytes, print_message
from castiron.vmfb.cache import cache_folder, cache_path
from castiron.vmfb.disk import reason
from castiron.vmfb.staging import remove_abandoned, replace_file

KIND = "shapes"
DEFAULT_CODEC = "q4_k"
# Disk space that stays free.
_SPARE_BYTES = 1 << 28

# Random blocks before they repeat: more than a core's caches hold, and quickly drawn.
TILE_BYTES = 1 << 22
# Scale of a block, about that of trained weights, and its byte offset in the block; 0 if not listed.
SCALES = {"q2_k": 0.002, "q3_k": 0.001, "tq1_0": 0.05, "tq2_0": 0.05, "iq4_nl": 0.001, "iq4_xs": 0.00003}
SCALE_OFFSETS = {"q2_k": 80, "q3_k": 108, "q6_k": 208, "tq1_0": 52, "tq2_0": 64}

Progress = Callable[[str, float], None]
# Name, shape and codec of a tensor.
Stored = tuple[str, tuple[int, ...], str]
Values = Callable[[str, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model with a GGUF architecture, from the config.json at `source`.

    rope_factor: factor of Llama 3's rotary scaling, 0 without scaling. normed_heads: whether
    queries and keys are normed.
    """

    architecture: str
    source: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    positions: int
    rope_theta: float
    rms_eps: float
    rope_factor: float = 0.0
    normed_heads: bool = False

    def tensors(self, codec: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield the GGUF name, shape and codec of every tensor; norms stay f32."""
        yield "token_embd.weight", (self.vocab, self.hidden), _head_codec(codec) if self.tied else codec
        if not self.tied:
            yield "output.weight", (self.vocab, self.hidden), _head_codec(codec)
        if self.rope_factor:
            yield "rope_freqs.weight", (self.head_dim // 2,), "f32"
        yield "output_norm.weight", (self.hidden,), "f32"
        for layer in range(self.layers):
            for leaf, shape in self._block().items():
                more = codec == "q4_k" and leaf in ("attn_v", "ffn_down") and use_more_bits(layer, self.layers)
                own = "f32" if leaf.endswith("norm") else "q6_k" if more else codec
                yield f"blk.{layer}.{leaf}.weight", shape, own

    def _block(self) -> dict[str, tuple[int, ...]]:
        queries, keys, hidden, inner = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.inner
        heads = {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)} if self.normed_heads else {}
        return {
            "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden), "attn_output": (hidden, queries),
            "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
            "attn_norm": (hidden,), "ffn_norm": (hidden,), **heads,
        }  # fmt: skip

    def metadata(self) -> dict[str, int | float | str]:
        """Return the GGUF metadata. It has the vocabulary's size but no tokens; llama.cpp makes up
        its own."""
        sizes = {
            "vocab_size": self.vocab,
            "context_length": self.positions,
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.inner,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.rope_theta,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
        }
        own = {f"{self.architecture}.{key}": value for key, value in sizes.items()}
        return {"general.architecture": self.architecture, **own, "tokenizer.ggml.model": "no_vocab"}


def _head_codec(codec: str) -> str:
    return "q6_k" if codec == "q4_k" else codec


@dataclass(frozen=True)
class Configured:
    """A model without a GGUF architecture, described by its published config.json; its checkpoint
    is an HF directory in bf16."""

    source: str
    config: Mapping[str, Any]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that the family reads, by HF's name."""
        weights = build(dict(self.config), lambda name: "bf16", 1, ()).weights.values()
        return {name: shape for weight in weights for name, shape in weight.tensors}


SHAPES: dict[str, Shape | Configured] = {
    "llama-3.2-1b": Shape(
        "llama", "https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json",
        vocab=128256, hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, head_dim=64, tied=True,
        positions=131072, rope_theta=500000.0, rms_eps=1e-5, rope_factor=32.0,
    ),
    "llama-3.1-8b": Shape(
        "llama", "https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json",
        vocab=128256, hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, head_dim=128, tied=False,
        positions=131072, rope_theta=500000.0, rms_eps=1e-5, rope_factor=8.0,
    ),
    "qwen3-0.6b": Shape(
        "qwen3", "https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json",
        vocab=151936, hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8, head_dim=128, tied=True,
        positions=40960, rope_theta=1000000.0, rms_eps=1e-6, normed_heads=True,
    ),
    "qwen3-4b": Shape(
        "qwen3", "https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json",
        vocab=151936, hidden=2560, inner=9728, layers=36, heads=32, kv_heads=8, head_dim=128, tied=True,
        positions=40960, rope_theta=1000000.0, rms_eps=1e-6, normed_heads=True,
    ),
    "lfm2-1.2b": Configured(
        "https://huggingface.co/LiquidAI/LFM2-1.2B/blob/main/config.json",
        {
            "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "max_position_embeddings": 128000,
        },
    ),
    "qwen3.5-0.8b": Configured(
        "https://huggingface.co/Qwen/Qwen3.5-0.8B/blob/main/config.json",
        {
            "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
            "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        },
    ),
}  # fmt: skip


def random_checkpoint(name: str, codec: str, progress: Progress) -> tuple[Path, str]:
    """Return the path of a random checkpoint of a known shape, and the `--weights` to compile it
    with.

    The first use writes it to the cache. A GGUF file already stores `codec`; an HF directory stores
    bf16. q4_k mixes codecs as llama.cpp's Q4_K_M does; any other codec applies to every matrix.
    Raises PipelineError for an unknown name or codec, and for a disk without space for the
    checkpoint and its bundle.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise PipelineError(f"unknown shape: {name}; without --kernel, --shape takes {', '.join(SHAPES)}")
    if codec not in CODECS:
        raise PipelineError(f"unknown codec: {codec}; --codec takes {', '.join(CODECS)}")
    if isinstance(shape, Configured):
        weights = "q4_k_m" if codec == "q4_k" else codec
        if weights not in WEIGHTS:
            known = ", ".join(c for c in CODECS if c in WEIGHTS)
            raise PipelineError(f"{name} cannot be quantised to {codec}; --codec takes {known}")
        return _directory(name, shape, progress), weights
    head, sizes = _head(shape, codec)
    tensors = list(shape.tensors(codec))
    return _write(f"{name}.{codec}.gguf", f"{name} in {codec}", head, sizes, tensors, _values(shape), progress), "native"


def _directory(name: str, shape: Configured, progress: Progress) -> Path:
    """Write an HF directory: config.json and model.safetensors, all in bf16."""
    start, header, sizes = 0, {}, []
    tensors = [(tensor, dims, "bf16") for tensor, dims in shape.tensors().items()]
    for tensor, dims, _ in tensors:
        sizes.append(2 * prod(dims))
        header[tensor] = {"dtype": "BF16", "shape": dims, "data_offsets": [start, start + sizes[-1]]}
        start += sizes[-1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    head = len(text).to_bytes(8, "little") + text
    ones = lambda _, dims: np.ones(dims)
    path = _write(f"{name}/model.safetensors", name, head, sizes, tensors, ones, progress).parent
    (path / CONFIG).write_text(json.dumps(dict(shape.config), indent=2) + "\n")
    return path


def _write(
    file: str, what: str, head: bytes, sizes: list[int], tensors: list[Stored], values: Values, progress: Progress
) -> Path:
    """Write the bytes `head` and then the tensors to a file in the cache, unless it is there.

    what: the checkpoint, for errors. sizes: padded size of each tensor in bytes. values: makes the
    vectors.
    """
    path = cache_path(KIND) / file
    if _is_complete(path, head, sum(sizes)):
        return path
    path = cache_folder(KIND) / file
    path.parent.mkdir(exist_ok=True)
    # An abandoned file may be as large as the new one.
    remove_abandoned(path.parent)
    _check_space(what, len(head) + sum(sizes), path)
    try:
        with replace_file(path) as out:
            out.write(head)
            _write_tensors(out, tensors, sizes, values, lambda done: progress(f"making {file}", done))
    except OSError as error:
        raise PipelineError(f"cannot write {path}: {reason(error)}") from None
    return path


def _is_complete(path: Path, head: bytes, data_bytes: int) -> bool:
    """Return whether the file at `path` begins with `head` and has the expected size."""
    try:
        with open(path, "rb") as file:
            return file.read(len(head)) == head and path.stat().st_size == len(head) + data_bytes
    except OSError:
        return False


def _check_space(what: str, size: int, path: Path) -> None:
    free, needed = shutil.disk_usage(path.parent).free, 2 * size
    message = f"{what}: a random checkpoint of {megabytes(size)} goes to {path.parent}, with a bundle of about the same size"
    if free < needed + _SPARE_BYTES:
        raise PipelineError(
            f"{message}; {megabytes(free)} are free: use castiron cache clear, or another folder with CASTIRON_CACHE"
        )
    print_message(f"{message}; {megabytes(free)} are free")


def _head(shape: Shape, codec: str) -> tuple[bytes, list[int]]:
    """Return the bytes before the tensor data, and the padded size of each tensor in bytes."""
    entries, tensors = [gguf_file.metadata_entry(*item) for item in shape.metadata().items()], list(shape.tensors(codec))
    try:
        sizes = [gguf_file.padded(gguf_file.tensor_bytes(dims, own)) for _, dims, own in tensors]
    except ValueError as error:
        raise PipelineError(f"no {codec} for this shape: {error}") from None
    return gguf_file.header(entries, tensors), sizes


def _values(shape: Shape) -> Values:
    """Return a function that makes vectors: ones for norms, Llama 3's factors for rotary
    frequencies."""

    def values(name: str, sizes: tuple[int, ...]) -> np.ndarray:
        if not name.startswith("rope"):
            return np.ones(sizes)
        return llama3_factors(shape.head_dim, shape.rope_theta, shape.rope_factor, 1.0, 4.0, 8192)

    return values


def _write_tensors(
    out: BinaryIO, tensors: list[Stored], sizes: list[int], values: Values, progress: Callable[[float], None]
) -> None:
    """Write tensors; a matrix repeats one random tile. `progress` gets the share done."""
    tiles = {own: random_tile(own) for own in {own for *_, own in tensors}}
    written, total = 0, sum(sizes)
    for (name, sizes_of, own), size in zip(tensors, sizes, strict=True):
        if len(sizes_of) == 1:
            data = from_f32(values(name, sizes_of).astype(np.float32), DTYPES[own]).tobytes()
            out.write(data + bytes(size - len(data)))
            written += size
            continue
        for start in range(0, size, len(tiles[own])):
            out.write(tiles[own][: size - start])
            progress((written + start) / total)
        written += size
    progress(1.0)


def raw_rows(codec_name: str, rows: int, in_features: int, seed: int) -> np.ndarray:
    """Return u8 `[rows, row_bytes]` of random codes with scales and minima like those of trained
    weights."""
    codec, rng = CODECS[codec_name], np.random.default_rng(seed)
    if not codec.quantised:
        values = (rng.standard_normal((rows, in_features)) * 0.05).astype(np.float32)
        return np.ascontiguousarray(from_f32(values, DTYPES[codec_name])).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, in_features // codec.block, codec.block_bytes), dtype=np.uint8)

    def put(at: int, size: float) -> None:
        halves = (rng.standard_normal(blocks.shape[:2]) * size).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)

    small, offset = codec.block == 32, SCALE_OFFSETS.get(codec_name, 0)
    if codec.exponents:
        blocks[:, :, 0] = rng.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    put(offset, SCALES.get(codec_name, 0.01 if small else 0.0002))
    if codec.minimum:
        put(offset + 2, 0.05 if small else 0.005 if codec_name == "q2_k" else 0.0005)
    return blocks.reshape(rows, -1)


def random_tile(codec_name: str, seed: int = 0) -> np.ndarray:
    """Return about TILE_BYTES bytes of random blocks. Their number is odd, so that the rows of a
    matrix differ."""
    codec = codec_of(codec_name)
    blocks = TILE_BYTES // codec.block_bytes | 1
    return raw_rows(codec_name, 1, blocks * codec.block, seed)[0]


def tiled_rows(codec_name: str, rows: int, in_features: int, seed: int = 0) -> np.ndarray:
    """Return u8 `[rows, row_bytes]` that repeats one tile; ValueError if a row is not a multiple of
    blocks."""
    return np.resize(random_tile(codec_name, seed), (rows, row_bytes(codec_name, in_features)))
