"""How text is cut before byte-level BPE: one row for each `tokenizer.ggml.pre`.

Names: llama.cpp's llama-vocab.cpp. Expressions and flags: the tokenizer.json files of the models that the names
stand for, which llama.cpp quotes beside its own rewritten forms.
"""

from dataclasses import dataclass

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
    """split: the expression whose matches are the words, or None for GPT-2's own; digits: each digit stands alone,
    cut before anything else; ignore_merges: a word that is a token is one token, whatever the merges say;
    nfc: text is normalised first; adds_bos: whether BOS is added where the file does not say."""

    split: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


_GPT2_ROW = PreTokenizer()
_DIGITS_ROW = PreTokenizer(digits=True)
_NEOX_ROW = PreTokenizer(nfc=True)
_LLAMA3_ROW = PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
_CL100K_ROW = PreTokenizer(_LLAMA3)
_QWEN2_ROW = PreTokenizer(_QWEN2, nfc=True)
_GPT4O_ROW = PreTokenizer(_GPT4O)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2_ROW,
    "phi-2": _GPT2_ROW,
    "mpt": _NEOX_ROW,
    "olmo": _NEOX_ROW,
    "smollm": _DIGITS_ROW,
    "starcoder": _DIGITS_ROW,
    "refact": _DIGITS_ROW,
    "codeshell": _DIGITS_ROW,
    "command-r": PreTokenizer(digits=True, nfc=True),
    "llama3": _LLAMA3_ROW,
    "llama-v3": _LLAMA3_ROW,
    "llama-bpe": _LLAMA3_ROW,
    "falcon3": _LLAMA3_ROW,
    "falcon-h1": _LLAMA3_ROW,
    "lfm2": _LLAMA3_ROW,
    "pixtral": _LLAMA3_ROW,
    "dbrx": _CL100K_ROW,
    "smaug-bpe": _CL100K_ROW,
    "qwen2": _QWEN2_ROW,
    "deepseek-r1-qwen": _QWEN2_ROW,
    "qwen35": PreTokenizer(_QWEN35, nfc=True),
    "stablelm2": _QWEN2_ROW,
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O_ROW,
    "llama4": _GPT4O_ROW,
}
