"""Convert the metadata of a GGUF file to the config.json of its model.

An unknown key under the architecture's prefix is an error, because it may change the result.
"""

import json
import re
from collections.abc import Mapping

import numpy as np

from castiron.emitter.layers.pooling import Dense, Pooling
from castiron.emitter.shorten import shorten_list, shorten_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Encoding, Tensor, reject_impossible_sizes
from castiron.pipelines.checkpoints.gguf import config_rules
from castiron.pipelines.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    DEEPSEEK2,
    MIXTRAL,
    OLMO3,
    Architecture,
    architecture_names,
)
from castiron.pipelines.checkpoints.gguf.config_rules import head_dim
from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf.metadata import Metadata, architecture_name
from castiron.pipelines.checkpoints.gguf.vocabulary import Vocabulary

# llama.cpp's default base of rotary embeddings.
_ROPE_BASE = 10000.0
# HF's names for the number of experts per token.
_EXPERTS_USED = {"num_experts_per_tok", "top_k_experts"}
# llama.cpp's pooling types.
_POOLING = {1: "mean", 2: "cls", 3: "last"}
_RANK = 4
# The rows of "yes" and of "no" in the output head of Qwen3-Reranker, and the text of its prompt.
RANK_ROWS, RANK_TEMPLATE = "cls.output.weight", "tokenizer.chat_template.rerank"

# From GGUF's roles of tokens to config keys.
_TOKEN_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}

_SAMPLING = "general.sampling."
_PENALTY, _PENALISED = "penalty_repeat", "penalty_last_n"
# From GGUF's key to HF's; castiron ignores Mirostat, XTC and the order of samplers.
_SAMPLING_KEYS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", _PENALTY: "repetition_penalty",
    _PENALISED: "repeat_last_n",
}  # fmt: skip
_INTEGERS = ("top_k", _PENALISED)
# llama.cpp's default of `penalty_last_n`, and the value for all tokens, as HF counts them.
_LAST_N, _ALL = 64, -1
# Values of sampling options must be below this limit, because GGUF's integers have 32 bits.
_MAX_OPTION = 2**31


# By value of llama.cpp's enum llama_expert_gating_func_type.
_GATING = {1: "softmax", 2: "sigmoid"}
# Layers and tokens of GLM-4.7-Flash, whose first files have no key for the function, like those of DeepSeek V2.
_GLM_SIZES = (47, 154880)


def architecture_of(file: GgufFile) -> Architecture:
    """Return the row of `ARCHITECTURES` for a file."""
    name = architecture_name(file)
    softmax = name == "deepseek2" and not _chooses_by_sigmoid(file)
    experts = file.metadata.get("llama.expert_count")
    special = {
        "llama": MIXTRAL if isinstance(experts, int) and experts else None,
        "olmo2": OLMO3 if "olmo2.attention.sliding_window" in file.metadata else None,
        "deepseek2": DEEPSEEK2 if softmax else None,
    }
    row = ARCHITECTURES.get(special.get(name) or name)
    if row is None:
        known = shorten_list(architecture_names(), max_length=150)
        raise CheckpointError(f"{file.path} has the unsupported architecture {shorten_text(name, 60)}; supported are {known}")
    return row


def _chooses_by_sigmoid(file: GgufFile) -> bool:
    metadata, embedding = Metadata(file), file.tensors.get("token_embd.weight")
    is_glm = embedding is not None and (metadata.integer("block_count"), embedding.shape[0]) == _GLM_SIZES
    gating = metadata.integer("expert_gating_func", 0) or (2 if is_glm else 1)
    if gating not in _GATING:
        raise metadata.invalid("expert_gating_func", " or ".join(f"{n} ({name})" for n, name in _GATING.items()))
    return _GATING[gating] == "sigmoid"


def encoding_of(file: GgufFile) -> Encoding | None:
    """Return the pooling and dense layers of an embedding model or reranker; None for others."""
    metadata = Metadata(file)
    kind = metadata.integer("pooling_type", 0)
    if not kind:
        return None
    if kind == _RANK:
        return _reranker(file, metadata)
    if kind not in _POOLING:
        raise metadata.invalid("pooling_type", " or ".join(f"{n} ({name})" for n, name in {**_POOLING, _RANK: "rank"}.items()))
    shapes = {n: file.tensors[name].shape for n in (2, 3) if (name := f"dense_{n}.weight") in file.tensors}
    dense = tuple(Dense(f"{n}_Dense", shape[0]) for n, shape in shapes.items())
    return Encoding(Pooling(_POOLING[kind], dense))


def _reranker(file: GgufFile, metadata: Metadata) -> Encoding:
    """Return the score of llama.cpp's pooling RANK: the softmax of "yes" and "no" at the last token."""
    rows, hidden = file.tensors.get(RANK_ROWS), metadata.integer("embedding_length")
    if architecture_name(file) != "qwen3" or rows is None or rows.shape != (2, hidden):
        stated = f"has shape {list(rows.shape)}" if rows else "is missing"
        raise metadata.error(
            f"a {shorten_text(architecture_name(file), 60)} reranker whose {RANK_ROWS} {stated} is not supported; "
            "give Qwen3-Reranker, or the HF directory of the model"
        )
    if not isinstance(file.metadata.get(RANK_TEMPLATE), str):
        raise metadata.error(f"the reranker's prompt is missing: {RANK_TEMPLATE}; convert the model again")

    def read() -> np.ndarray:
        yes, no = rows.dequantise()
        return (yes - no)[None].view(np.uint8)

    weight = Tensor("score.linear.weight", (1, rows.shape[1]), "f32", rows.source, read)
    return Encoding(Pooling("last", (Dense("score", 1),), False), tensors={weight.name: weight}, relevance="sigmoid")


def rank_template(text: str) -> str:
    """Return the Jinja template of a reranker's prompt, in which {query} and {document} are replaced."""
    roles = {
        f"{{{role}}}": f"messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first"
        for role in ("query", "document")
    }
    parts = re.split(r"(\{query\}|\{document\})", text)
    return "".join(f"{{{{ {roles.get(part) or json.dumps(part)} }}}}" for part in parts)


def hf_config(file: GgufFile) -> dict:
    """Return the content of the model's config.json."""
    row, metadata = architecture_of(file), Metadata(file)
    config: dict = {"model_type": row.model_type, **row.constants}
    for names, read in ((row.ints, metadata.integer), (row.floats, metadata.real)):
        stated = {name: read(key) for key, name in names.items() if key not in row.by_layer}
        config |= {name: value for name, value in stated.items() if value is not None}
    _check_sizes(config, metadata, row)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    reject_impossible_sizes(file.path, config, shapes)
    if head_dim(config) == 0:
        raise metadata.invalid("embedding_length", f"at least {config['num_attention_heads']}, the number of heads")
    config.setdefault("rope_theta", _ROPE_BASE)
    for name, leaf in row.flags.items():
        config[name] = metadata.has(0, leaf)
    for key, value in row.fixed.items():
        stated = metadata.get(key, value)
        if type(stated) is not type(value) or stated != value:
            raise metadata.invalid(key, f"{value}, the only value supported")
    for rule in row.rules:
        getattr(config_rules, rule)(config, metadata)
    # Check again, because rules set sizes too.
    reject_impossible_sizes(file.path, config, shapes)
    roles = Vocabulary(file).role_ids()
    config |= {name: roles.get(role) for role, name in _TOKEN_IDS.items()}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing; download the complete model")
    if len(embedding.shape) != 2:
        raise metadata.inconsistent(f"token_embd.weight has {len(embedding.shape)} dimensions, not 2")
    config["vocab_size"] = embedding.shape[0]
    if unread := metadata.unread():
        raise metadata.error(f"unknown metadata may change the result: {shorten_list(unread)}; ignore a key with --ignore-key")
    return config


def sampling_config(file: GgufFile) -> dict[str, float]:
    """Return a file's default sampling options, with the keys of generation_config.json."""
    metadata = Metadata(file, _SAMPLING)
    sampling = {hf_key: value for key, hf_key in _SAMPLING_KEYS.items() if (value := metadata.real(key)) is not None}
    if "repetition_penalty" in sampling:
        sampling.setdefault("repeat_last_n", _LAST_N)
    # Return the shortest decimal, 0.7, and not the f32's 0.699999988.
    return {hf_key: float(f"{value:.7g}") for hf_key, value in sampling.items()}


def sampling_metadata(generation: Mapping) -> dict[str, int | float]:
    """Return GGUF metadata for the sampling options of a generation_config.json."""
    greedy = generation.get("do_sample") is False
    keys = [_PENALTY, _PENALISED] if greedy else _SAMPLING_KEYS
    stated = {key: generation.get(_SAMPLING_KEYS[key]) for key in keys}
    sampling = {key: value for key, value in stated.items() if isinstance(value, int | float) and abs(value) < _MAX_OPTION}
    if generation.get("do_sample"):
        sampling.setdefault("temp", 1.0)
    if "top_k" in sampling:
        sampling["top_k"] = max(0, sampling["top_k"])
    if _PENALTY in sampling:
        sampling.setdefault(_PENALISED, _ALL)
    return {_SAMPLING + key: int(value) if key in _INTEGERS else float(value) for key, value in sampling.items()}


def _check_sizes(config: dict, metadata: Metadata, row: Architecture) -> None:
    sizes = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")
    for key in (*sizes, *(key for key in row.ints if key.startswith(("ssm.", "shortconv.")))):
        if key not in row.by_layer:
            metadata.required(key)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if metadata.integer("expert_count") == 0:  # a dense model
        metadata.get("expert_used_count")
        for name in _EXPERTS_USED:
            config.pop(name, None)
    elif metadata.integer("expert_count") and not config.keys() & _EXPERTS_USED:
        raise metadata.error(f"{config['model_type']} models with experts ({metadata.prefix}expert_count) are not supported")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads == 0 or heads % kv_heads:
        raise metadata.inconsistent(f"{heads} attention heads are not a multiple of {kv_heads} key-value heads")
    for key in {"attention.key_length", "attention.value_length"}.difference(row.by_layer):
        if metadata.integer(key) not in (None, head_dim(config)):
            raise metadata.invalid(key, f"{head_dim(config)}, the size of a head")
