"""How much work a model is: bytes read for a token, and arithmetic for a prompt. Bench sets times against these."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A decoder's work, out of its config (HF key names).

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
        """Four attention projections in each layer, and those of an MLP or of a token's experts."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = (2 if config.get("model_type") == "starcoder2" else 3) * hidden * config["intermediate_size"]
        experts, chosen = _experts(config)
        own = hidden * experts + 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"]) * chosen
        dense = config.get("mlp_only_layers") or ()
        sparse = [experts and i not in dense and not (i + 1) % config.get("decoder_sparse_step", 1) for i in range(layers)]
        matrices = sum(attention + (own if s else mlp) for s in sparse)
        return cls(matrices, config["vocab_size"] * hidden, layers, heads, kv_heads, head_dim)

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


def _experts(config: dict) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token passes; (0, 0) for a dense model."""
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    return experts, config.get("num_experts_per_tok", 0) if experts else 0


def bundle_bytes(bundle) -> int:
    """Bytes of weights that one decoded token reads."""
    config = bundle.manifest.config
    return bytes_read(parameter_sizes(bundle.file("weights.irpa")), config, bool(config.get("tie_word_embeddings")))


def bytes_read(sizes: dict[str, int], config: dict, tied: bool) -> int:
    """Of all weights those of a token's experts, and of an embedding table beside the output head only a row."""
    experts, chosen = _experts(config)
    read = 0
    for name, size in sizes.items():
        if tied or "embed_tokens" not in name:
            read += size * chosen // experts if ".experts." in name else size
    return read


def parameter_sizes(path: Path) -> dict[str, int]:
    """Bytes by name of the parameters in an irpa file."""
    import iree.runtime as rt

    index = rt.ParameterIndex()
    index.load(str(path), format="irpa")
    return {name: entry.length for name, entry in index.items()}


def gguf_bytes(path: Path) -> int:
    """Bytes of weights that llama.cpp reads for one token of a GGUF file."""
    from castiron.pipelines.checkpoints import open_checkpoint

    checkpoint = open_checkpoint(path)
    from castiron.emitter.codecs import row_bytes

    sizes = {
        name: int(np.prod(tensor.shape[:-1])) * row_bytes(tensor.codec, tensor.shape[-1])
        for name, tensor in checkpoint.tensors.items()
    }
    return bytes_read(sizes, checkpoint.config, "lm_head.weight" not in sizes)
