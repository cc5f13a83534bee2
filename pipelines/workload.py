"""How much work a model is: bytes read for a token, and arithmetic for a prompt. Bench sets times against these."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A dense decoder's work, out of its config (HF key names).

    matrices: elements of the weight matrices that every token passes, output head left out; head: elements of the
    output head, which only tokens with logits pass.
    """

    matrices: int
    head: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: dict) -> "Workload":
        """From a llama-like config: four attention and three MLP projections in each layer."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        return cls(layers * (attention + mlp), config["vocab_size"] * hidden, layers, heads, kv_heads, head_dim)

    @property
    def elements(self) -> int:
        """Weight elements that decoding one token reads."""
        return self.matrices + self.head

    def prefill_flops(self, tokens: int) -> float:
        """Multiplications and additions for `tokens` from an empty context, with logits of the last token only."""
        pairs = tokens * (tokens + 1) / 2
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        return 2.0 * self.matrices * tokens + 2.0 * self.head + attention

    def cache_bytes(self, depth: int, tokens: int, item_bytes: int) -> float:
        """Bytes of k and v that a token reads, on average over `tokens` from position `depth` on."""
        position = 2 * self.layers * self.kv_heads * self.head_dim * item_bytes
        return position * (depth + (tokens + 1) / 2)


def bundle_bytes(bundle) -> int:
    """Bytes of weights that one decoded token reads: all of the bundle's, but of an embedding table beside the output
    head only a row."""
    sizes = parameter_sizes(bundle.file("weights.irpa"))
    if bundle.manifest.config.get("tie_word_embeddings"):
        return sum(sizes.values())
    return sum(size for name, size in sizes.items() if "embed_tokens" not in name)


def parameter_sizes(path: Path) -> dict[str, int]:
    """Bytes by name of the parameters in an irpa file."""
    import iree.runtime as rt

    index = rt.ParameterIndex()
    index.load(str(path), format="irpa")
    return {name: entry.length for name, entry in index.items()}


def gguf_bytes(path: Path) -> int:
    """Bytes of weights that llama.cpp reads for one token of a GGUF file."""
    from .checkpoints import open_checkpoint

    checkpoint = open_checkpoint(path)
    from emitter.codecs import row_bytes

    sizes = {
        name: int(np.prod(tensor.shape[:-1])) * row_bytes(tensor.codec, tensor.shape[-1])
        for name, tensor in checkpoint.tensors.items()
    }
    tied = "lm_head.weight" not in sizes
    return sum(size for name, size in sizes.items() if tied or "embed_tokens" not in name)
