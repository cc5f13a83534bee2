"""What a text has to be: a JSON schema, a regular expression or a grammar, over a vocabulary, by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.constraint import Constraint
from castiron.pipelines.generation.thoughts import Marks
from castiron.pipelines.generation.token_bytes import described
from castiron.pipelines.generation.vocabulary import Vocabulary

# Without it a model may write white space without end.
JSON_OPTIONS = {"whitespace_flexible": False}
# Of what holds one text to a grammar: states of its lexer, which take 1 to 2 kB each, at most; bytes that it takes in the end,
# and for each byte of llguidance's own form of the grammar.
STATES, BASE_BYTES, BYTES_EACH = 25_000, 1_000_000, 2
# What llguidance may construct before the first token, in units of its own: half a second's work at most, done in a step that
# others wait for. An enumeration of 20,000 values takes less.
FIRST_FUEL = 400_000
# Of a schema, what no value has to hold.
COMMENTS = ("description", "title", "examples", "default", "$comment", "$schema", "$id")
# What writers of schemas put down that asks for nothing, and llguidance lacks.
IDLE: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,), "propertyNames": ({}, True, {"type": "string"})}
# Keywords whose value is schemas by name, and those whose value is a schema or several.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
INNER = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
# How llguidance words what it lacks, and what is said of it.
REFUSALS = (
    (r"Unimplemented keys: \[(.*)\]", "{} cannot be honoured; leave it out"),
    (r"Unknown format: (.*)", 'the format "{}" cannot be honoured; leave it out'),
    (
        r"(oneOf) constraints are not supported",
        '"{}" cannot be honoured where more than one of its parts may hold; say "anyOf"',
    ),
    (r"(?s)regex parse error:\n(.*)\nerror: (.*)", 'a "pattern" cannot be honoured: {1}'),
    (r"Pointer '(.*)' does not exist", 'a "$ref" leads to #{}, which does not exist'),
    (r"Resource '(.*?)' is not present", 'a "$ref" leads to {}, which is not part of the schema'),
)


class GrammarError(PipelineError):
    """A schema, expression or grammar that cannot be honoured; `kind` tells which, as `Grammars.compile` has it."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind.replace('_', ' ')}: {message}")
        self.kind = kind


class Grammar:
    """A text's grammar over one vocabulary, ready to be held against tokens; `calls`: the text is calls of functions; `nbytes`:
    what each text that is held to it takes of memory, about."""

    def __init__(self, grammars: Grammars, matcher, nbytes: int):
        self._grammars, self._matcher, self.calls, self.nbytes = grammars, matcher, False, nbytes

    def constraint(self, marks: Marks = (), prompt: str = "") -> Constraint:
        """Of one text, which comes behind what the model thinks, as the `marks` say and the end of the `prompt`."""
        grammars = self._grammars
        return Constraint(self._matcher.deep_copy(), grammars.tokens, grammars.eos, grammars.encode, marks, prompt)


class Grammars:
    """A vocabulary with llguidance's index of it, which takes a quarter of a second for 49,152 tokens."""

    def __init__(self, tokenizer, vocabulary: Vocabulary, eos: Sequence[int]):
        """`eos`: the tokens that end a text. PipelineError where llguidance is not installed."""
        try:
            import llguidance
        except ModuleNotFoundError:
            raise PipelineError("structured output needs llguidance: pip install 'castiron[structured]'") from None
        self._library = llguidance
        self._tokenizer = tokenizer
        # A vocabulary without an end gets one that no model ever says.
        self.tokens = vocabulary.tokens if eos else [*vocabulary.tokens, b""]
        self.eos = tuple(eos) or (len(vocabulary.tokens),)
        self.special = vocabulary.special

    @cached_property
    def _index(self):
        class Source:
            eos_token_id, bos_token_id = self.eos[0], None
            tokens, special_token_ids = self.tokens, list({*self.special, *self.eos})

            def __call__(_, text: str) -> list[int]:
                return self.encode(text)

        return self._library.LLTokenizer(self._library.TokenizerWrapper(Source()), eos_token=list(self.eos))

    @cached_property
    def _plain(self):
        """The tokenizer without the space that some put before a text: here texts go on."""
        tokenizer = self._tokenizer
        parts = json.dumps([described(tokenizer.normalizer), described(tokenizer.pre_tokenizer)])
        if not re.search(r'"Prepend"|"prepend_scheme": "(always|first)"|"add_prefix_space": true', parts):
            return tokenizer
        from tokenizers import Tokenizer

        text = tokenizer.to_str()
        text = re.sub(r'("prepend_scheme": ?)"(?:always|first)"', r'\1"never"', text)
        text = re.sub(r'("add_prefix_space": ?)true', r"\1false", text)
        return Tokenizer.from_str(json.dumps(_without_prepend(json.loads(text))))

    def encode(self, text: str) -> list[int]:
        """The ids of a text that goes on from another; they join to its very bytes."""
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return self._index.greedy_tokenize(text)

    def compile(
        self, *, json_schema: Mapping[str, Any] | bool | None = None, regex: str | None = None, grammar: str | None = None
    ) -> Grammar:
        """Of one of the three: a JSON schema, a regular expression for the whole text, or a grammar, Lark's or GBNF.

        GrammarError, which names the keyword, for a schema that llguidance cannot honour, and for what is not well formed.
        """
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        kinds = [kind for kind, value in given.items() if value is not None]
        if len(kinds) != 1:
            raise PipelineError("give one of json_schema, regex and grammar")
        kind, value = kinds[0], given[kinds[0]]
        # Of the others the texts are not known before they are parsed.
        for letter in dict.fromkeys("".join(_texts(value)) if kind == "json_schema" else ""):
            if not self._letters.issuperset(letter.encode("utf-8", "replace")):
                raise GrammarError(kind, f"this model's vocabulary has no bytes for {letter!r}")
        return self._compiled(kind, self.definition(kind, value))

    @cached_property
    def _letters(self) -> frozenset[int]:
        """The bytes that there are tokens of: some vocabularies lack those of rare characters."""
        return frozenset(b"".join(self.tokens[i] for i in set(range(len(self.tokens))).difference(self.special)))

    def definition(self, kind: str, value: Any) -> str:
        """In llguidance's own form."""
        from llguidance.gbnf_to_lark import any_to_lark

        matcher = self._library.LLMatcher
        if kind == "regex":
            return matcher.grammar_from_regex(value)
        try:
            if kind == "grammar":
                return matcher.grammar_from_lark(any_to_lark(value))
            if isinstance(value, bool):
                # The two schemas that are no object: everything, and nothing.
                value = {} if value else {"enum": []}
            return matcher.grammar_from_json_schema(json.dumps(without_idle(value)), overrides=JSON_OPTIONS)
        except Exception as error:
            # Of GBNF plain Exceptions, of a schema ValueError.
            raise GrammarError(kind, _sentence(kind, str(error))) from None

    def _compiled(self, kind: str, definition: str) -> Grammar:
        limits = self._library.LLParserLimits(max_lexer_states=STATES, initial_lexer_fuel=FIRST_FUEL)
        matcher = self._library.LLMatcher(self._index, definition, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(kind, _sentence(kind, matcher.get_error()))
        return Grammar(self, matcher, BASE_BYTES + BYTES_EACH * len(definition))


def without_idle(schema: Any) -> Any:
    """A JSON schema without keywords that ask for nothing as they stand."""
    if isinstance(schema, list):
        return [without_idle(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            value = {key: without_idle(each) for key, each in value.items()}
        elif name in INNER:
            value = without_idle(value)
        if value not in IDLE.get(name, ()):
            found[name] = value
    return found


def _sentence(kind: str, message: str) -> str:
    """llguidance's words for what is wrong, in one line."""
    for pattern, words in REFUSALS if kind == "json_schema" else ():
        if found := re.search(pattern, message):
            return words.format(*(group.strip() for group in found.groups()))
    if found := re.search(r"(?s)regex parse error:.*?\nerror: ([^\n]*)", message):
        return found[1]
    return next(iter(message.strip().splitlines()), "it is not well formed")[:300]


def _texts(value: Any) -> Iterator[str]:
    """Every text of a schema that a value may have to hold; a text as it is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name not in COMMENTS:
                yield name
                yield from _texts(each)


def _without_prepend(value: Any) -> Any:
    """A tokenizer's JSON without normalizers that put something before the text."""
    if isinstance(value, list):
        return [_without_prepend(each) for each in value if not (isinstance(each, dict) and each.get("type") == "Prepend")]
    if isinstance(value, dict):
        if value.get("type") == "Prepend":
            return None
        return {name: _without_prepend(each) if name in ("normalizer", "normalizers") else each for name, each in value.items()}
    return value
