"""Repairs of chats for templates that reject or lose parts of them, and tests of rendering."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castiron.pipelines.text.chat_template import REASONING
from castiron.pipelines.text.tool_formats import HERMES, ID, ToolFormat

Message = dict[str, Any]
Messages = list[Message]
Tools = Sequence[Mapping[str, Any]]

# Description of tools, worded as in Qwen 2.5's template, with which many models were trained.
DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments in this form:
{call}"""
CALL = ("<function-name>", "<args-json-object>")
RESULT = "<tool_response>\n{}\n</tool_response>"
# A system message inside another message, in the tags that coding agents use.
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
# Mistral's templates reject ids of another length.
ID_LENGTH = 9


def numbered_id(number: int) -> str:
    """Return an id for a call or a result without one."""
    return f"call{number:0{ID_LENGTH - 4}}"


def completed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose schema has the keys that templates read without a test."""
    function = tool.get("function") or {}
    schema = completed_schema(function.get("parameters"))
    properties = {
        name: {"type": "any", "description": "", **_filled(each)} for name, each in _filled(schema["properties"]).items()
    }
    return {**tool, "function": {"description": "", **function, "parameters": {**schema, "properties": properties}}}


def completed_schema(schema: Any) -> dict[str, Any]:
    """Return the schema of arguments with `type` and `properties`, and without null."""
    found = {"type": "object", "properties": {}, **_filled(schema)}
    # Grammars would look for the schema that it names.
    found.pop("$schema", None)
    return found


def _filled(schema: Any) -> dict[str, Any]:
    given = schema if isinstance(schema, Mapping) else {}
    return {name: value for name, value in given.items() if value is not None}


def described(messages: Messages, tools: Tools, form: ToolFormat) -> Messages:
    """Add a description of `tools` to the system message at the start."""
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    head, rest = _split(messages)
    texts = [*(message["content"] for message in head), DESCRIPTION.format(tools=shown, call=form.write([CALL]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _split(messages: Messages) -> tuple[Messages, Messages]:
    """Return the system messages at the start, and the messages after them."""
    count = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return messages[:count], messages[count:]


def _joined(*messages: Message) -> Message:
    """Join messages; the role is that of the first."""
    found = {**messages[0], "content": "\n\n".join(text for message in messages if (text := message["content"]))}
    for name in REASONING:
        if texts := [text for message in messages if (text := message.get(name))]:
            found[name] = "\n\n".join(texts)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        found["tool_calls"] = calls
    return found


def _one_system(messages: Messages, _: ToolFormat) -> Messages:
    head, rest = _split(messages)
    return [_joined(*head), *rest] if head else rest


def _no_system(messages: Messages, _: ToolFormat) -> Messages:
    head, rest = _split(messages)
    if not head:
        return rest
    count = len(rest) > 0 and rest[0]["role"] == "user"
    return [{**_joined(*head, *rest[:count]), "role": "user"}, *rest[count:]]


def _no_later_system(messages: Messages, _: ToolFormat) -> Messages:
    """Put a later system message at the end of the user's message or result before it."""
    found, rest = _split(messages)
    waiting: Messages = []
    for message in rest:
        takes = message["role"] in ("user", "tool")
        if message["role"] == "system":
            reminder = {"role": "user", "content": REMINDER.format(message["content"])}
            if not waiting and found and found[-1]["role"] in ("user", "tool"):
                found[-1] = _joined(found[-1], reminder)
            else:
                waiting = [_joined(*waiting, reminder)]
            continue
        found += [{**message, "content": _joined(*waiting, message)["content"]}] if waiting and takes else [*waiting, message]
        waiting = []
    return found + waiting


def _turns(messages: Messages) -> list[tuple[Message | None, Messages]]:
    """Return each message that is not a result, with the results that follow it."""
    found: list[tuple[Message | None, Messages]] = []
    for message in messages:
        if message["role"] != "tool":
            found.append((message, []))
        elif found:
            found[-1][1].append(message)
        else:
            found.append((None, [message]))
    return found


def _single_calls(messages: Messages, _: ToolFormat) -> Messages:
    """Put each of several calls into a message of its own, with its result after it."""
    found: Messages = []
    for message, results in _turns(messages):
        calls = message.get("tool_calls", ()) if message else ()
        for index, call in enumerate(calls[:-1]):
            found.append({**message, "tool_calls": [call]} if index == 0 else _calls(call))
            found += [result for result in results if result["tool_call_id"] == call["id"]]
            results = [result for result in results if result["tool_call_id"] != call["id"]]
        if message:
            found.append(_calls(calls[-1]) if len(calls) > 1 else message)
        found += results
    return found


def _calls(*calls: Message) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


def _text_before_calls(messages: Messages, _: ToolFormat) -> Messages:
    """Put the text of a message with calls into a message of its own."""
    found: Messages = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            found += [{**message, "tool_calls": []}, _calls(*message["tool_calls"])]
            del found[-2]["tool_calls"]
        else:
            found.append(message)
    return found


def _reasoning_before_calls(messages: Messages, _: ToolFormat) -> Messages:
    """Add the text of a message with reasoning and calls to the reasoning."""
    found: Messages = []
    for message in messages:
        reasoning = next(filter(None, map(message.get, REASONING)), None)
        if reasoning and message["content"] and message.get("tool_calls"):
            message = message | dict.fromkeys(REASONING, f"{reasoning}\n\n{message['content']}") | {"content": ""}
        found.append(message)
    return found


def _each_call(messages: Messages, change: Callable[[Message], Message]) -> Messages:
    return [
        {**message, "tool_calls": [change(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]


def json_calls(messages: Messages) -> Messages:
    """Write the arguments of calls as JSON text."""

    def written(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return _each_call(messages, written)


def _short_ids(messages: Messages, _: ToolFormat) -> Messages:
    def short_id(given: str) -> str:
        if re.fullmatch(rf"[a-zA-Z0-9]{{{ID_LENGTH}}}", given):
            return given
        return hashlib.blake2s(given.encode(errors="replace")).hexdigest()[:ID_LENGTH]

    return [
        {**message, "tool_call_id": short_id(message["tool_call_id"])} if message["role"] == "tool" else message
        for message in _each_call(messages, lambda call: {**call, "id": short_id(call["id"])})
    ]


def written_calls(messages: Messages, form: ToolFormat) -> Messages:
    """Write calls as text in the format of the model, or in that of the Hermes models."""
    form = form if form.style in ("json", "python") else HERMES
    found: Messages = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = form.write([(call["function"]["name"], form.arguments(call["function"]["arguments"])) for call in calls])
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            # The format numbers the calls of a message from 0.
            first, *others = text.split(ID)
            text = first + "".join(f"{number}{part}" for number, part in enumerate(others))
            message["content"] = "\n".join(filter(None, [message["content"], text]))
        found.append(message)
    return found


def _results_as_text(messages: Messages, _: ToolFormat) -> Messages:
    """Convert results without calls before them to users' messages."""
    found: Messages = []
    for message, results in _turns(messages):
        found += [message] if message else []
        if results and not (message and message.get("tool_calls")):
            text = "\n".join(RESULT.format(result["content"]) for result in results)
            results = [{"role": "user", "content": text}]
        found += results
    return found


def _results_for_all(messages: Messages, _: ToolFormat) -> Messages:
    """Add an empty result for each call without one."""
    found: Messages = []
    for message, results in _turns(messages):
        answered = {result["tool_call_id"] for result in results}
        found += [message, *results] if message else results
        for call in message.get("tool_calls", ()) if message else ():
            if call["id"] not in answered:
                name = call["function"]["name"]
                found.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": ""})
    return found


def _no_user_after(role: str) -> Callable[[Messages, ToolFormat], Messages]:
    """Return a repair that joins a user's message to a message of `role` before it."""

    def repair(messages: Messages, _: ToolFormat) -> Messages:
        changed: Messages = []
        for message in messages:
            if changed and (changed[-1]["role"], message["role"]) == (role, "user"):
                changed[-1] = _joined(changed[-1], message)
            else:
                changed.append(message)
        return changed

    return repair


def _user_first(messages: Messages, _: ToolFormat) -> Messages:
    head, rest = _split(messages)
    return messages if not rest or rest[0]["role"] == "user" else [*head, {"role": "user", "content": ""}, *rest]


def _some_user(messages: Messages, _: ToolFormat) -> Messages:
    """Add an empty user's message after the system message if there is no other."""
    if not messages or any(message["role"] == "user" for message in messages):
        return messages
    head, rest = _split(messages)
    return [*head, {"role": "user", "content": ""}, *rest]


def _no_adjacent_answers(messages: Messages, _: ToolFormat) -> Messages:
    """Join adjacent answers; separate an answer from calls after it by an empty user's message."""
    found: Messages = []
    for message in messages:
        if not (found and message["role"] == found[-1]["role"] == "assistant") or found[-1].get("tool_calls"):
            found.append(message)
        elif message.get("tool_calls"):
            found += [{"role": "user", "content": ""}, message]
        else:
            found[-1] = _joined(found[-1], message)
    return found


def _system_in_last_user(messages: Messages, _: ToolFormat) -> Messages:
    """Put the system message into the last user's message, where Mistral's templates have it."""
    head, rest = _split(messages)
    last = max((index for index, message in enumerate(rest) if message["role"] == "user"), default=None)
    if not head or last is None:
        return messages
    return [*rest[:last], {**_joined(*head, rest[last]), "role": "user"}, *rest[last + 1 :]]


def _no_empty_answers(messages: Messages, _: ToolFormat) -> Messages:
    has_text = lambda message: message["role"] != "assistant" or message["content"] or message.get("tool_calls")
    return list(filter(has_text, messages)) or [{"role": "user", "content": ""}]


def _content_in_parts(messages: Messages, _: ToolFormat) -> Messages:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


# What templates reject or lose, as test conversations, and what to do then. A letter is a message: S of the system, U of the
# user, A of the assistant, E the same without text, T a result. The others are calls of the assistant: C one, D two, X one
# with its arguments as JSON text, I one with a long id, B one with text, R one with text and reasoning.
REPAIRS: tuple[tuple[str, Callable[[Messages, ToolFormat], Messages]], ...] = (
    ("SSU", _one_system),
    ("SU", _no_system),
    ("SUASU SUSAU", _no_later_system),
    ("UCT", written_calls),
    ("UDTT", _single_calls),
    ("UBT", _text_before_calls),
    ("URT", _reasoning_before_calls),
    ("UIT", _short_ids),
    ("UT UAT UATA", _results_as_text),
    ("UEU", _no_empty_answers),
    ("UC UCU", _results_for_all),
    ("UCTU", _no_user_after("tool")),
    ("AU CTU", _user_first),
    ("S A CT", _some_user),
    ("UAAU", _no_adjacent_answers),
    ("UU", _no_user_after("user")),
    ("SUA", _system_in_last_user),
    ("U", _content_in_parts),
)
# Repairs that are always done if tools are described as text, because the calls are text then.
AS_TEXT = (written_calls, _results_as_text)
ARGUMENTS = {"argument": "value"}
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "a key"}}, "required": ["key"]}
TOOL = {"type": "function", "function": {"name": "probe", "description": "a function", "parameters": PARAMETERS}}


def conversation(letters: str) -> tuple[Messages, list[str]]:
    """Return a test conversation, and the texts that its rendering must have, in order."""
    messages, shown, ids = [], [], []
    for index, letter in enumerate(letters):
        text = f"message-{index}"
        message: Message = {"role": {"S": "system", "U": "user", "T": "tool"}.get(letter, "assistant"), "content": text}
        if letter == "E":
            message["content"] = ""
        elif letter == "T":
            message |= {"name": "probe", "tool_call_id": ids.pop(0) if ids else numbered_id(0)}
        elif letter not in "SUA":
            names = [f"call-{index}-{number}" for number in range(1 + (letter == "D"))]
            ids = [numbered_id(number) if letter != "I" else f"call_{number:020}" for number in range(len(names))]
            arguments = json.dumps(ARGUMENTS) if letter == "X" else ARGUMENTS
            calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name in zip(ids, names)
            ]
            message |= {"tool_calls": calls, "content": text if letter in "BR" else ""}
            message |= {"reasoning_content": "reasoning"} if letter == "R" else {}
            shown += names
        if letter in "SUAT":
            shown.append(text)
        messages.append(message)
    return messages, shown
