"""Separate tool calls from the text of an answer as it comes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from castiron.pipelines.text.reasoning import Reasoning, split_at_mark
from castiron.pipelines.text.tool_formats import HARMONY_MARKS, ToolFormat, read

# Matches a call up to its arguments, in formats whose JSON can be passed on in pieces.
JSON_HEAD = re.compile(r'\s*[\[,;]?\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
HEADS = {"json": JSON_HEAD, "list": JSON_HEAD, "named": re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")}


@dataclass(frozen=True)
class CallPart:
    """A piece of call number `index` in a text.

    The first piece has the function's `name`; the `arguments` of all pieces join to JSON.
    """

    index: int
    name: str | None
    arguments: str


Piece = str | CallPart


@dataclass(frozen=True)
class Tools:
    """Functions that a model may call, in the format of its template.

    `schemas`: JSON schemas of their parameters, by name. `single`: the first call ends the text.
    """

    form: ToolFormat
    schemas: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False

    def grammar(self, schemas: Mapping[str, Any], *, answer: Any = None, free: bool = False) -> dict[str, Any]:
        """Return the argument `tools` of `Grammars.compile`; options as of `ToolGrammar.text`."""
        return {"form": self.form.name, "schemas": dict(schemas), "parallel": not self.single, "answer": answer, "free": free}

    def reader(self) -> Calls | Harmony:
        return Harmony(self) if self.form.kind == "harmony" else Calls(self)


class Calls:
    """A reader that separates tool calls from the text of an answer.

    It holds back only text that may be the start of a call.
    """

    def __init__(self, tools: Tools):
        self.tools, self.form = tools, tools.form
        self.count = 0
        self._pending = ""
        # The text after the start mark of calls, and how many characters of it were passed on.
        self._payload: str | None = None
        self._done = 0
        self._value: _JsonObject | None = None
        self._text = False

    @property
    def full(self) -> bool:
        """Whether the request allows a single call, and that call is complete."""
        return self.tools.single and self.count > 0 and self._value is None and (self._payload is None or not self.form.end)

    def add(self, more: str) -> list[Piece]:
        """Append `more` to the text; return the pieces that are now final."""
        self._pending += more
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        pieces: list[Piece] = []
        if self._payload is not None:
            self._payload += self._pending
            self._emit_arguments(pieces)
            self._close(pieces)
        elif self._pending and not (self.count and not self._pending.strip()):
            pieces.append(self._pending)
        self._pending = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        if self._payload is not None:
            return self._step_payload(pieces)
        if not self.form.begin:
            return self._step_without_mark(pieces)
        certain, mark, rest = split_at_mark(self._pending, [self.form.begin])
        # Space before and between calls is not part of the answer.
        words = certain.rstrip()
        if words:
            pieces.append(words)
        if not mark:
            self._pending = self._pending[len(words) :]
            return False
        self._pending, self._payload, self._done = rest, "", 0
        return True

    def _step_without_mark(self, pieces: list[Piece]) -> bool:
        """Read pending text in a format without a start mark: text that starts with { is a call."""
        start = self._pending.lstrip().removeprefix("<|python_tag|>").lstrip()
        if self._text or start and not start.startswith("{") and not "<|python_tag|>".startswith(start):
            pieces += [self._pending] * bool(self._pending)
            self._pending, self._text = "", True
            return False
        if not start.startswith("{"):
            return False
        self._pending, self._payload, self._done = start, "", 0
        return True

    def _step_payload(self, pieces: list[Piece]) -> bool:
        """Move pending text to the payload, up to its end mark if the format has one."""
        certain, end, self._pending = split_at_mark(self._pending, [self.form.end] if self.form.end else [])
        self._payload += certain
        self._emit_arguments(pieces)
        if end:
            self._close(pieces, end)
        return bool(end)

    def _emit_arguments(self, pieces: list[Piece]) -> None:
        """Add the arguments in JSON that have come so far to `pieces`."""
        head = HEADS.get(self.form.kind)
        while head and (self.count == 0 or not self.tools.single or self._value):
            if self._value is None:
                # In a format without an end mark, another start mark starts another call.
                start = self._done + len(self.form.begin) * self._payload.startswith(self.form.begin or "\0", self._done)
                if not (found := head.match(self._payload, start)) or not self._is_function(found[1]):
                    return
                pieces.append(CallPart(self.count, found[1], ""))
                self._value, self._done = _JsonObject(), found.end()
            more = self._value.take(self._payload[self._done :])
            if more:
                pieces.append(CallPart(self.count, None, more))
                self._done += len(more)
            if not self._value.complete:
                return
            # In JSON a bracket closes the call after its arguments.
            closing = re.compile("" if self.form.kind == "named" else r"\s*\}").match(self._payload, self._done)
            if not closing:
                return
            self._done, self.count, self._value = closing.end(), self.count + 1, None

    def _close(self, pieces: list[Piece], end: str = "") -> None:
        """Read the calls of a complete payload; `end` is the end mark that followed it."""
        payload, self._payload = self._payload, None
        if self._value is not None:
            # The call was cut off inside its arguments; the client has received a part of them.
            self.count, self._value = self.count + 1, None
        elif not self._done:
            try:
                calls = read(self.form, payload, self.tools.schemas)
                if not all(self._is_function(name) for name, _ in calls):
                    raise ValueError("JSON that is not a call")
            except ValueError:
                pieces.append(f"{self.form.begin}{payload}{end}")
                return
            for name, arguments in calls[:1] if self.tools.single else calls:
                pieces.append(CallPart(self.count, name, arguments))
                self.count += 1

    def _is_function(self, name: str) -> bool:
        # Without a start mark, only the names of functions distinguish calls from JSON.
        return bool(self.form.begin) or not self.tools.schemas or name in self.tools.schemas


class _JsonObject:
    """A scanner that finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self.depth, self.quoted, self.escaped, self.complete = 0, False, False, False

    def take(self, text: str) -> str:
        """Return the part of `text` that belongs to the object."""
        for at, letter in enumerate(text if not self.complete else ""):
            if self.quoted:
                self.quoted = self.escaped or letter != '"'
                self.escaped = letter == "\\" and not self.escaped
            elif letter == '"':
                self.quoted = True
            else:
                self.depth += (letter in "{[") - (letter in "}]")
                if not self.depth:
                    self.complete = True
                    return text[: at + 1]
        return "" if self.complete else text


# A possible start of a call's header, before its channel.
RECIPIENT = re.compile(r"\s*(?:t|to|to=[\w.-]*)?\s*")


class Harmony:
    """Separates the messages of gpt-oss, whose format is called Harmony.

    The analysis channel is reasoning, a message to a function is a call, the rest is the answer.
    """

    def __init__(self, tools: Tools):
        self.tools, self.count = tools, 0
        self._pending, self._header, self._body = "", "", False
        self._kind: str | None = "text"
        # Whether the text may still be a recipient: the prompt ends in the first message's header.
        self._opening = True

    @property
    def full(self) -> bool:
        return self.tools.single and self.count > 0 and self._kind != "call"

    def add(self, more: str) -> list[Piece]:
        self._pending += more
        pieces: list[Piece] = []
        while True:
            certain, mark, rest = split_at_mark(self._pending, HARMONY_MARKS)
            if not mark and self._opening and RECIPIENT.fullmatch(certain):
                return pieces
            self._emit(certain, pieces)
            self._pending = rest
            if not mark:
                return pieces
            self._mark(mark, pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        self._opening = False
        self._emit(self._pending, pieces)
        self._pending = ""
        self._end()
        return pieces

    def _mark(self, mark: str, pieces: list[Piece]) -> None:
        self._opening = False
        if mark == "<|message|>":
            self._body = True
            name = re.search(r"to=functions\.([\w.-]+)", self._header)
            self._kind = "call" if name else "reasoning" if re.search("channel\\|>analysis", self._header) else "text"
            if name:
                pieces.append(CallPart(self.count, name[1], ""))
        elif mark in ("<|channel|>", "<|constrain|>") and not self._body:
            self._header += mark
        else:
            self._end()
            self._header = mark

    def _end(self) -> None:
        self.count += self._kind == "call"
        self._kind, self._body, self._header = "text", False, ""

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        recipient, self._opening = self._opening and RECIPIENT.fullmatch(text), False
        if not self._body and (self._header or recipient):
            self._header += text
        elif self._kind == "call":
            pieces.append(CallPart(self.count, None, text))
        else:
            pieces.append(Reasoning(text) if self._kind == "reasoning" else text)


def joined(parts: Sequence[CallPart]) -> list[tuple[str, str]]:
    """Return the complete calls as (name, arguments)."""
    found: dict[int, list[str]] = {}
    for part in parts:
        entry = found.setdefault(part.index, ["", ""])
        entry[0] += part.name or ""
        entry[1] += part.arguments
    return [(name, arguments) for _, (name, arguments) in sorted(found.items())]
