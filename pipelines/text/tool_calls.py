"""Tool calls, separated from the text of an answer as it comes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from castiron.pipelines.text.reasoning import Reasoning, prefix_start
from castiron.pipelines.text.tool_formats import HARMONY_MARKS, ToolFormat, read

# Matches a call up to its arguments, in formats whose JSON can be passed on in pieces.
JSON_HEAD = re.compile(r'\s*[\[,;]?\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
HEADS = {"json": JSON_HEAD, "list": JSON_HEAD, "named": re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")}


@dataclass(frozen=True)
class CallPart:
    """A piece of call number `index` in a text.

    The first piece of a call has the function's `name`; the `arguments` of all pieces join to JSON.
    """

    index: int
    name: str | None
    arguments: str


Piece = str | CallPart


@dataclass(frozen=True)
class Tools:
    """Functions that a model may call, in the format of its template.

    schemas: JSON schemas of their parameters, by name. single: the text ends after the first call.
    """

    form: ToolFormat
    schemas: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False

    def grammar(self, schemas: Mapping[str, Any], *, answer: Any = None, free: bool = False) -> dict[str, Any]:
        """Return the argument `tools` of `Grammars.compile` for a text of calls to the functions in
        `schemas`; `answer` and `free` as in `ToolGrammar.text`."""
        return {"form": self.form.name, "schemas": dict(schemas), "parallel": not self.single, "answer": answer, "free": free}

    def reader(self) -> Calls | Harmony:
        return Harmony(self) if self.form.kind == "harmony" else Calls(self)


class Calls:
    """A reader that separates tool calls from the text of an answer.

    It holds back text that may be the start of a call, and passes it on unchanged if it is not.
    """

    def __init__(self, tools: Tools):
        self.tools, self.form = tools, tools.form
        self.count = 0
        self._pending = ""
        # What followed the start mark of calls, and how much of it has been passed on.
        self._payload: str | None = None
        self._done = 0
        self._value: _JsonObject | None = None
        self._text = False

    @property
    def full(self) -> bool:
        """Whether the request allows a single call, and that call is complete."""
        return self.tools.single and self.count > 0 and self._value is None and (self._payload is None or not self.form.end)

    def add(self, more: str) -> list[Piece]:
        """Return the pieces that are final with `more`."""
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
        before, found, rest = self._pending.partition(self.form.begin)
        # Space before and between calls is not part of the answer.
        certain = before if found else self._pending[: prefix_start(self._pending, self.form.begin)]
        words = certain.rstrip()
        if words:
            pieces.append(words)
        if not found:
            self._pending = self._pending[len(words) :]
            return False
        self._pending, self._payload, self._done = rest, "", 0
        return True

    def _step_without_mark(self, pieces: list[Piece]) -> bool:
        """Step in a format without a start mark: a text that starts as JSON is a call."""
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
        """Move held text to the payload, up to its end mark."""
        end = self.form.end
        if not end:
            self._payload, self._pending = self._payload + self._pending, ""
            self._emit_arguments(pieces)
            return False
        before, found, rest = self._pending.partition(end)
        certain = before if found else self._pending[: prefix_start(self._pending, end)]
        self._payload += certain
        self._emit_arguments(pieces)
        self._pending = rest if found else self._pending[len(certain) :]
        if found:
            self._close(pieces, end)
        return bool(found)

    def _emit_arguments(self, pieces: list[Piece]) -> None:
        """Pass on arguments in JSON as they come."""
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
            if closing := re.compile(r"\s*\}").match(self._payload, self._done) if self.form.kind != "named" else True:
                self._done = self._done if closing is True else closing.end()
                self.count, self._value = self.count + 1, None
            else:
                return

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
        """Whether a name may be a function's; without a start mark, only the names in `schemas`
        distinguish calls from JSON."""
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
    """Separates the messages of gpt-oss: the analysis channel is reasoning, a message to a function
    is a call, the rest is the answer."""

    def __init__(self, tools: Tools):
        self.tools, self.count = tools, 0
        self._pending, self._header, self._body = "", "", False
        self._kind: str | None = "text"
        # True until something other than a recipient comes: the prompt ends in the header of the
        # first message.
        self._opening = True

    @property
    def full(self) -> bool:
        return self.tools.single and self.count > 0 and self._kind != "call"

    def add(self, more: str) -> list[Piece]:
        self._pending += more
        pieces: list[Piece] = []
        while found := re.search("|".join(map(re.escape, HARMONY_MARKS)), self._pending):
            self._emit(self._pending[: found.start()], pieces)
            self._pending = self._pending[found.end() :]
            self._mark(found[0], pieces)
        certain = min(prefix_start(self._pending, mark) for mark in HARMONY_MARKS)
        if self._opening and RECIPIENT.fullmatch(self._pending, 0, certain):
            return pieces
        self._emit(self._pending[:certain], pieces)
        self._pending = self._pending[certain:]
        return pieces

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
    """Return complete calls as (name, arguments), from all their pieces."""
    found: dict[int, list[str]] = {}
    for part in parts:
        entry = found.setdefault(part.index, ["", ""])
        entry[0] += part.name or ""
        entry[1] += part.arguments
    return [(name, arguments) for _, (name, arguments) in sorted(found.items())]
