"""Convert a GGUF file's tokenizer to the tokenizer.json that its model has on HF's hub.

Supported are byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), and Gemma 4's SentencePiece BPE
with merges ("gemma4"). transformers' reading of a GGUF ignores digit splitting (smollm, starcoder,
refact), NFC (qwen2) and ignore_merges (llama-bpe), which the models' own tokenizer.json files have.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from castiron.emitter.shorten import shorten, shorten_list
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf_metadata import Metadata

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's llama_token_type
SPACE = "\u2581"
# Maximum sum of the squared lengths of all tokens, which bounds the memory of all their splits
# (Gemma: 2e7).
_MAX_SQUARES = 500_000_000

# Gemma's merges follow the order of the ids, not of the scores.
_RANKED_BY_ID = {"gemma", "gemma2", "gemma3", "gemma-embedding"}

# Gemma 4's generation_config.json lists these; a GGUF file has one id.
_GEMMA4_ENDS = ("<eos>", "<|tool_response>", "<turn|>")

# Expressions and flags of pre-tokenizers, from the tokenizer.json files of models with their names.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _REST_WITH_SLASH
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _REST_WITH_SLASH
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before byte-level BPE.

    split: regular expression that matches words; None for GPT-2's. digits: whether digits are split
    off first. ignore_merges: whether a word in the vocabulary is one token even if no merges make
    it. nfc: whether text is normalised first. adds_bos: whether BOS is added by default.
    """

    split: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


# By `tokenizer.ggml.pre`, in llama.cpp's names (llama-vocab.cpp).
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2"), PreTokenizer()),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), PreTokenizer(digits=True)),
    "command-r": PreTokenizer(digits=True, nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral"),
        PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), PreTokenizer(_QWEN2, nfc=True)),
    "qwen35": PreTokenizer(_QWEN35, nfc=True),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_GPT4O)),
}


class _Metadata(Metadata):
    """The metadata of a tokenizer.

    tokens: text of each token. types: llama.cpp's llama_token_type of each, if the file has it.
    """

    def __init__(self, file: GgufFile):
        super().__init__(file, _PREFIX)
        self.tokens: list[str] = self.strings("tokens")
        self.types = self.numbers("token_type")

    def strings(self, key: str) -> list[str]:
        """Return the list of strings under a key that the file must have."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(f"{_PREFIX}{key} is missing or empty; fetch the file again")
        return value

    def numbers(self, key: str) -> np.ndarray | None:
        """Return an array with one number per token; None if the file lacks it."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.error(f"{_PREFIX}{key} is not a list of {len(self.tokens)} numbers, one for each token")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under a key; `default` if the file lacks the key."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.invalid(key, "true or false")
        return value

    def token(self, key: str) -> str | None:
        """Return the text of the token whose id is the key's value; None without the key."""
        number = self.get(key)
        if number is None:
            return None
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(self.tokens):
            raise self.invalid(key, f"below {len(self.tokens)}, the number of tokens")
        return self.tokens[number]


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the ids that end generation: end of sequence, end of turn, and for Gemma 4 its
    `_GEMMA4_ENDS`."""
    found = [file.metadata.get(_PREFIX + key) for key in ("eos_token_id", "eot_token_id")]
    tokens, model = (file.metadata.get(_PREFIX + key) for key in ("tokens", "model"))
    if isinstance(tokens, list) and isinstance(model, str) and model == "gemma4":
        found += [tokens.index(end) for end in _GEMMA4_ENDS if end in tokens]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def tokenizer_json(file: GgufFile) -> dict | None:
    """Return the file's tokenizer as the content of a tokenizer.json; None if the file has no
    tokenizer.

    CheckpointError for an invalid or unsupported tokenizer.
    """
    model = Metadata(file, _PREFIX).string("model")
    if model in (None, "no_vocab"):
        return None
    if model == "gpt2":
        return _byte_level(_Metadata(file))
    if model in ("llama", "gemma4"):
        return _sentencepiece(_Metadata(file), gemma4=model == "gemma4")
    raise CheckpointError(f"{file.path}: tokenizer.ggml.model is {shorten(model)}; supported are gpt2, llama and gemma4")


def _byte_level(metadata: _Metadata) -> dict:
    name = metadata.string("pre")
    row = PRE_TOKENIZERS.get(name)
    if row is None:
        known = shorten_list(PRE_TOKENIZERS, max_length=150)
        raise metadata.error(f"unknown pre-tokenizer {shorten(name, 60)}; known are {known}")
    vocabulary = {token: number for number, token in enumerate(metadata.tokens)}
    bpe = _bpe(vocabulary, list(_merges_of_file(metadata, vocabulary)))
    bpe |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": row.ignore_merges}
    splits = [{"type": "Digits", "individual_digits": True}] if row.digits else []
    if row.split is not None:
        splits.append({"type": "Split", "pattern": {"Regex": row.split}, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": row.split is None}
    return _tokenizer(
        metadata,
        model=bpe,
        normalizer={"type": "NFC"} if row.nfc else None,
        pre_tokenizer=_sequence("pretokenizers", [*splits, byte_level]),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        added=list(_added_tokens(metadata)),
        adds_bos=row.adds_bos,
    )


def _sequence(key: str, steps: list[dict]) -> dict:
    return steps[0] if len(steps) == 1 else {"type": "Sequence", key: steps}


def _merges_of_file(metadata: _Metadata, vocabulary: dict[str, int]) -> Iterator[list[str]]:
    for merge in metadata.strings("merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise metadata.error(f"the tokenizer merges {shorten(merge)}, which are not in its vocabulary")
        yield [left, right]


def _sentencepiece(metadata: _Metadata, gemma4: bool) -> dict:
    by_id = metadata.file.metadata.get("general.architecture") in _RANKED_BY_ID
    # GGUF stores runs of spaces as plain spaces, except Gemma 4's
    spelled = lambda token: SPACE * len(token) if token.strip(" ") == "" and not gemma4 else token
    tokens = [spelled(token) for token in metadata.tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if metadata.get("merges") is not None:
        merges = list(_merges_of_file(metadata, vocabulary))
    elif by_id:
        merges = [merge for token in _check_splits(metadata, tokens) for merge in _splits(token, vocabulary)]
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
        # All of Gemma 4's are special, though files list some as user-defined.
        added=[
            token | {"special": gemma4 or token["special"]} for token in _added_tokens(metadata) if token["content"].strip(" ")
        ],
        # Gemma 4's chat template writes BOS; its files wrongly request one.
        adds_bos=None if gemma4 else True,
    )


def _check_splits(metadata: _Metadata, tokens: list[str]) -> list[str]:
    """Return `tokens`; CheckpointError if they are so long that their splits would exceed the
    memory limit."""
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        raise metadata.error(f"the {len(tokens):,} tokens are too long for a SentencePiece vocabulary; fetch the file again")
    return tokens


def _splits(token: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens whose texts join to `token`, the pair with the longest left token
    first."""
    for at in range(len(token) - 1, 0, -1):
        left, right = token[:at], token[at:]
        if left in vocabulary and right in vocabulary:
            yield left, right


def _merges_by_score(metadata: _Metadata, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return BPE merges that tokenize as SentencePiece does, ordered by the score of the joined
    token.

    SentencePiece joins the pair whose result has the best score; BPE joins the pair that comes
    first in this list.
    """
    scores = metadata.numbers("scores")
    if scores is None:
        raise metadata.error("tokenizer.ggml.scores and tokenizer.ggml.merges are both missing")
    ranked = sorted(
        (-score, -len(left), -len(right), left, right)
        for token, score in zip(_check_splits(metadata, tokens), scores.tolist())
        for left, right in _splits(token, vocabulary)
    )
    return [(left, right) for _, _, _, left, right in ranked]


def _bpe(vocabulary: dict[str, int], merges: list) -> dict:
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **unset, **flags, "vocab": vocabulary, "merges": merges}


def _added_tokens(metadata: _Metadata) -> Iterator[dict]:
    """Yield tokenizer.json's added tokens, which are matched before BPE.

    Control tokens and those with a role, such as BOS, are special.
    """
    roles = ("bos", "eos", "unknown", "padding", "eot")
    named = {number for role in roles if isinstance(number := metadata.get(f"{role}_token_id"), int)}
    types = metadata.types if metadata.types is not None else np.zeros(len(metadata.tokens), np.int32)
    for number, (content, kind) in enumerate(zip(metadata.tokens, types.tolist())):
        special = kind in (_UNKNOWN, _CONTROL) or number in named
        if content and (special or kind == _USER_DEFINED):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": number, "content": content, **flags, "special": special}


def _tokenizer(metadata: _Metadata, *, added: list[dict], adds_bos: bool | None, **steps: dict | None) -> dict:
    post_processor = _post_processor(metadata, adds_bos)
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": post_processor}
    return base | steps


def _post_processor(metadata: _Metadata, adds_bos: bool | None) -> dict | None:
    """Return the post-processor that adds BOS and EOS as the file states; None if it adds neither.

    adds_bos: whether BOS is added if the file does not state it; None if BOS is never added.
    """
    before = [metadata.token("bos_token_id")] if adds_bos is not None and metadata.flag("add_bos_token", adds_bos) else []
    after = [metadata.token("eos_token_id")] if metadata.flag("add_eos_token", False) else []
    before, after = ([token for token in side if token is not None] for side in (before, after))
    if not before and not after:
        return None

    def around(sequence: str, type_id: int) -> list[dict]:
        special = lambda tokens: [{"SpecialToken": {"id": token, "type_id": type_id}} for token in tokens]
        return [*special(before), {"Sequence": {"id": sequence, "type_id": type_id}}, *special(after)]

    numbers = {token: metadata.tokens.index(token) for token in before + after}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in numbers.items()},
    }
