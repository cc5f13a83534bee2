"""Texts and GGUF headers to compare with llama.cpp's tokenizers, and known differences."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from tokenizers.pre_tokenizers import ByteLevel

from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile, as_read
from castiron.pipelines.checkpoints.pre_tokenizers import PRE_TOKENIZERS

# What llama.cpp-python's version of llama.cpp gave; `python -m tests.models.llama_cpp_vocabularies record` writes it.
RECORDED = Path(__file__).with_name("llama_cpp_tokens.json")

SPACES = [
    " ",
    "  ",
    "   ",
    "     ",
    " " * 17,
    "\n",
    "\n\n",
    " \n",
    "\t",
    "\r\n",
    "\t\t ",
    " \n \n",
    "\u00a0",
    "\u3000",
    "\v",
    "\f",
]
WORDS = """hello World helloWorld HTTPServer XMLHttp ABC I'm we'LL don't 'tis it's y'all'd x a B aB été naïve straße ünder мир привет
你好 世界 人工智能 日本語 テスト ひらがな 한국어 안녕 שלום مرحبا नमस्ते สวัสดี ສະບາຍ ក្មែរ 1 12 123 1234 12345 1234567 3.14 1,000 2024-01-02 ½ ² ٣٤٥ 🙂
👩‍👩‍👧 ! !! ... -- == / // /a _ __ $ ^ ` () [x] {} < > </ 's 's' " # @a ~ | || += => <= ¡ … 。 ， ！ “x” — – · € © é ﬁ \\n C++ e=mc² ½cup
http://a.b/c?d=1&e=2 def f(x): return x**2 a_b aBc1 1a2 12ab ab12 <sentinel:7> IMGIMGABZ ABIMG １２ Ａ ㄅㄆ ㄱㄴ""".split()
HAS_MARKS = re.compile("[\u0300-\u036f\u0900-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u200d\ufe0f]")

# Rows in which upper case starts a new word. llama.cpp knows only ASCII's upper case, and puts no marks into words.
CASED = ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m")
# Rows for which llama.cpp ignores upper case.
UNCASED = ("kimi-k2", "youtu", "tiny_aya", "cohere2moe")


def texts(random: Random, count: int, special: Sequence[str] = ()) -> list[str]:
    """Return random texts of words, white space and the texts of special tokens."""
    made = []
    for _ in range(count):
        parts = []
        for _ in range(random.randint(1, 9)):
            kinds = [SPACES, WORDS, special] if special else [SPACES, WORDS]
            parts.append(random.choice(random.choice(kinds)))
        made.append("".join(parts))
    return made


def is_comparable(pre: str | None, text: str) -> bool:
    """Return whether llama.cpp treats a text like the model's tokenizer.json.

    pre: the value of tokenizer.ggml.pre; None for SentencePiece.
    """
    # Special tokens that include white space include only ASCII's in llama.cpp.
    if pre is None:
        return all(c.isascii() for c in text if c.isspace())
    if PRE_TOKENIZERS[pre].nfc and unicodedata.normalize("NFC", text) != text:
        return False
    has_upper, has_number = any(c.isupper() for c in text), any(c.isnumeric() for c in text)
    if (
        pre in UNCASED
        and has_upper
        or pre in (*CASED, *UNCASED)
        and (HAS_MARKS.search(text) or has_upper and not text.isascii())
    ):
        return False
    # llama.cpp joins the start of a number to the text before it, and looks for no boundary of a word after it.
    # DeepSeek splits numbers into digits, and Falcon also the bytes that GPT-2 writes as digits, such as 0xB2.
    if pre in ("tiny_aya", "cohere2moe", "falcon", "deepseek-llm") and has_number:
        return False
    if pre == "falcon" and not text.isascii():
        return False
    # For llama.cpp, a number in superbpe's expression has only ASCII's digits.
    if pre == "superbpe" and any(c.isnumeric() and not c.isascii() for c in text):
        return False
    # llama.cpp takes U+3000 for a space, not for a character of the Asian words.
    return pre not in ("deepseek-llm", "deepseek-coder") or "\u3000" not in text


# Tokens that no merges make, which only ignore_merges gives.
UNMERGED = ("ĠHTTPServer", "XMLHttp", "Ġdef", "http", "Ġa1b2")
# Texts of special tokens that llama.cpp does not look for, or only to keep them in one piece.
OTHERS = """<|plamo:eos|> <|channel|> <|message|> <|start|> <|constrain|> <mask> [MASK] <unk> <s> <|user|> <|assistant|> [INST]""".split()


def made_vocabulary(merges: Mapping[str, Sequence[str]], pre: str | None) -> dict:
    """Return the GGUF metadata of a vocabulary of the kind that a pre-tokenizer needs."""
    is_raw = pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].is_raw
    return raw(merges["raw"], pre) if is_raw else byte_level(merges["byte_level"], pre)


def byte_level(merges: Sequence[str], pre: str | None, special: Sequence[str] = ()) -> dict:
    """Return the GGUF metadata of a byte-level BPE; pre: None leaves the key out."""
    tokens = list(dict.fromkeys([*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), *UNMERGED]))
    keys = {
        "model": "gpt2", "tokens": [*tokens, *special], "token_type": [1] * len(tokens) + [3] * len(special),
        "merges": list(merges), "add_bos_token": False,
    }  # fmt: skip
    return _prefixed(keys | ({} if pre is None else {"pre": pre}))


def raw(merges: Sequence[str], pre: str) -> dict:
    """Return the GGUF metadata of a BPE of plain text with byte tokens."""
    made = list(dict.fromkeys(merge.replace(" ", "") for merge in merges))
    characters = sorted({*"".join(made), "▁"})
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + characters + made
    kinds = [6] * 256 + [1] * (len(tokens) - 256) + [3]
    keys = {
        "model": "gpt2", "pre": pre, "tokens": [*tokens, "<s>"], "token_type": kinds, "merges": list(merges),
        "bos_token_id": len(tokens), "eos_token_id": len(tokens),
    }  # fmt: skip
    return _prefixed(keys)


def header(spec: Mapping) -> dict:
    """Return the GGUF metadata that a record of `random_spec` describes."""
    special = [text for text, _ in spec["special"]]
    kinds = [kind for _, kind in spec["special"]]
    if spec["model"] == "llama":
        plain = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdefghij<>|_xyz.", "ab", "▁a", "▁ab", "cd", "▁▁"]
        tokens, types = ["<unk>", "<s>", "</s>", *plain, *special], [2, 3, 3] + [6] * 256 + [1] * (len(plain) - 256) + kinds
        keys: dict = {"scores": [-float(number) for number in range(len(tokens))]}
    else:
        plain = [*sorted(ByteLevel.alphabet()), "ab", "Ġa", "Ġab", "cd", "ĠĠ"]
        tokens, types = [*plain, *special], [1] * len(plain) + kinds
        keys = {"merges": ["a b", "Ġ a", "Ġa b", "c d", "Ġ Ġ"]}
    keys |= {f"{role}_token_id": tokens.index(text) for role, text in spec["roles"].items()}
    keys |= {"model": spec["model"], "pre": spec["pre"], "tokens": tokens, "token_type": types}
    return {"general.name": spec["name"], **_prefixed(keys)}


def random_spec(random: Random, known: Sequence[Sequence[str]], others: Sequence[str]) -> dict:
    """Return a record of a random header: its special tokens with their types, roles, and names.

    known: groups of texts that llama.cpp looks for; it takes any one of a group. others: more texts.
    """
    model = random.choice(["llama", "gpt2", "gpt2"])
    pool = [random.choice(group) for group in known if random.random() < 0.3]
    pool += random.sample(list(others), random.randint(0, 6))
    # For llama.cpp, </s> is a special token only without these.
    left_out = ("<unk>", "<s>", "</s>", "<|tool_response>", "<|plamo:eos|>") if model == "llama" else ("</s>",)
    if model == "llama" or {"<|tool_response>", "<|plamo:eos|>"} & set(pool):
        pool = [text for text in pool if text not in left_out]
    pool = list(dict.fromkeys(pool))
    # llama.cpp takes any token 11 for EOS and BOS, if the file has none.
    roles = ["eos", "bos"] if pool or model == "llama" else []
    roles += [
        role
        for role in ("eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep", "fim_pre")
        if random.random() < 0.2
    ]
    chosen = {role: random.choice(pool) for role in roles} if pool else {}
    # A token with a role is special for castiron whatever its type is; for llama.cpp it is not.
    kinds = [random.choice([3, 3, 4] if text in chosen.values() else [3, 3, 3, 4, 1]) for text in pool]
    name = random.choice(["x", "Llama", "Phi-3 mini", "my-phi3", "ModernBERT", "modern-bert-base"])
    if "phi" in name.lower() and (model != "llama" or "<|endoftext|>" not in pool):
        name = "x"
    pre = random.choice(["default", "qwen2", "jina-v2-de", "gpt-2"])
    return {"model": model, "pre": pre, "name": name, "special": [list(pair) for pair in zip(pool, kinds)], "roles": chosen}


def gguf_of(metadata: Mapping) -> GgufFile:
    """Return a GGUF file of metadata alone, as it is read."""
    return GgufFile(Path("x.gguf"), as_read({"general.architecture": "llama", **metadata}), {})


def _prefixed(keys: Mapping) -> dict:
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
