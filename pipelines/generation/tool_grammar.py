"""The grammar of a text that is calls of functions, or an answer of a form of its own, in the form of a template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.grammar import JSON_OPTIONS, without_idle
from castiron.pipelines.generation.tool_forms import ToolForm

# Of a schema, what says nothing about its values.
WORDS = {"description", "title", "default", "examples", "$schema", "$defs", "definitions"}


class ToolGrammar:
    """Builds Lark's text; `special` has the ids of marks that are one token and no text."""

    def __init__(self, form: ToolForm, special: Mapping[str, int]):
        self.form, self.special = form, special
        self.rules: list[str] = []
        # Whether a text of JSON may be something else than a call.
        self.mixed = False

    def text(self, schemas: Mapping[str, Any], parallel: bool, answer: Any = None, free: bool = False) -> str:
        """Of one call of any function of `schemas`, by the JSON schemas of their parameters, or with `parallel` of more, or
        with `answer` of JSON that holds to that schema, or where the text is `free` of any words, with such calls among them or
        behind them, in a form that has a mark for calls; PipelineError for parameters that a form without JSON cannot be held
        to."""
        form, self.mixed = self.form, answer is not None and not self.form.begin
        write = getattr(self, f"_{form.kind}")
        calls = " | ".join(write(name, without_idle(schema)) for name, schema in schemas.items())
        self.rules.append(f"call: {calls}")
        # Harmony's calls begin with a channel of their own.
        begin, end = self.mark(form.begin) if form.kind != "harmony" else "", self.mark(form.end)
        line = quoted("\n")
        several = f'"[" call{" (" + quoted(", ") + " call)*" if parallel else ""} "]"'
        # What stands behind the mark.
        bodies = {
            "json": f"{line} call {line} {end}" if begin else "call",
            "xml": f"{line} call {line} {end}",
            "list": several,
            "python": f"{several} {end}",
            "named": "call",
            "gemma": f"call {end}",
            "harmony": "call",
        }
        body, between = bodies[form.kind], line if form.kind in ("json", "xml") else ""
        more = f" ({between} {begin} {body})*" if parallel and begin and form.kind in ("json", "xml", "named", "gemma") else ""
        whole = f"{begin} {body}{more}"
        if free:
            # The first mark that comes ends the words before it.
            lazy = "" if form.begin in self.special else "[lazy]"
            self.rules += ["WORDS: /(.|\\n)*/", f"lead{lazy}: WORDS {begin}"]
            whole = f"(lead {body})* WORDS" if form.end else f"lead {body}{more} | WORDS"
        if answer is not None:
            whole = f"{whole} | {self._value(without_idle(answer), {})}"
        return "\n".join(["%llguidance {}", f"start: {whole}", *self.rules, ""])

    def mark(self, text: str) -> str:
        """A mark as the token or the text that the model writes."""
        if not text:
            return ""
        return f"<[{self.special[text]}]>" if text in self.special else quoted(text)

    def _rule(self, body: str) -> str:
        """The name of a new rule."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """JSON of a schema that is part of `root`."""
        shared = {key: value for key, value in root.items() if key in ("$defs", "definitions")}
        schema = schema if isinstance(schema, dict) else {}
        return self._rule(f"%json {json.dumps({**shared, **schema, 'x-guidance': JSON_OPTIONS})}")

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        # What is called takes an object, whatever its schema leaves open.
        return self._value({"type": "object", **schema}, {})

    def _json(self, name: str, schema: Any) -> str:
        if self.mixed:
            # In the lexemes that JSON of a schema has, of which the longest would leave no other.
            words = ["{", '"name"', ":", json.dumps(name), ",", f'"{self.form.arguments}"', ":"]
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
            plain = self._texts(name, value) if kind(value) == "string" else self._value(value, schema)
            start, end = f"<parameter={key}>\n", "\n</parameter>\n"
            return f"{quoted(start)} {plain} {quoted(end)}"

        start = f"<function={name}>\n"
        return f"{quoted(start)} {self._members(name, schema, write, '')} {quoted('</function>')}"

    def _gemma(self, name: str, schema: Any) -> str:
        return f"{quoted(f'call:{name}')} {self._gemma_value(name, {'type': 'object', **schema})}"

    def _gemma_value(self, name: str, schema: Any) -> str:
        """JSON without quotes around keys, and tokens for quotes."""
        quote = self.mark(self.form.quote)
        match kind(schema):
            case "object":
                write = lambda key, value: f"{quoted(f'{key}:')} {self._gemma_value(name, value)}"
                return f"{quoted('{')} {self._members(name, schema, write, ',')} {quoted('}')}"
            case "array" if not schema.keys() - WORDS - {"type", "items"}:
                item = self._rule(self._gemma_value(name, schema.get("items", {})))
                return f"{quoted('[')} ({item} ({quoted(',')} {item})*)? {quoted(']')}"
            case "string":
                return f"{quote} {self._texts(name, schema)} {quote}"
            case "integer" | "number" | "boolean" | "null":
                return self._value(schema, {})
        raise self._refusal(name)

    def _texts(self, name: str, schema: Mapping[str, Any]) -> str:
        """A string that stands without its quotes."""
        known = schema.keys() - WORDS - {"type"}
        if not known:
            return "/[^<]*/"
        if known <= {"enum", "const"} and _are_texts(texts := schema.get("enum", [schema.get("const")])):
            return f"({' | '.join(map(quoted, texts))})"
        raise self._refusal(name)

    def _members(self, name: str, schema: Any, write: Callable[[str, Any], str], between: str) -> str:
        """The properties of an object in their order, those that are not required or not."""
        if schema.keys() - WORDS - {"type", "properties", "required", "additionalProperties"}:
            raise self._refusal(name)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not (isinstance(properties, dict) and isinstance(required, list)):
            raise self._refusal(name)
        # What may follow where nothing is written yet, and where something is.
        first = rest = self._rule('""')
        for key, value in reversed(properties.items()):
            member = self._rule(write(key, value))
            skip = (f" | {first}", f" | {rest}") if key not in required else ("", "")
            first, rest = self._rule(f"{member} {rest}{skip[0]}"), self._rule(f"{quoted(between)} {member} {rest}{skip[1]}")
        return first

    def _refusal(self, name: str) -> PipelineError:
        message = f"the parameters of {name} cannot be held to in this model's form of calls; give plain types and properties"
        return PipelineError(message)


def kind(schema: Any) -> str | None:
    """The one type that a schema has, of an enum without one that of its values."""
    if not isinstance(schema, dict):
        return None
    if "type" not in schema and _are_texts(schema.get("enum")):
        return "string"
    return schema.get("type") if isinstance(schema.get("type"), str) else None


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)
