"""The forms in which models write calls of functions, and which of them a chat template has."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Call = tuple[str, str]


@dataclass(frozen=True)
class ToolForm:
    """`begin` and `end` stand around calls, `end` empty where they go on to the end of the text and both where a text that
    is JSON is a call. `kind`: how a call is written. `signs`: what a template of this form says, one of them. `marks`: more
    that a reader must see."""

    name: str
    kind: str
    begin: str
    end: str
    signs: tuple[str, ...]
    quote: str = '"'
    arguments: str = "arguments"
    marks: tuple[str, ...] = ()


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
# Of several that fit the first counts.
FORMS = {
    form.name: form
    for form in (
        ToolForm("harmony", "harmony", "<|channel|>", "", ("<|channel|>analysis",),
                 marks=HARMONY_MARKS),
        ToolForm("mistral-args", "named", "[TOOL_CALLS]", "", ("[ARGS]",), marks=("[ARGS]",)),
        ToolForm("mistral", "list", "[TOOL_CALLS]", "", ("[TOOL_CALLS]",)),
        ToolForm("gemma4", "gemma", "<|tool_call>", "<tool_call|>", ("<|tool_call>",), '<|"|>', marks=('<|"|>',)),
        ToolForm("functiongemma", "gemma", "<start_function_call>", "<end_function_call>", ("<start_function_call>",),
                 "<escape>", marks=("<escape>",)),
        ToolForm("lfm2", "python", "<|tool_call_start|>", "<|tool_call_end|>",
                 ("<|tool_call_start|>", "<|tool_list_start|>", "<|tool_response_start|>")),
        ToolForm("qwen-xml", "xml", "<tool_call>", "</tool_call>", ("<function=",)),
        ToolForm("hermes", "json", "<tool_call>", "</tool_call>", ("<tool_call>",)),
        ToolForm("llama3", "json", "", "", ('"parameters": dictionary',), arguments="parameters", marks=("<|python_tag|>",)),
    )
}  # fmt: skip


def form_of(template: str | None) -> str | None:
    """The name of the form of calls that a chat template has; None for one that has none, or none that is known."""
    return next((name for name, form in FORMS.items() if any(sign in (template or "") for sign in form.signs)), None)


def read(form: ToolForm, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """The calls of a whole payload as (name, arguments in JSON), by the parameters' JSON schemas where their types are not
    written; ValueError for what is none."""
    try:
        return READERS[form.kind](form, payload.strip(), schemas)
    except (ValueError, SyntaxError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"no calls: {error}") from None


def _json(form: ToolForm, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    value = json.loads(payload)
    found = value if isinstance(value, list) else [value]
    return [(_name(each["name"]), _arguments(each.get("arguments", each.get("parameters", {})))) for each in found]


def _named(form: ToolForm, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    name, _, arguments = payload.partition("[ARGS]")
    return [(_name(name.partition("[")[0].strip()), _arguments(json.loads(arguments)))]


def _python(form: ToolForm, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """[f(a="x", b=1), g()], where JSON's true, false and null are understood too."""
    words = {"true": True, "false": False, "null": None}

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Name():
                return words[node.id]
            case ast.List() | ast.Tuple():
                return [value(each) for each in node.elts]
            case ast.Dict():
                return {value(key): value(each) for key, each in zip(node.keys, node.values)}
        return ast.literal_eval(node)

    calls = ast.parse(payload, mode="eval").body
    found = calls.elts if isinstance(calls, ast.List) else [calls]
    return [
        (_name(ast.unparse(call.func)), _arguments({word.arg: value(word.value) for word in call.keywords})) for call in found
    ]


def _gemma(form: ToolForm, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """call:name{key:<|"|>text<|"|>,other:[1,true]}: JSON, but for keys without quotes and quotes that are tokens."""
    head = re.match(r"call:([^{]+)\{", payload)
    texts: list[str] = []
    parts = payload[head.end() - 1 :].split(form.quote)
    if len(parts) % 2 == 0:
        raise ValueError("a text without an end")
    for index, part in enumerate(parts):
        if index % 2:
            texts.append(part)
            parts[index] = f'"{len(texts) - 1}"'
        else:
            parts[index] = re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part)

    def value(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: value(each) for key, each in found.items()}
        if isinstance(found, list):
            return [value(each) for each in found]
        return texts[int(found)] if isinstance(found, str) else found

    return [(_name(head[1].strip()), _arguments(value(json.loads("".join(parts)))))]


def _xml(form: ToolForm, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """<function=name> with <parameter=key> lines, whose types the schema knows."""
    name, body = re.fullmatch(r"(?s)<function=([^>]+)>(.*?)(?:</function>)?\s*", payload).groups()
    known = (schemas.get(name) or {}).get("properties") or {}
    arguments = {}
    for key, text in re.findall(r"(?s)<parameter=([^>]+)>\n?(.*?)\n?</parameter>", body):
        kinds = known.get(key, {}).get("type") if isinstance(known.get(key), dict) else None
        arguments[key] = text
        if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
            with contextlib.suppress(ValueError):
                arguments[key] = json.loads(text)
    return [(_name(name), _arguments(arguments))]


READERS = {"json": _json, "list": _json, "named": _named, "python": _python, "gemma": _gemma, "xml": _xml}


def _name(value: Any) -> str:
    if not (isinstance(value, str) and value):
        raise ValueError("a call without a name")
    return value


def _arguments(value: Any) -> str:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("arguments that are no object")
    return json.dumps(value, ensure_ascii=False)
