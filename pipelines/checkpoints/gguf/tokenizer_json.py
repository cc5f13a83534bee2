"""Convert the tokenizer of a GGUF file to a tokenizer.json like the one of the HF model.

Supported are BPE ("gpt2") and SentencePiece BPE, with scores ("llama") or merges ("gemma4"). The
conversion in transformers is not used, because it ignores digit splitting (smollm, starcoder,
refact), NFC (qwen2) and ignore_merges (llama-bpe).
"""

from collections.abc import Iterable, Iterator
from typing import Any

from castiron.emitter.shorten import shorten, shorten_list
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf.vocabulary import Vocabulary, added_tokens
from castiron.pipelines.checkpoints.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer

SPACE = "\u2581"
# Max sum of the tokens' squared lengths, which bounds the memory for all splits of tokens (Gemma: 2e7).
_MAX_SQUARES = 500_000_000

# Architectures whose merges are in the order of token ids, not of scores.
_RANKED_BY_ID = {"gemma", "gemma2", "gemma3", "gemma-embedding"}


def tokenizer_json(file: GgufFile) -> dict | None:
    """Return the content of a tokenizer.json; None if the file has no tokenizer."""
    vocabulary = Vocabulary(file)
    if vocabulary.model is None:
        return None
    if vocabulary.model == "gpt2":
        return _bpe(vocabulary, _pre_tokenizer(vocabulary))
    if vocabulary.model in ("llama", "gemma4"):
        return _sentencepiece(vocabulary, gemma4=vocabulary.model == "gemma4")
    supported = "supported are gpt2, llama and gemma4"
    raise CheckpointError(f"{file.path}: tokenizer.ggml.model is {shorten(vocabulary.model)}; {supported}")


def lacks_pre_tokenizer(file: GgufFile) -> bool:
    """Return whether a BPE file names no pre-tokenizer, so that llama.cpp's default is used."""
    vocabulary = Vocabulary(file)
    return vocabulary.model == "gpt2" and not vocabulary.string("pre")


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    name = vocabulary.string("pre") or DEFAULT
    row = PRE_TOKENIZERS.get(name)
    if row is None:
        known = shorten_list(PRE_TOKENIZERS, max_length=150)
        raise vocabulary.error(f"unknown pre-tokenizer {shorten(name, 60)}; known are {known}")
    return row


def _bpe(vocabulary: Vocabulary, row: PreTokenizer) -> dict:
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = list(_merges_of_file(vocabulary, ids))
    bpe = {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": row.ignore_merges, "byte_fallback": row.is_raw}
    raw = _raw_steps(adds_prefix=False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _tokenizer(
        vocabulary,
        model=bpe,
        normalizer={"type": "NFC"} if row.nfc else raw["normalizer"] if row.is_raw else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(row.steps)} if row.steps else None,
        decoder=raw["decoder"] if row.is_raw else byte_level,
        added_tokens=list(added_tokens(vocabulary, merges)),
        adds_bos=row.adds_bos,
    )


def _merges_of_file(vocabulary: Vocabulary, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    for merge in vocabulary.strings("merges"):
        at = merge.find(" ", 1)  # the left token may be a space
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.inconsistent(f"the merge {shorten(merge)} uses or makes an unknown token")
        yield left, right


def _sentencepiece(vocabulary: Vocabulary, gemma4: bool) -> dict:
    # Except for Gemma 4, GGUF stores tokens of only spaces as plain spaces.
    spelled = lambda token: SPACE * len(token) if token.strip(" ") == "" and not gemma4 else token
    ids = {spelled(token): number for number, token in enumerate(vocabulary.tokens)}
    if vocabulary.get("merges") is not None:
        merges = list(_merges_of_file(vocabulary, ids))
    else:
        merges = _merges_of_vocabulary(vocabulary, [spelled(token) for token in vocabulary.tokens], ids)
    bpe = {"type": "BPE", "vocab": ids, "merges": merges, "fuse_unk": True, "byte_fallback": True}
    bpe["unk_token"] = vocabulary.token("unknown")
    return _tokenizer(
        vocabulary,
        model=bpe,
        pre_tokenizer=None,
        **_raw_steps(adds_prefix=vocabulary.flag("add_space_prefix", not gemma4)),
        # All of Gemma 4's added tokens are special, though files list some as user-defined.
        added_tokens=[
            token | {"special": gemma4 or token["special"]}
            for token in added_tokens(vocabulary, merges)
            if token["content"].strip(" ")
        ],
        # Gemma 4's chat template writes BOS, but its files wrongly state that the tokenizer adds it.
        adds_bos=None if gemma4 else True,
    )


def _raw_steps(adds_prefix: bool) -> dict[str, dict]:
    normalize = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decode = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if adds_prefix:
        normalize.insert(0, {"type": "Prepend", "prepend": SPACE})
        decode.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"normalizer": {"type": "Sequence", "normalizers": normalize}, "decoder": {"type": "Sequence", "decoders": decode}}


def _merges_of_vocabulary(vocabulary: Vocabulary, tokens: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Compute merges from tokens: by score or, for Gemma, by id of the token that a merge makes."""
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        raise vocabulary.error(f"the texts of the {len(tokens):,} tokens are too long for a SentencePiece vocabulary")
    ranks: Iterable[float] = range(len(tokens))
    if vocabulary.file.metadata.get("general.architecture") not in _RANKED_BY_ID:
        scores = vocabulary.numbers("scores")
        if scores is None:
            raise vocabulary.error("tokenizer.ggml.scores and tokenizer.ggml.merges are both missing")
        ranks = [-score for score in scores.tolist()]
    ranked = sorted(
        (rank, -len(left), -len(right), left, right)
        for rank, token in zip(ranks, tokens)
        for left, right in ((token[:at], token[at:]) for at in range(len(token) - 1, 0, -1))
        if left in ids and right in ids
    )
    return [(left, right) for *_, left, right in ranked]


def _tokenizer(vocabulary: Vocabulary, *, adds_bos: bool | None, **parts: Any) -> dict:
    post_processor = _post_processor(vocabulary, adds_bos)
    return {"version": "1.0", "truncation": None, "padding": None, "post_processor": post_processor, **parts}


def _post_processor(vocabulary: Vocabulary, adds_bos: bool | None) -> dict | None:
    """Return the step that adds BOS and EOS, or None. With adds_bos None, BOS is not added."""
    adds_bos = adds_bos is not None and vocabulary.flag("add_bos_token", adds_bos)
    sides = (adds_bos, "bos"), (vocabulary.flag("add_eos_token", False), "eos")
    before, after = ([token] if adds and (token := vocabulary.token(role)) is not None else [] for adds, role in sides)
    if not before and not after:
        return None

    def around(sequence: str, type_id: int) -> list[dict]:
        special = lambda tokens: [{"SpecialToken": {"id": token, "type_id": type_id}} for token in tokens]
        return [*special(before), {"Sequence": {"id": sequence, "type_id": type_id}}, *special(after)]

    numbers = {token: vocabulary.tokens.index(token) for token in before + after}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in numbers.items()},
    }
