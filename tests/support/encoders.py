"""Small random text encoders as of sentence-transformers, and their vectors by torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from castiron.emitter.models import ENCODERS
from castiron.reference import tiny
from tests.support import served

PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": ""}
_KEYS = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def write(
    family: str, directory: Path, *, pooling: str, dense: tuple[int, ...] = (), longest: int | None = None, bare: bool = True,
    **config,
) -> Path:  # fmt: skip
    """Write an encoder with `dense` layers after pooling, for texts of up to `longest` tokens.

    bare: without the output head and its prefix in tensor names.
    """
    location = _single(family, directory, config) if family in ENCODERS else tiny.tiny_model(family, directory, **config)
    if bare and family not in ENCODERS:
        AutoModel.from_pretrained(location).save_pretrained(location)
        assert not any(name.startswith("model.") for name in load_file(location / "model.safetensors"))
    words = served.tokenizer()
    # Every text begins with <s> and ends with </s>, as in EmbeddingGemma.
    words.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    words.save(str(location / "tokenizer.json"))
    hidden = json.loads((location / "config.json").read_text())["hidden_size"]
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"{i + 2}_Dense", "Dense") for i in range(len(dense)))]
    modules = [*kinds, (f"{len(kinds)}_Normalize", "Normalize")]
    _save(location / "modules.json", [_module(i, *module) for i, module in enumerate(modules)])
    _save(
        location / "1_Pooling/config.json", {"word_embedding_dimension": hidden, _KEYS[pooling]: True, "include_prompt": True}
    )
    _save(location / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    if longest:
        _save(location / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    generator = torch.Generator().manual_seed(1)
    for i, (inner, outer) in enumerate(zip((hidden, *dense), dense)):
        biased = bool(i % 2)
        described = {"in_features": inner, "out_features": outer, "bias": biased}
        activation = "torch.nn.modules.activation.Tanh" if biased else "torch.nn.modules.linear.Identity"
        _save(location / f"{i + 2}_Dense/config.json", {**described, "activation_function": activation})
        tensors = {"linear.weight": torch.randn(outer, inner, generator=generator) / inner**0.5}
        if biased:
            tensors["linear.bias"] = torch.randn(outer, generator=generator)
        save_file(tensors, location / f"{i + 2}_Dense/model.safetensors")
    return location


def _single(family: str, directory: Path, config: dict, kind=AutoModel) -> Path:
    """Write a random model of an encoder family, with random norms and biases."""
    sizes = {name: value for name, value in tiny.COMMON.items() if name != "num_key_value_heads"}
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model(family, **sizes | config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            scale = 0.3 if weight.ndim == 1 else 0.5 if "embeddings" in name else 1.5 / weight.shape[-1] ** 0.5
            weight.copy_(weight * (weight.ndim == 1) + scale * noise)
    model.save_pretrained(directory)
    return directory


def write_classifier(family: str, directory: Path, activation: str | None = None, **config) -> Path:
    """Write a classifier of two texts with one label. activation: the module after it."""
    location = _single(family, directory, {"num_labels": 1, **config}, AutoModelForSequenceClassification)
    words = served.tokenizer()
    pair = "<s>:0 $A:0 </s>:0 $B:1 </s>:1"
    words.post_processor = TemplateProcessing("<s> $A </s>", pair, [("<s>", 1), ("</s>", 2)])
    words.save(str(location / "tokenizer.json"))
    if activation:
        own = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{activation}"}}
        _save(location / "config.json", json.loads((location / "config.json").read_text()) | own)
    return location


def logit(location: Path, query: str, document: str) -> float:
    """Return transformers' logit for two texts, before any activation."""
    model = AutoModelForSequenceClassification.from_pretrained(
        location, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = Tokenizer.from_file(str(location / "tokenizer.json")).encode(query, document)
    types = {"token_type_ids": torch.tensor([found.type_ids])} if model.config.model_type == "bert" else {}
    with torch.inference_mode():
        return model(input_ids=torch.tensor([found.ids]), **types).logits.item()


def _module(index: int, path: str, kind: str) -> dict:
    return {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}


def _save(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


class Oracle:
    """The vectors of an encoder, computed by transformers and torch."""

    def __init__(self, location: Path):
        self.model = AutoModel.from_pretrained(location, dtype=torch.float32, attn_implementation="eager").eval()
        config = json.loads((location / "1_Pooling/config.json").read_text())
        self.pooling = next(name for name, key in _KEYS.items() if config.get(key))
        self.dense = []
        for folder in sorted(location.glob("*_Dense")):
            activation = json.loads((folder / "config.json").read_text())["activation_function"]
            self.dense.append((load_file(folder / "model.safetensors"), activation.endswith("Tanh")))

    def vector(self, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            states = self.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            found = {"lasttoken": states[-1], "cls": states[0], "mean": states.mean(0)}[self.pooling]
            for tensors, tanh in self.dense:
                found = torch.nn.functional.linear(found, tensors["linear.weight"], tensors.get("linear.bias"))
                found = found.tanh() if tanh else found
            return torch.nn.functional.normalize(found, dim=0).numpy()
