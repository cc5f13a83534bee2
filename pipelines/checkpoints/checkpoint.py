"""The class `Checkpoint`, a model in a GGUF file or an HF directory, and checks of it."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.codecs import dequantise, row_bytes
from castiron.emitter.codecs.finite import are_finite
from castiron.emitter.layers.pooling import Pooling
from castiron.emitter.shorten import shorten, shorten_text
from castiron.pipelines.child_process import ChildProcess, LimitExceeded
from castiron.pipelines.errors import CheckpointError as CheckpointError
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.archive import Part

# Buffers in some checkpoints that castiron computes from the config instead.
_IGNORABLE = re.compile(
    r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)|(.*\.)?embeddings\.position_ids"
    r"|.*\.(attn|self_attn|attention)\.(masked_bias|causal_mask)"
)

# Config keys whose values cannot exceed the tensors' numbers of layers and experts, and their largest dimension.
_LAYERS = ("num_hidden_layers", "n_layer")
_EXPERTS = ("num_local_experts", "num_experts", "num_experts_per_tok", "n_routed_experts")
_EXTENTS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_size_per_layer_input", "n_embd", "n_head", "n_inner", "n_positions",
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "n_groups", "ssm_state_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip

_KEY_OR_VALUE = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.(?:k_proj|v_proj|k_norm)\.(?:weight|bias)")
# The embedding's name, of which GPT-2 has another, and that of the output head, to which it may be tied.
EMBEDDINGS, HEAD = ("model.embed_tokens.weight", "transformer.wte.weight"), "lm_head.weight"

# Text with which tokenizers are checked. Scripts, numbers, code and white space show how pre-tokenizers differ.
SAMPLE = (
    "Hello, world! I'm sure they'll say it's 12345.678 ÷ 9, WE'RE told.\n\n\tdef f(x):\n        return x ** 2  # ok\r\n"
    "naïve Ångström e\u0301 Привет мир 你好,世界 こんにちは 안녕 مرحبا नमस्ते 🚀   trailing   \u00a0 ___ {}[]<|>\n \n  end "
) + "a b " * 50
# The tokenizers library aborts on some damaged files, so a child process loads each tokenizer first.
# One process serves all tokenizers, because starting it takes longer than most checks.
_child = ChildProcess(seconds=10, max_bytes=2 << 30)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor in a file, whose data is read when it is needed.

    name: HF's name, also for a tensor of a GGUF checkpoint. source: its name in the file.
    shape: (out, in) for a linear layer.
    """

    name: str
    shape: tuple[int, ...]
    codec: str
    source: str
    read: Callable[[], np.ndarray]

    @property
    def data(self) -> np.ndarray:
        """Return the stored bytes, u8 [*shape[:-1], bytes of a row]; they may be memory-mapped."""
        return self.read()

    @property
    def nbytes(self) -> int:
        """Return the size of the stored data; ValueError if blocks do not divide a row."""
        return math.prod(self.shape[:-1]) * row_bytes(self.codec, self.shape[-1])

    def dequantise(self) -> np.ndarray:
        """Return the values, f32 [*shape]."""
        return dequantise(self.codec, self.data)


@dataclass(frozen=True)
class Encoding:
    """What an embedding model or reranker has besides the transformer.

    prompts: texts to put before an input, by name; default_prompt: name of one of them.
    max_tokens: None if only the context limits a text.
    relevance: for a reranker, what converts a logit to a score: "sigmoid" or "identity".
    types: whether the second text of a pair has token type id 1, as in BERT.
    """

    pooling: Pooling
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    relevance: str | None = None
    types: bool = False


@dataclass
class Checkpoint:
    """A model's config, tensors and tokenizer, with HF's names.

    format: "gguf" or "hf".
    config, tokenizer, generation_config: the contents of HF's JSON files.
    special_tokens: texts for a chat template, by name ("bos_token"); None if only ids are known.
    fim_token_ids: of a GGUF file, by role, such as "suf".
    left_out: numbers of tensors that castiron does not use, by prefix.
    column_orders: names of weights to names of their orders (`column_order`).
    """

    path: Path
    format: str
    config: dict
    tensors: Mapping[str, Tensor]
    tokenizer: dict | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    fim_token_ids: Mapping[str, int] = field(default_factory=dict)
    generation_config: dict = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    encoding: Encoding | None = None
    quantization_config: dict | None = None
    column_orders: Mapping[str, str] = field(default_factory=dict)


def inconsistent(path: object, problem: str) -> CheckpointError:
    """Return the error for a checkpoint whose parts contradict each other."""
    return CheckpointError(f"{path} is inconsistent: {problem}")


def map_file(path: Path) -> memoryview:
    """Map a regular file into memory, read-only; CheckpointError if it is empty or unreadable."""
    try:
        return Part.of(path).map()
    except ValueError:
        raise CheckpointError(f"{path} is empty; download the file again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the file and its permissions") from None


def without(keys: Mapping, ignored: Sequence[str], where: Path) -> dict:
    """Return a config or metadata without the keys of --ignore-key; each must be in it."""
    if absent := [key for key in ignored if key not in keys]:
        raise CheckpointError(f"{where} has no key {shorten(absent[0])}; remove --ignore-key for this key")
    return {key: value for key, value in keys.items() if key not in ignored}


def is_ignorable(name: str) -> bool:
    """Return whether a tensor is a buffer that castiron computes from the config."""
    return _IGNORABLE.fullmatch(name) is not None


def reject_impossible_sizes(path: Path, config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if a size in the config exceeds what the tensors' `shapes` allow."""
    numbers = [[part for part in name.split(".") if part.isdecimal()] for name in shapes]
    # Experts are tensors such as model.layers.3.mlp.experts.7.up_proj.weight, or one tensor [experts, out, in].
    layers = len({indices[0] for indices in numbers if indices})
    stacked = max((shape[0] for shape in shapes.values() if len(shape) == 3), default=0)
    experts = max(stacked, len({indices[1] for indices in numbers if len(indices) > 1}))
    extent = max((size for shape in shapes.values() for size in shape), default=0)
    for keys, max_value, tensor_sizes in (
        (_LAYERS, layers, f"the tensors have {layers} layers"),
        (_EXPERTS, experts, f"the tensors have {experts} experts"),
        (_EXTENTS, extent, f"no tensor is longer than {extent}"),
    ):
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and value > max_value:
                raise inconsistent(path, f"{key} is {shorten(value, 30)}, but {tensor_sizes}")


def without_shared(tensors: dict[str, Tensor], config: Mapping) -> dict[str, Tensor]:
    """Return the tensors without the K and V that Gemma 4's last layers share with earlier ones."""
    layers, shared = config.get("num_hidden_layers"), config.get("num_kv_shared_layers")
    if config.get("model_type") != "gemma4_text" or not isinstance(layers, int) or not isinstance(shared, int):
        return tensors
    others = range(layers - shared, layers)
    unused = {name for name in tensors if (match := _KEY_OR_VALUE.fullmatch(name)) and int(match[1]) in others}
    return {name: tensor for name, tensor in tensors.items() if name not in unused}


def missing_and_left_over(required: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> list[str]:
    """Return an error for each tensor that is missing, not needed, or of another shape."""
    tensors, problems = checkpoint.tensors, []
    for name, shape in required.items():
        if name not in tensors:
            problems.append(f"{name} {list(shape)} is missing")
        elif tuple(tensors[name].shape) != tuple(shape):
            problems.append(f"{name} is {list(tensors[name].shape)}, the config requires {list(shape)}")
    for name, tensor in tensors.items():
        if name in required or is_ignorable(name):
            continue
        # Some writers of GPTQ store a bias of zeros for every layer.
        if checkpoint.quantization_config and name.endswith(".bias") and not tensor.dequantise().any():
            continue
        # A model with a tied output head may store the head too, if it equals the embedding.
        embedding = next((each for each in EMBEDDINGS if each in required), None)
        if name == HEAD and embedding and (tied := tensors.get(embedding)) is not None:
            if tensor.shape != tied.shape or tensor.codec != tied.codec or not np.array_equal(tensor.data, tied.data):
                problems.append(f"{HEAD} differs from {embedding}, to which the config ties it")
            continue
        problems.append(f"{shorten_text(name, 60)} {list(tensor.shape)} is left over")
    return problems


def validate(checkpoint: Checkpoint, vocab: int) -> None:
    """Raise CheckpointError for a special token outside the vocabulary, or a non-finite weight."""
    tokens = [("bos_token_id", checkpoint.bos_token_id), *(("eos_token_id", eos) for eos in checkpoint.eos_token_ids)]
    tokens += [(f"fim_{role}_token_id", token) for role, token in checkpoint.fim_token_ids.items()]
    for key, token in tokens:
        if token is not None and not 0 <= token < vocab:
            raise inconsistent(checkpoint.path, f"{key} is {shorten_text(str(token))}, outside the vocabulary of {vocab}")
    check_finite(checkpoint)


def check_tokenizer(checkpoint: Checkpoint, vocab: int) -> bytes | None:
    """Return tokenizer.json as bytes, or None; CheckpointError for one with ids from `vocab` on."""
    return None if checkpoint.tokenizer is None else _check_tokenizer(checkpoint.tokenizer, checkpoint.path, vocab)


def check_finite(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a tensor has infinities or NaNs."""
    for tensor in checkpoint.tensors.values():
        if not are_finite(tensor.codec, tensor.data):
            raise CheckpointError(f"{checkpoint.path}: {shorten_text(tensor.name)} has infinities or NaNs")


def tokenizer_of(content: Mapping[str, Any], path: object) -> Any:
    """Return a tokenizer without truncation and padding; `path` is for errors."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(_check_tokenizer(content, path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_tokenizer(content: Mapping[str, Any], path: object, vocab: int | None = None) -> bytes:
    try:
        text = json.dumps(content, ensure_ascii=False)
        data = text.encode()
        largest = _child.call(largest_id, text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else "not UTF-8"
        raise CheckpointError(f"{path}: its tokenizer is {problem}; download the model again") from None
    except LimitExceeded as error:
        raise CheckpointError(f"{path}: the tokenizers library fails on its tokenizer: {error}; download again") from None
    except PipelineError as error:
        raise CheckpointError(f"{path}: its tokenizer cannot be read ({error}); download the model again") from None
    if vocab is not None and largest >= vocab:
        raise inconsistent(path, f"its tokenizer has id {largest}, but the vocabulary has {vocab} tokens")
    return data


def largest_id(content: str) -> int:
    """Return the largest id of `SAMPLE`, encoded by a tokenizer.json; -1 if it cannot encode it."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises Exception itself
        raise PipelineError("".join(c for c in str(error)[:100] if c.isprintable())) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A tokenizer may fail on this text and not on others.
    with contextlib.suppress(Exception):
        ids = tokenizer.encode(SAMPLE).ids
        tokenizer.decode(ids)
        return max(ids, default=-1)
    return -1
