"""The formats in which models write tool calls: how calls are read, and grammars of calls."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from castiron.pipelines.errors import PipelineError

Call = tuple[str, str]
# Keywords that don't constrain values by themselves: annotations and definitions.
ANNOTATIONS = {"description", "title", "default", "examples", "$schema", "$defs", "definitions"}
TEXT = "/(.|\\n)*/"
# The key of llguidance's options, which a schema may not set.
OPTIONS = "x-guidance"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    `kind`: how a call is written, between the marks `begin` and `end`. Without `begin` a text of
    JSON is a call; without `end` the end of the text ends it. `signs`: a template of this format
    contains one of these texts. `quote`: mark around strings. `arguments`: the key of the arguments
    in JSON. `marks`: other special tokens in calls.
    """

    name: str
    kind: str
    begin: str
    end: str
    signs: tuple[str, ...]
    quote: str = '"'
    arguments: str = "arguments"
    marks: tuple[str, ...] = ()


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
# By name; the first format that matches a template is the template's.
FORMATS = {
    form.name: form
    for form in (
        ToolFormat("harmony", "harmony", "<|channel|>", "", ("<|channel|>analysis",),
                 marks=HARMONY_MARKS),
        ToolFormat("mistral-args", "named", "[TOOL_CALLS]", "", ("[ARGS]",), marks=("[ARGS]",)),
        ToolFormat("mistral", "list", "[TOOL_CALLS]", "", ("[TOOL_CALLS]",)),
        ToolFormat("gemma4", "gemma", "<|tool_call>", "<tool_call|>", ("<|tool_call>",), '<|"|>', marks=('<|"|>',)),
        ToolFormat("functiongemma", "gemma", "<start_function_call>", "<end_function_call>", ("<start_function_call>",),
                 "<escape>", marks=("<escape>",)),
        ToolFormat("lfm2", "python", "<|tool_call_start|>", "<|tool_call_end|>",
                 ("<|tool_call_start|>", "<|tool_list_start|>", "<|tool_response_start|>")),
        ToolFormat("qwen-xml", "xml", "<tool_call>", "</tool_call>", ("<function=",)),
        ToolFormat("hermes", "json", "<tool_call>", "</tool_call>", ("<tool_call>",)),
        ToolFormat("llama3", "json", "", "", ('"parameters": dictionary',), arguments="parameters", marks=("<|python_tag|>",)),
    )
}  # fmt: skip


def format_of(template: str | None) -> str | None:
    """Return the name of a chat template's tool format; None if it is not known."""
    return next((name for name, form in FORMATS.items() if any(sign in (template or "") for sign in form.signs)), None)


def read(form: ToolFormat, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a complete payload as (name, arguments in JSON); ValueError without one.

    `schemas` of the functions' parameters give the types in formats that do not write them.
    """
    try:
        return READERS[form.kind](form, payload.strip(), schemas)
    except (ValueError, SyntaxError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"no calls: {error}") from None


def _json(form: ToolFormat, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    value = json.loads(payload)
    found = value if isinstance(value, list) else [value]
    return [(_name(each["name"]), _arguments(each.get("arguments", each.get("parameters", {})))) for each in found]


def _named(form: ToolFormat, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    name, _, arguments = payload.partition("[ARGS]")
    return [(_name(name.partition("[")[0].strip()), _arguments(json.loads(arguments)))]


def _python(form: ToolFormat, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """Read [f(a="x", b=1), g()], also with JSON's true, false and null."""

    class Constants(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Constant:
            return ast.Constant({"true": True, "false": False, "null": None}[node.id])

    value = lambda node: ast.literal_eval(Constants().visit(node))
    calls = ast.parse(payload, mode="eval").body
    found = calls.elts if isinstance(calls, ast.List) else [calls]
    return [
        (_name(ast.unparse(call.func)), _arguments({word.arg: value(word.value) for word in call.keywords})) for call in found
    ]


def _gemma(form: ToolFormat, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """Read call:name{key:<|"|>text<|"|>,other:[1,true]}: JSON whose strings have other quotes."""
    head = re.match(r"call:([^{]+)\{", payload)
    parts = payload[head.end() - 1 :].split(form.quote)
    if len(parts) % 2 == 0:
        raise ValueError("an unterminated string")
    with_quotes = lambda keys: re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', keys)
    parts = [json.dumps(part) if index % 2 else with_quotes(part) for index, part in enumerate(parts)]
    return [(_name(head[1].strip()), _arguments(json.loads("".join(parts))))]


def _xml(form: ToolFormat, payload: str, schemas: Mapping[str, Any]) -> list[Call]:
    """Read <function=name> with <parameter=key> lines; the schema has their types."""
    name, body = re.fullmatch(r"(?s)<function=([^>]+)>(.*?)(?:</function>)?\s*", payload).groups()
    known = (schemas.get(name) or {}).get("properties") or {}
    arguments = {}
    # A value may hold a closing tag, but not one before another parameter or at the end.
    for key, text in re.findall(r"(?s)<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", body):
        kinds = known.get(key, {}).get("type") if isinstance(known.get(key), dict) else None
        arguments[key] = text
        if kinds != "string":
            with contextlib.suppress(ValueError):
                value = json.loads(text)
                # Models write strings without quotes; grammars quote strings that could be another
                # value.
                if "string" not in (kinds or ()) or value is None or isinstance(value, str):
                    arguments[key] = value
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
        raise ValueError("arguments that are not an object")
    return json.dumps(value, ensure_ascii=False)


class ToolGrammar:
    """Builds a Lark grammar of calls.

    `special`: the ids of marks that are special tokens, by name. `options`: llguidance's for JSON.
    """

    def __init__(self, form: str, special: Mapping[str, int], options: Mapping[str, Any]):
        self.form, self.special, self.options = FORMATS[form], special, options
        self.rules: list[str] = []
        # Whether JSON may be the answer instead of a call.
        self.mixed = False

    def text(self, schemas: Mapping[str, Any], parallel: bool, answer: Any = None, free: bool = False) -> str:
        """Return the grammar, in Lark, of one call of a function.

        Args:
            schemas: JSON schemas of the functions' parameters, by name.
            parallel: allow several calls.
            answer: a JSON schema; allow JSON of that schema instead.
            free: allow any text around calls, in a format with a start mark.

        Raises:
            PipelineError: a format without JSON cannot enforce a schema.
        """
        form, self.mixed = self.form, answer is not None and not self.form.begin
        write = getattr(self, f"_{form.kind}")
        calls = " | ".join(write(name, schema) for name, schema in schemas.items())
        self.rules.append(f"call: {calls}")
        # Harmony's calls start with a channel of their own.
        begin, end = self.mark(form.begin) if form.kind != "harmony" else "", self.mark(form.end)
        line = quoted("\n")
        calls_list = f'"[" call{" (" + quoted(", ") + " call)*" if parallel else ""} "]"'
        # Rules for the text after the start mark.
        bodies = {
            "json": f"{line} call {line} {end}" if begin else "call",
            "xml": f"{line} call {line} {end}",
            "list": calls_list,
            "python": f"{calls_list} {end}",
            "named": "call",
            "gemma": f"call {end}",
            "harmony": "call",
        }
        body, between = bodies[form.kind], line if form.kind in ("json", "xml") else ""
        more = f" ({between} {begin} {body})*" if parallel and begin and form.kind in ("json", "xml", "named", "gemma") else ""
        text = f"{begin} {body}{more}"
        if free:
            # The first mark ends the text before it.
            lazy = "" if form.begin in self.special else "[lazy]"
            self.rules += [f"OTHER: {TEXT}", f"lead{lazy}: OTHER {begin}"]
            text = f"(lead {body})* OTHER" if form.end else f"lead {body}{more} | OTHER"
        if answer is not None:
            text = f"{text} | {self._value(answer, {})}"
        return "\n".join(["%llguidance {}", f"start: {text}", *self.rules, ""])

    def mark(self, text: str) -> str:
        """Return a mark as the special token or the text that the model writes."""
        if not text:
            return ""
        return f"<[{self.special[text]}]>" if text in self.special else quoted(text)

    def _rule(self, body: str, attributes: str = "") -> str:
        """Add a rule with this body to the grammar; return the rule's name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the rule of the JSON values of a schema; `root`: the schema that contains it."""
        shared = {key: value for key, value in root.items() if key in ("$defs", "definitions")}
        schema = schema if isinstance(schema, dict) else {}
        return self._rule(f"%json {json.dumps({**shared, **schema, OPTIONS: self.options})}")

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        # A function takes an object, even if its schema doesn't say so.
        return self._value({"type": "object", **schema}, {})

    def _json(self, name: str, schema: Any) -> str:
        if self.mixed:
            # Use the lexemes that an answer in JSON has: llguidance would prefer a longer lexeme.
            item, key = self.options["item_separator"], self.options["key_separator"]
            words = ["{", '"name"', key, json.dumps(name), item, f'"{self.form.arguments}"', key]
            return f"{' '.join(map(quoted, words))} {self._arguments(schema)} {quoted('}')}"
        head = f'{{"name": {json.dumps(name)}, "{self.form.arguments}": '
        return f"{quoted(head)} {self._arguments(schema)} {quoted('}')}"

    _list = _json

    def _named(self, name: str, schema: Any) -> str:
        return f"{quoted(name)} {self.mark('[ARGS]')} {self._arguments(schema)}"

    def _harmony(self, name: str, schema: Any) -> str:
        head = f"{self.mark('<|channel|>')} {quoted(f'commentary to=functions.{name} ')} {self.mark('<|constrain|>')}"
        return f"{head} {quoted('json')} {self.mark('<|message|>')} {self._arguments(schema)}"

    def _python(self, name: str, schema: Any) -> str:
        write = lambda key, value: f"{quoted(f'{key}=')} {self._value(value, schema)}"
        return f"{quoted(f'{name}(')} {self._members(name, schema, write, ', ')} {quoted(')')}"

    def _xml(self, name: str, schema: Any) -> str:
        def write(key: str, value: Any) -> str:
            start, end = f"<parameter={key}>\n", "\n</parameter>\n"
            if type_of(value) == "string":
                return f"{quoted(start)} {self._string(name, value, end)}"
            return f"{quoted(start)} {self._value(value, schema)} {quoted(end)}"

        start = f"<function={name}>\n"
        return f"{quoted(start)} {self._members(name, schema, write, '')} {quoted('</function>')}"

    def _gemma(self, name: str, schema: Any) -> str:
        return f"{quoted(f'call:{name}')} {self._gemma_value(name, {'type': 'object', **schema})}"

    def _gemma_value(self, name: str, schema: Any) -> str:
        """Return the rule of a value in Gemma's form of JSON, whose strings have other quotes."""
        quote = self.mark(self.form.quote)
        match type_of(schema):
            case "object":
                write = lambda key, value: f"{quoted(f'{key}:')} {self._gemma_value(name, value)}"
                return f"{quoted('{')} {self._members(name, schema, write, ',')} {quoted('}')}"
            case "array" if not schema.keys() - ANNOTATIONS - {"type", "items"}:
                item = self._rule(self._gemma_value(name, schema.get("items", {})))
                return f"{quoted('[')} ({item} ({quoted(',')} {item})*)? {quoted(']')}"
            case "string":
                return f"{quote} {self._string(name, schema, self.form.quote)}"
            case "integer" | "number" | "boolean" | "null":
                return self._value(schema, {})
        raise self._refusal(name)

    def _string(self, name: str, schema: Mapping[str, Any], end: str) -> str:
        """Return the rule of a string without quotes, up to and including the first `end`."""
        known = schema.keys() - ANNOTATIONS - {"type"}
        if not known:
            return f"{TEXT} {self.mark(end)}" if end in self.special else self._rule(f"{TEXT} {quoted(end)}", "[lazy]")
        if known <= {"enum", "const"} and are_strings(values := schema.get("enum", [schema.get("const")])):
            return f"({' | '.join(map(quoted, values))}) {self.mark(end)}"
        raise self._refusal(name)

    def _members(self, name: str, schema: Any, write: Callable[[str, Any], str], between: str) -> str:
        """Return the rule of an object's properties in order; optional ones may be left out."""
        if schema.keys() - ANNOTATIONS - {"type", "properties", "required", "additionalProperties"}:
            raise self._refusal(name)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not (isinstance(properties, dict) and isinstance(required, list)):
            raise self._refusal(name)
        # Rules for what may follow before the first property and after a property.
        first = rest = self._rule('""')
        for key, value in reversed(properties.items()):
            member = self._rule(write(key, value))
            skip = (f" | {first}", f" | {rest}") if key not in required else ("", "")
            first, rest = self._rule(f"{member} {rest}{skip[0]}"), self._rule(f"{quoted(between)} {member} {rest}{skip[1]}")
        return first

    def _refusal(self, name: str) -> PipelineError:
        message = f"the parameters of {name} cannot be enforced in this model's tool format; use plain types and properties"
        return PipelineError(message)


def quoted(text: str) -> str:
    """Return a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def type_of(schema: Any) -> str | None:
    """Return the only JSON type of a schema, "string" for an enum of strings; None for others."""
    if not isinstance(schema, dict):
        return None
    if "type" not in schema and are_strings(schema.get("enum")):
        return "string"
    return schema.get("type") if isinstance(schema.get("type"), str) else None


def are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
