"""Adapt the messages and tools of a chat to what its template renders.

Clients send histories of any form. `normal_messages` converts them to one form, the one that HF's
templates expect. Many templates still reject or lose a part of it, such as a second system message.
`Adapter` changes only such parts. It learns what a template renders from short test conversations,
never from the client's, so that the text of a conversation is a prefix of its continuation's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import REASONING
from castiron.pipelines.text.repairs import (
    AS_TEXT,
    REPAIRS,
    TOOL,
    Message,
    Messages,
    Tools,
    completed,
    conversation,
    described,
    json_calls,
    numbered_id,
    written_calls,
)
from castiron.pipelines.text.tool_formats import HERMES, ToolFormat
from castiron.vmfb.bundle.json_record import short

# Renders messages and tools with variables; raises PipelineError if the template rejects them.
Render = Callable[[Messages, Tools | None, Mapping[str, Any]], str]

# Roles of messages that chat templates know by another name.
ROLES = {"developer": "system", "function": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")
# The argument that holds what a call has in place of an object, such as a truncated text.
INPUT = "input"
# The name of a function whose call is not in the conversation.
UNKNOWN = "tool"
# A line at the start of Claude Code's system message, for accounting, which differs in each request. The next text block may
# follow without a line break.
BILLING = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*;)*[ \t]*(?:\r?\n)?")


def normal_messages(messages: Iterable[Mapping[str, Any]]) -> Messages:
    """Return messages as HF's templates expect them; raise PipelineError for other content."""
    found: Messages = []
    open_calls: dict[str, str] = {}
    count = 0
    for given in messages:
        message = {name: value for name, value in given.items() if name not in REASONING or isinstance(value, str)}
        role = message["role"] = ROLES.get(given.get("role", ""), given.get("role"))
        message["content"] = text_of(given.get("content"))
        if role == "system" and isinstance(text := message["content"], str) and (line := BILLING.match(text)):
            message["content"] = text[line.end() :]
            if not message["content"]:
                continue
        calls = message.pop("tool_calls", None)
        if calls and role == "assistant":
            calls = calls if isinstance(calls, list) else [calls]
            message["tool_calls"] = [_normal_call(call, count + index) for index, call in enumerate(calls)]
            open_calls |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
            count += len(calls)
        if role == "tool":
            name, call_id = message.get("name"), message.get("tool_call_id")
            call_id = call_id or next(
                (each for each, called in open_calls.items() if name in (None, "", called)), numbered_id(count)
            )
            called = open_calls.pop(call_id, None) or next(iter(open_calls.values()), UNKNOWN)
            message |= {"name": name or called, "tool_call_id": call_id}
        found.append(message)
    return found


def text_of(content: Any) -> Any:
    """Return the text of a message's content: text, a list of parts with text, or None."""
    if not (isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)):
        return "" if content is None else content
    for part in content:
        if part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = short(repr(part.get("type")))
            raise PipelineError(f"content of type {kind} is not supported: the model reads only text; leave it out")
    return "".join(part["text"] for part in content)


def _normal_call(call: Any, number: int) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise PipelineError(
            "tool_calls of a message are not in OpenAI's format; give each call a function with name and arguments"
        )
    function = {**function, "arguments": _object(function.get("arguments"))}
    return {**call, "id": call.get("id") or numbered_id(number), "type": "function", "function": function}


def _object(arguments: Any) -> dict[str, Any]:
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "null")
            # Half of an emoji, as in a truncated call, cannot be encoded.
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            value = arguments
    return value if isinstance(value, dict) else {} if value is None else {INPUT: value}


class Adapter:
    """Changes what a chat template rejects or loses in the messages and tools of a chat.

    describes: whether to describe tools as text, because the template does not.
    """

    # Max number of stored results of tests.
    MAX_KNOWN = 1000

    def __init__(self, render: Render, form: ToolFormat, describes: bool):
        self._render, self._form, self._describes = render, form, describes
        self._known: dict[tuple[Any, ...], bool] = {}

    def adapted(self, messages: Messages, tools: Tools | None, variables: Mapping[str, Any]) -> tuple[Messages, Tools | None]:
        """Return messages and tools that the template renders without loss."""
        shown = self._shown(tools, variables) if tools else None
        if tools and shown is None:
            messages = described(messages, tools, self._form)
        if shown is None and not self._renders("U", shown, variables):
            # Templates for tools loop over them without a test.
            shown = []
        is_text = bool(tools and not shown and self._form is HERMES)
        return self._repaired(messages, len(REPAIRS), shown, variables, is_text), shown

    def _shown(self, tools: Tools, variables: Mapping[str, Any]) -> Tools | None:
        """Return tools that the template shows; None if it shows none."""
        names = [name for tool in tools if isinstance(name := tool.get("function", tool).get("name"), str)]
        for some in () if self._describes else (tools, [completed(tool) for tool in tools]):
            try:
                text = self._render(conversation("U")[0], some, variables)
            except PipelineError:
                continue
            if all(name in text for name in names):
                return some
        return None

    def _repaired(
        self, messages: Messages, count: int, tools: Tools | None, variables: Mapping[str, Any], is_text: bool = False
    ) -> Messages:
        """Apply those of the first `count` repairs that the template needs."""
        for index, (conversations, repair) in enumerate(REPAIRS[:count]):
            changed = repair(messages, self._form)
            if changed == messages:
                continue
            is_needed = is_text and repair in AS_TEXT
            if is_needed or not all(self._renders(letters, tools, variables, index) for letters in conversations.split()):
                if repair is written_calls and not is_text and self._renders("UXT", tools, variables, index):
                    changed = json_calls(messages)
                messages = changed
        return messages

    def _renders(self, letters: str, tools: Tools | None, variables: Mapping[str, Any], count: int = 0) -> bool:
        """Return whether a test conversation is rendered completely after `count` repairs."""
        tools = [TOOL] if tools else tools
        # Only the hash is stored, because clients choose the variables.
        key = letters, count, repr(tools), hash(repr(sorted(variables.items())))
        if (known := self._known.get(key)) is not None:
            return known
        messages, marks = conversation(letters)
        try:
            text = self._render(self._repaired(messages, count, tools, variables), tools, variables)
        except PipelineError:
            text = ""
        in_order = re.search(".*".join(map(re.escape, marks)), text, re.DOTALL)
        # Arguments must be written neither as Python's dict nor as a JSON text in a JSON text.
        found = in_order is not None and "{'argument'" not in text and '{\\"argument' not in text
        if len(self._known) >= self.MAX_KNOWN:
            self._known.clear()
        self._known[key] = found
        return found
