"""Grammars that a text has to match: JSON schemas, regular expressions, Lark or GBNF."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from castiron.pipelines.child_process import ChildProcess, LimitExceeded, run_on_large_stack
from castiron.pipelines.engine.chooser import ConstraintError
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.reasoning import Marks

# Limits of the child process that first compiles a grammar: seconds of processor time, bytes of memory.
SECONDS, MAX_BYTES = 1.0, 1 << 30
# Max characters of a grammar, and how many compiled definitions are cached.
MAX_CHARACTERS, MAX_CACHED = 1_000_000, 16
# Estimated bytes of memory for the grammar of one text: a fixed part, and a part for each byte of its definition.
BASE_BYTES, BYTES_EACH = 1_000_000, 2
# Short texts that few tokenizers merge with the text after them.
PRECEDING = ("\n", "=")


class GrammarConstraint:
    """A constraint that makes a generated text match a grammar, except for reasoning at its start.

    Args:
        matcher: an llguidance matcher that only this constraint uses.
        grammars: the compiler that compiled the grammar.
        marks: pairs of texts that enclose reasoning, such as ("<think>", "</think>").
        prompt: the text before the generated text. If it ends in the first text of a pair, the
            generated text starts with reasoning.
    """

    def __init__(self, matcher, grammars: Grammars, marks: Marks = (), prompt: str = ""):
        self._matcher, self._grammars, self.eos = matcher, grammars, grammars.eos
        self.forced: deque[int] = deque()
        # End marks of the reasoning in progress, and its last bytes.
        self._ends = tuple(end.encode() for start, end in marks if prompt.rstrip().endswith(start))
        self._reasoning = b""
        # By token that may start reasoning now: the end mark. A mark of several tokens is not
        # accepted, because its first token could be the start of the text itself.
        self._starts: dict[int, bytes] = {}
        if not self._ends and not any(prompt.rstrip().endswith(end) for _, end in marks):
            self._starts = {ids[0]: end.encode() for start, end in marks if len(ids := grammars.encode(start)) == 1}
        self._look_ahead()

    def copy(self) -> GrammarConstraint:
        other = copy(self)
        other._matcher, other.forced = self._matcher.deep_copy(), self.forced.copy()
        return other

    @property
    def done(self) -> bool:
        return not self._ends and self._matcher.is_stopped()

    def allows(self, token: int) -> bool:
        if self.forced:
            return token == self.forced[0]
        return bool(self._ends) or token in self._starts or self._matcher.validate_tokens([token]) == 1

    def mask(self, vocab: int) -> np.ndarray:
        """Return which tokens may come next, bool [vocab]; raise ConstraintError if none may."""
        found = np.full(vocab, bool(self._ends) and not self.forced)
        if self.forced:
            found[self.forced[0]] = True
        elif not self._ends:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocab]
            found[: len(bits)] = bits
            found[list(self._starts)] = True
            # If the grammar forces bytes that no token has, llguidance returns a token for later
            # bytes, which is not valid.
            if np.count_nonzero(bits) == 1 and self._matcher.validate_tokens([int(bits.argmax())]) != 1:
                found[int(bits.argmax())] = False
            if self._matcher.is_error() or not found.any():
                raise self._error()
        return found

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """Return `logits` [vocab] with minus infinity for tokens that may not come next."""
        return np.where(self.mask(len(logits)), logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Append a generated token to the text that must match the grammar.

        Raise ConstraintError if the grammar does not allow the token, or if the check exceeds a
        limit.
        """
        if self._ends:
            self._accept_reasoning(token)
        elif token in self._starts:
            self._ends, self._starts = (self._starts[token],), {}
        else:
            self._starts = {}
            if not self._matcher.consume_token(token):
                raise self._error()
        if self.forced:
            self.forced.popleft()
        self._look_ahead()

    def _accept_reasoning(self, token: int) -> None:
        tokens = self._grammars.tokens
        self._reasoning += tokens[token] if token < len(tokens) else b""
        for end in self._ends:
            _, found, rest = self._reasoning.partition(end)
            if found:
                self._ends = ()
                # The token may contain the mark and more.
                if rest.strip() and not self._matcher.consume_tokens(
                    self._grammars.encode(rest.decode("utf-8", "replace").lstrip())
                ):
                    raise self._error()
                return
        # The end of the bytes may be a part of a mark: retain as many bytes as the longest one has.
        self._reasoning = self._reasoning[-max(map(len, self._ends)) :]

    def _look_ahead(self) -> None:
        if not (self.forced or self._ends or self._starts):
            tokens = self._matcher.compute_ff_tokens()
            # The grammar may force bytes that no token has; then no token is forced.
            self.forced.extend(tokens[: self._matcher.validate_tokens(tokens)])

    def _error(self) -> ConstraintError:
        reason = next(iter(self._matcher.get_error().splitlines()), "")
        # llguidance returns a single word for a regular end, and text for an error.
        reason = reason if " " in reason else "no token of this model fits"
        return ConstraintError(f"no allowed next token in the grammar: {reason}; change the grammar")


class GrammarError(PipelineError):
    """Raised for an unsupported schema, regular expression or grammar.

    `kind`: name of the argument of `Grammars.compile`, such as "json_schema". `is_limit`: whether
    the grammar exceeds a limit.
    """

    def __init__(self, kind: str, message: str, is_limit: bool = False):
        super().__init__(f"{kind.replace('_', ' ')}: {message}")
        self.kind, self.is_limit = kind, is_limit


class Grammar:
    """A compiled grammar; its method `constraint` applies it to one generated text.

    calls: whether the grammar describes tool calls. nbytes: estimated memory in bytes that the
    constraint of one text takes.
    """

    def __init__(self, grammars: Grammars, matcher, nbytes: int, calls: bool):
        self._grammars, self._matcher, self.nbytes, self.calls = grammars, matcher, nbytes, calls

    def constraint(self, marks: Marks = (), prompt: str = "") -> GrammarConstraint:
        """Return a new constraint that makes one generated text match this grammar.

        marks: pairs of texts that enclose reasoning, such as ("<think>", "</think>"). The grammar
        does not apply to reasoning. prompt: the text before the generated text. If it ends in the
        first text of a pair, the generated text starts with reasoning.
        """
        return GrammarConstraint(self._matcher.deep_copy(), self._grammars, marks, prompt)


class Grammars:
    """A compiler of grammars for the vocabulary of one tokenizer.

    A child process compiles each grammar first, because llguidance may crash.

    backend: a `tokenizers.Tokenizer`. vocabulary: the bytes of each token, by id. eos: ids of the
    end tokens.
    """

    def __init__(self, backend, vocabulary: Sequence[bytes], eos: Sequence[int]):
        try:
            from castiron.pipelines.text import grammar_compiler
        except ModuleNotFoundError:
            raise PipelineError(
                "llguidance is not installed, but structured output needs it; pip install 'castiron-llm[structured]'"
            ) from None
        self._compiler, self._backend = grammar_compiler, backend
        # llguidance needs an end token, so a vocabulary without one gets a token that no model generates.
        self.tokens = [*vocabulary] if eos else [*vocabulary, b""]
        self.eos = tuple(eos) or (len(vocabulary),)
        added = backend.get_added_tokens_decoder()
        self.special = tuple(sorted(i for i in added if added[i].special and i < len(vocabulary)))
        marks = {str(added[i].content): i for i in self.special}
        tokens = [token.decode("latin-1") for token in self.tokens]
        self._child = ChildProcess(SECONDS, MAX_BYTES, grammar_compiler.start, tokens, self.special, self.eos, marks)
        self._definition = lru_cache(MAX_CACHED)(self._definition_in_child)

    @cached_property
    def _index(self) -> Any:
        return self._compiler.make_index(self.tokens, self.special, self.eos, self.encode)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without the space that some tokenizers put before it."""
        ids_of = lambda text: self._backend.encode(text, add_special_tokens=False).ids
        # Some tokenizers add a space before a text; then encode it after another short text.
        for before in ("", *PRECEDING):
            ids = ids_of(before + text)[len(ids_of(before)) :]
            if b"".join(self.tokens[i] for i in ids) == text.encode():
                return ids
        return self._index.greedy_tokenize(text)

    def compile(
        self, *, json_schema: Mapping[str, Any] | bool | None = None, regex: str | None = None, grammar: str | None = None,
        tools: Mapping[str, Any] | None = None, compact_json: bool = False,
    ) -> Grammar:  # fmt: skip
        """Compile a grammar that a complete text has to match; give exactly one of the first four.

        Args:
            json_schema: a JSON schema.
            regex: a regular expression.
            grammar: a grammar in Lark or GBNF.
            tools: a description of tool calls, as returned by `Tools.grammar`.
            compact_json: whether JSON is written without spaces.

        Raises:
            GrammarError: the grammar has an unsupported keyword, or exceeds a limit.
        """
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar, "tools": tools}
        kinds = [kind for kind, value in given.items() if value is not None]
        if len(kinds) != 1:
            raise PipelineError(f"{len(kinds)} grammars are given; give one of json_schema, regex and grammar")
        kind, value = kinds[0], given[kinds[0]]
        try:
            definition = self._define(kind, value, compact_json)
        except GrammarError as error:
            # The schemas of tools that are not strict may be replaced, whatever they are.
            if kind != "tools" or not error.is_limit or (looser := self._compiler.with_types_only(value)) == value:
                raise
            definition = self._define(kind, looser, compact_json)
        # This stack is twice as large as the child process's, on which the grammar compiled.
        matcher = run_on_large_stack(self._compiler.make_matcher, self._index, definition)
        if matcher.is_error():
            raise GrammarError(kind, matcher.get_error())
        return Grammar(self, matcher, BASE_BYTES + BYTES_EACH * len(definition), calls=kind == "tools")

    async def compile_async(self, **given: Any) -> Grammar:
        """Run `compile` in another thread; given: the arguments of `compile`.

        Most of the work is done in a child process, which is killed if the coroutine is cancelled.
        """
        queued = self._thread.submit(self.compile, **given)
        work = asyncio.wrap_future(queued)
        # Read the exception, so that asyncio does not log the error of a cancelled request.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            if not queued.cancel():
                self._child.stop()
                await asyncio.wait([work])
            raise
        return work.result()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar")

    def _define(self, kind: str, value: Any, compact: bool) -> str:
        try:
            text = json.dumps(value)
            if len(text) > MAX_CHARACTERS:
                raise GrammarError(
                    kind, f"the definition has {len(text)} characters, the limit is {MAX_CHARACTERS}; shorten it", is_limit=True
                )
            return self._definition(kind, text, compact)
        except LimitExceeded as error:
            raise GrammarError(kind, f"the definition is too complex: {error}; simplify it", is_limit=True) from None
        except RecursionError:
            raise GrammarError(kind, "the definition nests too deep; reduce its nesting", is_limit=True) from None

    def _definition_in_child(self, kind: str, text: str, compact: bool) -> str:
        try:
            return self._child.call(self._compiler.compile_definition, kind, text, compact)
        except PipelineError as error:
            raise GrammarError(kind, str(error)) from None
