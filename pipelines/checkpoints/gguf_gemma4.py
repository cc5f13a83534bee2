"""What a GGUF file says of Gemma 4 layer by layer, as HF's config keys, which say it by kinds of layers.

Sources: Gemma4Model in llama.cpp's converter, llama.cpp's src/models/gemma4.cpp, HF's Gemma4TextConfig.
"""

import numpy as np


def gemma4_layers(config: dict, metadata) -> None:
    """Sliding and full layers, whose heads differ; those without own keys and values; embeddings of layers; experts."""
    layers, heads = config["num_hidden_layers"], metadata.by_layer("attention.head_count_kv")
    config["layer_types"] = kinds = _kinds(layers, metadata)
    full = kinds.index("full_attention")
    config["num_key_value_heads"] = heads[kinds.index("sliding_attention") if "sliding_attention" in kinds else full]
    config["num_global_key_value_heads"] = heads[full]
    config["attention_k_eq_v"] = f"blk.{full}.attn_v.weight" not in metadata.file.tensors
    by_kind = {"sliding_attention": config["num_key_value_heads"], "full_attention": heads[full]}
    if heads != [by_kind[kind] for kind in kinds] or any(not n or config["num_attention_heads"] % n for n in heads):
        raise metadata.fail(f"{metadata.prefix}attention.head_count_kv is not one number for each kind of layer")
    if not config["attention_k_eq_v"] and len(set(heads)) > 1:
        raise metadata.fail("its full layers have values and another number of heads, which is not supported")
    _widths(config, metadata)
    config["head_dim"], config["global_head_dim"] = (_head(metadata, ending) for ending in ("_swa", ""))
    config.setdefault("hidden_size_per_layer_input", 0)
    if (embedding := metadata.file.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = embedding.shape[0]
    config["enable_moe_block"] = bool(config.get("num_experts"))


def _kinds(layers: int, metadata) -> list[str]:
    slides = metadata.get("attention.sliding_window_pattern")
    stated = isinstance(slides, np.ndarray) and slides.dtype == bool and len(slides) == layers
    if not stated or slides[-1]:
        raise metadata.fail(
            f"{metadata.prefix}attention.sliding_window_pattern does not say of each of {layers} layers whether it slides, "
            "which the last does not"
        )
    if slides.any():
        metadata.required("attention.sliding_window")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _widths(config: dict, metadata) -> None:
    """The MLP's width, or twice it in layers without keys and values of their own."""
    layers, widths = config["num_hidden_layers"], metadata.by_layer("feed_forward_length")
    shared = config.setdefault("num_kv_shared_layers", 0)
    if shared >= layers:
        raise metadata.fail(f"{metadata.prefix}attention.shared_kv_layers is {shared}, and there are {layers} layers")
    width = config["intermediate_size"] = widths[0]
    config["use_double_wide_mlp"] = wide = widths[-1] == 2 * width
    if not width or widths != [width] * (layers - shared) + [width * (2 if wide else 1)] * shared:
        raise metadata.fail(
            f"{metadata.prefix}feed_forward_length is not one number, or twice it in layers that share keys and values"
        )


def _head(metadata, ending: str) -> int:
    length = metadata.required(f"attention.key_length{ending}")
    if metadata.integer(f"attention.value_length{ending}", length) != length:
        raise metadata.fail(f"{metadata.prefix}attention.value_length{ending} is not attention.key_length{ending}")
    return length
