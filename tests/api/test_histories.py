"""Each API brings any history to any template."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest

from castiron.pipelines.api.anthropic import messages
from castiron.pipelines.api.callable_tools import callable_tools
from castiron.pipelines.api.generation import Generation
from castiron.pipelines.api.ollama.chat import parse_ollama_chat
from castiron.pipelines.api.ollama.records import OllamaChatRequest
from castiron.pipelines.api.openai import responses_records
from castiron.pipelines.api.openai.chat import parse_chat
from castiron.pipelines.api.openai.records import ChatRequest
from castiron.pipelines.api.request_body import parse_record
from tests.support.histories import KINDS, PARAMETERS, Histories, api_of, prompt_of

COUNT = 12


def arguments_of(call: dict) -> dict:
    try:
        found = json.loads(call["function"]["arguments"])
        json.dumps(found, ensure_ascii=False).encode()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"text": call["function"]["arguments"]}


def anthropic(history: list[dict], tools: list[dict] | None) -> Generation:
    turns: list[dict[str, Any]] = []
    for message in history:
        content = message["content"] or ""
        match message["role"]:
            case "tool":
                block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
                turns.append({"role": "user", "content": [block]})
            case "assistant":
                text = [{"type": "text", "text": content}] if isinstance(content, str) else content
                calls = [
                    {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments_of(call)}
                    for call in message.get("tool_calls", ())
                ]
                turns.append({"role": "assistant", "content": [*text, *calls]})
            case role:
                turns.append({"role": "user" if role == "user" else "system", "content": content})
    given = {"messages": turns, "max_tokens": 1}
    if tools:
        given["tools"] = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"] or {}} for tool in tools
        ]
    return messages.parse_message(parse_record(messages.MessagesRequest, given), ())


def responses(history: list[dict], tools: list[dict] | None) -> Generation:
    items: list[dict[str, Any]] = []
    for message in history:
        if message["role"] == "tool":
            output = message["content"] or ""
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
            continue
        items.append({"role": message["role"], "content": message["content"] or ""})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
        ]
    given = {"input": items, "tools": [{"type": "function", **tool["function"]} for tool in tools or ()] or None}
    body = parse_record(responses_records.ResponsesRequest, given)
    return responses_records.parse_response(body, [], responses_records.messages_of(body.items(lambda _: None)))


def ollamas(history: list[dict], tools: list[dict] | None) -> Generation:
    given: list[dict[str, Any]] = []
    for message in history:
        content = message["content"] or ""
        text = content if isinstance(content, str) else content[0]["text"]
        given.append({"role": message["role"], "content": text})
        if calls := message.get("tool_calls"):
            given[-1]["tool_calls"] = [{"function": {"name": "look", "arguments": arguments_of(call)}} for call in calls]
    body = parse_record(OllamaChatRequest, {"messages": given, "tools": tools})
    return parse_ollama_chat(body)


@pytest.mark.parametrize("convert", [anthropic, responses, ollamas])
def test_every_text_of_an_odd_history_is_in_the_prompt(convert):
    for kind, template in KINDS.items():
        api = api_of(template)
        for seed in range(COUNT):
            history = Histories(Random(seed))
            given, tools = history.messages(seed % 7), history.tools()
            prompt = prompt_of(api, convert(given, tools))
            assert not [text for text in history.texts if text not in prompt], (kind, seed, given, prompt)


@pytest.mark.parametrize("kind", ["all", "qwen"])
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_empty_and_incomplete_parameters_have_a_grammar(kind, strict, choice):
    api = api_of(KINDS[kind])
    for parameters in PARAMETERS:
        function = {"name": "look", "parameters": parameters, "strict": strict}
        tools = [{"type": "function", "function": function}]
        body = parse_record(
            ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
        )
        called = callable_tools(parse_chat(body), api.tokenizer.tool_format)
        assert called
        form = called.answer_format(None)
        assert form is not None or not strict and choice == "auto"
        asyncio.run(api.grammar(form))


@pytest.mark.parametrize("variable", messages.KEEPS_REASONING)
def test_a_client_can_keep_earlier_reasoning_in_the_prompt(variable):
    """The template leaves out the reasoning of answers before the last question, unless a variable says otherwise."""
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        f"{{% if m.thinking and ({variable} is defined and {variable} == {messages.KEEPS_REASONING[variable]}"
        " or loop.index0 > messages | length - 2) %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
    )
    api = api_of(template)
    turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    for number in range(3):
        blocks = [{"type": "thinking", "thinking": f"hm{number}", "signature": ""}, {"type": "text", "text": "b"}]
        turns += [{"role": "assistant", "content": blocks}, {"role": "user", "content": "c"}]
    for keep, count in (({"keep": "all"}, 3), ({"keep": {"type": "thinking_turns", "value": 1}}, 0), ({}, 0)):
        edits = {"edits": [{"type": "clear_thinking_20251015", **keep}]}
        body = parse_record(messages.MessagesRequest, {"messages": turns, "max_tokens": 1, "context_management": edits})
        assert prompt_of(api, messages.parse_message(body, api.variables)).count("hm") == count
