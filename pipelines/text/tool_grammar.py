"""Build grammars of tool calls, in llguidance's dialect of Lark, from a `ToolFormat`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.tool_formats import ID, KEY, ToolFormat

# Keywords that don't constrain values by themselves: annotations and definitions.
ANNOTATIONS = {"description", "title", "default", "examples", "$schema", "$defs", "definitions"}
TEXT = "/(.|\\n)*/"
# The schema key for llguidance's options, which a client's schema may not set.
OPTIONS = "x-guidance"


class ToolGrammar:
    """A builder of a Lark grammar for tool calls; special: ids of special tokens by text."""

    def __init__(self, form: ToolFormat, special: Mapping[str, int], options: Mapping[str, Any]):
        self.form, self.special, self.options = form, special, options
        names = sorted([ID, *special], key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)).join("()"))
        self.rules: list[str] = []
        # Whether JSON may be the answer instead of a call.
        self.mixed = False

    def text(self, schemas: Mapping[str, Any], parallel: bool, answer: Any = None, free: bool = False) -> str:
        """Return the Lark grammar of a text with a tool call.

        Args:
            schemas: JSON schemas of the functions' parameters, by function name.
            parallel: whether several calls are allowed.
            answer: a JSON schema; JSON of this schema is allowed instead of a call.
            free: whether other text is allowed around calls; if so, the format must have a start
                mark.

        Raises:
            PipelineError: a schema cannot be enforced, because the format does not write arguments
                as JSON.
        """
        form, self.mixed = self.form, answer is not None and not self.form.triggers
        self.rules.append(f"call: {' | '.join(self._call(name, schema) for name, schema in schemas.items())}")
        opening = "" if self.mixed else form.section_begin + form.begin
        more = f" ({self.mark(form.separator + form.begin)} call)*" if parallel and not self.mixed else ""
        text = f"{self.mark(opening)} call{more} {self.mark(form.section_end)}"
        if free:
            trigger = form.triggers[0]
            self.rules.append(f"OTHER: {TEXT}")
            rest = f"{self._until(trigger)} {self.mark(opening.removeprefix(trigger))} call"
            section = f"{rest}{more} {self.mark(form.section_end)}"
            text = f"({section if form.section_begin else rest})* OTHER" if form.close else f"{section} | OTHER"
        if answer is not None:
            text = f"{text} | {self._value(answer, {})}"
        return "\n".join(["%llguidance {}", f"start: {text}", *self.rules, "ID: /[0-9A-Za-z]{1,9}/", ""])

    def _call(self, name: str, schema: Any) -> str:
        """Return the Lark expression for a call of the function `name`, from the name on.

        The text before the name is the same for all functions. The expression includes this text in
        Harmony, and if the answer may be JSON instead of a call (`self.mixed`).
        """
        form = self.form
        if form.style == "harmony":
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return f"{self.mark(head)} {self._arguments(schema)}"
        write = {"json": self._json, "python": self._python, "tags": self._tags, "gemma": self._gemma}[form.style]
        if self.mixed:
            # Use the same lexemes as an answer in JSON, because llguidance would prefer a longer lexeme.
            return f"{self._lexemes(form.begin + name + form.head)} {write(name, schema)} {self._lexemes(form.end)}"
        return f"{self.mark(name + form.head)} {write(name, schema)} {self.mark(form.end)}"

    def _lexemes(self, text: str) -> str:
        """Return Lark strings for the JSON tokens in `text`: strings, brackets, and separators.

        Separators get the white space of `self.options`, as ", ".
        """
        spaced = {",": self.options["item_separator"], ":": self.options["key_separator"]}
        return " ".join(quoted(spaced.get(part, part)) for part in re.findall(r'"[^"]*"|[{}\[\],:]', text))

    def mark(self, text: str) -> str:
        """Return the Lark expression for a text of the tool format, such as a start mark.

        Each special token in it stays one token, and `ID` matches any identifier.
        """
        write = lambda part: "ID" if part == ID else f"<[{self.special[part]}]>" if part in self.special else quoted(part)
        return " ".join(map(write, self._parts(text)))

    def _parts(self, text: str) -> list[str]:
        return [part for part in self._names.split(text) if part]

    def _until(self, end: str) -> str:
        """Return the Lark expression for any text up to and including the first `end`."""
        parts = self._parts(end)
        if parts == [end] and end not in self.special:
            return self._rule(f"{TEXT} {quoted(end)}", "[lazy]")
        # If `end` has a special token, that token ends the text, which must end in the part of `end` before the token.
        before = "" if parts[0] in self.special else parts[0]
        pattern = f"{TEXT[:-1]}{re.escape(before).replace('/', chr(92) + '/')}/" if before else TEXT
        return f"{pattern} {self.mark(end.removeprefix(before))}"

    def _rule(self, body: str, attributes: str = "") -> str:
        """Add a rule to the grammar; return its name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        shared = {key: value for key, value in root.items() if key in ("$defs", "definitions")}
        schema = schema if isinstance(schema, dict) else {}
        return self._rule(f"%json {json.dumps({**shared, **schema, OPTIONS: self.options})}")

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        # Arguments are an object, even if the schema does not state it.
        return self._value({"type": "object", **schema}, {})

    def _json(self, name: str, schema: Any) -> str:
        return self._arguments(schema)

    def _python(self, name: str, schema: Any) -> str:
        write = lambda key, value: f"{quoted(f'{key}=')} {self._value(value, schema)}"
        return self._members(name, schema, write, ", ")

    def _tags(self, name: str, schema: Any) -> str:
        form = self.form

        def write(key: str, value: Any) -> str:
            kind, end = type_of(value), form.value_end.replace(KEY, key)
            texts = form.key_end if kind is None else {kind: form.key_end.get(kind, form.key_end.get("", ""))}
            text = lambda of: f"{self.mark(form.key_begin + key + texts[of])}"
            of_string = f"{text('string')} {self._string(name, value, end)}" if "string" in texts else ""
            others = dict.fromkeys(
                f"{text(of)} {self._value(value, schema)} {self.mark(end)}" for of in texts if of != "string"
            )
            return f"({' | '.join(filter(None, [of_string, *others]))})"

        return self._members(name, schema, write, "")

    def _gemma(self, name: str, schema: Any) -> str:
        return self._gemma_value(name, {"type": "object", **schema})

    def _gemma_value(self, name: str, schema: Any) -> str:
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
        """Return the Lark expression for an unquoted string and the text `end` after it."""
        known = schema.keys() - ANNOTATIONS - {"type"}
        if not known:
            return self._until(end)
        if known <= {"enum", "const"} and are_strings(values := schema.get("enum", [schema.get("const")])):
            return f"({' | '.join(map(quoted, values))}) {self.mark(end)}"
        raise self._refusal(name)

    def _members(self, name: str, schema: Any, write: Callable[[str, Any], str], between: str) -> str:
        """Return the name of a rule for an object's properties, in the order of the schema.

        write: returns the Lark expression for (key, schema of the value). between: text between
        properties. Optional properties may be left out.
        """
        if schema.keys() - ANNOTATIONS - {"type", "properties", "required", "additionalProperties"}:
            raise self._refusal(name)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not (isinstance(properties, dict) and isinstance(required, list)):
            raise self._refusal(name)
        # Rules for the rest of the properties: `first` if none was written before, `rest` otherwise.
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
    """Return a text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def type_of(schema: Any) -> str | None:
    """Return the JSON type of a schema's values; None if several types are allowed."""
    if not isinstance(schema, dict):
        return None
    if "type" not in schema and are_strings(schema.get("enum")):
        return "string"
    return schema.get("type") if isinstance(schema.get("type"), str) else None


def are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
