"""Checkpoint and Tensor, which represent checkpoints of every format, and checks of their content:
sizes, tensor names, finite weights, token ids and the tokenizer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.codecs import are_finite, dequantise
from castiron.emitter.pooling import Pooling
from castiron.emitter.shorten import shorten, shorten_text
from castiron.pipelines.child_process import ChildProcess, LimitExceeded
from castiron.pipelines.errors import CheckpointError as CheckpointError
from castiron.pipelines.errors import PipelineError

# Buffers in some checkpoints, which are computed from the config.
_IGNORABLE = (
    re.compile(r".*\.rotary_emb\.inv_freq"),
    re.compile(r"(.*\.)?embeddings\.position_ids"),
    re.compile(r".*\.rotary_emb\.(cos|sin)_cached"),
    re.compile(r".*\.(attn|self_attn|attention)\.(masked_bias|causal_mask)"),
)

# Config keys bounded by the tensors: by the number of layers, of experts, and by the longest
# dimension of any tensor.
_LAYERS = ("num_hidden_layers", "n_layer")
_EXPERTS = ("num_local_experts", "num_experts", "num_experts_per_tok", "n_routed_experts")
_EXTENTS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_size_per_layer_input", "n_embd", "n_head", "n_inner", "n_positions",
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "n_groups", "ssm_state_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip

_KEY_OR_VALUE = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.(?:k_proj|v_proj|k_norm)\.(?:weight|bias)")
_EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Text that a tokenizer encodes and decodes when it is checked.
SAMPLE = "Hello, it's 12:30 on the 7th.\n\n\tdef f(x):\r\n    return x ** 2  # ünïcödé 日本語 \U0001f600\n" + "a b " * 50
# Limits of the child process that loads a tokenizer.
_SECONDS, _MAX_BYTES = 10, 2 << 30
# The tokenizers library aborts on some damaged files, so a child process loads each tokenizer first.
# One process serves all tokenizers, because starting it takes longer than most checks.
_child = ChildProcess(_SECONDS, _MAX_BYTES)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor under its HF name, in the number format of the file.

    shape: logical, (out, in) for a linear layer. codec: a key of `castiron.emitter.codecs.CODECS`.
    source: the tensor's name in the file. read: function that returns `data`.
    """

    name: str
    shape: tuple[int, ...]
    codec: str
    source: str
    read: Callable[[], np.ndarray]

    @property
    def data(self) -> np.ndarray:
        """Return the stored bytes, u8 [*shape[:-1], row_bytes].

        A view of the mapped file, except for tensors that GGUF stores in another order or form:
        those are computed at each access and not cached.
        """
        return self.read()

    def dequantise(self) -> np.ndarray:
        """Return the values, f32 [*shape]."""
        return dequantise(self.codec, self.data)


@dataclass(frozen=True)
class Encoding:
    """How an embedding model turns texts into vectors.

    pooling: how the hidden states of a text become one vector.
    prompts: text to put before an input, by name. default_prompt: name of the prompt used by
    default.
    max_tokens: maximum number of tokens of a text; None for the length of the context.
    lower_case: whether texts are lower-cased.
    tensors: weights of the layers after pooling, by name.
    relevance, types: fields of `castiron.vmfb.manifest.Encoder` for a reranker.
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
    """A model's config, tensors and tokenizer, in HF's names.

    format: "gguf" or "hf".
    config: in config.json's form, with `model_type`.
    tokenizer: the content of tokenizer.json, or None. Its post-processor adds the BOS token where
    the model wants one.
    left_out: how many tensors of vision and other parts were dropped, by prefix of their names.
    encoding: for an embedding model or a reranker.
    """

    path: Path
    format: str
    config: dict
    tensors: Mapping[str, Tensor]
    tokenizer: dict | None = None
    chat_template: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_config: dict = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    encoding: Encoding | None = None


def without(keys: Mapping, ignored: Sequence[str], where: Path) -> dict:
    """Return `keys` without the ignored ones; CheckpointError if an ignored key does not exist.

    where: path of the file, for the error.
    """
    if absent := [key for key in ignored if key not in keys]:
        raise CheckpointError(f"{where} has no key {shorten(absent[0])}; remove it from --ignore-key")
    return {key: value for key, value in keys.items() if key not in ignored}


def is_ignorable(name: str) -> bool:
    """Return whether a tensor is a buffer that is computed from the config, and so is not read."""
    return any(pattern.fullmatch(name) for pattern in _IGNORABLE)


def reject_impossible_sizes(path: Path, config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for a config with more layers, experts or elements than the tensors
    have.

    This check bounds the memory of everything that is built from the config.
    shapes: shape of each tensor by HF's or GGUF's name.
    """
    numbers = [[part for part in name.split(".") if part.isdecimal()] for name in shapes]
    # model.layers.3.mlp.experts.7.up_proj.weight, or one tensor [experts, out, in] for all.
    layers = len({found[0] for found in numbers if found})
    stacked = max((shape[0] for shape in shapes.values() if len(shape) == 3), default=0)
    experts = max(stacked, len({found[1] for found in numbers if len(found) > 1}))
    extent = max((size for shape in shapes.values() for size in shape), default=0)
    for keys, max_value, found in (
        (_LAYERS, layers, f"the tensors have {layers} layers"),
        (_EXPERTS, experts, f"the tensors have {experts} experts"),
        (_EXTENTS, extent, f"no tensor is longer than {extent}"),
    ):
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and value > max_value:
                raise CheckpointError(f"{path}: {key} is {shorten(value, 30)}, but {found}; fetch the checkpoint again")


def without_shared(tensors: dict[str, Tensor], config: Mapping) -> dict[str, Tensor]:
    """Drop the key and value weights of Gemma 4's layers that reuse keys and values of earlier
    layers."""
    layers, shared = config.get("num_hidden_layers"), config.get("num_kv_shared_layers")
    if config.get("model_type") != "gemma4_text" or not isinstance(layers, int) or not isinstance(shared, int):
        return tensors
    others = range(layers - shared, layers)
    unused = {name for name in tensors if (match := _KEY_OR_VALUE.fullmatch(name)) and int(match[1]) in others}
    return {name: tensor for name, tensor in tensors.items() if name not in unused}


def missing_and_left_over(required: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> list[str]:
    """Return one message for each tensor that is missing, has another shape, or is not required.

    required: shape of each tensor that the model reads, by HF name. A stored output head of a tied
    model is accepted if it equals the embedding.
    """
    tensors, problems = checkpoint.tensors, []
    for name, shape in required.items():
        if name not in tensors:
            problems.append(f"{name} {list(shape)} is missing")
        elif tuple(tensors[name].shape) != tuple(shape):
            problems.append(f"{name} is {list(tensors[name].shape)}, the config requires {list(shape)}")
    for name, tensor in tensors.items():
        if name in required or is_ignorable(name):
            continue
        if name == HEAD and _EMBEDDING in required and (tied := tensors.get(_EMBEDDING)) is not None:
            if tensor.shape != tied.shape or tensor.codec != tied.codec or not np.array_equal(tensor.data, tied.data):
                problems.append(f"{HEAD} differs from {_EMBEDDING}, to which the config ties it")
            continue
        problems.append(f"{shorten_text(name, 60)} {list(tensor.shape)} is left over")
    return problems


def validate(checkpoint: Checkpoint, vocab: int) -> None:
    """Raise CheckpointError for invalid token ids, weights that are not finite, or an invalid
    tokenizer."""
    tokens = [("bos_token_id", checkpoint.bos_token_id), *(("eos_token_id", eos) for eos in checkpoint.eos_token_ids)]
    for key, token in tokens:
        if token is not None and not 0 <= token < vocab:
            raise CheckpointError(f"{checkpoint.path}: {key} is {shorten_text(str(token))}, outside the vocabulary of {vocab}")
    check_finite(checkpoint)
    if checkpoint.tokenizer is not None:
        _check_tokenizer(checkpoint.tokenizer, checkpoint.path, vocab)


def check_finite(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a tensor has infinities or NaNs."""
    for tensor in checkpoint.tensors.values():
        if not are_finite(tensor.codec, tensor.data):
            raise CheckpointError(f"{checkpoint.path}: {shorten_text(tensor.name)} has infinities or NaNs; fetch it again")


def tokenizer_of(content: Mapping[str, Any], path: object) -> Any:
    """Return the tokenizer of a tokenizer.json, without truncation or padding; CheckpointError if
    it is invalid.

    content: the parsed tokenizer.json. path: path of the checkpoint, for errors.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(_check_tokenizer(content, path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_tokenizer(content: Mapping[str, Any], path: object, vocab: int | None = None) -> bytes:
    """Return the bytes of a tokenizer.json; CheckpointError if it can't be loaded or yields ids >=
    `vocab`."""
    try:
        text = json.dumps(content, ensure_ascii=False)
        data = text.encode()
        largest = _child.call(largest_id, text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: its tokenizer nests too deep or is not UTF-8; download it again") from None
    except LimitExceeded as error:
        raise CheckpointError(f"{path}: the tokenizers library fails on its tokenizer: {error}; download it again") from None
    except PipelineError as error:
        raise CheckpointError(f"{path}: its tokenizer cannot be read ({error}); download it again") from None
    if vocab is not None and largest >= vocab:
        raise CheckpointError(
            f"{path}: its tokenizer has id {largest}, but the vocabulary has {vocab} tokens; use the tokenizer of this model"
        )
    return data


def largest_id(content: str) -> int:
    """Return the largest token id in the encoding of a sample text; -1 if it can't be encoded.

    content: tokenizer.json's text. It runs in the child process. PipelineError if it can't be loaded.
    """
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
