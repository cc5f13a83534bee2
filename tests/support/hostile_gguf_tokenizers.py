"""Write valid directories with adapters, encoders and classifiers, which `hostile_mutants` damages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from castiron.emitter.models import build
from castiron.pipelines.checkpoints.encoding_files import HEADS
from tests.support.valid_checkpoints import BPE, configs

ADAPTER = "adapter"
BESIDE = ("encoder", "judge_bert", "judge_modernbert", "adapted")
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
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
        config = {"model_type": model, **SIZES, **own, "architectures": [f"X{'ForSequenceClassification'}"]}
        config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
        found.append(_save(folder / f"judge_{model}", config))
    adapted = _save(folder / "adapted", configs()["llama"])
    _write(adapted / ADAPTER / "adapter_config.json", LORA)
    lora = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{side}.weight": np.ones(shape, np.float32)
            for n in range(3) for side, shape in (("A", (2, 32)), ("B", (32, 2)))}  # fmt: skip
    save_file(lora, adapted / ADAPTER / "adapter_model.safetensors")
    return [*found, adapted]


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _save(folder: Path, config: dict) -> Path:
    folder.mkdir()
    head = HEADS.get(config["model_type"])
    pooling = head.pooling(config) if head else None
    weights = build(config, lambda name: "f32", 64, () if head else (8,), embeds=(8,) if head else (), pooling=pooling).weights
    own = {name: stored for stored, name in head.tensors.items()} if head else {}
    rng = np.random.default_rng(0)
    tensors = {own.get(w.name, w.name): rng.standard_normal(w.shape, np.float32) for w in weights.values() if w.values is None}
    save_file(tensors, folder / "model.safetensors")
    _write(folder / "config.json", config)
    _write(folder / "tokenizer.json", BPE)
    _write(folder / "tokenizer_config.json", {"model_max_length": 48})
    return folder
