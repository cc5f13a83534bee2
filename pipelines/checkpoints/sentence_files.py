"""How a directory's model encodes texts: the files that sentence-transformers keeps beside config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from castiron.emitter.pooling import Dense, Pooling
from castiron.emitter.shown import shown, shown_list, shown_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Encoding, Tensor
from castiron.pipelines.checkpoints.json_files import json_object, json_value
from castiron.pipelines.checkpoints.safetensors_file import CODEC_OF_DTYPE, read_safetensors

MODULES = "modules.json"
_PROMPTS, _LIMITS = "config_sentence_transformers.json", "sentence_*_config.json"
# Names of pooling: in a file of today, and the keys of older ones.
_MODES = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_OLD_MODES = {"mean": "mean_tokens", "lasttoken": "lasttoken", "cls": "cls_token"}
_OLD_PREFIX = "pooling_mode_"
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
# Kinds of modules that do nothing but in training.
_TRAINING = ("Dropout",)
_TENSORS = "model.safetensors"


def read_encoding(path: Path) -> Encoding | None:
    """What the files in the directory `path` say, None where there is no modules.json; CheckpointError, one sentence, for what
    castiron does not do."""
    found = json_value(path / MODULES)
    if found is None:
        return None
    kinds = [_module(path, entry) for entry in (found if isinstance(found, list) else [])]
    if [kind for kind, _ in kinds[:2]] != ["Transformer", "Pooling"] or kinds[0][1]:
        raise CheckpointError(
            f"{path / MODULES} does not begin with a Transformer of this folder and a Pooling: castiron encodes by such alone"
        )
    pooling, tensors = Pooling(_mode(path / kinds[1][1]), normalised=False), {}
    for kind, folder in kinds[2:]:
        if kind == "Normalize" and not pooling.normalised:
            pooling = replace(pooling, normalised=True)
        elif kind == "Dense" and not pooling.normalised:
            dense = _dense(path / folder, folder)
            tensors |= _dense_tensors(path / folder, folder)
            pooling = replace(pooling, dense=(*pooling.dense, dense))
        elif kind not in _TRAINING:
            raise CheckpointError(
                f"{path / MODULES} has {shown_text(kind)} after what castiron knows: Dense layers, then Normalize"
            )
    prompts = json_object(path / _PROMPTS) or {}
    limits = next((json_object(file) or {} for file in sorted(path.glob(_LIMITS))), {})
    texts, default = prompts.get("prompts") or {}, prompts.get("default_prompt_name")
    if not isinstance(texts, dict):
        raise CheckpointError(f"{path / _PROMPTS} has {shown(texts)} for prompts, which is no object of texts: fetch it again")
    named = {name: text for name, text in texts.items() if isinstance(text, str)}
    if default is not None and (not isinstance(default, str) or default not in named):
        raise CheckpointError(f"{path / _PROMPTS} has no prompt {shown(default)}, which it says is the usual one")
    most = _tokens(limits.get("max_seq_length"))
    return Encoding(pooling, named, default, most or tokenizer_limit(path), limits.get("do_lower_case") is True, tensors)


def _module(path: Path, entry: Any) -> tuple[str, str]:
    """Kind and folder of a module; kinds have had several homes in sentence-transformers."""
    if isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str):
        folder = entry["path"]
        if folder == Path(folder).name != ".." and len(folder) < 100 and folder.isprintable():
            return entry["type"].rpartition(".")[2], folder
    raise CheckpointError(f"{path / MODULES} does not name the type and the folder of each module")


def _mode(folder: Path) -> str:
    config = _config(folder)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [name for name, key in _OLD_MODES.items() if config.get(_OLD_PREFIX + key)]
        modes += [key for key, on in config.items() if key.startswith(_OLD_PREFIX) and on and key not in _OLD_KEYS]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in tuple(_MODES):
        said = shown_list(map(str, modes), most=100) if modes else "nothing"
        raise CheckpointError(f"{folder} pools by {said}, not by one of {', '.join(_MODES)}")
    if config.get("include_prompt") is False and modes != ["lasttoken"]:
        raise CheckpointError(f"{folder} leaves the prompt out of what it pools, which castiron does not do")
    return _MODES[modes[0]]


_OLD_KEYS = {_OLD_PREFIX + key for key in _OLD_MODES.values()}


def _dense(folder: Path, name: str) -> Dense:
    config = _config(folder)
    features, bias = config.get("out_features"), config.get("bias", True)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise CheckpointError(f"{folder} is no linear layer of a text's vector with one of {', '.join(_ACTIVATIONS)} after it")
    if not isinstance(features, int) or features < 1 or not isinstance(bias, bool):
        raise CheckpointError(f"{folder / 'config.json'} lacks out_features, a number, or bias, true or false")
    return Dense(name, features, bias, _ACTIVATIONS[activation])


def _dense_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    if not (folder / _TENSORS).is_file():
        raise CheckpointError(f"{folder} has no {_TENSORS}: save the model as safetensors")
    found = {}
    for stored in read_safetensors(folder / _TENSORS).values():
        codec = CODEC_OF_DTYPE.get(stored.dtype)
        if codec is None:
            raise CheckpointError(
                f"{folder / _TENSORS}: {shown_text(stored.name)} is stored as {stored.dtype}, which is not supported"
            )
        rows = stored.data.reshape(*stored.shape[:-1], -1)
        full = f"{name}.{stored.name}"
        found[full] = Tensor(full, stored.shape, codec, stored.name, lambda rows=rows: rows)
    return found


def _config(folder: Path) -> dict:
    found = json_object(folder / "config.json")
    if found is None:
        raise CheckpointError(f"{folder} has no config.json, and {MODULES} names it: fetch it")
    return found


def tokenizer_limit(path: Path) -> int | None:
    """How many tokens of a text the tokenizer in the directory `path` keeps, None where it does not say."""
    return _tokens((json_object(path / "tokenizer_config.json") or {}).get("model_max_length"))


def _tokens(value: Any) -> int | None:
    """A number of tokens, None for what is none: some say 1e30 where there is no limit."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def base_names(tensors: Mapping[str, Tensor], keep: Sequence[str] = ("lm_head.",)) -> dict[str, Tensor]:
    """The tensors of a model that was saved without what stands around it (HF's `Qwen3Model`) under the names that they have
    within (`Qwen3ForCausalLM`)."""
    if "embed_tokens.weight" not in tensors:
        return dict(tensors)
    named = {name: name if name.startswith((*keep, "model.")) else f"model.{name}" for name in tensors}
    return {named[name]: replace(tensor, name=named[name]) for name, tensor in tensors.items()}
