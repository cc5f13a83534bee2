"""Models that people run, by their sizes: what a random checkpoint needs to cost what theirs costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from castiron.emitter.models import build
from castiron.pipelines.casting.weights import use_more_bits

# Matrices of a K-quant that llama.cpp's Q4_K_M keeps in Q6_K, in half of the layers.
_MORE_BITS = ("attn_v", "ffn_down")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as its config.json has them; `source` is where that was published.

    rope_factor: of Llama 3's scaling of the rotary frequencies, 0 for none. normed_heads: queries and keys are normed.
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
        """Name in GGUF, shape and codec of every tensor of the file; norms stay f32."""
        yield "token_embd.weight", (self.vocab, self.hidden), _head_codec(codec) if self.tied else codec
        if not self.tied:
            yield "output.weight", (self.vocab, self.hidden), _head_codec(codec)
        if self.rope_factor:
            yield "rope_freqs.weight", (self.head_dim // 2,), "f32"
        yield "output_norm.weight", (self.hidden,), "f32"
        for layer in range(self.layers):
            for leaf, shape in self._matrices().items():
                more = codec == "q4_k" and leaf in _MORE_BITS and use_more_bits(layer, self.layers)
                yield f"blk.{layer}.{leaf}.weight", shape, "q6_k" if more else codec
            for leaf, size in self._norms().items():
                yield f"blk.{layer}.{leaf}.weight", (size,), "f32"

    def _matrices(self) -> Mapping[str, tuple[int, int]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_q": (queries, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, queries),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }

    def _norms(self) -> Mapping[str, int]:
        heads = {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim} if self.normed_heads else {}
        return {"attn_norm": self.hidden, "ffn_norm": self.hidden, **heads}

    @property
    def parameters(self) -> int:
        """Weights of the model, as its publisher counts them."""
        return sum(prod(shape) for name, shape, _ in self.tensors("f32") if not name.startswith("rope"))

    def metadata(self) -> dict[str, int | float | str]:
        """What the file says of the model. No vocabulary: the size of one alone, for which llama.cpp makes tokens up."""
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
    """A model by its config.json, as `source` has it: an HF directory in bf16, which is quantised when it is cast."""

    source: str
    config: Mapping[str, Any]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that the family reads, by HF's name."""
        weights = build(dict(self.config), lambda name: "bf16", 1, ()).weights.values()
        return {name: shape for weight in weights for name, shape in weight.tensors}

    @property
    def parameters(self) -> int:
        """Weights of the model, as its publisher counts them."""
        return sum(prod(shape) for shape in self.tensors().values())


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
