"""Convert grammars to llguidance's format, and compile each once to test it, in a child process.

The child process protects the server, because llguidance overflows its stack, or takes minutes, for
some grammars of a few kilobytes.
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
# Keywords that don't constrain values.
ANNOTATIONS = ("description", "title", "examples", "default", "$comment", "$schema", "$id")
# Keywords that llguidance does not support, with values that do not constrain the text.
NOOPS: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,), "propertyNames": ({}, True, {"type": "string"})}
# Keywords whose value is an object of schemas, and keywords whose value is a schema or a list of schemas.
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
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
        """Index a vocabulary. tokens: bytes of each. special, eos: ids. marks: ids by text."""
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
            raise PipelineError("the definition nests too deep; reduce its nesting") from None
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
    """Create this child process's compiler; tokens: bytes of each token, decoded as Latin-1."""
    global _compiler
    _compiler = Compiler([token.encode("latin-1") for token in tokens], *more)


def compile_definition(kind: str, value: str, compact: bool) -> str:
    """Return a grammar in llguidance's format; value: the grammar's definition as JSON text."""
    return _compiler.compile(kind, json.loads(value), compact)


def make_index(tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], encode: Callable[[str], list[int]]) -> Any:
    """Return llguidance's index of a vocabulary; encode: returns the token ids of a text."""

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
    """Return a JSON schema without keywords that don't constrain values."""
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
    """Return llguidance's options for JSON.

    They fix the white space, because a model could otherwise generate white space endlessly.
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
