"""Read the layers after the transformer of embedding models and rerankers from HF directories."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.layers.pooling import Dense, Pooling
from castiron.emitter.models import ENCODERS
from castiron.emitter.shorten import shorten, shorten_list, shorten_text
from castiron.pipelines.checkpoints.checkpoint import EMBEDDINGS, HEAD, CheckpointError, Encoding, Tensor, inconsistent
from castiron.pipelines.checkpoints.hf.read_files import json_object, json_value, read_safetensors

MODULES = "modules.json"
_PROMPTS, _LIMITS = "config_sentence_transformers.json", "sentence_*_config.json"
# From sentence-transformers' names of pooling to castiron's. Older files have a flag for each mode, and two other names.
_MODES = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_FLAG, _OLD_NAMES = "pooling_mode_", {"mean_tokens": "mean", "cls_token": "cls"}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_TENSORS = "model.safetensors"
# The files that `read_encoding` opens besides `module_files`; * is any name.
FILES = (MODULES, _PROMPTS, _LIMITS)
_EMBEDDING = "sentence_embedding"


def read_encoding(path: Path, config: dict) -> Encoding | None:
    """Read a sentence-transformers model's pooling and layers; None without modules.json."""
    listed = json_value(path / MODULES)
    if listed is None:
        return None
    modules = [_module(path, entry) for entry in (listed if isinstance(listed, list) else [])]
    if [kind for kind, _ in modules] == ["Transformer"] and _architecture(config).endswith("ForSequenceClassification"):
        return None
    if [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"] or modules[0][1]:
        kinds = shorten_text(", ".join(kind for kind, _ in modules[:2])) or "no modules"
        raise CheckpointError(
            f"{path / MODULES} begins with unsupported modules: {kinds}; supported are Transformer, with no path, and Pooling"
        )
    pooling, tensors = Pooling(_mode(path / modules[1][1]), normalised=False), {}
    for kind, folder in modules[2:]:
        if kind == "Normalize" and not pooling.normalised:
            pooling = replace(pooling, normalised=True)
        elif kind == "Dense" and not pooling.normalised:
            pooling = replace(pooling, dense=(*pooling.dense, _dense(path / folder, folder)))
            if not (path / folder / _TENSORS).exists():
                raise CheckpointError(f"{path / folder} has no {_TENSORS}; save the model as safetensors")
            stored = read_safetensors(path / folder / _TENSORS)
            tensors |= {(name := f"{folder}.{leaf}"): replace(tensor, name=name) for leaf, tensor in stored.items()}
        elif kind != "Dropout":  # only training uses it
            supported = "supported after Pooling are Dense modules and then one Normalize"
            raise CheckpointError(f"{path / MODULES}: unsupported module in this place: {shorten_text(kind)}; {supported}")
    named, default = _prompts(path)
    limits = next((json_object(file) or {} for file in sorted(path.glob(_LIMITS))), {})
    max_tokens = _tokens(limits.get("max_seq_length")) or tokenizer_limit(path)
    return Encoding(pooling, named, default, max_tokens, limits.get("do_lower_case") is True, tensors)


def module_files(path: Path) -> list[str]:
    """Return the files of the modules after the transformer: configs, weights of Dense layers."""
    listed = json_value(path / MODULES)
    modules = [_module(path, entry) for entry in (listed if isinstance(listed, list) else [])]
    configs = [f"{folder}/config.json" for kind, folder in modules if kind in ("Pooling", "Dense")]
    return configs + [f"{folder}/{_TENSORS}" for kind, folder in modules if kind == "Dense"]


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    stated = json_object(path / _PROMPTS) or {}
    texts, default = stated.get("prompts") or {}, stated.get("default_prompt_name")
    if not isinstance(texts, dict):
        raise CheckpointError(f"{path / _PROMPTS}: prompts is {shorten(texts)}, not an object")
    named = {name: text for name, text in texts.items() if isinstance(text, str)}
    if default is not None and (not isinstance(default, str) or default not in named):
        raise inconsistent(path / _PROMPTS, f"default_prompt_name is {shorten(default)}, but there is no such prompt")
    return named, default


def _module(path: Path, entry: Any) -> tuple[str, str]:
    if isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str):
        folder = entry["path"]
        if folder == Path(folder).name != ".." and len(folder) < 100 and folder.isprintable():
            return entry["type"].rpartition(".")[2], folder
    raise CheckpointError(f"{path / MODULES}: module {shorten(entry)} lacks a valid type or path")


def _mode(folder: Path) -> str:
    config = _config(folder)
    modes = config.get("pooling_mode")
    if modes is None:
        flagged = [key.removeprefix(_FLAG) for key, on in config.items() if key.startswith(_FLAG) and on]
        modes = [_OLD_NAMES.get(name, name) for name in flagged]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in tuple(_MODES):
        stated = shorten_list(map(str, modes), max_length=100) if modes else "missing"
        raise CheckpointError(f"{folder}: the pooling mode is {stated}; it must be one of {', '.join(_MODES)}")
    if config.get("include_prompt") is False and modes != ["lasttoken"]:
        raise CheckpointError(f"{folder}: include_prompt is false, which only pooling mode lasttoken supports")
    return _MODES[modes[0]]


def _dense(folder: Path, name: str) -> Dense:
    config = _config(folder)
    features, bias = config.get("out_features"), config.get("bias", True)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"{folder}: unsupported activation {shorten_text(activation)}; supported are {known}")
    if (source := config.get("module_input_name", _EMBEDDING)) != _EMBEDDING:
        raise CheckpointError(f"{folder}: module_input_name is {shorten(source)}; only {_EMBEDDING!r} is supported")
    if not isinstance(features, int) or features < 1:
        raise CheckpointError(f"{folder}: out_features is {shorten(features)}, not an integer above 0")
    if not isinstance(bias, bool):
        raise CheckpointError(f"{folder}: bias is {shorten(bias)}, not true or false")
    return Dense(name, features, bias, _ACTIVATIONS[activation])


def _config(folder: Path) -> dict:
    config = json_object(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder} has no config.json, but {MODULES} lists this folder; download the complete model")
    return config


def tokenizer_limit(path: Path) -> int | None:
    """Return the max tokens of a text from tokenizer_config.json; None without a limit."""
    return _tokens((json_object(path / "tokenizer_config.json") or {}).get("model_max_length"))


def _tokens(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


@dataclass(frozen=True)
class Head:
    """The layers after the transformer in a family's rerankers; modules: their names by HF's."""

    modules: Mapping[str, str]
    pooling: Callable[[dict], Pooling]
    types: bool = False


def _bert(config: dict) -> Pooling:
    return Pooling("cls", (Dense("pooler", config["hidden_size"], True, "tanh"), Dense("classifier", 1, True)), False)


def _modernbert(config: dict) -> Pooling:
    biased, norm = config.get("classifier_bias") is True, (config.get("norm_eps", 1e-5), config.get("norm_bias") is True)
    activation = config.get("classifier_activation", "gelu")
    head = Dense("head", config["hidden_size"], biased, activation, norm)
    return Pooling(config.get("classifier_pooling", "cls"), (head, Dense("classifier", 1, True)), False)


def _architecture(config: dict) -> str:
    kinds = config.get("architectures")
    return kinds[0] if isinstance(kinds, list) and kinds and isinstance(kinds[0], str) else ""


def _last_token(config: dict) -> Pooling:
    return Pooling("last", (Dense("score", 1),), False)


# The layer of a decoder's sequence classifier (HF's GenericForSequenceClassification).
_DECODER = Head({"score": "score.linear"}, _last_token)
# The layers of a reranker after the transformer, by model type.
HEADS = {
    "bert": Head({"bert.pooler.dense": "pooler.linear", "classifier": "classifier.linear"}, _bert, types=True),
    "modernbert": Head({"head.dense": "head.linear", "head.norm": "head.norm", "classifier": "classifier.linear"}, _modernbert),
}


# The roles of the two texts in the chat template of a reranker, as sentence-transformers and vLLM name them.
_ROLES = [re.compile(rf"""role['"\])]*\s*(?:==|,\s*['"]eq['"]\s*,)\s*['"]{role}['"]""") for role in ("query", "document")]
# Names of Qwen3's rerankers, and the prompt of their model card, which their first versions have nowhere else.
_QWEN3_RERANKER = re.compile("qwen3[-_]reranker", re.IGNORECASE)
QWEN3_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('Given a web search query, retrieve relevant passages that answer the query') }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>{{ '\\n\\n' }}"
)


def reranker_template(path: Path, config: dict, template: str | None) -> str | None:
    """Return the template of a reranker's pairs: its own, or Qwen3's model card's; else None."""
    limits = next((json_object(file) or {} for file in sorted(path.glob(_LIMITS))), {})
    if template is not None and (all(role.search(template) for role in _ROLES) or (path / MODULES).exists()):
        stated = limits.get("processing_kwargs")
        variables = stated.get("chat_template") if isinstance(stated, dict) else None
        # For example, add_generation_prompt, which is false by default.
        settings = {
            key: value for key, value in (variables or {}).items() if key.isidentifier() and isinstance(value, bool | str)
        }
        return "".join(f"{{%- set {key} = {value!r} %}}" for key, value in settings.items()) + template
    # The hub's cache has models--ORG--NAME/snapshots/COMMIT.
    names = (path.resolve().name, path.resolve().parents[1].name if len(path.resolve().parents) > 1 else "")
    named = any(isinstance(name, str) and _QWEN3_RERANKER.search(name) for name in (*names, config.get("_name_or_path")))
    return QWEN3_PROMPT if config["model_type"] == "qwen3" and (named or config.get("is_original_qwen3_reranker")) else None


def read_token_reranker(
    path: Path, config: dict, tensors: Mapping[str, Tensor], tokenizer: Mapping, template: str | None
) -> Encoding | None:
    """Return the pooling of a language model that scores by yes and no; None for other models.

    The score is the logit of "yes" minus that of "no", one linear layer (sentence-transformers'
    LogitScore, vLLM). template: from `reranker_template`.
    """
    stated = json_value(path / MODULES)
    folders = [_module(path, entry) for entry in (stated if isinstance(stated, list) else [])]
    scores = [folder for kind, folder in folders if kind == "LogitScore"]
    is_causal = _architecture(config).endswith("ForCausalLM")
    if not scores and not (is_causal and template and stated is None):
        return None
    if template is None:
        raise inconsistent(path, "the chat template lacks the roles query and document")
    scoring = _config(path / scores[0]) if scores else {}
    model = tokenizer.get("model")
    vocabulary = dict(vocab) if isinstance(model, dict) and isinstance(vocab := model.get("vocab"), dict) else {}
    vocabulary |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    ids = [scoring.get(key, vocabulary.get(token)) for key, token in (("true_token_id", "yes"), ("false_token_id", "no"))]
    head = next((tensors[name] for name in (HEAD, *EMBEDDINGS) if name in tensors), None)
    if scores and "false_token_id" in scoring and ids[1] is None:
        del ids[1]
    if head is None or not all(type(index) is int and 0 <= index < head.shape[0] for index in ids):
        raise inconsistent(path, f"the tokens of its scores are {shorten(ids)}, not token ids")

    def read() -> np.ndarray:
        rows = head.dequantise()[ids]
        return (rows[0] - rows[1] if len(ids) > 1 else rows[0])[None].view(np.uint8)

    weight = Tensor("score.linear.weight", (1, head.shape[1]), "f32", head.source, read)
    return Encoding(
        _last_token(config), *_prompts(path), tokenizer_limit(path), tensors={weight.name: weight},
        relevance=_relevance(path, config),
    )  # fmt: skip


def read_classifier(path: Path, config: dict, stored: Mapping[str, Tensor]) -> Encoding | None:
    """Return the pooling of an HF sequence classifier with one label; None for other models."""
    kind = _architecture(config)
    if not kind.endswith("ForSequenceClassification"):
        return None
    head, weight = HEADS.get(config["model_type"]), stored.get("classifier.weight")
    if head is None and config["model_type"] not in ENCODERS and (weight := stored.get("score.weight")) is not None:
        head = _DECODER
    if head is None or weight is None or weight.shape[:1] != (1,):
        known = ", ".join(HEADS)
        raise CheckpointError(
            f"{path} is a {shorten_text(kind)}; supported are only {known} and decoder classifiers with one label"
        )
    if not isinstance(config.get("hidden_size"), int):
        raise CheckpointError(f"{path}: hidden_size is {shorten(config.get('hidden_size'))}, not a number")
    pooling = head.pooling(config)
    activations = _ACTIVATIONS.values()
    if head is not _DECODER and pooling.mode not in ("cls", "mean"):
        raise CheckpointError(f"{path}: the classifier has pooling {shorten(pooling.mode)}; supported are cls and mean")
    if unknown := [dense.activation for dense in pooling.dense if dense.activation not in tuple(activations)]:
        known = ", ".join(activations)
        raise CheckpointError(f"{path}: the classifier has activation {shorten(unknown[0])}; supported are {known}")
    names = {
        f"{name}.{part}": f"{graph_name}.{part}" for name, graph_name in head.modules.items() for part in ("weight", "bias")
    }
    tensors = {graph_name: replace(stored[name], name=graph_name) for name, graph_name in names.items() if name in stored}
    return Encoding(
        pooling, *_prompts(path), tokenizer_limit(path), tensors=tensors, relevance=_relevance(path, config), types=head.types,
    )  # fmt: skip


def _relevance(path: Path, config: dict) -> str:
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = (json_object(path / _PROMPTS) or {}).get("activation_fn") or named
    named = str(named or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if named not in ("Sigmoid", "Identity"):
        raise CheckpointError(f"{path} has an unsupported activation {shorten_text(named)}; supported are Sigmoid and Identity")
    return named.lower()
