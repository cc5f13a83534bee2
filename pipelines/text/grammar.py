"""Grammars that a text has to match: JSON schemas, regular expressions, Lark or GBNF."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from castiron.pipelines.child_process import ChildProcess, Interrupted, LimitExceeded, run_on_large_stack
from castiron.pipelines.engine.constraint import ConstraintError
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.lane import Cache, Lane
from castiron.pipelines.text.reasoning import Marks

# Limits of the child process that first compiles a grammar: seconds of processor time, bytes of memory.
SECONDS, MAX_BYTES = 1.0, 1 << 30
# Seconds of processor time of grammars that are compiled before others, and how long grammars of a client that sent
# another one are compiled after others.
QUICK_SECONDS, SLOW_CLIENT_SECONDS = 0.25, 300.0
# Max seconds until a client of a server gets its grammar or an error.
MAX_WAIT = 5.0
# Max characters of a grammar, and how many compiled definitions and errors are cached.
MAX_CHARACTERS, MAX_CACHED, MAX_ERRORS = 1_000_000, 16, 1_000
# Estimated bytes of memory for the grammar of one text: a fixed part, and a part for each byte of its definition.
BASE_BYTES, BYTES_EACH = 1_000_000, 2
# Short texts that few tokenizers merge with the text after them.
PRECEDING = ("\n", "=")


class GrammarConstraint:
    """Makes a generated text match a grammar, except for reasoning at its start."""

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
        """Append a token; raise ConstraintError if it is not allowed or exceeds a limit."""
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
    """Raised for a definition, of argument `kind`, that is not supported or exceeds a limit."""

    def __init__(self, kind: str, reason: str, is_limit: bool = False):
        super().__init__(f"{kind.replace('_', ' ')}: {reason}")
        self.kind, self.reason, self.is_limit = kind, reason, is_limit


class GrammarBusy(GrammarError):
    """Raised if a grammar could not be compiled in time, because others are compiled."""

    def __init__(self, kind: str):
        super().__init__(kind, f"it was not compiled within {MAX_WAIT:g} s, because the server is busy; retry later")


class Grammar:
    """A compiled grammar; nbytes: estimated memory of the constraint of one text."""

    def __init__(self, grammars: Grammars, matcher, nbytes: int, calls: bool):
        self._grammars, self._matcher, self.nbytes, self.calls = grammars, matcher, nbytes, calls

    def constraint(self, marks: Marks = (), prompt: str = "") -> GrammarConstraint:
        """Return a new constraint that makes one generated text match this grammar.

        It does not apply to reasoning between `marks`, in which `prompt` may end.
        """
        return GrammarConstraint(self._matcher.deep_copy(), self._grammars, marks, prompt)


class Grammars:
    """A compiler of grammars for one tokenizer's vocabulary: the bytes of each token, by id.

    A child process compiles each grammar first, because llguidance may crash. One compiles quick
    grammars; another, of lower priority, compiles slow ones, and those of clients that sent one a
    short time ago, so that nobody waits for another client's slow grammars. Errors are stored.
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
        start = (MAX_BYTES, grammar_compiler.start, tokens, self.special, self.eos, marks)
        self._quick = Lane(ChildProcess(QUICK_SECONDS, *start, niceness=0))
        self._slow = Lane(ChildProcess(SECONDS, *start))
        # Definitions by a hash of the grammar, and errors of grammars that cannot be compiled.
        self._definitions, self._errors = Cache(MAX_CACHED), Cache(MAX_ERRORS)
        # By client: until when its grammars are compiled as slow ones.
        self._slow_until: dict[str, float] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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
        """Compile a grammar that a complete text has to match: exactly one of the first four.

        grammar: Lark or GBNF. tools: from `Tools.grammar`. compact_json: JSON without spaces. Raise
        GrammarError for an unsupported keyword or an exceeded limit.
        """
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar, "tools": tools}
        return self._compile(given, compact_json, self._slow.child)

    async def compile_async(self, client: str = "", compact_json: bool = False, **given: Any) -> Grammar:
        """Run `compile` for a client; raise GrammarBusy after MAX_WAIT seconds.

        A client compiles one grammar at a time. client: "" for the local user, who waits without
        limit.
        """
        deadline = time.monotonic() + MAX_WAIT if client else None
        async with self._turns.setdefault(client, asyncio.Lock()):
            with contextlib.suppress(_NotCached):
                return await asyncio.to_thread(self._compile, given, compact_json, None)
            if client and time.monotonic() > self._slow_until.get(client, 0):
                with contextlib.suppress(_TooSlow):
                    return await self._run(self._quick, given, compact_json, deadline)
                now = time.monotonic()
                self._slow_until = {name: until for name, until in self._slow_until.items() if until > now}
                self._slow_until[client] = now + SLOW_CLIENT_SECONDS
            return await self._run(self._slow, given, compact_json, deadline)

    async def _run(self, lane: Lane, given: Mapping[str, Any], compact: bool, deadline: float | None) -> Grammar:
        try:
            return await lane.run(deadline, self._compile, given, compact, lane.child, deadline)
        except TimeoutError:
            raise GrammarBusy(next(iter(given))) from None

    def _compile(
        self, given: Mapping[str, Any], compact: bool, child: ChildProcess | None, deadline: float | None = None
    ) -> Grammar:  # fmt: skip
        """Compile a grammar in a child process; without one, raise _NotCached for a new grammar."""
        kinds = [kind for kind, value in given.items() if value is not None]
        if len(kinds) != 1:
            raise PipelineError(f"{len(kinds)} grammars are given; give one of json_schema, regex and grammar")
        kind, value = kinds[0], given[kinds[0]]
        try:
            definition = self._define(kind, value, compact, child, deadline)
        except GrammarError as error:
            # The schemas of tools that are not strict may be replaced, whatever they are.
            if kind != "tools" or not error.is_limit or (looser := self._compiler.with_types_only(value)) == value:
                raise
            definition = self._define(kind, looser, compact, child, deadline)
        # This stack is twice as large as the child process's, on which the grammar compiled.
        matcher = run_on_large_stack(self._compiler.make_matcher, self._index, definition)
        if matcher.is_error():
            raise GrammarError(kind, matcher.get_error())
        return Grammar(self, matcher, BASE_BYTES + BYTES_EACH * len(definition), calls=kind == "tools")

    def _define(self, kind: str, value: Any, compact: bool, child: ChildProcess | None, deadline: float | None) -> str:
        """Return the definition of a grammar in llguidance's format, and store it, or its error."""
        try:
            text = json.dumps(value)
        except RecursionError:
            raise GrammarError(kind, "the definition nests too deep; reduce its nesting", is_limit=True) from None
        key = sha256(f"{kind} {compact} {text}".encode()).digest()
        if found := self._definitions.get(key):
            return found
        if error := self._errors.get(key):
            raise GrammarError(kind, *error)
        try:
            definition = self._in_child(kind, text, compact, child, deadline)
        except GrammarError as error:
            if not isinstance(error, GrammarBusy):
                self._errors.put(key, (error.reason, error.is_limit))
            raise
        self._definitions.put(key, definition)
        return definition

    def _in_child(self, kind: str, text: str, compact: bool, child: ChildProcess | None, deadline: float | None) -> str:
        if len(text) > MAX_CHARACTERS:
            raise GrammarError(
                kind, f"the definition has {len(text)} characters, the limit is {MAX_CHARACTERS}; shorten it", is_limit=True
            )
        if child is None:
            raise _NotCached
        wall = None if deadline is None else deadline - time.monotonic()
        if wall is not None and wall <= 0:
            raise GrammarBusy(kind)
        try:
            return child.call(self._compiler.compile_definition, kind, text, compact, wall_seconds=wall)
        except Interrupted:
            raise GrammarBusy(kind) from None
        except LimitExceeded as error:
            if child is self._quick.child and child.used >= child.seconds:
                raise _TooSlow from None
            raise GrammarError(kind, f"the definition is too complex: {error}; simplify it", is_limit=True) from None
        except PipelineError as error:
            raise GrammarError(kind, str(error)) from None


class _NotCached(Exception):
    """Raised if a grammar was not compiled before."""


class _TooSlow(Exception):
    """Raised if a grammar takes more time than the quick lane has."""
