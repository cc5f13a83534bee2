"""Write small valid checkpoints, which `hostile_mutants` damages.

HF directories of every family, GGUF files of some architectures, and directories with adapters,
encoders and classifiers.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from castiron.emitter.models import build
from castiron.pipelines.checkpoints.hf.encoding_files import HEADS
from castiron.reference.tiny import COMMON, FAMILIES
from tests.support.hf_to_gguf import convert
from tests.support.tiny_gguf import LLAMA_SIZES, llama_tensors, write_gguf

BPE = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [
    {"id": 2, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\s?\\w+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "ab": 5, "abab": 6}, "merges": [["a", "b"], ["ab", "ab"]]}}  # fmt: skip
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<u>", "<s>", "</s>", "a", "b", "ab", "\u2581"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
}
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<u>", "<s>", "</s>", "a", "b", "ab", "\u0120"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 3, 3, 1, 1, 1, 1],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
GGUFS: dict[str, dict] = {
    "llama": SENTENCEPIECE | {"llama.rope.dimension_count": 16} | {f"llama.{k}": v for k, v in _YARN.items()},
    "qwen3": BYTE_LEVEL | {"qwen3.attention.key_length": 16, "qwen3.attention.value_length": 16},
    "gemma3": SENTENCEPIECE | {"gemma3.attention.sliding_window": 8, "gemma3.attention.key_length": 16},
    "phi3": BYTE_LEVEL | {"phi3.rope.dimension_count": 16, "phi3.rope.scaling.original_context_length": 64},
    "lfm2": BYTE_LEVEL | {"lfm2.attention.head_count_kv": [2, 2], "lfm2.shortconv.l_cache": 3},
    "smollm3": BYTE_LEVEL | {"smollm3.rope.dimension_count": 16, "smollm3.rope.scaling.type": "linear", "smollm3.rope.scaling.factor": 2.0},
}  # fmt: skip


def gguf_parts(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Return metadata and tensors of a valid GGUF file of an architecture."""
    sizes = {key.replace("llama.", f"{name}."): value for key, value in LLAMA_SIZES.items()}
    tensors, ones = llama_tensors(), lambda *shape: np.ones(shape, np.float32)
    for layer in (f"blk.{number}." for number in range(2)):
        norms = {"qwen3": "attn_q_norm attn_k_norm", "lfm2": "attn_q_norm attn_k_norm",
                 "gemma3": "attn_q_norm attn_k_norm post_attention_norm post_ffw_norm"}.get(name, "")  # fmt: skip
        tensors |= {
            f"{layer}{leaf}.weight": ones(16 if "_norm" in leaf[:11] and leaf[5] in "qk" else 64) for leaf in norms.split()
        }
        if name == "phi3":
            q, k, v, up = (tensors.pop(f"{layer}{leaf}.weight") for leaf in ("attn_q", "attn_k", "attn_v", "ffn_gate"))
            tensors |= {f"{layer}attn_qkv.weight": np.concatenate((q, k, v)), f"{layer}ffn_up.weight": np.concatenate((up, up))}
    if name == "phi3":
        tensors |= {f"rope_factors_{length}.weight": ones(8) for length in ("long", "short")}
    if name == "qwen3":
        tensors["output.weight"] = tensors["token_embd.weight"]
    if name == "lfm2":
        tensors["token_embd_norm.weight"] = tensors.pop("output_norm.weight")
    return sizes | GGUFS[name], tensors


ROPES = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
     "mscale_all_dim": 0.5, "attention_factor": 1.2},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "factor": 2.0},
]  # fmt: skip


def configs() -> dict[str, dict]:
    """Return a config.json of every family, and one of llama with each kind of rope scaling."""
    small = COMMON | {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    found = {name: {"model_type": name, **small, **own} for name, own in FAMILIES.items() if name != "gpt2"}
    sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 48}
    found["gpt2"] = {"model_type": "gpt2", **sizes}
    for rope in ROPES:
        llama = found["llama"] | {"head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu"}
        found[f"llama with {rope['rope_type']}"] = llama | {"rope_scaling": rope}
    return found


# Hybrids that llama.cpp's converter writes, by their HF family.
HYBRIDS = ("falcon_h1", "granitemoehybrid", "lfm2_moe", "nemotron_h", "qwen3_5_text", "qwen3_5_moe_text")


def write_hybrid(folder: Path, family: str) -> Path:
    """Write a GGUF file of a hybrid family, as llama.cpp's converter would from its HF directory."""
    location = folder / f"of_{family}"
    config = configs()[family]
    _write_weights(location, config)
    if family == "nemotron_h":
        saved = load_file(location / "model.safetensors")
        save_file(
            {name.replace("model.", "backbone."): values for name, values in saved.items()}, location / "model.safetensors"
        )
    (location / "config.json").write_text(json.dumps(config))
    return convert(location, AutoConfig.from_pretrained(location), folder / f"hybrid_{family}.gguf")


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _write_weights(location: Path, config: dict) -> list[str]:
    """Write random weights of a config to the directory `location`; return their names."""
    head = HEADS.get(config["model_type"])
    encoding = {"embeds": (8,), "pooling": head.pooling(config)} if head else {}
    weights = build(config, lambda name: "f32", 64, () if head else (8,), **encoding).weights
    modules = head.modules.items() if head else ()
    stored = {f"{name}.{part}": f"{stored}.{part}" for stored, name in modules for part in ("weight", "bias")}
    rng = np.random.default_rng(0)
    location.mkdir()
    tensors = {
        stored.get(w.name, w.name): rng.standard_normal(w.shape, np.float32) for w in weights.values() if w.values is None
    }
    if config["model_type"] == "gpt2":  # stored as [in, out]
        tensors = {key: w.T.copy() if ".c_" in key and w.ndim > 1 else w for key, w in tensors.items()}
    save_file(tensors, location / "model.safetensors")
    return [*tensors]


def write_valid(folder: Path, families: Collection[str] = ()) -> list[Path]:
    """Write GGUF files of GGUFS and HYBRIDS, and HF directories of all families or of `families`."""
    found = []
    for name in GGUFS:
        found.append(folder / f"{name}.gguf")
        write_gguf(found[-1], name, *gguf_parts(name))
    found += [write_hybrid(folder, name) for name in HYBRIDS]
    for name, config in configs().items():
        if families and name not in families:
            continue
        location = folder / name.replace(" ", "_")
        tensors = _write_weights(location, config)
        files = {
            "config.json": config,
            "generation_config.json": {"eos_token_id": [2], "bos_token_id": 1, "temperature": 0.7},
            "tokenizer.json": BPE,
            "tokenizer_config.json": {
                "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
                "eos_token": "</s>",
            },
        }
        for file, content in files.items():
            _write(location / file, content)
        if name == "qwen3":
            index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
            (location / "model.safetensors.index.json").write_text(json.dumps(index))
            (location / "model.safetensors").rename(location / "model-1.safetensors")
        found.append(location)
    return found


ADAPTER = "adapter"
BESIDE = ("encoder", "judge_bert", "judge_modernbert", "adapted")
ENCODER_SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {r"layers\.[02]\..*": 11}, "use_rslora": True, "init_lora_weights": True}  # fmt: skip


def write_beside(folder: Path) -> list[Path]:
    """Write an encoder, two rerankers, and a model with an adapter in its folder `adapter`."""
    encoder = _save(folder / "encoder", configs()["qwen3"] | {"tie_word_embeddings": True})
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
    modules = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds)]
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": True},
        "2_Dense/config.json": {"in_features": 32, "out_features": 16, "bias": False, "activation_function": "torch.nn.Tanh"},
        "config_sentence_transformers.json": {"prompts": {"query": "find: "}, "default_prompt_name": "query"},
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    }.items():
        _write(encoder / name, content)
    save_file({"linear.weight": np.ones((16, 32), np.float32)}, encoder / "2_Dense/model.safetensors")
    found = [encoder]
    for model, own in (("bert", {"type_vocab_size": 2}), ("modernbert", {"classifier_pooling": "mean"})):
        config = {"model_type": model, **ENCODER_SIZES, **own, "architectures": [f"X{'ForSequenceClassification'}"]}
        config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
        found.append(_save(folder / f"judge_{model}", config))
    adapted = _save(folder / "adapted", configs()["llama"])
    _write(adapted / ADAPTER / "adapter_config.json", LORA)
    lora = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{side}.weight": np.ones(shape, np.float32)
            for n in range(3) for side, shape in (("A", (2, 32)), ("B", (32, 2)))}  # fmt: skip
    save_file(lora, adapted / ADAPTER / "adapter_model.safetensors")
    return [*found, adapted]


def _save(folder: Path, config: dict) -> Path:
    _write_weights(folder, config)
    _write(folder / "config.json", config)
    _write(folder / "tokenizer.json", BPE)
    _write(folder / "tokenizer_config.json", {"model_max_length": 48})
    return folder
