"""Read the tokenizer files of an HF directory as AutoTokenizer of transformers 5 combines them.

`tokenizer.json` has the vocabulary and the steps. `tokenizer_config.json`, or the older files
`special_tokens_map.json` and `added_tokens.json`, name special tokens and add further tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from castiron.emitter.shorten import shorten, shorten_text
from castiron.pipelines.checkpoints.chat_templates import join_templates
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.hf.read_files import json_object, text_of
from castiron.pipelines.checkpoints.pre_tokenizers import PRE_TOKENIZERS

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL, _ADDED, _VOCAB, _MERGES = "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"
_TEMPLATE, _OLD_TEMPLATE, _TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
# Vocabularies that castiron cannot read.
_UNREAD = ("tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model", _VOCAB)
# The files that `read_tokenizer` opens; * is any name.
FILES = (TOKENIZER, TOKENIZER_CONFIG, _SPECIAL, _ADDED, _VOCAB, _MERGES, _TEMPLATE, _OLD_TEMPLATE, f"{_TEMPLATES}/*.jinja")

# The special tokens that every tokenizer class of transformers knows.
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip")


@dataclass(frozen=True)
class _Class:
    """What a tokenizer class of transformers adds to the files.

    pre: a key of `PRE_TOKENIZERS`, for vocab.json with merges.txt. special: default special tokens.
    resets_flags: whether special tokens lose flags such as rstrip.
    """

    pre: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    resets_flags: bool = False


def _special(text: str, *names: str) -> dict[str, str]:
    return {f"{name}_token": text for name in names}


_GENERIC = _Class()
_CLASSES = {
    "GPT2Tokenizer": _Class("gpt-2", _special("<|endoftext|>", "unk", "bos", "eos")),
    "Qwen2Tokenizer": _Class("qwen2", _special("<|endoftext|>", "unk", "eos", "pad"), resets_flags=True),
    "Qwen3_5Tokenizer": _Class("qwen35", _special("<|endoftext|>", "unk", "eos", "pad")),
    "LlamaTokenizer": _Class(None, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "GemmaTokenizer": _Class(None, {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}),
    "BertTokenizer": _Class(None, {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}),
    "CohereTokenizer": _Class(
        "command-r",
        {"eos_token": "<|END_OF_TURN_TOKEN|>", "bos_token": "<BOS_TOKEN>", "mask_token": "<MASK_TOKEN>", "unk_token": "<UNK>"}
        | {f"{name}_token": f"<{name.upper()}>" for name in ("pad", "cls", "sep")},
    ),
}  # fmt: skip
# The class that transformers registers for a model_type; "" is a class that adds nothing. Other types have none.
_REGISTERED = {
    **dict.fromkeys(("cohere2",), "CohereTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    "bert": "BertTokenizer",
    **dict.fromkeys(
        (
            "ernie4_5", "glm4_moe_lite", "granite", "granitemoe", "granitemoehybrid", "ministral3", "mistral", "mistral3",
            "mixtral", "modernbert", "olmo2", "olmo3", "phi3", "smolvlm", "stablelm",
        ),
        "",
    ),
}  # fmt: skip
# Model types whose registered class transformers uses whatever the files name.
_ALWAYS_REGISTERED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True)
class HfTokenizer:
    """The tokenizer of an HF directory.

    content: tokenizer.json with all added tokens; None if the directory has no tokenizer.
    special_tokens: texts by names such as "bos_token" or "image_token".
    """

    content: dict | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None

    def ids(self, name: str) -> list[int]:
        """Return the id of the special token with this name, if there is one."""
        text, content = self.special_tokens.get(name), self.content or {}
        added = [entry["id"] for entry in _entries(content) if entry["content"] == text]
        return added[-1:] or [number for number in [_vocabulary(content).get(text or "")] if number is not None]

    def is_added(self, token: int) -> bool:
        return any(entry["id"] == token for entry in _entries(self.content or {}))


def read_tokenizer(path: Path, config: Mapping[str, Any]) -> HfTokenizer:
    """Read the tokenizer and the chat template in a directory."""
    fields = json_object(path / TOKENIZER_CONFIG) or {}
    template = read_chat_template(path, fields)
    content = json_object(path / TOKENIZER)
    kind = _class_of(fields, config, content)
    if content is None and (content := _from_vocabulary(path, kind, fields)) is None:
        return HfTokenizer(chat_template=template)
    padding = content.get("padding")
    defaults = {"pad_token": padding.get("pad_token")} if isinstance(padding, dict) else {}
    settings = dict(fields)
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    own_names = _pop_own(settings, str)
    if "added_tokens_decoder" in settings:
        decoder = dict(_numbered(path, settings["added_tokens_decoder"]))
    else:
        settings, decoder = _with_old_files(path, settings, content)
    named = {**defaults, **kind.special, **settings}
    named = {name: named[name] for name in NAMES if named.get(name) is not None} | _pop_own(settings, (str, dict)) | own_names
    checked = lambda token: token if isinstance(token, str) else _token(path, token)
    named, extra = {name: checked(token) for name, token in named.items()}, [checked(token) for token in _listed(settings)]
    content = _with_added(path, content, decoder, named, extra, _rows(config))
    if kind.resets_flags:
        texts = dict.fromkeys(map(_content, (*named.values(), *extra)))
        content = _with_added(path, content, dict(enumerate(_token(path, text) for text in texts)), {}, [], _rows(config))
    tokenizer = HfTokenizer(content, {name: _content(token) for name, token in named.items()}, template)
    if not (path / TOKENIZER).exists():
        content["post_processor"] = _post_processor(tokenizer, fields)
    return tokenizer


def read_chat_template(path: Path, fields: Mapping[str, Any]) -> str | None:
    """Return the joined chat templates of files, otherwise of tokenizer_config.json's `fields`."""
    templates = {"default": text_of(path / _TEMPLATE)}
    templates |= {file.stem: text_of(file) for file in sorted((path / _TEMPLATES).glob("*.jinja"))}
    if not any(templates.values()):
        templates = _templates_of(fields.get("chat_template"))
    if not any(templates.values()):
        templates = _templates_of((json_object(path / _OLD_TEMPLATE) or {}).get("chat_template"))
    return join_templates(templates.get("default"), templates.get("tool_use"))


def _templates_of(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    return value if isinstance(value, dict) else {"default": value}


def _rows(config: Mapping) -> float:
    inner = config.get("text_config")
    value = (inner if isinstance(inner, dict) and "vocab_size" in inner else config).get("vocab_size")
    return value if isinstance(value, int) and value > 0 else math.inf


def _post_processor(tokenizer: HfTokenizer, fields: Mapping) -> dict | None:
    """Return the step that adds the tokens of add_bos_token and add_eos_token, or None."""
    added = {name: tokenizer.ids(name) for name in ("bos_token", "eos_token") if fields.get(f"add_{name}") is True}
    texts = {name: tokenizer.special_tokens[name] for name, ids in added.items() if ids}
    special = lambda name, type_id: [{"SpecialToken": {"id": texts[name], "type_id": type_id}}] if name in texts else []

    def around(sequence: str, type_id: int) -> list[dict]:
        own = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*special("bos_token", type_id), own, *special("eos_token", type_id)]

    used = {text: {"id": text, "ids": added[name], "tokens": [text]} for name, text in texts.items()}
    single, pair = around("A", 0), around("A", 0) + around("B", 1)
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used} if texts else None


def _pop_own(fields: dict, kinds: type | tuple[type, ...]) -> dict[str, Any]:
    names = [name for name in fields if name.endswith("_token") and name not in NAMES and isinstance(fields[name], kinds)]
    own_tokens = {name: fields.pop(name) for name in names}
    return (
        own_tokens | fields.pop("extra_special_tokens") if isinstance(fields.get("extra_special_tokens"), dict) else own_tokens
    )


def _class_of(fields: Mapping, config: Mapping, content: Mapping | None) -> _Class:
    """Return the tokenizer class that AutoTokenizer chooses."""
    named = fields.get("tokenizer_class") or config.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    model_type = config.get("model_type")
    registered = _REGISTERED.get(model_type) if isinstance(model_type, str) else None
    # LlamaTokenizer is not for byte-level BPE, but many files name it.
    if named == "LlamaTokenizer" and model_type not in _ALWAYS_REGISTERED and content and _has_bytes(content):
        return _GENERIC
    if named is None or model_type in _ALWAYS_REGISTERED and named != registered:
        named = registered
    if registered == "" and content is not None:
        return _GENERIC
    return _CLASSES.get(named or "", _GENERIC)


def _has_bytes(content: Mapping) -> bool:
    steps = [content.get("pre_tokenizer"), content.get("decoder")]
    return '"ByteLevel"' in str(steps).replace("'", '"')


def _from_vocabulary(path: Path, kind: _Class, fields: Mapping) -> dict | None:
    """Return a tokenizer.json made from vocab.json and merges.txt; None without tokenizer."""
    vocab, merges = json_object(path / _VOCAB), text_of(path / _MERGES)
    if vocab is None or merges is None or kind.pre is None:
        if unread := next((name for name in _UNREAD if (path / name).exists()), None):
            raise CheckpointError(
                f"{path} has the tokenizer {unread} but no {TOKENIZER}; save it with transformers: "
                "AutoTokenizer.from_pretrained(path).save_pretrained(path)"
            )
        return None
    row, lines = PRE_TOKENIZERS[kind.pre], [line for line in merges.splitlines() if line and not line.startswith("#version")]
    prefix = fields.get("add_prefix_space") is True
    steps = [step | {"add_prefix_space": prefix} if step["type"] == "ByteLevel" else step for step in row.steps]
    model = {"type": "BPE", "vocab": vocab, "merges": lines}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": {"type": "NFC"} if row.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, "model": model,
    }  # fmt: skip


def _numbered(path: Path, decoder: Any) -> Iterator[tuple[int, dict]]:
    for number, value in (decoder if isinstance(decoder, dict) else {}).items():
        if not number.isdecimal():
            raise CheckpointError(f"{path}: added_tokens_decoder has id {shorten_text(number)}, not a number")
        yield int(number), _token(path, value)


def _token(path: Path, value: Any, special: bool | None = None) -> dict[str, Any]:
    """Return an entry of added_tokens, without id; the defaults are AddedToken's."""
    entry = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise CheckpointError(f"{path} has the special token {shorten(value)}, which is not a text")
    is_special = entry.get("special") is True if special is None else special
    normalized = entry.get("normalized")
    flags = {name: entry.get(name) is True for name in _FLAGS}
    return {
        "content": entry["content"], **flags, "normalized": not is_special if normalized is None else normalized is True,
        "special": is_special,
    }  # fmt: skip


def _with_old_files(path: Path, fields: Mapping, content: Mapping) -> tuple[dict, dict[int, dict]]:
    """Add the older files to tokenizer_config.json's fields; return these, and the added tokens."""
    named = json_object(path / _SPECIAL) or {}
    named = {k: {**v, "special": True} if isinstance(v, dict) and "content" in v else v for k, v in named.items()}
    if isinstance(extra := named.get("extra_special_tokens"), list):
        named["extra_special_tokens"] = [*_list(fields.get("extra_special_tokens")), *extra]
    settings = {**fields, **named}
    tokens = [*map(settings.get, NAMES), *_list(settings.get("extra_special_tokens"))]
    texts = [_content(token) for token in tokens if not (isinstance(token, dict) and "__type" in token)]
    special = {text for text in texts if isinstance(text, str)}
    decoder = {}
    for text, number in (json_object(path / _ADDED) or {}).items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise CheckpointError(f"{path / _ADDED}: the id of {shorten_text(text)} is {shorten(number)}, not a number")
        decoder[number] = _token(path, {"content": text}, text in special)
    # A special token has the flags that these files give it, even if tokenizer.json has another token of its id.
    of_text = {token["content"]: token for token in decoder.values()}
    settings |= {name: of_text[text] for name in NAMES if (text := _content(settings.get(name))) in of_text}
    return settings, decoder | {entry["id"]: _token(path, entry) for entry in _entries(content)}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _listed(fields: Mapping) -> list:
    return _list(fields.get("extra_special_tokens", fields.get("additional_special_tokens")))


def _entries(content: Mapping) -> list[dict]:
    entries = content.get("added_tokens")
    is_valid = lambda entry: isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int
    return entries if isinstance(entries, list) and all(map(is_valid, entries)) else []


def _vocabulary(content: Mapping) -> dict[str, int]:
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: [text, score] each
        texts = [entry[0] if isinstance(entry, list) and entry else None for entry in vocab]
        return {text: index for index, text in enumerate(texts) if isinstance(text, str)}
    return vocab if isinstance(vocab, dict) and all(type(number) is int for number in vocab.values()) else {}


def _with_added(
    path: Path, content: dict, decoder: Mapping[int, dict], named: Mapping[str, Any], extra: list, rows: float
) -> dict:
    """Return a tokenizer.json with the further added tokens.

    transformers adds the tokens of `decoder`, and then each of the others unless there is an equal
    one. A token may get several entries, of which the last one counts. A new token with an id from
    `rows` on, often a pad token, is left out, because the model has no embedding for it.
    """
    vocab, stored = _vocabulary(content), _entries(content)
    if not vocab or content.get("added_tokens") not in (None, stored):
        return content  # a damaged file, which the library rejects
    known = {token["content"] for token in (*stored, *decoder.values())}
    new: list = [token for _, token in sorted(decoder.items())]
    for token in (*named.values(), *extra):
        # A text and a token with flags are never equal.
        if _content(token) not in known and token not in new:
            new.append(token)
    special, ids = set(map(_content, named.values())), {entry["content"]: entry["id"] for entry in stored}
    entries, last_of = list(stored), {entry["content"]: entry for entry in stored}
    for token in map(partial(_token, path), new):
        text = token["content"]
        if text and text not in ids:
            last = max(ids.values(), default=-1)
            ids[text] = vocab.get(text, last + 1 if last >= len(vocab) else len(vocab))
        entry = {"id": ids.get(text), **token, "special": token["special"] or text in special}
        if text and entry != last_of.get(text) and (text in last_of or ids[text] < rows):
            entries.append(entry)
            last_of[text] = entry
    return {**content, "added_tokens": entries}
