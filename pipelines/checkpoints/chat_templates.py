"""Find the chat templates of an HF directory, and join those for requests with and without tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castiron.pipelines.checkpoints.hf_files import json_object, text_of

_FILE, _OLD_FILE, _FOLDER = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
# The files that `read_chat_template` opens; * is any name.
FILES = (_FILE, _OLD_FILE, f"{_FOLDER}/*.jinja")


def read_chat_template(path: Path, fields: Mapping[str, Any]) -> str | None:
    """Return the chat template of the directory `path`, see `join_templates`; None if it has none.

    As in transformers, template files replace those in tokenizer_config.json, and a template named
    `tool_use` is for requests with tools. fields: the content of tokenizer_config.json.
    """
    templates = {"default": text_of(path / _FILE)}
    templates |= {file.stem: text_of(file) for file in sorted((path / _FOLDER).glob("*.jinja"))}
    if not any(templates.values()):
        templates = _named(fields.get("chat_template"))
    if not any(templates.values()):
        templates = _named((json_object(path / _OLD_FILE) or {}).get("chat_template"))
    return join_templates(templates.get("default"), templates.get("tool_use"))


def _named(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    return value if isinstance(value, dict) else {"default": value}


def join_templates(default: Any, tool_use: Any) -> str | None:
    """Return one template that renders `tool_use` for requests with tools, otherwise `default`.

    Values that are not strings count as missing; the result is None if both are missing.
    """
    if not isinstance(tool_use, str) or tool_use == default:
        return default if isinstance(default, str) else None
    if not isinstance(default, str):
        default = "{{ raise_exception('the model has a chat template only for requests with tools') }}"
    # Jinja removes a newline at the end of a template or after a block, and white space before a block.
    ends = [text.removesuffix("\n") + "{{ '' }}" for text in (tool_use, default)]
    return f"{{% if tools %}}\n{ends[0]}{{% else %}}\n{ends[1]}{{% endif %}}"
