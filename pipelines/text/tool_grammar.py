"""A grammar of tool calls in Lark, from the tool format and the functions' JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.json_schema import ANY, NOTHING, UNENFORCED, Schema, is_schema, type_of
from castiron.pipelines.text.tool_formats import ID, KEY, ToolFormat

# Lark's pattern of any text.
TEXT = "/(.|\\n)*/"
# The schema key for llguidance's options, which a client's schema may not set.
OPTIONS = "x-guidance"
# llguidance's options for schemas of which a part may be left out.
LENIENT = {"lenient": True, "coerce_one_of": True}
# Terminals for the placeholders of a format.
TERMINALS = {ID: "ID", KEY: "KEY"}
# Keywords that limit a string which the format writes without quotes.
LIMITING = {"enum", "minLength", "maxLength", "pattern", "format"}
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    "|[0-9]{2}(?:0[48]|[2468][048]|[13579][26])-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1?[1-9]?[0-9]|10[0-9])"
# Regular expressions of the strings of a `format`.
FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL})+", "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}  # fmt: skip
# The name of a function's schema among the definitions of its parts.
ROOT = "root"


class ToolGrammar:
    """A builder of a Lark grammar for tool calls."""

    def __init__(self, form: ToolFormat, special: Mapping[str, int], options: Mapping[str, Any]):
        self.form, self.special, self.options = form, special, options
        names = sorted([*TERMINALS, *special], key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)).join("()"))
        self.rules: list[str] = []
        # Whether JSON may be the answer instead of a call.
        self.mixed = False

    def text(
        self, schemas: Mapping[str, Any], parallel: bool, answer: Any = None, free: bool = False, strict: Collection[str] = ()
    ) -> str:  # fmt: skip
        """Return the Lark grammar of a text with a call; arguments as those of `Tools.grammar`.

        Raise PipelineError if a strict schema cannot be enforced.
        """
        form, self.mixed = self.form, answer is not None and not self.form.triggers
        calls = [_Call(self, name, schema, name in strict).rule() for name, schema in schemas.items()]
        self.rules.append(f"call: {' | '.join(calls)}")
        opening = "" if self.mixed else form.section_begin + form.begin
        more = f" ({self.mark(form.separator + form.begin)} call)*" if parallel and not self.mixed else ""
        text = f"{self.mark(opening)} call{more} {self.mark(form.section_end)}"
        if free:
            trigger = form.triggers[0]
            self.rules.append(f"OTHER: {TEXT}")
            rest = f"{self.until(trigger)} {self.mark(opening.removeprefix(trigger))} call"
            section = f"{rest}{more} {self.mark(form.section_end)}"
            text = f"({section if form.section_begin else rest})* OTHER" if form.close else f"{section} | OTHER"
        if answer is not None:
            text = f"{text} | {self.json(answer, self.options)}"
        terminals = ["ID: /[0-9A-Za-z]{1,9}/", "KEY: /[A-Za-z_][0-9A-Za-z_]{0,63}/"]
        return "\n".join(["%llguidance {}", f"start: {text}", *self.rules, *terminals, ""])

    def lexemes(self, text: str) -> str:
        """Return Lark strings, separated by spaces, that match a part of a tool call in JSON."""
        spaced = {",": self.options["item_separator"], ":": self.options["key_separator"]}
        return " ".join(quoted(spaced.get(part, part)) for part in re.findall(r'"[^"]*"|[{}\[\],:]', text))

    def mark(self, text: str) -> str:
        """Return the Lark expression for a fixed text of a tool call, such as "<tool_call>"."""
        tokens = {mark: f"<[{index}]>" for mark, index in self.special.items()} | TERMINALS
        return " ".join(tokens.get(part) or quoted(part) for part in self._parts(text))

    def _parts(self, text: str) -> list[str]:
        return [part for part in self._names.split(text) if part]

    def until(self, end: str, minimum: int = 0, limit: int | None = None, patterns: Sequence[str] = ()) -> str:
        """Return the Lark expression for any text up to and including the first `end`.

        minimum, limit: min and max characters before it. patterns: regular expressions of that
        text.
        """
        parts, has_limit = self._parts(end), minimum > 0 or limit is not None or bool(patterns)
        if parts == [end] and end not in self.special and not has_limit:
            return self.rule(f"{TEXT} {quoted(end)}", "[lazy]")
        # If `end` has a special token, that token ends the text, which must end in the part of `end` before the token.
        before = "" if parts[0] in self.special else parts[0]
        after, pattern = self.mark(end.removeprefix(before)), _in_lark(re.escape(before))
        if not has_limit:
            return f"{TEXT[:-1]}{pattern}/ {after}"
        # A lexeme is as long as possible, so it has to contain `end`, and only at its end.
        name = f"TEXT_{len(self.rules)}"
        is_first = f" & ~/(.|\\n)*{pattern}(.|\\n)+/" if before else ""
        texts = [f"(?:{_in_lark(each)})" for each in patterns]
        if minimum > 0 or limit is not None:
            texts.append(f"(.|\\n){{{minimum},{'' if limit is None else limit}}}")
        self.rules.append(f"{name}: {' & '.join(f'/{text}{pattern}/' for text in texts)}{is_first}")
        return f"{name} {after}"

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def json(self, schema: Any, options: Mapping[str, Any]) -> str:
        """Return the name of a rule for JSON that matches a schema."""
        schema = schema if isinstance(schema, dict) else NOTHING if schema is False else ANY
        return self.rule(f"%json {json.dumps({**schema, OPTIONS: options})}")


class _Call:
    """A builder of the rules for calls of one function."""

    def __init__(self, grammar: ToolGrammar, name: str, schema: Any, is_strict: bool):
        self.grammar, self.form, self.name, self.is_strict = grammar, grammar.form, name, is_strict
        self.schema = Schema(schema)
        self.options = {**grammar.options, **({} if is_strict else LENIENT)}
        # Rules that may contain themselves, by the key and the id of the schema, and this schema, whose id stays its own.
        self._rules: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}

    def rule(self) -> str:
        """Return the Lark expression of a call, from the name on or the marks before it."""
        form, grammar, name = self.form, self.grammar, self.name
        if form.style == "harmony":
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return f"{grammar.mark(head)} {self._json()}"
        arguments = {"json": self._json, "python": self._python, "tags": self._tags, "gemma": self._gemma}[form.style]()
        if grammar.mixed:
            # Use the same lexemes as an answer in JSON, because llguidance would prefer a longer lexeme.
            return f"{grammar.lexemes(form.begin + name + form.head)} {arguments} {grammar.lexemes(form.end)}"
        return f"{grammar.mark(name + form.head)} {arguments} {grammar.mark(form.end)}"

    def _json(self) -> str:
        # Arguments are an object, even if the schema does not state it.
        return self.grammar.json({**self.schema.root, "type": "object"}, self.options)

    def _python(self) -> str:
        write = lambda key, value: f"{self.grammar.mark(f'{key}=')} {self._value(value)}"
        return self._members(self.schema.root, write, ", ")

    def _tags(self) -> str:
        form, mark = self.form, self.grammar.mark

        def member(key: str, value: Any) -> str:
            # Values in nested tags may contain values of their own schema.
            return self._named(key, value, lambda schema: write(key, schema)) if form.item else f"({write(key, value)})"

        def write(key: str, value: Any) -> str:
            end, found = form.value_end.replace(KEY, key), dict[str, list[tuple[str, dict[str, Any]]]]()
            for kind, each in self._branches(value):
                before = mark(form.key_begin + key + form.key_end.get(kind, form.key_end.get("", "")))
                found.setdefault(before, []).append((kind, each))
            return " | ".join(f"{before} ({values(branches, end)})" for before, branches in found.items())

        def values(branches: list[tuple[str, dict[str, Any]]], end: str) -> str:
            # The text of a string may be that of any other value.
            any_text = [each for kind, each in branches if kind == "string" and not each.keys() & LIMITING]
            return " | ".join(
                self._string(each, end) if kind == "string" else f"{nested(kind, each)} {mark(end)}"
                for kind, each in ([("string", any_text[0])] if any_text else branches)
            )

        def nested(kind: str, schema: dict[str, Any]) -> str:
            if not form.item or kind not in ("array", "object") or "enum" in schema:
                return self._value(schema)
            if kind == "object":
                return self._members(schema, member, "")
            self._check(schema, {"type", "items"})
            return f"{member(form.item, self.schema.members(schema).items)}*"

        return self._members(self.schema.root, member, "")

    def _gemma(self) -> str:
        return self._gemma_object(self.schema.root)

    def _gemma_object(self, schema: Any) -> str:
        write = lambda key, value: f"{self.grammar.mark(f'{key}:')} {self._gemma_value(value)}"
        return f"{quoted('{')} {self._members(schema, write, ',')} {quoted('}')}"

    def _gemma_value(self, schema: Any) -> str:
        branches = lambda schema: " | ".join(self._gemma_branch(kind, each) for kind, each in self._branches(schema))
        return self._named("", schema, branches)

    def _named(self, key: str, schema: Any, body: Callable[[dict[str, Any]], str]) -> str:
        """Return the name of the rule `body(schema)`, which may contain itself."""
        schema = self._normalised(schema)
        if (key, id(schema)) not in self._rules:
            name, index = self.grammar.rule(""), len(self.grammar.rules) - 1
            self._rules[key, id(schema)] = name, schema
            self.grammar.rules[index] = f"{name}: {body(schema)}"
        return self._rules[key, id(schema)][0]

    def _gemma_branch(self, kind: str, schema: dict[str, Any]) -> str:
        form, mark = self.form, self.grammar.mark
        if kind == "object":
            return self._gemma_object(schema)
        if kind == "array":
            self._check(schema, {"type", "items"})
            item = self._gemma_value(schema.get("items", ANY))
            return f"{quoted('[')} ({item} ({quoted(',')} {item})*)? {quoted(']')}"
        return f"{mark(form.quote)} {self._string(schema, form.quote)}" if kind == "string" else self._value(schema)

    def _branches(self, schema: Any) -> list[tuple[str, dict[str, Any]]]:
        """Return `_by_type(schema)`; if nothing matches, raise PipelineError or allow all."""
        found = self._by_type(schema)
        if self.is_strict and not found:
            raise self._refusal()
        return found or self._by_type(ANY)

    def _by_type(self, schema: Any) -> list[tuple[str, dict[str, Any]]]:
        """Divide a part of the schema into (JSON type, schema of values of this type)."""
        schema = self._normalised(schema)
        keys = schema.keys() - UNENFORCED
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            found: dict[str, list[Any]] = {}
            for value in values:
                if self.schema.allows(value, schema):
                    found.setdefault(type_of(value), []).append(value)
            return [(kind, {"enum": values}) for kind, values in found.items()]
        if keys == {"$ref"} and (target := self.schema.target(schema["$ref"])) is not None:
            return self._by_type(target)
        for key in ("anyOf", "allOf", "oneOf"):
            options = schema[key] if keys == {key} and isinstance(schema[key], list) else []
            if options and (key == "anyOf" or len(options) == 1 or key == "oneOf" and self._is_disjoint(options)):
                return [branch for each in options for branch in self._by_type(each)]
        kinds = self.schema.types(schema)
        kinds = [kind for kind in kinds if kind != "integer" or "number" not in kinds]
        has_parts = bool(keys & {"anyOf", "oneOf", "allOf", "$ref"})
        return [(kind, {"allOf": [schema], "type": kind} if has_parts else {**schema, "type": kind}) for kind in kinds]

    def _is_disjoint(self, options: list[Any]) -> bool:
        """Whether at most one of `options` can match a value, or this does not matter."""
        types = [{kind.replace("integer", "number") for kind in self.schema.types(each)} for each in options]
        return not self.is_strict or sum(map(len, types)) == len(set().union(*types))

    def _normalised(self, schema: Any) -> dict[str, Any]:
        """Return a part of the schema as an object; if strict, reject what is no schema."""
        if self.is_strict and not is_schema(schema):
            raise self._refusal()
        return schema if isinstance(schema, dict) else NOTHING if schema is False else ANY

    def _value(self, schema: Any) -> str:
        """Return the name of a rule for JSON that matches a part of the function's schema."""
        schema = self._normalised(schema)
        if '"$ref"' in json.dumps(schema):
            # References lead to the function's schema, from which the part is taken.
            root = {key: value for key, value in self.schema.root.items() if key not in ("$id", "$schema")}
            schema = {**_moved(schema), "$defs": {ROOT: _moved(root)}}
        return self.grammar.json(schema, self.options)

    def _string(self, schema: Mapping[str, Any], end: str) -> str:
        """Return the Lark expression for a string without quotes, followed by the text `end`."""
        if isinstance(values := schema.get("enum"), list):
            return f"({' | '.join(map(quoted, values))}) {self.grammar.mark(end)}"
        lengths = {key: schema[key] for key in ("minLength", "maxLength") if isinstance(schema.get(key), int)}
        known = {"pattern": _complete(schema.get("pattern")), "format": FORMATS.get(str(schema.get("format")))}
        patterns = {keyword: pattern for keyword, pattern in known.items() if pattern is not None}
        self._check(schema, {"type", *lengths, *patterns})
        return self.grammar.until(end, lengths.get("minLength", 0), lengths.get("maxLength"), list(patterns.values()))

    def _members(self, schema: Any, write: Callable[[str, Any], str], between: str) -> str:
        """Return the name of a rule for the properties of an object, in the schema's order."""
        rule, members = self.grammar.rule, self.schema.members(schema)
        if self.is_strict and not members.is_exact:
            raise self._refusal()
        # Rules for the rest of the properties: `first` if none was written before, `rest` otherwise.
        first = rest = rule('""')
        # Without properties, any keys are allowed, except where a tag's name is a key.
        if not members.properties and members.rest not in (None, False) and KEY not in self.form.value_end:
            member = rule(write(KEY, members.rest))
            first = rule(f"({member} ({quoted(between)} {member})*)?" if between else f"{member}*")
        for key, value in reversed(members.properties.items()):
            member = rule(write(key, value))
            skip = (f" | {first}", f" | {rest}") if key not in members.required else ("", "")
            first, rest = rule(f"{member} {rest}{skip[0]}"), rule(f"{quoted(between)} {member} {rest}{skip[1]}")
        return first

    def _check(self, schema: Mapping[str, Any], enforced: set[str]) -> None:
        """Raise PipelineError if a strict schema has other keywords than those `enforced`."""
        if self.is_strict and schema.keys() - UNENFORCED - enforced:
            raise self._refusal()

    def _refusal(self) -> PipelineError:
        return PipelineError(
            f"the parameters of {self.name} cannot be enforced in this model's tool format; use plain types and properties, "
            "or leave strict out"
        )


def _moved(schema: Any) -> Any:
    """Return a schema whose references lead to `ROOT` among its definitions."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_ref = isinstance(ref := schema.get("$ref"), str) and ref.startswith("#")
    return {key: _moved(value) for key, value in schema.items()} | ({"$ref": f"#/$defs/{ROOT}{ref[1:]}"} if is_ref else {})


def _complete(pattern: Any) -> str | None:
    """Return an expression of the complete texts in which `pattern` occurs; None if it cannot."""
    if not isinstance(pattern, str):
        return None
    is_start, is_end = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern)
    # Remove escapes, classes and groups: an anchor belongs to one of several alternatives.
    outer, before = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern), ""
    while outer != before:
        outer, before = re.sub(r"\([^()]*\)", "", outer), outer
    if "|" in outer and (is_start or is_end):
        return None
    inner = pattern[is_start : len(pattern) - bool(is_end)]
    return f"{'' if is_start else TEXT[1:-1]}(?:{inner}){'' if is_end else TEXT[1:-1]}"


def _in_lark(pattern: str) -> str:
    """Return a regular expression as Lark has it between slashes."""
    return re.sub(r"\\?\n", r"\\n", re.sub(r"(?s)\\/|/", r"\\/", pattern))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
