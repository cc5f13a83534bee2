"""The formats in which models write tool calls, and the parser of calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.json_schema import Schema
from castiron.vmfb.bundle.json_record import RecordError, from_json, short
from castiron.vmfb.bundle.manifest import Manifest

# Placeholders in the texts of a format: a call's id or index, and an argument's key.
ID, KEY = "⟨id⟩", "⟨key⟩"
STYLES = ("json", "tags", "python", "gemma", "harmony")
# Keys of `ToolFormat.key_end`: the types of JSON, or "" for any.
KINDS = ("", "string", "integer", "number", "boolean", "null", "array", "object")
# Matches marks such as <tool_call> or [TOOL_CALLS] at the start of a text, and the word after them.
_MARKS = re.compile(r"(?:<[^<>\s]+>|\[[A-Z_/]+\])+\w*")


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a model writes tool calls: the fixed texts around names and arguments.

    Calls are `section_begin`, the calls separated by `separator`, `section_end`. A call is `begin`,
    the name, `head`, the arguments, `end`. `ID` in these texts stands for an identifier of the
    model's.

    style: "json": an object. "tags": keys and values between texts: `key_begin`, the key, `key_end`
    by the value's JSON type ("" for any), the value, `value_end`, in which `KEY` stands for the
    key. "python": keyword arguments. "gemma": JSON with `quote` around strings and none around
    keys. "harmony": messages of gpt-oss; other fields are unused. item: for "tags", the key of a
    list's items, if lists and objects are tags too. is_python: for "tags", whether they are
    Python's.
    """

    style: str
    begin: str = ""
    head: str = ""
    end: str = ""
    separator: str = ""
    section_begin: str = ""
    section_end: str = ""
    key_begin: str = ""
    key_end: dict[str, str] = field(default_factory=dict)
    value_end: str = ""
    quote: str = '"'
    item: str = ""
    is_python: bool = False

    @staticmethod
    def of(manifest: Manifest) -> ToolFormat | None:
        """Return the tool format of a bundle, or None; raise PipelineError if it is invalid."""
        try:
            form = from_json(ToolFormat | None, manifest.tool_format, "tool_format")
            if form and form.style not in STYLES:
                raise RecordError(f"tool_format.style is {short(repr(form.style))}; use one of {', '.join(STYLES)}")
            if form and (unknown := sorted(form.key_end.keys() - set(KINDS))):
                types = ", ".join(filter(None, KINDS))
                raise RecordError(f"tool_format.key_end has the unknown JSON type {short(repr(unknown[0]))}; use {types}")
        except RecordError as error:
            raise PipelineError(f"{manifest.name} has an invalid manifest: {error}; compile the bundle again") from None
        return form

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that start calls, such as "<tool_call>"; none for bare JSON."""
        found = (_trigger(text) for text in (self.section_begin + self.begin, self.begin))
        return tuple(dict.fromkeys(text for text in found if text))

    @property
    def close(self) -> str:
        """The text that ends calls, such as "</tool_call>"; "" if the text's end does."""
        return "".join((self.section_end if self.section_begin else self.end).lstrip(" \n]})").split()[-1:])

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the format, which may contain special tokens."""
        if self.style == "harmony":
            return HARMONY_MARKS
        return (
            self.section_begin, self.begin, self.head, self.end, self.separator, self.section_end, self.key_begin,
            *self.key_end.values(), self.value_end, self.quote,
        )  # fmt: skip

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of `calls`, each (name, text of the arguments), in this format."""
        written = [f"{self.begin}{name}{self.head}{arguments}{self.end}" for name, arguments in calls]
        return self.section_begin + self.separator.join(written) + self.section_end

    def arguments(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of a call's arguments; the style is json or python."""
        if self.style == "python":
            return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return json.dumps(arguments, ensure_ascii=False)

    def example(self) -> str:
        """Return an example of a call in this format, on one line, to show to users."""
        if self.style == "harmony":
            return "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}"
        tags = f"{self.key_begin}key{next(iter(self.key_end.values()), '')}value{self.value_end}"
        text = self.write([("name", tags if self.style == "tags" else "{…}" if self.style != "python" else "…")])
        return " ".join(text.replace(KEY, "key").replace(ID, "id").split())


def _trigger(text: str) -> str:
    """Return the fixed text that starts a call, from the `text` before its name."""
    marks = _MARKS.match(text)
    return marks[0] if marks else re.split(rf"{ID}|(?<!\w)\[?\{{|\{{", text)[0].rstrip()


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
HERMES = ToolFormat("json", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
_PYTHON = ToolFormat(
    "python", "", "(", ")", ", ", section_begin="<|tool_call_start|>[", section_end="]<|tool_call_end|>"
)  # fmt: skip
_DEEPSEEK = ToolFormat(
    "json", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
_GRANITE = ToolFormat("json", '{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]")
_KIMI = ToolFormat(
    "json", "<|tool_call_begin|>functions.", f":{ID}<|tool_call_argument_begin|>", "<|tool_call_end|>", "",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
)  # fmt: skip
_COMMAND_R = ToolFormat(
    "json", '{\n        "tool_name": "', '",\n        "parameters": ', "\n    }", ",\n    ",
    "Action: ```json\n[\n    ", "\n]```",
)  # fmt: skip
_FUNCTOOLS = ToolFormat("json", '{"name": "', '", "arguments": ', "}", ", ", "functools[", "]")
# Formats that cannot be derived, because the template writes no calls or writes them differently:
# (a text in the template that identifies it, the format). Sources: the models' cards and llama.cpp's common/chat.cpp.
KNOWN = (
    ("<|channel|>analysis", ToolFormat("harmony")),
    ("<|tool_call_start|>", _PYTHON),
    ("<|tool_list_start|>", _PYTHON),
    ("<|tool_response_start|>", _PYTHON),
    ("List of tools: [", _PYTHON),
    ("<｜tool▁calls▁begin｜>", _DEEPSEEK),
    ("<|tool_calls_section_begin|>", _KIMI),
    ("<|tool_call|>", _GRANITE),
    ("Action: ```json", _COMMAND_R),
    ("functools[", _FUNCTOOLS),
    ("<tool_call>", HERMES),
)
# Keys under which models write a function's name and its arguments in JSON.
NAME_KEYS, ARGUMENT_KEYS = ("name", "tool_name", "function"), ("arguments", "parameters", "args", "input")
# Values that are written as nothing in nested tags, the most probable first.
EMPTY: dict[str, Any] = {"string": "", "array": [], "object": {}, "null": None}
# JSON of values as Python writes them.
PYTHON = {"None": "null", "True": "true", "False": "false"}
# Exceptions of parsing a text that is not a call; in a generator, StopIteration becomes RuntimeError.
NOT_CALLS = (
    ValueError, SyntaxError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError, MemoryError
)  # fmt: skip

# A function's name and its arguments.
ReadCall = tuple[str, dict]


class CallReader:
    """A parser of tool calls in one format."""

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Any]):
        self.form, self.schemas = form, {name: Schema(schema) for name, schema in schemas.items()}

    def read(self, payload: str) -> list[ReadCall]:
        """Return the calls in `payload`, the text of calls; raise ValueError if there are none."""
        styles = {"json": self._json, "python": self._python, "gemma": self._gemma, "tags": self._tags}
        try:
            calls = list(styles[self.form.style](payload))
        except NOT_CALLS as error:
            raise ValueError(f"the model's text is not a tool call in the format {self.form.style}: {error}") from None
        if not calls:
            raise ValueError(f"the model's text has no tool call in the format {self.form.style}")
        return calls

    @cached_property
    def head(self) -> re.Pattern:
        """The pattern of a call's text before its arguments; group 1 is the function's name."""
        follows = r"\s*(?=\{)" if self.form.style in ("json", "gemma") else ""
        begin, head = _lenient(self.form.begin).removeprefix(r"\s*"), _lenient(self.form.head) + follows
        return re.compile(f"{begin}([\\w.:/-]+){head}".replace(r"\s*\s*", r"\s*"))

    @cached_property
    def argument(self) -> re.Pattern:
        """The pattern of an argument in tags: `key`, `value`, and a group of the type's name."""
        form = self.form
        # White space next to a value may belong to the value, so it is matched exactly.
        exact = lambda text: re.sub(r"((?:\\?\s)+)", r"(?:\1)?", re.escape(text))
        ends = "|".join(f"(?P<{kind or 'any'}>{exact(text)})" for kind, text in _by_text(form.key_end).items())
        value_end = exact(form.value_end).replace(re.escape(KEY), "(?P=key)")
        begin = _lenient(form.key_begin).removeprefix(r"\s*")
        follows = rf"(?=\s*(?:{begin}|\Z))"
        return re.compile(f"(?s){begin}(?P<key>[^\\s<>]+?)(?:{ends})(?P<value>.*?){value_end}{follows}")

    @cached_property
    def mark(self) -> re.Pattern:
        """The pattern of the text before or after a value; `open` or `close` is its key."""
        form = self.form
        close = re.escape(form.value_end).replace(re.escape(KEY), r"(?P<close>[^\s<>]+)")
        return re.compile(rf"{close}|{re.escape(form.key_begin)}(?P<open>[^\s<>]+){re.escape(form.key_end.get('', ''))}")

    def fitted(self, name: str, arguments: Any) -> dict | None:
        """Return the arguments of a call; None if they don't match the function's schema.

        Two mistakes of small models are corrected: null for an optional parameter, and arguments
        that repeat a part of the schema, such as `"required": ["city"]`.
        """
        schema = self.schemas.get(name)
        if schema is None or not isinstance(arguments, dict):
            return None
        known, found = schema.arguments, {}
        for key, value in arguments.items():
            if key not in known.properties and key in schema.root and schema.root[key] == value:
                continue
            fits = schema.allows(value, schema.argument(key), by_type=True)
            if value is None and key not in known.required and not fits:
                continue
            if not fits or known.properties and key not in known.properties:
                return None
            found[key] = value
        return found if all(key in found for key in known.required) else None

    def _inside(self, payload: str) -> str:
        for trigger in self.form.triggers:
            payload = payload.removeprefix(trigger)
        return payload.removesuffix(self.form.close)

    def _json(self, payload: str) -> Iterator[ReadCall]:
        at, decoder = 0, json.JSONDecoder()
        while found := self.head.search(payload, at):
            arguments, at = decoder.raw_decode(payload, found.end())
            yield found[1], _object(arguments)
        if not at:
            yield from read_bare(self._inside(payload))

    def _python(self, payload: str) -> Iterator[ReadCall]:
        """Parse calls such as [f(a="x", b=1), g()], also with JSON's true, false and null."""

        class Constants(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.Constant:
                return ast.Constant({"true": True, "false": False, "null": None}[node.id])

        value = lambda node: ast.literal_eval(Constants().visit(node))
        payload = self._inside(payload)
        # Some templates don't escape line breaks in strings.
        payload = re.sub(r"(?s)'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", lambda found: found[0].replace("\n", "\\n"), payload)
        try:
            calls = ast.parse(payload.strip(), mode="eval").body
        except SyntaxError:
            # Some don't escape quotes either: a string ends before the next argument or the end of the call.
            string = re.compile(r"='(.*?)'(?=\s*(?:,\s*\w+=|\)\s*(?:[,\]]|\Z)))")
            payload = string.sub(lambda found: "=" + repr(found[1].replace("\\n", "\n")), payload)
            calls = ast.parse(payload.strip(), mode="eval").body
        for call in calls.elts if isinstance(calls, ast.List) else [calls]:
            yield _name(ast.unparse(call.func)), _object({_name(word.arg): value(word.value) for word in call.keywords})

    def _gemma(self, payload: str) -> Iterator[ReadCall]:
        """Parse a call such as call:name{key:<|"|>text<|"|>,other:[1,true]}."""
        head = self.head.search(payload)
        parts = payload[head.end() :].removesuffix(self.form.close).split(self.form.quote)
        if len(parts) % 2 == 0:
            raise ValueError(f"tool call has an unterminated string; end it with {self.form.quote}")
        with_quotes = lambda text: re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', text)
        # Templates write some values as Python does.
        in_json = lambda text: re.sub(r"(?<=[:\[,])\s*(None|True|False)\s*(?=[,\]}])", lambda found: PYTHON[found[1]], text)
        parts = [json.dumps(part) if index % 2 else in_json(with_quotes(part)) for index, part in enumerate(parts)]
        yield head[1], _object(json.loads("".join(parts)))

    def _tags(self, payload: str) -> Iterator[ReadCall]:
        form, heads = self.form, [*self.head.finditer(payload)]
        if not heads:
            yield from read_bare(self._inside(payload))
            return
        end, close = re.compile(_lenient(form.end.split()[0])), re.compile(re.escape(form.close) + r"\Z")
        for head, following in zip(heads, [*heads[1:], None]):
            rest = payload[head.end() : following.start() if following else len(payload)]
            # A value may contain the end mark, so use the last one; some models leave it out.
            marks = [*end.finditer(rest)] or [*close.finditer(rest)]
            yield head[1], dict(self._tagged_arguments(head[1], rest[: marks[-1].start()] if marks else rest))

    def _tagged_arguments(self, name: str, text: str) -> Iterator[tuple[str, Any]]:
        schema = self.schemas.get(name) or Schema(None)
        if self.form.item:
            yield from ((key, self._nested(value, schema, schema.argument(key))) for key, value in self._elements(text))
            return
        for found in self.argument.finditer(text):
            key, value = found["key"], re.sub(r"(?s)\A<!\[CDATA\[(.*)\]\]>\Z", r"\1", found["value"])
            if len(self.form.key_end) > 1 and found.groupdict().get("string"):
                yield key, value
            else:
                # If the text before a value says its type, this is not a string.
                is_unquoted, is_python = len(self.form.key_end) == 1, self.form.is_python
                yield key, schema.value_of(value, schema.argument(key), is_unquoted, is_python)

    def _elements(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (key, text of the value) of each argument, without those inside a value."""
        start, open_keys = 0, list[str]()
        for mark in self.mark.finditer(text):
            if mark["open"]:
                start = start if open_keys else mark.end()
                open_keys.append(mark["open"])
            elif open_keys and open_keys[-1] == mark["close"]:
                key = open_keys.pop()
                if not open_keys:
                    yield key, text[start : mark.start()]

    def _nested(self, text: str, schema: Schema, part: Any) -> Any:
        """Return the value of a text that may consist of tags; part: its part of `schema`."""
        kinds, elements = schema.types(part), [*self._elements(text)]
        if elements and "array" in kinds and all(key == self.form.item for key, _ in elements):
            return [self._nested(value, schema, schema.members(part).items) for _, value in elements]
        if elements and "object" in kinds:
            return {key: self._nested(value, schema, schema.argument(key, part)) for key, value in elements}
        if not text and (empty := [EMPTY[kind] for kind in EMPTY if kind in kinds]):
            # The template omits null, and a text may be empty; so may a list and an object.
            return copy(empty[0])
        return schema.value_of(text, part)


def read_bare(text: str) -> Iterator[ReadCall]:
    """Yield (function name, arguments) of calls without tags such as <tool_call> around them."""
    decoder, at = json.JSONDecoder(), 0
    while found := re.compile(r"[\[{]").search(text, at):
        try:
            value, at = decoder.raw_decode(text, found.start())
        except ValueError:
            end = max(text.rfind("}"), text.rfind("]")) + 1
            value, at = ast.literal_eval(text[found.start() : end]), end
        for each in value if isinstance(value, list) else [value]:
            # OpenAI's form: {"type": "function", "function": {"name", "arguments"}}.
            each = each["function"] if isinstance(each.get("function"), dict) else each
            name = next(each[key] for key in NAME_KEYS if key in each)
            yield _name(name), _object(next((each[key] for key in ARGUMENT_KEYS if key in each), {}))


def _name(value: Any) -> str:
    if not (isinstance(value, str) and value):
        raise ValueError(f"function name of a tool call is {short(repr(value))}; it must be a non-empty string")
    return value


def _object(value: Any) -> dict:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError(f"arguments of a tool call are {short(repr(value))}; they must be a JSON object")
    # Python literals may be sets, bytes, or numbers that JSON does not have, which raise an error.
    json.dumps(value, allow_nan=False)
    return value


def _by_text(key_end: Mapping[str, str]) -> dict[str, str]:
    """Return `key_end` with each text once, that of strings first."""
    found = dict.fromkeys(key_end[kind] for kind in sorted(key_end, key=lambda kind: kind != "string"))
    return {next(kind for kind, each in key_end.items() if each == text): text for text in found}


def _lenient(text: str) -> str:
    """Return a regular expression that matches `text`, but ignores differences in white space."""
    pattern = ""
    for part in re.split(rf"(\s+|{ID}|[{{}}\[\],:])", text):
        if part == ID:
            pattern += r"[\w.:-]*"
        elif part.isspace():
            pattern += r"\s*"
        elif part and part in "{}[],:":
            pattern += rf"\s*{re.escape(part)}\s*"
        else:
            pattern += re.escape(part)
    # Adjacent expressions for space would try every way to divide a long space between them.
    return re.sub(r"(?:\\s\*)+", r"\\s*", pattern)
