"""Convert grammars to llguidance's format, and compile each of them for a test.

This is first done in a child process, to protect the server: for some grammars of a few kilobytes,
llguidance overflows its stack or takes minutes. A grammar of tool calls is written in llguidance's
dialect of Lark; the model's `ToolFormat` describes how the model writes calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.special_tokens import strings_of
from castiron.pipelines.text.tool_formats import ID, KEY, ToolFormat

# Max states of the lexer of a text; each takes 1 to 2 kB.
MAX_STATES = 25_000
# Max work before the first token and at each token, in llguidance's units. The first takes up to
# 0.5 s. The second takes up to 10 ms, or 0.4 s for a long text that the grammar forces, and other
# requests wait during that time. An enumeration of 20,000 values takes less.
FIRST_FUEL, STEP_FUEL = 400_000, 50_000
# Max nesting of terminals, because llguidance's work at a token grows with the cube of the depth.
MAX_TERMINAL_DEPTH = 200
# Keywords that don't constrain values.
ANNOTATIONS = ("description", "title", "examples", "default", "$comment", "$schema", "$id")
# Keywords whose value is an object of schemas for "$ref", and all keywords that a value need not match.
DEFINITIONS = ("$defs", "definitions")
UNENFORCED = {*ANNOTATIONS, *DEFINITIONS}
# Lark's pattern of any text.
TEXT = "/(.|\\n)*/"
# The schema key for llguidance's options, which a client's schema may not set.
OPTIONS = "x-guidance"
# Keywords that llguidance does not support, with values that do not constrain the text.
NOOPS: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,), "propertyNames": ({}, True, {"type": "string"})}
# Keywords whose value is an object of schemas, and keywords whose value is a schema or a list of schemas.
NAMED_SCHEMAS = ("properties", "patternProperties", *DEFINITIONS)
SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
# Patterns of llguidance's error messages, and the message for the user.
ERRORS = (
    (r"Unimplemented keys: \[(.*)\]", "{} cannot be honoured; leave it out"),
    (r"Unknown format: (.*)", 'the format "{}" cannot be honoured; leave it out'),
    (r"(oneOf) constraints are not supported", '"{}" cannot be honoured where more than one of its parts may match; use anyOf'),
    (r"(?s)regex parse error:\n(.*)\nerror: (.*)", 'a "pattern" cannot be honoured: {1}'),
    (r"Pointer '(.*)' does not exist", 'a "$ref" leads to #{}, which does not exist'),
    (r"Resource '(.*?)' is not present", 'a "$ref" leads to {}, which is not part of the schema'),
    (r"recursion limit exceeded", "it nests deeper than 100 levels"),
)


class Compiler:
    """A converter of grammars to llguidance's format, for one vocabulary."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], marks: Mapping[str, int]):
        """Prepare to compile grammars for a vocabulary.

        tokens: the bytes of each token. special, eos: ids of the special tokens and of the end
        tokens. marks: the ids of special tokens by their text, such as "<tool_call>".
        """
        self.marks = marks
        self.index = make_index(tokens, special, eos, lambda text: self.index.greedy_tokenize(text))
        # All bytes in the vocabulary, because some vocabularies lack the bytes of rare characters.
        self.bytes = frozenset(b"".join(tokens[i] for i in set(range(len(tokens))).difference(special)))

    def compile(self, kind: str, value: Any, compact: bool) -> str:
        """Return a grammar in llguidance's format.

        Args:
            kind: "json_schema", "regex", "grammar" (Lark or GBNF) or "tools".
            value: the schema, expression or grammar; for "tools", the result of `Tools.grammar`.
            compact: whether JSON has no white space.

        Raises:
            PipelineError: the grammar is not supported, or no token can start a matching text.
        """
        definition = self.definition(kind, value, compact)
        matcher = make_matcher(self.index, definition)
        if matcher.is_error():
            raise PipelineError(_message(kind, matcher.get_error()))
        # Do the work before the first token now, because it may exceed a limit of the child process.
        matcher.compute_ff_tokens()
        matcher.compute_bitmask()
        return definition

    def definition(self, kind: str, value: Any, compact: bool) -> str:
        matcher = llguidance.LLMatcher
        if kind == "regex":
            return matcher.grammar_from_regex(value)
        try:
            if kind == "json_schema":
                schema = json.dumps(self.checked_schema(value))
                return matcher.grammar_from_json_schema(schema, overrides=json_options(compact))
            if kind == "tools":
                schemas = {name: without_noops(schema) for name, schema in value.pop("schemas").items()}
                answer = without_noops(value.pop("answer"))
                grammar = ToolGrammar(ToolFormat(**value.pop("form")), self.marks, json_options(compact))
                return matcher.grammar_from_lark(grammar.text(schemas, answer=answer, **value))
            check_terminals(lark := any_to_lark(value))
            return matcher.grammar_from_lark(lark)
        except (PipelineError, MemoryError):
            raise
        except RecursionError:
            raise PipelineError("the grammar or schema nests too deep; reduce its nesting") from None
        except Exception as error:
            # The conversion of GBNF raises a plain Exception, that of a schema a ValueError.
            raise PipelineError(_message(kind, str(error))) from None

    def checked_schema(self, schema: Any) -> Any:
        for character in dict.fromkeys("".join(strings_of(schema, ANNOTATIONS))):
            if not self.bytes.issuperset(character.encode("utf-8", "replace")):
                raise PipelineError(f"no tokens of this model spell {character!r}; remove it from the schema")
        if isinstance(schema, bool):
            # The schema true allows every value, and false allows none.
            return {} if schema else {"enum": []}
        return without_noops(schema)


_compiler: Compiler


def start(tokens: Sequence[str], *more: Any) -> None:
    """Create the `Compiler` that this child process uses.

    tokens: the bytes of each token, decoded as Latin-1. more: the other arguments of `Compiler`.
    """
    global _compiler
    _compiler = Compiler([token.encode("latin-1") for token in tokens], *more)


def compile_definition(kind: str, value: str, compact: bool) -> str:
    """Call `compile` of this process's `Compiler`; value: the definition, as JSON text."""
    return _compiler.compile(kind, json.loads(value), compact)


def make_index(tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], encode: Callable[[str], list[int]]) -> Any:
    """Return llguidance's `LLTokenizer` for a vocabulary.

    tokens: the bytes of each token, by id. special, eos: ids of the special tokens and of the end
    tokens. encode: returns the token ids of a text.
    """

    class Source:
        eos_token_id, bos_token_id = eos[0], None

        def __call__(self, text: str) -> list[int]:
            return encode(text)

    Source.tokens, Source.special_token_ids = tokens, list({*special, *eos})
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Source()), eos_token=list(eos))


def make_matcher(index: Any, definition: str) -> Any:
    limits = llguidance.LLParserLimits(max_lexer_states=MAX_STATES, initial_lexer_fuel=FIRST_FUEL, step_lexer_fuel=STEP_FUEL)
    return llguidance.LLMatcher(index, definition, log_level=0, limits=limits)


def check_terminals(lark: str) -> None:
    """Raise PipelineError if terminals of a Lark grammar are nested too deeply."""
    # Remove literals and comments, which may contain names of terminals.
    names = re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/', " ", lark)
    parts = re.split(r"(?m)^[ \t]*(\w+)[^:\n|]*:", names)
    used = {
        name: set(re.findall(r"\b[A-Z_][A-Z0-9_]*\b", body)) for name, body in zip(parts[1::2], parts[2::2]) if name.isupper()
    }
    depths = dict.fromkeys(used, 1)
    for _ in range(MAX_TERMINAL_DEPTH):
        deeper = {name: 1 + max((depths[each] for each in inner if each in depths), default=0) for name, inner in used.items()}
        if deeper == depths:
            return
        depths = deeper
    raise PipelineError(f"terminals nest deeper than {MAX_TERMINAL_DEPTH} levels; make some of them rules, named in lower case")


def without_noops(schema: Any) -> Any:
    """Return a JSON schema without keywords that llguidance rejects although they have no effect.

    For example, `"uniqueItems": false` is removed.
    """
    if isinstance(schema, list):
        return [without_noops(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            value = {key: without_noops(each) for key, each in value.items()}
        elif name in SCHEMAS:
            value = without_noops(value)
        if value not in NOOPS.get(name, ()) and name != OPTIONS:
            found[name] = value
    return found


def json_options(compact: bool) -> dict[str, Any]:
    """Return llguidance's options for the white space in JSON.

    compact: whether to write no spaces; otherwise, one space follows each comma and colon. Other
    white space is not allowed, because a model could generate it endlessly.
    """
    # Models are trained on ", " and ": ", and answer less accurately in compact JSON.
    item, key = (",", ":") if compact else (", ", ": ")
    return {"whitespace_flexible": False, "item_separator": item, "key_separator": key}


def _message(kind: str, error: str) -> str:
    for pattern, message in ERRORS if kind == "json_schema" else ():
        if found := re.search(pattern, error):
            return message.format(*(group.strip() for group in found.groups()))
    if found := re.search(r"(?s)regex parse error:.*?\nerror: ([^\n]*)", error):
        return found[1]
    return next(iter(error.strip().splitlines()), "it is not well formed")[:300]


class ToolGrammar:
    """A builder of a Lark grammar for tool calls.

    form: the format in which the model writes calls. special: ids of special tokens by their text.
    options: llguidance's options for JSON.
    """

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
            answer: a JSON schema, or None. If given, the text may be JSON that matches this schema
                instead of a call.
            free: whether other text is allowed around or instead of calls. If so, calls must start
                with a fixed text such as "<tool_call>".

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
        """Return the Lark expression for a call of the function `name`.

        schema: JSON schema of the function's parameters. In most formats, the expression begins with
        the function's name; in some, with the marks before the name.
        """
        form = self.form
        if form.style == "harmony":
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return f"{self.mark(head)} {self._json(name, schema)}"
        write = {"json": self._json, "python": self._python, "tags": self._tags, "gemma": self._gemma}[form.style]
        if self.mixed:
            # Use the same lexemes as an answer in JSON, because llguidance would prefer a longer lexeme.
            return f"{self._lexemes(form.begin + name + form.head)} {write(name, schema)} {self._lexemes(form.end)}"
        return f"{self.mark(name + form.head)} {write(name, schema)} {self.mark(form.end)}"

    def _lexemes(self, text: str) -> str:
        """Return Lark strings, separated by spaces, that match a part of a tool call in JSON.

        text: this part, such as '{"name": "f", "arguments": '. Each string, bracket and separator
        of the JSON becomes one Lark string. White space in `text` is replaced by that of
        `self.options`.
        """
        spaced = {",": self.options["item_separator"], ":": self.options["key_separator"]}
        return " ".join(quoted(spaced.get(part, part)) for part in re.findall(r'"[^"]*"|[{}\[\],:]', text))

    def mark(self, text: str) -> str:
        """Return the Lark expression for a fixed text of a tool call, such as "<tool_call>".

        A special token in `text` is matched as one token. The placeholder `ID` in `text` matches
        any identifier.
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
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        shared = {key: value for key, value in root.items() if key in DEFINITIONS}
        schema = schema if isinstance(schema, dict) else {}
        return self._rule(f"%json {json.dumps({**shared, **schema, OPTIONS: self.options})}")

    def _json(self, name: str, schema: Any) -> str:
        # Arguments are an object, even if the schema does not state it.
        return self._value({"type": "object", **schema}, {})

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
            case "array" if not schema.keys() - UNENFORCED - {"type", "items"}:
                item = self._rule(self._gemma_value(name, schema.get("items", {})))
                return f"{quoted('[')} ({item} ({quoted(',')} {item})*)? {quoted(']')}"
            case "string":
                return f"{quote} {self._string(name, schema, self.form.quote)}"
            case "integer" | "number" | "boolean" | "null":
                return self._value(schema, {})
        raise self._refusal(name)

    def _string(self, name: str, schema: Mapping[str, Any], end: str) -> str:
        """Return the Lark expression for a string without quotes, followed by the text `end`.

        name: the function's name, for error messages. schema: the JSON schema of the string, which
        may list the allowed strings.
        """
        known = schema.keys() - UNENFORCED - {"type"}
        if not known:
            return self._until(end)
        if known <= {"enum", "const"} and are_strings(values := schema.get("enum", [schema.get("const")])):
            return f"({' | '.join(map(quoted, values))}) {self.mark(end)}"
        raise self._refusal(name)

    def _members(self, name: str, schema: Any, write: Callable[[str, Any], str], between: str) -> str:
        """Add Lark rules for the properties of an object; return the name of the main rule.

        The rules match the properties in the schema's order; optional ones may be left out.

        Args:
            name: the function's name, for error messages.
            schema: JSON schema of the object.
            write: called with a property's key and the schema of its value; returns the Lark
                expression for the property.
            between: the text between two properties.
        """
        if schema.keys() - UNENFORCED - {"type", "properties", "required", "additionalProperties"}:
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
