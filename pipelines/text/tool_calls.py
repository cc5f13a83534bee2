"""Separate tool calls from the text of an answer while it is generated, or in a complete text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from castiron.pipelines.text.reasoning import Reasoning, split_at_mark
from castiron.pipelines.text.tool_formats import HARMONY_MARKS, NOT_CALLS, CallReader, ReadCall, ToolFormat, read_bare

# The start of a call in JSON without marks, which may be in a list or a code block.
BARE_CALL = re.compile(r"""(?:```\w*\s*)?\[?\s*\{\s*["'](?:name|tool_name|function|type|arguments|parameters)["']\s*:""")
# A text that may become the start of such a call, and the positions in a text where one may start.
BARE_PREFIX = re.compile(r"""(?:`{1,2}|```\w*\s*\[?\s*\{?\s*["']?\w*["']?|\[?\s*\{\s*["']?\w*["']?|\[\s*)\s*\Z""")
BARE_START = re.compile(r"(?m)^[ \t]*(?=`|[\[{])")

Call = tuple[str, str]


@dataclass(frozen=True)
class CallPart:
    """A part of a tool call in a streamed answer; `index` counts the calls of the answer from 0.

    Only the first part has the name. The arguments of all parts, joined, are a JSON object.
    """

    index: int
    name: str | None
    arguments: str


Piece = str | CallPart


@dataclass(frozen=True)
class Tools:
    """The functions that a model may call; single: the first call ends the answer."""

    form: ToolFormat
    schemas: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False

    def grammar(
        self, schemas: Mapping[str, Any], *, answer: Any = None, free: bool = False, strict: Collection[str] = ()
    ) -> dict[str, Any]:  # fmt: skip
        """Return a description of the allowed tool calls, for `Grammars.compile(tools=...)`.

        answer: a JSON schema of text instead of a call. free: other text is allowed around calls.
        strict: functions whose schema must be enforced completely.
        """
        return {
            "form": asdict(self.form), "schemas": dict(schemas), "parallel": not self.single, "answer": answer, "free": free,
            "strict": sorted(set(schemas).intersection(strict)),
        }  # fmt: skip

    def reader(self) -> Calls | Harmony:
        return Harmony(self) if self.form.style == "harmony" else Calls(self)


def read_calls(tools: Tools, text: str) -> list[Call]:
    """Return the calls in a complete text, each as (function name, arguments in JSON)."""
    reader = tools.reader()
    return joined([piece for piece in [*reader.add(text), *reader.finish()] if isinstance(piece, CallPart)])


class Calls:
    """Splits an answer into text and tool calls while it is generated.

    Models sometimes write a call as JSON without its marks; it is accepted if it fits the function.
    """

    def __init__(self, tools: Tools):
        self.tools, self.form = tools, tools.form
        self.calls = CallReader(tools.form, tools.schemas)
        self.triggers, self.close = tools.form.triggers, tools.form.close
        self.count = 0
        self._pending = ""
        # `_payload`: the text from the start mark of calls on, None outside calls. `_done`: how many
        # characters of it were returned. `_value`: the scanner of the arguments in progress.
        self._payload: str | None = None
        self._done = 0
        self._value: _Json | None = None
        # A scanner of JSON that may be a call without marks, and the number of scanned characters.
        self._bare: tuple[_Json, int] | None = None
        # Whether a call without marks may start here, at the start of the text or after a call.
        self._may_start = True

    @property
    def full(self) -> bool:
        """Whether the answer must end: one call is allowed (`Tools.single`), and it is complete."""
        return self.tools.single and self.count > 0 and self._value is None and (self._payload is None or not self.close)

    def add(self, more: str) -> list[Piece]:
        """Append `more` to the text; return the pieces (`CallPart` or str) that are now final."""
        self._pending += more
        pieces: list[Piece] = []
        while self._step_payload(pieces) if self._payload is not None else self._step_text(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """End the text; return its last pieces (`CallPart` or str), which were held back."""
        pieces: list[Piece] = []
        if self._payload is not None:
            self._payload += self._pending
            self._pending = ""
            self._emit_arguments(pieces)
            self._end_payload(pieces)
        if self._bare and self._bare[0].complete:
            # A code block without its end mark.
            self._pending += "```"
            self._step_bare(pieces)
        if self._pending and not (self.count and not self._pending.strip()):
            pieces.append(self._pending)
        self._pending = ""
        return pieces

    def _step_text(self, pieces: list[Piece]) -> bool:
        """Process text outside calls, without what may start one; return whether to go on."""
        start = self._bare_start()
        text = self._pending if start is None else self._pending[:start]
        certain, mark, rest = split_at_mark(text, self.triggers, final=start is not None)
        if mark:
            self._emit_text(certain.rstrip(), pieces)
            self._pending, self._payload, self._done = self._pending[len(certain) + len(mark) :], mark, 0
            return True
        # White space before and between calls is not part of the answer.
        words = certain.rstrip()
        self._emit_text(words, pieces)
        self._pending = self._pending[len(words) :]
        return start is not None and self._step_bare(pieces)

    def _emit_text(self, words: str, pieces: list[Piece]) -> None:
        if words:
            pieces.append(words)
            self._may_start = False

    def _bare_start(self) -> int | None:
        for found in BARE_START.finditer(self._pending if self.tools.schemas else ""):
            # The pending text may start inside a line.
            if found.start() == 0 and not self._may_start:
                continue
            text = self._pending[found.end() :]
            if BARE_CALL.match(text) or BARE_PREFIX.match(text):
                return found.end()
        return None

    def _step_bare(self, pieces: list[Piece]) -> bool:
        """Move complete JSON at the start to `pieces`, as calls or text, if there is one."""
        text = self._pending.lstrip()
        if not (start := BARE_CALL.match(text)):
            return False
        scanner, end = self._bare or (_Json(), re.search(r"[\[{]", start[0]).start())
        end += len(scanner.take(text[end:]))
        self._bare = scanner, end
        if scanner.complete and text.startswith("```"):
            closed = text.find("```", end)
            end = closed + 3 if closed >= 0 else 0
        if not scanner.complete or not end:
            return False
        self._bare, space = None, self._pending[: len(self._pending) - len(text)]
        self._pending = text[end:]
        try:
            calls = [(name, self._fitted(name, arguments)) for name, arguments in read_bare(text[:end])]
        except NOT_CALLS:
            self._emit_text(space + text[:end], pieces)
        else:
            self._emit_calls(calls, pieces)
            self._pending = self._pending.lstrip(" \n;,")
        return True

    def _fitted(self, name: str, arguments: dict) -> dict:
        """Return the arguments of a call; raise ValueError if they are invalid."""
        found = self.calls.fitted(name, arguments)
        if found is None and not self.triggers and name in self.tools.schemas:
            # In a format without marks the name alone tells calls from other JSON.
            return arguments
        if found is None:
            if name not in self.tools.schemas:
                raise ValueError(f"the request has no function {name!r}")
            raise ValueError(f"the arguments of a call of {name!r} do not match its JSON schema")
        return found

    def _emit_calls(self, calls: Sequence[ReadCall], pieces: list[Piece]) -> None:
        for name, arguments in calls[:1] if self.tools.single else calls:
            pieces.append(CallPart(self.count, name, json.dumps(arguments, ensure_ascii=False)))
            self.count += 1
        self._may_start = True

    def _step_payload(self, pieces: list[Piece]) -> bool:
        """Process text inside calls; return whether the text that ends them was found."""
        certain, end, self._pending = split_at_mark(self._pending, [self.close] if self.close else [])
        self._payload += certain + end
        self._emit_arguments(pieces)
        if end:
            self._end_payload(pieces)
        return bool(end)

    def _emit_arguments(self, pieces: list[Piece]) -> None:
        while self.form.style == "json" and (self.count == 0 or not self.tools.single or self._value):
            if self._value is None:
                if not (found := self.calls.head.search(self._payload, self._done)):
                    return
                pieces.append(CallPart(self.count, found[1], ""))
                self._value, self._done = _Json(), found.end()
            more = self._value.take(self._payload[self._done :])
            if more:
                pieces.append(CallPart(self.count, None, more))
                self._done += len(more)
            if not self._value.complete:
                return
            self.count, self._value = self.count + 1, None

    def _end_payload(self, pieces: list[Piece]) -> None:
        payload, self._payload = self._payload, None
        if self._value is not None:
            # The call was cut off inside its arguments; the client has received a part of them.
            self.count, self._value = self.count + 1, None
        elif not self._done:
            try:
                self._emit_calls(self.calls.read(payload), pieces)
            except ValueError:
                self._emit_text(payload, pieces)
        self._may_start = True


class _Json:
    """Finds the end of a JSON object or list in streamed text; strings may be single-quoted."""

    def __init__(self) -> None:
        self.depth, self.quote, self.escaped, self.complete = 0, "", False, False

    def take(self, text: str) -> str:
        """Read more text; return the part of it that belongs to the JSON value."""
        for at, letter in enumerate(text if not self.complete else ""):
            if self.quote:
                if letter == self.quote and not self.escaped:
                    self.quote = ""
                self.escaped = letter == "\\" and not self.escaped
            elif letter in "\"'":
                self.quote = letter
            else:
                self.depth += (letter in "{[") - (letter in "}]")
                if not self.depth:
                    self.complete = True
                    return text[: at + 1]
        return "" if self.complete else text


# A possible start of a call's header, before its channel.
RECIPIENT = re.compile(r"\s*(?:t|to|to=[\w.-]*)?\s*")


class Harmony:
    """A streaming reader of the messages of gpt-oss, whose format is called Harmony."""

    def __init__(self, tools: Tools):
        self.tools, self.count = tools, 0
        self._pending, self._header, self._body = "", "", False
        self._kind: str | None = "text"
        # Whether the text may start with a recipient, because the prompt ends in the first message's header.
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
    """Join the `parts` of each call; return the calls as (name, arguments in JSON)."""
    found: dict[int, list[str]] = {}
    for part in parts:
        entry = found.setdefault(part.index, ["", ""])
        entry[0] += part.name or ""
        entry[1] += part.arguments
    return [(name, arguments) for _, (name, arguments) in sorted(found.items())]
