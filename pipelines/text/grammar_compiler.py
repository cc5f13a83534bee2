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
from castiron.pipelines.text.json_schema import ANNOTATIONS, DEFINITIONS, EXAMPLES, Schema
from castiron.pipelines.text.special_tokens import strings_of
from castiron.pipelines.text.tool_formats import ToolFormat
from castiron.pipelines.text.tool_grammar import OPTIONS, ToolGrammar

# Max states of the lexer of a text; each takes 1 to 2 kB.
MAX_STATES = 25_000
# Max work before the first token and at each token, in llguidance's units. The first takes up to
# 0.5 s. The second takes up to 10 ms, or 0.4 s for a long text that the grammar forces, and other
# requests wait during that time. An enumeration of 20,000 values takes less.
FIRST_FUEL, STEP_FUEL = 400_000, 50_000
# Max nesting of terminals, because llguidance's work at a token grows with the cube of the depth.
MAX_TERMINAL_DEPTH = 200
# Max arguments of a function whose schema is reduced to types.
MAX_ARGUMENTS = 1_000
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
    """A converter of grammars to llguidance's format, for one vocabulary.

    tokens: the bytes of each token. marks: ids of special tokens by text, such as "<tool_call>".
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], marks: Mapping[str, int]):
        self.marks = marks
        self.index = make_index(tokens, special, eos, lambda text: self.index.greedy_tokenize(text))
        # All bytes in the vocabulary, because some vocabularies lack the bytes of rare characters.
        self.bytes = frozenset(b"".join(tokens[i] for i in set(range(len(tokens))).difference(special)))

    def compile(self, kind: str, value: Any, compact: bool) -> str:
        """Return a grammar in llguidance's format; raise PipelineError if it is not supported.

        kind: "json_schema", "regex", "grammar" (Lark or GBNF) or "tools", with `Tools.grammar`.
        """
        if kind == "tools":
            value = self._enforceable(value, compact)
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
                grammar = ToolGrammar(ToolFormat(**value["form"]), self.marks, json_options(compact))
                schemas = {name: without_noops(schema) for name, schema in value["schemas"].items()}
                given = {**value, "schemas": schemas, "answer": without_noops(value["answer"])}
                del given["form"]
                return matcher.grammar_from_lark(grammar.text(**given))
            check_terminals(lark := any_to_lark(value))
            return matcher.grammar_from_lark(lark)
        except (PipelineError, MemoryError):
            raise
        except RecursionError:
            raise PipelineError("the grammar or schema nests too deep; reduce its nesting") from None
        except Exception as error:
            # The conversion of GBNF raises a plain Exception, that of a schema a ValueError.
            raise PipelineError(_message(kind, str(error))) from None

    def _enforceable(self, tools: dict[str, Any], compact: bool) -> dict[str, Any]:
        """Return `tools`; of loose schemas that cannot be enforced, only types remain."""
        loose = [name for name in tools["schemas"] if name not in tools["strict"]]
        if self._is_enforceable(tools, loose, compact):
            return tools
        return with_types_only(tools, [name for name in loose if not self._is_enforceable(tools, [name], compact)])

    def _is_enforceable(self, tools: dict[str, Any], names: Sequence[str], compact: bool) -> bool:
        """Return whether the grammar of calls of some functions can be compiled."""
        if not names:
            return True
        schemas = {name: tools["schemas"][name] for name in names}
        try:
            definition = self.definition("tools", {**tools, "schemas": schemas, "answer": None}, compact)
        except PipelineError:
            return False
        return not make_matcher(self.index, definition).is_error()

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
    """Create this process's `Compiler`; tokens: the bytes of each token, decoded as Latin-1."""
    global _compiler
    _compiler = Compiler([token.encode("latin-1") for token in tokens], *more)


def compile_definition(kind: str, value: str, compact: bool) -> str:
    """Call `compile` of this process's `Compiler`; value: the definition, as JSON text."""
    return _compiler.compile(kind, json.loads(value), compact)


def make_index(tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], encode: Callable[[str], list[int]]) -> Any:
    """Return llguidance's `LLTokenizer` for a vocabulary."""

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
    """Return a schema without keywords that llguidance rejects although they have no effect."""
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


def with_types_only(tools: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Reduce schemas to the types of arguments; names: None for all that are not strict."""
    schemas = tools["schemas"]
    loose = [name for name in schemas if name not in tools["strict"]] if names is None else names
    return {**tools, "schemas": {**schemas, **{name: _types_only(Schema(schemas[name])) for name in loose}}}


def _types_only(schema: Schema) -> dict[str, Any]:
    members = schema.arguments
    if len(members.properties) > MAX_ARGUMENTS:
        return {"type": "object"}
    types = {key: schema.types(each) for key, each in members.properties.items()}
    properties = {key: {"type": found} if 0 < len(found) < len(EXAMPLES) else {} for key, found in types.items()}
    return {"type": "object", "properties": properties, "required": sorted(members.required),
            "additionalProperties": members.rest is not False}  # fmt: skip


def json_options(compact: bool) -> dict[str, Any]:
    """Return llguidance's options for white space: none, or one space after each comma and colon.

    A model could generate other white space endlessly.
    """
    # Models are trained on ", " and ": ", and answer less accurately in compact JSON.
    item, key = (",", ":") if compact else (", ", ": ")
    return {"whitespace_flexible": False, "item_separator": item, "key_separator": key}


def _message(kind: str, error: str) -> str:
    for pattern, message in ERRORS if kind in ("json_schema", "tools") else ():
        if found := re.search(pattern, error):
            return message.format(*(group.strip() for group in found.groups()))
    if found := re.search(r"(?s)regex parse error:.*?\nerror: ([^\n]*)", error):
        return found[1]
    # A schema in a grammar has a position there, which means nothing to a client.
    error = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", error.strip())
    return next(iter(error.splitlines()), "it is not well formed")[:300]
