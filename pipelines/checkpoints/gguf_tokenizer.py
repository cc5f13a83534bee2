"""Convert the tokenizer of a GGUF file to a tokenizer.json like the one of the HF model.

Supported are byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), and Gemma 4's SentencePiece BPE
with merges ("gemma4"). The conversion in transformers is not used, because it ignores digit
splitting (smollm, starcoder, refact), NFC (qwen2) and ignore_merges (llama-bpe).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from castiron.emitter.shorten import shorten, shorten_list
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf_metadata import Metadata

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's llama_token_type
SPACE = "\u2581"
# Max sum of the tokens' squared lengths, which bounds the memory for all splits of tokens (Gemma: 2e7).
_MAX_SQUARES = 500_000_000

# Architectures whose merges are in the order of token ids, not of scores.
_RANKED_BY_ID = {"gemma", "gemma2", "gemma3", "gemma-embedding"}

# The end tokens in Gemma 4's generation_config.json, of which a GGUF file has only one.
_GEMMA4_ENDS = ("<eos>", "<|tool_response>", "<turn|>")

# Roles of fill-in-the-middle (FIM) tokens, whose keys are fim_pre_token_id and so on, and older keys.
_FIM = {"pre": "prefix", "suf": "suffix", "mid": "middle", "pad": "fim_pad", "rep": "fim_rep", "sep": "fim_sep"}

# Regular expressions of pre-tokenizers, from the tokenizer.json files of their models.
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

# Letters in DeepSeek's regular expression: the cased letters of an older Unicode, without Georgian ones, small Armenian
# ones and a few others.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DIGITS = {"type": "Digits", "individual_digits": True}
_DEEPSEEK_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _byte_level_step(use_regex: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splits(*regexes: str) -> tuple[dict, ...]:
    return tuple({"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in regexes)


def _deepseek(*regexes: str) -> tuple[dict, ...]:
    return (*_splits(*regexes), _DIGITS, _byte_level_step(False))


_DEEPSEEK_LLM = _deepseek(
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_ASIAN,
)
_DEEPSEEK_CODER = _deepseek("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN)
# The steps Digits and Split run after ByteLevel, so they match the characters that it writes for bytes.
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _byte_level_step(True),
    {"type": "Digits", "individual_digits": False},
    *_splits("[0-9][0-9][0-9]"),
)


def _words(regex: str | None = None, digits: bool = False) -> tuple[dict, ...]:
    before = [_DIGITS] if digits else []
    return (*before, *_splits(*[regex] if regex else []), _byte_level_step(use_regex=regex is None))


@dataclass(frozen=True)
class PreTokenizer:
    """The steps before byte-level BPE, which normalise text and split it into words.

    steps: pre-tokenizers in the format of tokenizer.json.
    ignore_merges: whether a word in the vocabulary becomes one token, even if no merges give it.
    nfc: whether text is first normalised to Unicode NFC.
    adds_bos: whether to add BOS if the GGUF file does not have the key add_bos_token.
    """

    steps: tuple[dict, ...] = _words()
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


# By value of `tokenizer.ggml.pre`, whose names are llama.cpp's (llama-vocab.cpp).
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2"), PreTokenizer()),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), PreTokenizer(_words(digits=True))),
    "command-r": PreTokenizer(_words(digits=True), nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral"),
        PreTokenizer(_words(_LLAMA3), ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer(_words(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), PreTokenizer(_words(_QWEN2), nfc=True)),
    "qwen35": PreTokenizer(_words(_QWEN35), nfc=True),
    "tekken": PreTokenizer(_words(_TEKKEN), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_words(_GPT4O))),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(
        (*_splits(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3), _byte_level_step(False))
    ),
    "falcon": PreTokenizer(_FALCON),
}


class _Metadata(Metadata):
    def __init__(self, file: GgufFile):
        super().__init__(file, _PREFIX)
        self.tokens: list[str] = self.strings("tokens")

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value:
            problem = "missing" if value is None else "empty" if isinstance(value, list) else "not a list of strings"
            raise self.error(f"{_PREFIX}{key} is {problem}; download the file again")
        return value

    def numbers(self, key: str) -> np.ndarray | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.error(
                f"{_PREFIX}{key} is not a list of {len(self.tokens)} numbers, one for each token; convert the model again"
            )
        return value

    def token(self, key: str) -> str | None:
        number = self.integer(key)
        if number is None:
            return None
        if number >= len(self.tokens):
            raise self.invalid(key, f"below {len(self.tokens)}, the number of tokens")
        return self.tokens[number]


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the ids of the tokens that end generation.

    For Gemma 4, these include end tokens that are not in the file's metadata.
    """
    metadata = Metadata(file, _PREFIX)
    found = [metadata.get(key) for key in ("eos_token_id", "eot_token_id")]
    if metadata.string("model") == "gemma4":
        tokens = _Metadata(file).tokens
        found += [tokens.index(end) for end in _GEMMA4_ENDS if end in tokens]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def fim_token_ids(file: GgufFile) -> dict[str, int]:
    """Return the ids of the fill-in-the-middle tokens by role, such as "suf" (suffix)."""
    metadata = Metadata(file, _PREFIX)
    found = {role: [metadata.integer(f"{key}_token_id") for key in (f"fim_{role}", old)] for role, old in _FIM.items()}
    return {role: number for role, numbers in found.items() for number in reversed(numbers) if number is not None}


def tokenizer_json(file: GgufFile) -> dict | None:
    """Return the content of a tokenizer.json; None if the file has no tokenizer."""
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
    merges = list(_merges_of_file(metadata, vocabulary))
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": row.ignore_merges}
    return _tokenizer(
        metadata,
        model=bpe,
        normalizer={"type": "NFC"} if row.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(row.steps)},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        added_tokens=list(_added_tokens(metadata)),
        adds_bos=row.adds_bos,
    )


def _merges_of_file(metadata: _Metadata, vocabulary: dict[str, int]) -> Iterator[list[str]]:
    for merge in metadata.strings("merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise metadata.error(f"the merge {shorten(merge)} uses or makes an unknown token; convert the model again")
        yield [left, right]


def _sentencepiece(metadata: _Metadata, gemma4: bool) -> dict:
    # Except for Gemma 4, GGUF stores tokens of only spaces as plain spaces.
    spelled = lambda token: SPACE * len(token) if token.strip(" ") == "" and not gemma4 else token
    vocabulary = {spelled(token): number for number, token in enumerate(metadata.tokens)}
    if metadata.get("merges") is not None:
        merges = list(_merges_of_file(metadata, vocabulary))
    else:
        merges = _merges_of_vocabulary(metadata, [spelled(token) for token in metadata.tokens], vocabulary)
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": merges, "fuse_unk": True, "byte_fallback": True}
    bpe["unk_token"] = metadata.token("unknown_token_id")
    normalize = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decode = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.flag("add_space_prefix", not gemma4):
        normalize.insert(0, {"type": "Prepend", "prepend": SPACE})
        decode.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        metadata,
        model=bpe,
        normalizer={"type": "Sequence", "normalizers": normalize},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decode},
        # All of Gemma 4's added tokens are special, though files list some as user-defined.
        added_tokens=[
            token | {"special": gemma4 or token["special"]} for token in _added_tokens(metadata) if token["content"].strip(" ")
        ],
        # Gemma 4's chat template writes BOS, but its files wrongly state that the tokenizer adds it.
        adds_bos=None if gemma4 else True,
    )


def _merges_of_vocabulary(metadata: _Metadata, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Compute the BPE merges of a SentencePiece tokenizer from its tokens; the file has no merges.

    Returns pairs (left, right), highest priority first. A merge has the priority of the token that
    it produces, left + right. For Gemma, tokens with lower ids have priority; for other models,
    tokens with higher scores.

    tokens: the text of each token. vocabulary: {text: token id}.
    """
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        raise metadata.error(
            f"the texts of the {len(tokens):,} tokens are too long for a SentencePiece vocabulary; download the file again"
        )
    ranks: Iterable[float] = range(len(tokens))
    if metadata.file.metadata.get("general.architecture") not in _RANKED_BY_ID:
        scores = metadata.numbers("scores")
        if scores is None:
            raise metadata.error("tokenizer.ggml.scores and tokenizer.ggml.merges are both missing; convert the model again")
        ranks = [-score for score in scores.tolist()]
    ranked = sorted(
        (rank, -len(left), -len(right), left, right)
        for rank, token in zip(ranks, tokens)
        for left, right in ((token[:at], token[at:]) for at in range(len(token) - 1, 0, -1))
        if left in vocabulary and right in vocabulary
    )
    return [(left, right) for *_, left, right in ranked]


def _added_tokens(metadata: _Metadata) -> Iterator[dict]:
    roles = ("bos", "eos", "unknown", "padding", "eot")
    named = {number for role in roles if isinstance(number := metadata.get(f"{role}_token_id"), int)}
    types = metadata.numbers("token_type")
    kinds = [0] * len(metadata.tokens) if types is None else types.tolist()
    for number, (content, kind) in enumerate(zip(metadata.tokens, kinds)):
        special = kind in (_UNKNOWN, _CONTROL) or number in named
        if content and (special or kind == _USER_DEFINED):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": number, "content": content, **flags, "special": special}


def _tokenizer(metadata: _Metadata, *, adds_bos: bool | None, **parts: Any) -> dict:
    post_processor = _post_processor(metadata, adds_bos)
    return {"version": "1.0", "truncation": None, "padding": None, "post_processor": post_processor, **parts}


def _post_processor(metadata: _Metadata, adds_bos: bool | None) -> dict | None:
    """Return the post_processor of tokenizer.json, which adds BOS and EOS; None if it adds neither.

    adds_bos: whether to add BOS if the metadata have no key add_bos_token. None: do not add BOS,
        whatever the metadata say.
    """
    adds_bos = adds_bos is not None and metadata.flag("add_bos_token", adds_bos)
    sides = (adds_bos, "bos_token_id"), (metadata.flag("add_eos_token", False), "eos_token_id")
    before, after = ([token] if adds and (token := metadata.token(key)) is not None else [] for adds, key in sides)
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
