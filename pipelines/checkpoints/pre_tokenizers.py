"""How a GGUF file's byte-level BPE splits text into words, by the value of `tokenizer.ggml.pre`.

The names are those of llama.cpp's llama-vocab.cpp, except whitespace, for which its "gpt2" fails.
The regular expressions are those of the models' tokenizer.json files, where llama.cpp or
transformers quotes them, else llama.cpp's. llama.cpp differs from a tokenizer.json in texts that
are not in NFC, in upper case outside ASCII (all upper case for kimi-k2, tiny_aya and youtu), in
numbers next to letters or spaces (tiny_aya), and in characters that its Unicode tables lack.
"""

from dataclasses import dataclass

# The value for files without the key.
DEFAULT = "default"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}" + _REST
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}" + _REST
_MINICPM5 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}+" + _REST
_UFAKZEKA = rf"{_LETTERS}|\p{{N}}" + _REST
_JAIS2 = (
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"\s{1}"
)  # fmt: skip
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES
_SEED_CODER = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1}}" + r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+" + _SPACES
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
) + _SPACES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]" + _SPACES
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# Expressions that start a new word where lower case is followed by upper case.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + _SPACES


def _cased(after: str, without: str = "") -> str:
    """Return the part for words; `after` follows them, `without` is `&&[^...]` or empty."""
    upper, lower, before = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]", r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"


_TEKKEN = _cased("") + r"|\p{N}" + _REST_WITH_SLASH
_GPT4O = _cased(f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _REST_WITH_SLASH
_YOUTU = _cased(f"{_CONTRACTIONS}?") + r"|\p{N}" + _REST_WITH_SLASH
_KIMI = r"[\p{Han}]+|" + _cased(f"{_CONTRACTIONS}?", r"&&[^\p{Han}]") + r"|\p{N}{1,3}" + _REST

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
_DEEPSEEK_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_YOUTU_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|"
) + _ASIAN
_AFMOE_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
# Thirds of a number, counted from its end. llama.cpp joins the first one to the text before the number.
_AFMOE_NUMBERS = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_DEEPSEEK_V3_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_DEEPSEEK_V3 = _DEEPSEEK_V3_WORDS + r"[\r\n]*|\s*[\r\n]+" + _SPACES


def _byte_level(use_regex: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _splits(*regexes: str) -> tuple[dict, ...]:
    return tuple({"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in regexes)


_DIGITS = {"type": "Digits", "individual_digits": True}
_DEEPSEEK_LLM = (
    *_splits(
        "[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$", _DEEPSEEK_ASIAN,
    ),
    _DIGITS, _byte_level(False),
)  # fmt: skip
_DEEPSEEK_CODER = (*_splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN), _DIGITS, _byte_level(False))
# The steps Digits and Split run after ByteLevel, so they match the characters that it writes for bytes.
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _byte_level(True),
    {"type": "Digits", "individual_digits": False},
    *_splits("[0-9][0-9][0-9]"),
)


def _words(*regexes: str, digits: bool = False) -> tuple[dict, ...]:
    return (*([_DIGITS] if digits else []), *_splits(*regexes), _byte_level(use_regex=not regexes))


@dataclass(frozen=True)
class PreTokenizer:
    """The steps before BPE, which normalise text and split it into words.

    ignore_merges: whether a word in the vocabulary is one token, even if no merges give it.
    adds_bos: whether BOS is added if the file lacks add_bos_token.
    is_raw: whether tokens are plain text with U+2581 for spaces, as in SentencePiece, not GPT-2's
        characters for bytes.
    """

    steps: tuple[dict, ...] = _words()
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False
    is_raw: bool = False


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2"), PreTokenizer()),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), PreTokenizer(_words(digits=True))),
    "command-r": PreTokenizer(_words(digits=True), nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0", "jina-v5-nano"),
        PreTokenizer(_words(_LLAMA3), ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_words(_LLAMA3))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(_words(_LLAMA3), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), PreTokenizer(_words(_QWEN2), nfc=True)),
    "qwen35": PreTokenizer(_words(_QWEN35), nfc=True),
    "tekken": PreTokenizer(_words(_TEKKEN), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer(_words(_GPT4O))),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), PreTokenizer(_words(r"\p{N}{1,3}", _ASIAN, _DEEPSEEK_V3))
    ),
    "falcon": PreTokenizer(_FALCON),
    # Rows for which llama.cpp is the only source.
    DEFAULT: PreTokenizer(_words(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            "exaone4", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe",
            "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code",
        ),
        PreTokenizer(),
    ),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), PreTokenizer(_words(digits=True))),
    **dict.fromkeys(("hunyuan", "solar-open", "kormo", "f2llmv2", "megrez", "grok-2"), PreTokenizer(_words(_QWEN2))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer(_words(_BAILING))),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), PreTokenizer(_words(_BLOOM))),
    "viking": PreTokenizer(_words(_BLOOM, r"\p{N}")),
    "minicpm5": PreTokenizer(_words(r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "jais-2": PreTokenizer(_words(_JAIS2)),
    "seed-coder": PreTokenizer(_words(_SEED_CODER)),
    "ufakzeka": PreTokenizer(_words(_UFAKZEKA)),
    "laguna": PreTokenizer(_words(r"[^\n]+|[\n]+", _QWEN2)),
    "exaone-moe": PreTokenizer(_words(_EXAONE_MOE)),
    "spark2_5": PreTokenizer(_words(r"\p{N}{1,3}", _ASIAN, _DEEPSEEK_V3_WORDS + r"|[\r\n]" + _SPACES, r"\p{N}")),
    "youtu": PreTokenizer(_words(_YOUTU_ASIAN, _YOUTU), ignore_merges=True),
    "granite-embed-multi-97m": PreTokenizer(_words(_GPT4O), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer(_words(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    "kimi-k2": PreTokenizer(_words(_KIMI)),
    "superbpe": PreTokenizer(_words(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "afmoe": PreTokenizer(_words(_AFMOE_NUMBERS, _AFMOE_ASIAN, _DEEPSEEK_V3)),
    "chameleon": PreTokenizer(
        _words(
            "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
        ),
        adds_bos=True,
    ),
    "sarvam-moe": PreTokenizer((), is_raw=True),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), PreTokenizer((), adds_bos=True, is_raw=True)),
}  # fmt: skip
