"""The tokenizer in a GGUF's metadata as the content of the tokenizer.json that its model has at HF.

Three kinds are read: byte-level BPE ("gpt2"), SentencePiece BPE ("llama") and Gemma 4's ("gemma4"), which is the latter with
its merges. Whether BOS or EOS is added stands in the post-processor and nowhere else.

Where this differs from transformers' own reading of a GGUF, it is on purpose: transformers knows no digit splitting
(smollm, starcoder, refact), no NFC (qwen2) and no ignore_merges (llama-bpe), all of which the models' own
tokenizer.json files have.
"""

from collections.abc import Iterator

import numpy as np

from castiron.emitter.shown import shown, shown_list
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf_config import Metadata
from castiron.pipelines.checkpoints.gguf_file import GgufFile
from castiron.pipelines.checkpoints.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's llama_token_type
SPACE = "\u2581"
# Characters of a token, of which real vocabularies have 256 at most; and of all parts of all tokens, of which Gemma's have 2e7.
_LONGEST, _MOST_PARTS = 4096, 500_000_000

# Gemma's scores do not follow the order of its merges, the ids do.
_RANKED_BY_ID = {"gemma", "gemma2", "gemma3", "gemma-embedding"}

# Gemma 4's generation_config.json ends an answer at each of these; a file has room for one.
_GEMMA4_ENDS = ("<eos>", "<|tool_response>", "<turn|>")


class _Metadata(Metadata):
    """The tokenizer's keys, with their types checked."""

    def __init__(self, file: GgufFile):
        super().__init__(file, _PREFIX)
        self.tokens: list[str] = self.strings("tokens")
        self.types = self.numbers("token_type")

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise self.fail(f"its tokenizer has no {_PREFIX}{key}, so text cannot be turned into tokens")
        if (longest := max(map(len, value))) > _LONGEST:
            raise self.fail(f"{_PREFIX}{key} has one of {longest:,} characters, and none may have more than {_LONGEST:,}")
        return value

    def numbers(self, key: str) -> np.ndarray | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.fail(f"{_PREFIX}{key} does not have one number for each of the {len(self.tokens)} tokens")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{_PREFIX}{key} is {shown(value)}, not true or false")
        return value

    def token(self, key: str) -> str | None:
        """The token that a metadata key names by its number."""
        number = self.get(key)
        if number is None:
            return None
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(self.tokens):
            raise self.fail(f"{_PREFIX}{key} is {shown(number)}, outside the vocabulary of {len(self.tokens)}")
        return self.tokens[number]


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The tokens that end an answer: end of sequence and, where the file names one, end of turn; Gemma 4's by their names."""
    found = [file.metadata.get(_PREFIX + key) for key in ("eos_token_id", "eot_token_id")]
    tokens, model = (file.metadata.get(_PREFIX + key) for key in ("tokens", "model"))
    if isinstance(tokens, list) and isinstance(model, str) and model == "gemma4":
        found += [tokens.index(end) for end in _GEMMA4_ENDS if end in tokens]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def tokenizer_json(file: GgufFile) -> dict | None:
    """tokenizer.json's content, or None if the file has no tokenizer; CheckpointError if it cannot be read."""
    model = Metadata(file, _PREFIX).word("model")
    if model in (None, "no_vocab"):
        return None
    if model == "gpt2":
        return _byte_level(_Metadata(file))
    if model in ("llama", "gemma4"):
        return _sentencepiece(_Metadata(file), gemma4=model == "gemma4")
    raise CheckpointError(f"{file.path} has a tokenizer of kind {shown(model)}; supported are gpt2, llama and gemma4")


def _byte_level(metadata: _Metadata) -> dict:
    name = metadata.word("pre")
    row = PRE_TOKENIZERS.get(name)
    if row is None:
        known = shown_list(PRE_TOKENIZERS, most=150)
        raise metadata.fail(f"unknown pre-tokenizer {shown(name, 60)}; known are {known}")
    vocabulary = {token: number for number, token in enumerate(metadata.tokens)}
    bpe = _bpe(vocabulary, list(_merges_of_file(metadata, vocabulary)))
    bpe |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": row.ignore_merges}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": row.split is None}
    return _tokenizer(
        metadata,
        model=bpe,
        normalizer={"type": "NFC"} if row.nfc else None,
        pre_tokenizer=_sequence("pretokenizers", [*_cuts(row), byte_level]),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        added=list(_added_tokens(metadata)),
        adds_bos=row.adds_bos,
    )


def _cuts(row: PreTokenizer) -> Iterator[dict]:
    if row.digits:
        yield {"type": "Digits", "individual_digits": True}
    if row.split is not None:
        yield {"type": "Split", "pattern": {"Regex": row.split}, "behavior": "Isolated", "invert": False}


def _sequence(key: str, steps: list[dict]) -> dict:
    return steps[0] if len(steps) == 1 else {"type": "Sequence", key: steps}


def _merges_of_file(metadata: _Metadata, vocabulary: dict[str, int]) -> Iterator[list[str]]:
    for merge in metadata.strings("merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise metadata.fail(f"its tokenizer merges {shown(merge)}, which are not tokens of its vocabulary")
        yield [left, right]


def _sentencepiece(metadata: _Metadata, gemma4: bool) -> dict:
    by_id = metadata.file.metadata.get("general.architecture") in _RANKED_BY_ID
    # GGUF writes runs of spaces as they look in text, but for Gemma 4; the model joins them from single ones
    spelled = lambda token: SPACE * len(token) if token.strip(" ") == "" and not gemma4 else token
    tokens = [spelled(token) for token in metadata.tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if metadata.get("merges") is not None:
        merges = list(_merges_of_file(metadata, vocabulary))
    elif by_id:
        merges = [merge for token in _divisible(metadata, tokens) for merge in _splits(token, vocabulary)]
    else:
        merges = _merges_by_score(metadata, tokens, vocabulary)
    unknown = metadata.token("unknown_token_id")
    bpe = _bpe(vocabulary, merges) | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decode = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = spaces
    if metadata.flag("add_space_prefix", not gemma4):
        normalizer = _sequence("normalizers", [{"type": "Prepend", "prepend": SPACE}, spaces])
        decode.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        metadata,
        model=bpe,
        normalizer=normalizer,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decode},
        # Files of Gemma 4 have as the user's some of its special ones, all of which its tokenizer.json has as special.
        added=[
            token | {"special": gemma4 or token["special"]} for token in _added_tokens(metadata) if token["content"].strip(" ")
        ],
        # Files of Gemma 4 say that one is added, and its own tokenizer.json adds none: its chat template writes it.
        adds_bos=None if gemma4 else True,
    )


def _divisible(metadata: _Metadata, tokens: list[str]) -> list[str]:
    """`tokens`, where all pairs of parts that may make one are not too many to look at."""
    if sum(len(token) ** 2 for token in tokens) > _MOST_PARTS:
        raise metadata.fail(f"the {len(tokens):,} tokens of its tokenizer are too long to be those of SentencePiece")
    return tokens


def _splits(token: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that make `token`, those with the longer left part first."""
    for at in range(len(token) - 1, 0, -1):
        left, right = token[:at], token[at:]
        if left in vocabulary and right in vocabulary:
            yield left, right


def _merges_by_score(metadata: _Metadata, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose whole has the best score; BPE the pair that comes first in this list."""
    scores = metadata.numbers("scores")
    if scores is None:
        raise metadata.fail("its tokenizer has neither tokenizer.ggml.scores nor tokenizer.ggml.merges")
    ranked = sorted(
        (-score, -len(left), -len(right), left, right)
        for token, score in zip(_divisible(metadata, tokens), scores.tolist())
        for left, right in _splits(token, vocabulary)
    )
    return [(left, right) for _, _, _, left, right in ranked]


def _bpe(vocabulary: dict[str, int], merges: list) -> dict:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added_tokens(metadata: _Metadata) -> Iterator[dict]:
    """Tokens matched whole in the text: control tokens and those that the file names are special, user's are not."""
    roles = ("bos", "eos", "unknown", "padding", "eot")
    named = {number for role in roles if isinstance(number := metadata.get(f"{role}_token_id"), int)}
    types = metadata.types if metadata.types is not None else np.zeros(len(metadata.tokens), np.int32)
    for number, (content, kind) in enumerate(zip(metadata.tokens, types.tolist())):
        special = kind in (_UNKNOWN, _CONTROL) or number in named
        if content and (special or kind == _USER_DEFINED):
            yield {
                "id": number,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }


def _tokenizer(metadata: _Metadata, *, model, normalizer, pre_tokenizer, decoder, added, adds_bos: bool | None) -> dict:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(metadata, adds_bos),
        "decoder": decoder,
        "model": model,
    }


def _post_processor(metadata: _Metadata, adds_bos: bool | None) -> dict | None:
    """Adds BOS and EOS where the file, or llama.cpp's default for this kind of tokenizer, says so; no BOS, whatever the file
    says, if `adds_bos` is None."""
    before = [metadata.token("bos_token_id")] if adds_bos is not None and metadata.flag("add_bos_token", adds_bos) else []
    after = [metadata.token("eos_token_id")] if metadata.flag("add_eos_token", False) else []
    before, after = ([token for token in side if token is not None] for side in (before, after))
    if not before and not after:
        return None

    def around(sequence: str, type_id: int) -> list[dict]:
        return [
            *({"SpecialToken": {"id": token, "type_id": type_id}} for token in before),
            {"Sequence": {"id": sequence, "type_id": type_id}},
            *({"SpecialToken": {"id": token, "type_id": type_id}} for token in after),
        ]

    numbers = {token: metadata.tokens.index(token) for token in before + after}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in numbers.items()},
    }
