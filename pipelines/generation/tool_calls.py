"""Calls of functions, told from the text of an answer as it comes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from castiron.pipelines.generation.stops import beginning_in
from castiron.pipelines.generation.thoughts import Thought
from castiron.pipelines.generation.tool_forms import HARMONY_MARKS, ToolForm, read

# What stands before the arguments of a call, where these come as JSON that can be told piece by piece.
JSON_HEAD = re.compile(r'\s*[\[,;]?\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
HEADS = {"json": JSON_HEAD, "list": JSON_HEAD, "named": re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")}


@dataclass(frozen=True)
class CallPart:
    """A piece of call number `index` of a text: its name at its beginning, then its arguments, JSON in pieces."""

    index: int
    name: str | None
    arguments: str


Piece = str | CallPart


@dataclass(frozen=True)
class Tools:
    """Functions that a model may call, in the form of its template; `schemas` are those of their parameters by name.

    `single`: the text ends behind the first call.
    """

    form: ToolForm
    schemas: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False

    def reader(self) -> Calls | Harmony:
        return Harmony(self) if self.form.kind == "harmony" else Calls(self)


class Calls:
    """Tells calls from text. What may be the beginning of a call is held back, and what turns out to be none is text as it
    was written."""

    def __init__(self, tools: Tools):
        self.tools, self.form = tools, tools.form
        self.count = 0
        self._held = ""
        # Of calls that have begun, what came behind their mark, and how much of it is told.
        self._payload: str | None = None
        self._done = 0
        self._value: _Value | None = None
        self._text = False

    @property
    def full(self) -> bool:
        """Whether the only call that there may be is whole."""
        return self.tools.single and self.count > 0 and self._value is None and (self._payload is None or not self.form.end)

    def add(self, more: str) -> list[Piece]:
        """The pieces that are certain once `more` has come."""
        self._held += more
        told: list[Piece] = []
        while self._step(told):
            pass
        return told

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        told: list[Piece] = []
        if self._payload is not None:
            self._payload += self._held
            self._tell(told)
            self._close(told)
        elif self._held and not (self.count and not self._held.strip()):
            told.append(self._held)
        self._held = ""
        return told

    def _step(self, told: list[Piece]) -> bool:
        if self._payload is not None:
            return self._go_on(told)
        if not self.form.begin:
            return self._bare(told)
        before, found, rest = self._held.partition(self.form.begin)
        # Space before a call is none of the answer's, nor is that between calls.
        certain = before if found else self._held[: beginning_in(self._held, self.form.begin)]
        words = certain.rstrip()
        if words:
            told.append(words)
        if not found:
            self._held = self._held[len(words) :]
            return False
        self._held, self._payload, self._done = rest, "", 0
        return True

    def _bare(self, told: list[Piece]) -> bool:
        """Of a form without a mark: a text that begins as JSON is a call."""
        start = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        if self._text or start and not start.startswith("{") and not "<|python_tag|>".startswith(start):
            told += [self._held] * bool(self._held)
            self._held, self._text = "", True
            return False
        if not start.startswith("{"):
            return False
        self._held, self._payload, self._done = start, "", 0
        return True

    def _go_on(self, told: list[Piece]) -> bool:
        """Takes what is held into the payload, up to the mark that ends it."""
        end = self.form.end
        if not end:
            self._payload, self._held = self._payload + self._held, ""
            self._tell(told)
            return False
        before, found, rest = self._held.partition(end)
        certain = before if found else self._held[: beginning_in(self._held, end)]
        self._payload += certain
        self._tell(told)
        self._held = rest if found else self._held[len(certain) :]
        if found:
            self._close(told, end)
        return bool(found)

    def _tell(self, told: list[Piece]) -> None:
        """Tells of arguments in JSON as they come."""
        head = HEADS.get(self.form.kind)
        while head and (self.count == 0 or not self.tools.single or self._value):
            if self._value is None:
                # A mark between calls without an end is another beginning.
                start = self._done + len(self.form.begin) * self._payload.startswith(self.form.begin or "\0", self._done)
                if not (found := head.match(self._payload, start)) or not self._known(found[1]):
                    return
                told.append(CallPart(self.count, found[1], ""))
                self._value, self._done = _Value(), found.end()
            more = self._value.take(self._payload[self._done :])
            if more:
                told.append(CallPart(self.count, None, more))
                self._done += len(more)
            if not self._value.whole:
                return
            if closing := re.compile(r"\s*\}").match(self._payload, self._done) if self.form.kind != "named" else True:
                self._done = self._done if closing is True else closing.end()
                self.count, self._value = self.count + 1, None
            else:
                return

    def _close(self, told: list[Piece], end: str = "") -> None:
        """The payload is whole, and `end` stood behind it."""
        payload, self._payload = self._payload, None
        if self._value is not None:
            # Cut off inside its arguments, as a client is to see.
            self.count, self._value = self.count + 1, None
        elif not self._done:
            try:
                calls = read(self.form, payload, self.tools.schemas)
                if not all(self._known(name) for name, _ in calls):
                    raise ValueError("an answer that has a name")
            except ValueError:
                told.append(f"{self.form.begin}{payload}{end}")
                return
            for name, arguments in calls[:1] if self.tools.single else calls:
                told.append(CallPart(self.count, name, arguments))
                self.count += 1

    def _known(self, name: str) -> bool:
        """Whether it may be a function's; where no mark tells calls from JSON, only the functions' own names tell."""
        return bool(self.form.begin) or not self.tools.schemas or name in self.tools.schemas


class _Value:
    """Follows a JSON object to its end."""

    def __init__(self) -> None:
        self.depth, self.quoted, self.escaped, self.whole = 0, False, False, False

    def take(self, text: str) -> str:
        """As much of `text` as belongs to it."""
        for at, letter in enumerate(text if not self.whole else ""):
            if self.quoted:
                self.quoted = self.escaped or letter != '"'
                self.escaped = letter == "\\" and not self.escaped
            elif letter == '"':
                self.quoted = True
            else:
                self.depth += (letter in "{[") - (letter in "}]")
                if not self.depth:
                    self.whole = True
                    return text[: at + 1]
        return "" if self.whole else text


class Harmony:
    """The messages of gpt-oss: what goes to the analysis channel is thought, what is addressed to a function is a call of it,
    and the rest is said."""

    def __init__(self, tools: Tools):
        self.tools, self.count = tools, 0
        self._held, self._header, self._body = "", "", False
        self._kind: str | None = "text"

    @property
    def full(self) -> bool:
        return self.tools.single and self.count > 0 and self._kind != "call"

    def add(self, more: str) -> list[Piece]:
        self._held += more
        told: list[Piece] = []
        while found := re.search("|".join(map(re.escape, HARMONY_MARKS)), self._held):
            self._say(self._held[: found.start()], told)
            self._held = self._held[found.end() :]
            self._mark(found[0], told)
        certain = min(beginning_in(self._held, mark) for mark in HARMONY_MARKS)
        self._say(self._held[:certain], told)
        self._held = self._held[certain:]
        return told

    def finish(self) -> list[Piece]:
        told: list[Piece] = []
        self._say(self._held, told)
        self._held = ""
        self._end()
        return told

    def _mark(self, mark: str, told: list[Piece]) -> None:
        if mark == "<|message|>":
            self._body = True
            name = re.search(r"to=functions\.([\w.-]+)", self._header)
            self._kind = "call" if name else "thought" if re.search("channel\\|>analysis", self._header) else "text"
            if name:
                told.append(CallPart(self.count, name[1], ""))
        elif mark in ("<|channel|>", "<|constrain|>") and not self._body:
            self._header += mark
        else:
            self._end()
            self._header = mark

    def _end(self) -> None:
        self.count += self._kind == "call"
        self._kind, self._body, self._header = "text", False, ""

    def _say(self, text: str, told: list[Piece]) -> None:
        if not text:
            return
        if not self._body and self._header:
            self._header += text
        elif self._kind == "call":
            told.append(CallPart(self.count, None, text))
        else:
            told.append(Thought(text) if self._kind == "thought" else text)


def joined(parts: Sequence[CallPart]) -> list[tuple[str, str]]:
    """Whole calls as (name, arguments), of all their pieces."""
    found: dict[int, list[str]] = {}
    for part in parts:
        entry = found.setdefault(part.index, ["", ""])
        entry[0] += part.name or ""
        entry[1] += part.arguments
    return [(name, arguments) for _, (name, arguments) in sorted(found.items())]
