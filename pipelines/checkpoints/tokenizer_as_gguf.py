"""A tokenizer.json as the metadata of a GGUF file: what `gguf_tokenizer` reads, from right to left.

Byte-level BPE is llama.cpp's "gpt2", BPE that falls back to bytes, as SentencePiece trains it, its "llama". What is written is
read back, and refused unless it cuts a text of many kinds into the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError
from castiron.pipelines.checkpoints.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf_tokenizer import SPACE, tokenizer_json
from castiron.pipelines.checkpoints.gguf_writer import Value, as_read
from castiron.pipelines.checkpoints.hf_as_gguf import architecture_for
from castiron.pipelines.checkpoints.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from castiron.pipelines.generation.trial import tokenizer_of

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's llama_token_type
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_CONVERT = "convert the model with llama.cpp's convert_hf_to_gguf.py, and quantise the file that this writes"
# Scripts, numbers, contractions, code and runs of white space, on which pre-tokenizers differ.
SAMPLE = (
    "Hello, world! I'm sure they'll say it's 12345.678 ÷ 9, WE'RE told.\n\n\tdef f(x):\n        return x ** 2  # ok\r\n"
    "naïve Ångström e\u0301 Привет мир 你好,世界 こんにちは 안녕 مرحبا नमस्ते 🚀   trailing   \u00a0 ___ {}[]<|>\n \n  end "
)


def tokenizer_metadata(checkpoint: Checkpoint, vocab: int) -> dict[str, Value]:
    """The tokenizer's keys for a model with `vocab` rows of embeddings; without a tokenizer its absence.

    CheckpointError for one that is neither kind of BPE, or cuts text by rules that GGUF has no words for.
    """
    found = checkpoint.tokenizer
    if found is None:
        return {_PREFIX + "model": "no_vocab"}
    model = found.get("model") or {}
    steps = list(_steps(found.get("pre_tokenizer"), "pretokenizers"))
    if model.get("type") == "BPE" and model.get("byte_fallback"):
        keys = _sentencepiece(found, model, steps, vocab)
    elif model.get("type") == "BPE" and "ByteLevel" in {step.get("type") for step in steps}:
        keys = _byte_level(checkpoint, found, model, steps, vocab)
    else:
        raise CheckpointError(
            f"{checkpoint.path} has a tokenizer that is neither byte-level BPE nor BPE with bytes to fall back to, which "
            f"castiron does not write: {_CONVERT}"
        )
    before, after = _around(found.get("post_processor"))
    ids = {"bos": checkpoint.bos_token_id, "eos": next(iter(checkpoint.eos_token_ids), None)}
    ids |= {"padding": checkpoint.config.get("pad_token_id"), "unknown": model.get("vocab", {}).get(model.get("unk_token"))}
    if len(checkpoint.eos_token_ids) > 1:
        ids["eot"] = checkpoint.eos_token_ids[-1]
    keys |= {f"{role}_token_id": number for role, number in ids.items() if isinstance(number, int) and 0 <= number < vocab}
    keys |= {"add_bos_token": before, "add_eos_token": after}
    told = {_PREFIX + key: value for key, value in keys.items()}
    _check(checkpoint, told)
    return told | ({"tokenizer.chat_template": checkpoint.chat_template} if checkpoint.chat_template else {})


def _byte_level(checkpoint: Checkpoint, found: dict, model: dict, steps: list[dict], vocab: int) -> dict[str, Value]:
    row = _row(found, model, steps)
    name = next((name for name, known in PRE_TOKENIZERS.items() if _cuts(known) == _cuts(row)), None)
    if name is None:
        raise CheckpointError(f"{checkpoint.path} has a tokenizer that cuts text by rules without a name in GGUF: {_CONVERT}")
    tokens, kinds = _tokens(found, model, vocab)
    merges = [" ".join(pair) for pair in _merges(model)]
    return {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": kinds, "merges": merges}


def _sentencepiece(found: dict, model: dict, steps: list[dict], vocab: int) -> dict[str, Value]:
    """llama.cpp joins the two neighbours whose whole has the best score, so a token's score is minus the place of its first
    merge; what no merge makes comes after all of them."""
    tokens, kinds = _tokens(found, model, vocab)
    ranks: dict[str, int] = {}
    for left, right in _merges(model):
        ranks.setdefault(left + right, len(ranks))
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    for number, token in enumerate(tokens):
        if token == model.get("unk_token"):
            kinds[number] = _UNKNOWN
        elif _BYTE_TOKEN.fullmatch(token):
            kinds[number] = _BYTE
        elif kinds[number] == _USER_DEFINED:
            # These are found in a text before its spaces are written so.
            tokens[number] = token.replace(SPACE, " ")
    normalizers = _steps(found.get("normalizer"), "normalizers")
    prefix = any(step["type"] == "Prepend" for step in normalizers) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps
    )
    keys: dict[str, Value] = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores}
    return keys | {"add_space_prefix": prefix}


def _merges(model: dict) -> Iterator[tuple[str, str]]:
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _steps(step: dict | None, parts: str) -> Iterator[dict]:
    """The steps of a sequence, or the one there is."""
    if step and step.get("type") == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    elif step:
        yield step


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


def tokens_by_id(found: dict) -> dict[int, str]:
    """The text of each token of a tokenizer.json, whatever its kind."""
    vocabulary = (found.get("model") or {}).get("vocab") or {}
    return {number: token for token, number in vocabulary.items()} | {
        t["id"]: t["content"] for t in found.get("added_tokens", ())
    }


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
    told = as_read({"general.architecture": architecture_for(checkpoint)[0], **metadata})
    back = tokenizer_json(GgufFile(Path(checkpoint.path), 3, told, {}, np.empty(0, np.uint8)))
    ours, theirs = (tokenizer_of(content, checkpoint.path).encode(SAMPLE).ids for content in (checkpoint.tokenizer, back))
    if ours != theirs:
        raise CheckpointError(f"{checkpoint.path} has a tokenizer that a GGUF file would cut text otherwise with: {_CONVERT}")
