"""Random tokenizer directories, as the versions of transformers and their users write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the cat sat on the mat, didn't it? 1234 + 56.7 = x\n",
    "Ångström 你好 naïve  <s> im_start tool",
    "def f(x):\n    return",
]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Texts of special tokens. The first ones are in the vocabularies of all bases.
STORED = ("<s>", "</s>", "<|endoftext|>", "<unk>")
TEXTS = (*STORED, "<|im_start|>", "<|im_end|>", "<pad>", "<image>", "<tool_call>", "<think>", "[INST]", "<eos>", "x1")
ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
OTHER_ROLES = ("image_token", "audio_token", "boi_token")
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}",
    "{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ boi_token }}\n{%- if bos_token is defined %}B{% endif %}\n",
    "\n  {% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{{ sep_token }}{{ cls_token }}\n\n",
    "{% set x = 'a' %}{% generation %}{% set x = bos_token %}{{ x }}\n{% endgeneration %}{{ x }}{{ eos_token }}",
    "{% if add_generation_prompt %}<|im_start|>{{ mask_token }}{% endif %}{% set x = eos_token %} {{ x }}  \n  ",
)
# tokenizer_class, base and model type of directories without tokenizer.json.
VOCABULARIES = (
    ("GPT2Tokenizer", "gpt2", "gpt2"), ("GPT2TokenizerFast", "gpt2", "llama"), (None, "gpt2", "starcoder2"),
    ("Qwen2Tokenizer", "qwen", "qwen2"), ("Qwen2TokenizerFast", "qwen", "qwen3"), (None, "qwen", "qwen2"),
    ("LlamaTokenizer", "qwen", "qwen2"), ("Qwen2Tokenizer", "qwen", "llama"),
)  # fmt: skip
# tokenizer_class, base and model type of directories whose class has the steps of tokenizer.json in its code.
CLASSES = (
    ("GPT2Tokenizer", "gpt2", "gpt2"), ("GPT2Tokenizer", "gpt2", "llama"), ("GPT2TokenizerFast", "gpt2", "granite"),
    ("Qwen2Tokenizer", "qwen", "qwen2"), ("Qwen2TokenizerFast", "qwen", "qwen3"), (None, "qwen", "qwen3_moe"),
    ("Qwen2Tokenizer", "qwen", "lfm2"), ("GemmaTokenizer", "gemma", "gemma2"), ("GemmaTokenizerFast", "gemma", "gemma3_text"),
)  # fmt: skip
# Model types whose class uses tokenizer.json as it is.
GENERIC_TYPES = ("llama", "mistral", "granite", "phi3", "olmo2", "lfm2", "stablelm")


def _byte_level(pre: Any, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(text, special=True) for text in STORED]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def _gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _qwen() -> Tokenizer:
    steps = [pre_tokenizers.Split(Regex(QWEN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return _byte_level(pre_tokenizers.Sequence(steps), normalizers.NFC())


def _sentencepiece(prepend: bool = True) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prepend else []), normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = [AddedToken(text, special=True, normalized=False) for text in (*STORED, *(f"<0x{n:02X}>" for n in range(256)))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False))
    described = json.loads(made.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(described))


def _unigram() -> Tokenizer:
    pieces = [(text, 0.0) for text in (*STORED, "▁")] + [(c, -5.0) for c in sorted({*"".join(CORPUS)} - {" "})]
    made = Tokenizer(models.Unigram([*pieces, ("▁the", -2.0), ("at", -3.0)], unk_id=3, byte_fallback=False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


BASES: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": _gpt2, "qwen": _qwen, "sentencepiece": _sentencepiece, "gemma": lambda: _sentencepiece(False), "unigram": _unigram,
}  # fmt: skip


@cache
def base(name: str) -> str:
    """Return the tokenizer.json of a base without added tokens; those in STORED are in its vocabulary."""
    return json.dumps(json.loads(BASES[name]().to_str()) | {"added_tokens": []})


def _flags() -> st.SearchStrategy[dict[str, bool]]:
    plain = st.just(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return plain | st.fixed_dictionaries({name: st.booleans() for name in names})


def _tokens(min_size: int = 0) -> st.SearchStrategy[list[dict[str, Any]]]:
    one = st.builds(lambda text, flags, special: {"content": text, **flags, "special": special},
                    st.sampled_from(TEXTS), _flags(), st.booleans())  # fmt: skip
    return st.lists(one, min_size=min_size, max_size=6, unique_by=lambda token: token["content"])


def _role() -> st.SearchStrategy[Any]:
    text = st.sampled_from(TEXTS)
    token = st.builds(lambda content, flags: {"__type": "AddedToken", "content": content, **flags, "special": True},
                      text, _flags())  # fmt: skip
    return st.none() | text | token


def _templates(draw: Any, config: dict, files: dict[str, str]) -> None:
    text = st.sampled_from(TEMPLATES)
    named = st.fixed_dictionaries({"default": text}, optional={"tool_use": text, "rag": text})
    match draw(st.sampled_from(("none", "config", "named", "file", "files", "both"))):
        case "config":
            config["chat_template"] = draw(text)
        case "named":
            config["chat_template"] = [{"name": name, "template": found} for name, found in draw(named).items()]
        case "file":
            files["chat_template.jinja"] = draw(text)
        case "files" | "both" as kind:
            for name, found in draw(named).items():
                files["chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"] = found
            if kind == "both":
                config["chat_template"] = draw(text)


def _special_tokens(draw: Any, size: int, config: dict, files: dict[str, str]) -> None:
    """Draw the keys and files that name special tokens and add tokens; size: number of tokens before them."""
    config |= draw(st.dictionaries(st.sampled_from(ROLES), _role(), max_size=5))
    config |= draw(st.dictionaries(st.sampled_from(OTHER_ROLES), st.sampled_from(TEXTS), max_size=2))
    texts, first = st.lists(st.sampled_from(TEXTS), max_size=3, unique=True), size - draw(st.integers(0, 2))
    match draw(st.sampled_from(("", "", "extra_special_tokens", "additional_special_tokens", "named"))):
        case "named":
            own = st.dictionaries(st.sampled_from(OTHER_ROLES), st.sampled_from(TEXTS), max_size=2)
            config["extra_special_tokens"] = draw(own)
        case key if key:
            config[key] = draw(texts)
    if draw(st.booleans()):
        config["added_tokens_decoder"] = {str(first + n): token for n, token in enumerate(draw(_tokens()))}
    if draw(st.integers(0, 2)) == 0:
        named = draw(st.dictionaries(st.sampled_from((*ROLES, "image_token")), _role(), max_size=4))
        own = lambda value: {k: v for k, v in value.items() if k not in ("__type", "special")}
        named = {role: own(value) if isinstance(value, dict) else value for role, value in named.items() if value is not None}
        named |= {"additional_special_tokens": draw(texts)} if draw(st.booleans()) else {}
        files["special_tokens_map.json"] = json.dumps(named)
    if draw(st.integers(0, 3)) == 0:
        files["added_tokens.json"] = json.dumps({text: first + n for n, text in enumerate(draw(texts))})
    for key in ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"):
        if draw(st.integers(0, 3)) == 0:
            config[key] = draw(st.booleans())


@st.composite
def directories(draw: Any) -> dict[str, str]:
    """Draw the files of a directory, text by name, whose tokenizer class uses tokenizer.json as it is."""
    name, model_type = draw(st.sampled_from(tuple(BASES))), draw(st.sampled_from(GENERIC_TYPES))
    files, config, model = dict[str, str](), dict[str, Any](), {"model_type": model_type}
    made = Tokenizer.from_str(base(name))
    for token in draw(_tokens()):
        made.add_tokens([AddedToken(**token)])
    if draw(st.booleans()):
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    if draw(st.integers(0, 7)) == 0:
        made.enable_padding(pad_token="<pad>", pad_id=0)
        made.enable_truncation(4)
    files["tokenizer.json"] = made.to_str()
    classes = ["PreTrainedTokenizerFast", "TokenizersBackend", "UnknownTokenizer"]
    if name in ("gpt2", "qwen") and model_type != "mistral":
        classes += ["LlamaTokenizerFast", "LlamaTokenizer"]
    if (kind := draw(st.none() | st.sampled_from(classes))) is not None:
        (model if kind in classes[:2] and draw(st.booleans()) else config)["tokenizer_class"] = kind
    _special_tokens(draw, made.get_vocab_size(), config, files)
    _templates(draw, config, files)
    if config or draw(st.booleans()):
        files["tokenizer_config.json"] = json.dumps(config)
    return {**files, "config.json": json.dumps(model)}


@st.composite
def class_directories(draw: Any) -> dict[str, str]:
    """Draw the files of a directory, text by name, for a tokenizer class with steps and special tokens of its own."""
    kind, name, model_type = draw(st.sampled_from(CLASSES))
    made = Tokenizer.from_str(base(name))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in STORED])
    for token in draw(_tokens()):
        made.add_tokens([AddedToken(**token)])
    files, config = {"tokenizer.json": made.to_str()}, {"tokenizer_class": kind} if kind else {}
    _special_tokens(draw, made.get_vocab_size(), config, files)
    files.pop("added_tokens.json", None)
    config.pop("added_tokens_decoder", None)
    if draw(st.booleans()):
        entries = json.loads(made.to_str())["added_tokens"]
        config["added_tokens_decoder"] = {str(entry.pop("id")): entry for entry in entries}
    _templates(draw, config, files)
    return {**files, "tokenizer_config.json": json.dumps(config), "config.json": json.dumps({"model_type": model_type})}


@st.composite
def vocabularies(draw: Any) -> dict[str, str]:
    """Draw the files of a directory with vocab.json and merges.txt instead of tokenizer.json."""
    kind, name, model_type = draw(st.sampled_from(VOCABULARIES))
    model = json.loads(base(name))["model"]
    lines = [] if draw(st.booleans()) else ["#version: 0.2"]
    files = {
        "vocab.json": json.dumps(model["vocab"]),
        "merges.txt": "\n".join([*lines, *map(" ".join, model["merges"]), ""]),
        "config.json": json.dumps({"model_type": model_type}),
    }
    config = {"tokenizer_class": kind} if kind else {}
    if draw(st.integers(0, 3)) == 0:
        config["add_prefix_space"] = draw(st.booleans())
    _special_tokens(draw, len(model["vocab"]), config, files)
    _templates(draw, config, files)
    return {**files, "tokenizer_config.json": json.dumps(config)}


def write(path: Path, files: Mapping[str, str]) -> Path:
    """Write files, text by name, into the folder `path`, and return it."""
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path
