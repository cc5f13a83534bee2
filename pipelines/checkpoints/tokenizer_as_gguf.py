"""A byte-level tokenizer.json as the metadata of a GGUF file: what `gguf_tokenizer` reads, from right to left.

What is written is read back, and refused unless it cuts a text of many kinds into the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError
from castiron.pipelines.checkpoints.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf_tokenizer import tokenizer_json
from castiron.pipelines.checkpoints.gguf_writer import Value, as_read
from castiron.pipelines.checkpoints.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's llama_token_type
_CONVERT = "convert the model with llama.cpp's convert_hf_to_gguf.py, and quantise the file that this writes"
# Scripts, numbers, contractions, code and runs of white space, on which pre-tokenizers differ.
SAMPLE = (
    "Hello, world! I'm sure they'll say it's 12345.678 ÷ 9, WE'RE told.\n\n\tdef f(x):\n        return x ** 2  # ok\r\n"
    "naïve Ångström e\u0301 Привет мир 你好,世界 こんにちは 안녕 مرحبا नमस्ते 🚀   trailing   \u00a0 ___ {}[]<|>\n \n  end "
)


def tokenizer_metadata(checkpoint: Checkpoint, vocab: int) -> dict[str, Value]:
    """The tokenizer's keys for a model with `vocab` rows of embeddings; without a tokenizer its absence.

    CheckpointError for one that is not byte-level BPE, or is cut by rules that no `tokenizer.ggml.pre` names.
    """
    found = checkpoint.tokenizer
    if found is None:
        return {_PREFIX + "model": "no_vocab"}
    model = found.get("model") or {}
    steps = list(_steps(found.get("pre_tokenizer")))
    if model.get("type") != "BPE" or model.get("byte_fallback") or "ByteLevel" not in {step.get("type") for step in steps}:
        raise CheckpointError(
            f"{checkpoint.path} has a tokenizer that is not byte-level BPE, which castiron does not write: {_CONVERT}"
        )
    row = _row(found, model, steps)
    name = next((name for name, known in PRE_TOKENIZERS.items() if _cuts(known) == _cuts(row)), None)
    if name is None:
        raise CheckpointError(f"{checkpoint.path} has a tokenizer that cuts text by rules without a name in GGUF: {_CONVERT}")
    tokens, kinds = _tokens(found, model, vocab)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    before, after = _around(found.get("post_processor"))
    ids = {"bos": checkpoint.bos_token_id, "eos": next(iter(checkpoint.eos_token_ids), None)}
    ids["padding"] = checkpoint.config.get("pad_token_id")
    if len(checkpoint.eos_token_ids) > 1:
        ids["eot"] = checkpoint.eos_token_ids[-1]
    keys: dict[str, Value] = {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": kinds, "merges": merges}
    keys |= {f"{role}_token_id": number for role, number in ids.items() if isinstance(number, int) and 0 <= number < vocab}
    keys |= {"add_bos_token": before, "add_eos_token": after}
    told = {_PREFIX + key: value for key, value in keys.items()}
    _check(checkpoint, told)
    return told | ({"tokenizer.chat_template": checkpoint.chat_template} if checkpoint.chat_template else {})


def _steps(pre_tokenizer: dict | None) -> Iterator[dict]:
    if pre_tokenizer and pre_tokenizer.get("type") == "Sequence":
        for step in pre_tokenizer["pretokenizers"]:
            yield from _steps(step)
    elif pre_tokenizer:
        yield pre_tokenizer


def _row(found: dict, model: dict, steps: list[dict]) -> PreTokenizer:
    splits = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    return PreTokenizer(
        split=splits[0] if splits else None,
        digits=any(step["type"] == "Digits" for step in steps),
        ignore_merges=bool(model.get("ignore_merges")),
        nfc=(found.get("normalizer") or {}).get("type") == "NFC",
    )


def _cuts(row: PreTokenizer) -> tuple:
    """Everything but whether BOS is added, which is written by itself."""
    return row.split, row.digits, row.ignore_merges, row.nfc


def _tokens(found: dict, model: dict, vocab: int) -> tuple[list[str], list[int]]:
    """The text and the kind of each id up to `vocab`; ids without a token are filled up as the converter does."""
    by_id = {number: (token, _NORMAL) for token, number in model["vocab"].items()}
    for token in found.get("added_tokens") or ():
        by_id[token["id"]] = token["content"], _CONTROL if token.get("special") else _USER_DEFINED
    rows = [by_id.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(max(vocab, max(by_id, default=-1) + 1))]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _around(post_processor: dict | None) -> tuple[bool, bool]:
    """Whether a special token is put before a text, and after it."""
    if not post_processor:
        return False, False
    if post_processor.get("type") == "Sequence":
        sides = [_around(step) for step in post_processor["processors"]]
        return any(before for before, _ in sides), any(after for _, after in sides)
    single = post_processor.get("single") or []
    at = next((place for place, piece in enumerate(single) if "Sequence" in piece), None)
    return (False, False) if at is None else (at > 0, at < len(single) - 1)


def _check(checkpoint: Checkpoint, metadata: dict[str, Value]) -> None:
    told = as_read({"general.architecture": "llama", **metadata})
    back = tokenizer_json(GgufFile(Path(checkpoint.path), 3, told, {}, np.empty(0, np.uint8)))
    ours, theirs = (Tokenizer.from_str(json.dumps(content)).encode(SAMPLE).ids for content in (checkpoint.tokenizer, back))
    if ours != theirs:
        raise CheckpointError(f"{checkpoint.path} has a tokenizer that a GGUF file would cut text otherwise with: {_CONVERT}")
