"""Small random rerankers of decoders: language models with yes and no, and sequence classifiers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from castiron.reference import tiny

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
YES, NO = "yes", "no"
SIZES = {"vocab_size": 320, "num_hidden_layers": 1, "max_position_embeddings": 1024}
# The template of a published reranker, with the roles of sentence-transformers and vLLM.
TEMPLATE = (
    "{%- for message in messages if message['role'] == 'system' %}<|im_start|>system\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>user\n{% for message in messages %}{% if message['role'] == 'query' %}Q: {{ message['content'] }}\n"
    "{%- elif message['role'] == 'document' %}\nD: {{ message['content'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, in which yes, no and the marks are tokens, as in Qwen's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, "ye", YES, NO])}
    found = Tokenizer(models.BPE(vocab, [("y", "e"), ("ye", "s"), ("n", "o")]))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens([AddedToken(mark, special=mark[1] == "|") for mark in MARKS])
    return found


def language_model(path: Path, template: str | None, tied: bool = True, **files: object) -> Path:
    """Write a Qwen3ForCausalLM. files: JSON files by name without .json; `__` is a slash."""
    made = tiny.tiny_model("qwen3", path, **SIZES, tie_word_embeddings=tied)
    write_text(made, template)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    for name, content in files.items():
        file = made / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return made


def write_text(path: Path, template: str | None) -> None:
    tokenizer().save(str(path / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": MARKS[0], "eos_token": MARKS[2]}
    (path / "tokenizer_config.json").write_text(json.dumps(stated | ({"chat_template": template} if template else {})))


def classifier(path: Path, template: str | None = None, family: str = "qwen3") -> Path:
    """Write a classifier whose weight is the difference of two rows of a model's output head."""
    source = tiny.tiny_model(family, path.with_name(f"{path.name}-source"), **SIZES)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    head = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).lm_head.weight
    yes, no = (tokenizer().token_to_id(token) for token in (YES, NO))
    with torch.no_grad():
        model.score.weight.copy_(head[yes] - head[no])
    model.config.pad_token_id = tokenizer().token_to_id(MARKS[0])
    model.save_pretrained(path)
    write_text(path, template)
    return path


def modules(*kinds: tuple[str, str]) -> list[dict]:
    return [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(kinds)]


_TRANSFORMER = ("sentence_transformers.base.modules.transformer.Transformer", "")
_SCORE = ("sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "1_LogitScore")
_PROMPTS = {
    "prompts": {"query": "Find it"},
    "default_prompt_name": "query",
    "activation_fn": "torch.nn.modules.linear.Identity",
}
_PUBLISHED = {
    "modules": modules(_TRANSFORMER, _SCORE),
    "config_sentence_transformers": {"model_type": "CrossEncoder", **_PROMPTS},
    "sentence_bert_config": {
        "transformer_task": "text-generation",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "logits"},
            "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
        },
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        "module_output_name": "causal_logits",
    },
}
# By name: a function that writes the checkpoint.
KINDS: dict[str, Callable[[Path], Path]] = {
    "template": lambda path: language_model(path, TEMPLATE),
    "untied": lambda path: language_model(path, TEMPLATE, tied=False),
    "modules": lambda path: language_model(
        path, TEMPLATE, **_PUBLISHED, **{"1_LogitScore__config": {"true_token_id": 7, "false_token_id": 9}}
    ),
    "one token": lambda path: language_model(
        path, TEMPLATE, **_PUBLISHED, **{"1_LogitScore__config": {"true_token_id": 7, "false_token_id": None}}
    ),
    "classifier": classifier,
    "classifier with template": lambda path: classifier(path, TEMPLATE),
    "classifier of llama": lambda path: classifier(path, family="llama"),
}
