"""/v1/responses with OpenAI's client: requests reach the chat, answers have its types."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field
from starlette.testclient import TestClient

from castiron.pipelines.api.generation import plain_message
from castiron.pipelines.api.openai.responses import ResponseStore
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from tests.support import talking

talking_path = talking.talking_path
PATH = "/v1/responses"
ASKED = {"input": "hi", "temperature": 0, "max_output_tokens": 30, "ignore_eos": True}
COLOUR = {
    "type": "object", "properties": {"c": {"enum": ["red", "green"]}}, "required": ["c"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "name": "w", "description": "d", "parameters": COLOUR, "strict": True},
    {"type": "function", "name": "n"},
]
EVENTS = talking.event_types(ResponseStreamEvent)


@pytest.fixture(scope="module")
def app(talking_path):
    with TestClient(
        open_app(talking_path, threads=1, api_keys=["one", "two"]), headers={"authorization": "Bearer one"}
    ) as client:
        yield client


def openais(app, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key=key, max_retries=0, http_client=app)


@pytest.fixture(scope="module")
def client(app):
    return openais(app, "one")


def ask(app, **more) -> dict:
    """Return a response, validated strictly as the client's type."""
    answer = app.post(PATH, json={**ASKED, **more})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


def streamed(app, **more) -> tuple[list[dict], dict]:
    """Return the events of a stream and its response, which the events must add up to."""
    found = talking.events(app, PATH, **{**ASKED, **more})
    for event in found:
        EVENTS[event["type"]].model_validate(event, strict=True)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"]["status"] == "in_progress" and not found[0]["response"]["output"]
    output: list[dict] = []
    for event in found[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            output.append(event["item"])
        item = output[event["output_index"]]
        assert event["output_index"] == len(output) - 1 and event.get("item_id", item["id"]) == item["id"]
        if kind == "response.content_part.added":
            item["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "response.custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind == "response.custom_tool_call_input.done":
            assert item["input"] == event["input"]
        elif kind.endswith(".delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        elif kind.endswith("text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "response.content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind == "response.function_call_arguments.done":
            assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
        elif kind == "response.output_item.done":
            assert {**item, "status": event["item"]["status"]} == event["item"] and event["item"]["status"] != "in_progress"
            output[-1] = event["item"]
    assert found[-1]["response"]["output"] == output
    return found, found[-1]["response"]


def bare(response: dict) -> dict:
    """Return a response without the fields that differ between answers to one request."""
    ids = ("id", "call_id")
    output = [{key: value for key, value in item.items() if key not in ids} for item in response["output"]]
    rest = {key: value for key, value in response.items() if key not in ("id", "created_at", "completed_at", "usage")}
    return rest | {"output": output}


def text(response: dict) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_answers_and_streams_equal_those_of_a_chat(app, client):
    ask(app)
    generated = app.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "temperature": 0,
                                                  "max_tokens": 30, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}).json()  # fmt: skip
    complete, (found, last) = ask(app), streamed(app)
    assert text(complete) == text(last) == generated["choices"][0]["message"]["content"] and bare(complete) == bare(last)
    assert found[-1]["type"] == "response.incomplete" and complete["status"] == "incomplete"
    assert complete["incomplete_details"] == {"reason": "max_output_tokens"} and complete["output"][0]["status"] == "incomplete"
    usage = complete["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (len("u:hi;a:"), 30, 37)
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == len("u:hi;a:") - 1
    # A limit above the free context is lowered.
    assert ask(app, max_output_tokens=100_000)["usage"]["total_tokens"] == talking.CONTEXT + 1
    assert ask(app, max_output_tokens=None)["usage"]["total_tokens"] == talking.CONTEXT + 1
    probable = ask(app, include=["message.output_text.logprobs"], top_logprobs=2)["output"][0]["content"][0]
    assert probable["logprobs"] == generated["choices"][0]["logprobs"]["content"] and probable["text"] == text(complete)
    assert streamed(app, top_logprobs=2)[1]["output"][0]["content"][0] == probable


def test_reasoning_text_and_calls_are_separate_items(app, client, monkeypatch):
    talking.answer_with(monkeypatch, app, talking.ANSWER)
    more = {"tools": TOOLS, "max_output_tokens": None, "ignore_eos": None, "metadata": {"a": "b"}, "instructions": "x",
            "reasoning": {"summary": "auto"}}  # fmt: skip
    complete, (found, last) = ask(app, **more), streamed(app, **more)
    assert bare(complete) == bare(last) and found[-1]["type"] == "response.completed" and last["status"] == "completed"
    reasoning, message, *calls = complete["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and reasoning["summary"] == []
    assert text(complete) == "Well." and message["status"] == "completed"
    assert [(call["name"], call["arguments"]) for call in calls] == talking.CALLS and len({c["call_id"] for c in calls}) == 2
    assert complete["metadata"] == {"a": "b"} and complete["instructions"] == "x"
    assert complete["tools"][0]["parameters"] == COLOUR
    assert 0 < complete["usage"]["output_tokens_details"]["reasoning_tokens"] <= len("<think>Hm.</think>")
    with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    types = [item.type for item in final.output]
    assert final.output_text == "Well." and types == ["reasoning", "message", "function_call", "function_call"]
    assert "response.reasoning_text.delta" in kinds and kinds.count("response.function_call_arguments.done") == 2
    single = ask(app, **more | {"parallel_tool_calls": False})
    assert [item["type"] for item in single["output"]] == ["reasoning", "message", "function_call"]
    talking.answer_with(monkeypatch, app, talking.ANSWER[: talking.ANSWER.index("]")])
    assert ask(app, **more)["output"][-1]["arguments"] == '{"a": [1'


class City(BaseModel):
    name: str = Field(max_length=4)
    large: bool


def test_text_matches_a_format(client, app):
    answer = client.responses.parse(model="tiny", input="hi", text_format=City, max_output_tokens=60)
    assert isinstance(answer.output_parsed, City) and len(answer.output_parsed.name) <= 4
    assert answer.text.format.type == "json_schema" and answer.text.format.schema_["properties"].keys() == {"name", "large"}
    complete = ask(app, text={"format": {"type": "json_object"}}, ignore_eos=None, max_output_tokens=110)
    assert isinstance(json.loads(text(complete)), dict)


def count(client, **more) -> int:
    return client.responses.input_tokens.count(model="tiny", **more).input_tokens


def test_items_reach_the_template(client, app):
    for given, rendered in (
        ("hi", "u:hi;a:"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]}], "u:hi;a:"),
        ([{"role": "developer", "content": "b"}, {"type": "message", "role": "user", "content": "hi"}], "s:b;u:hi;a:"),
        ([{"role": "user", "content": "hi"}, {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "?"}]},
          {"role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
          {"type": "function_call", "call_id": "1", "name": "w", "arguments": '{"k": 1}'},
          {"type": "function_call", "call_id": "2", "name": "n", "arguments": "{}"},
          {"type": "function_call_output", "call_id": "1", "output": "sun"},
          {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "now"}]}],
         "u:hi;a:ok<w k><n>;t:sun;t:now;a:"),
    ):  # fmt: skip
        assert count(client, input=given) == len(rendered)
        assert ask(app, input=given, max_output_tokens=1)["usage"]["input_tokens"] == len(rendered)
    assert count(client, input="hi", instructions="bc") == len("s:bc;u:hi;a:")
    both = [{"role": "system", "content": "d"}, {"role": "user", "content": "hi"}]
    assert count(client, input=both, instructions="bc") == len("s:bc\n\nd;u:hi;a:")
    assert count(client, input="hi", tools=TOOLS) == len("w n <tool_call>;u:hi;a:")
    assert count(client, input="hi", reasoning={"effort": "none"}) == len("u:hi;a:-")
    assert count(client, input="hi", reasoning={"effort": "medium"}) == len("u:hi;a:++")
    assert count(client, input="hi", extra_body={"chat_template_kwargs": {"enable_thinking": True}}) == len("u:hi;a:++")


def test_only_the_client_of_a_response_can_continue_it(app, client, monkeypatch):
    talking.answer_with(monkeypatch, app, talking.ANSWER)
    first = client.responses.create(model="tiny", input="hi", instructions="bc", tools=TOOLS, stream=False)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    # Instructions are not carried over.
    prompt = "u:hi;a:Well.<n a><n>;t:sun;a:"
    assert count(client, input=[result], previous_response_id=first.id) == len(prompt)
    talking.answer_with(monkeypatch, app, "ok")
    second = streamed(app, input=[result], previous_response_id=first.id, ignore_eos=None)[1]
    assert second["usage"]["input_tokens"] == len(prompt) and second["previous_response_id"] == first.id
    assert count(client, input="b", previous_response_id=second["id"]) == len(prompt + "ok;u:b;a:")
    # Some of OpenAI's clients send what they have parsed too.
    sent = [item.model_dump() | ({"parsed_arguments": {}} if item.type == "function_call" else {}) for item in first.output]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    for items in (sent, references):
        assert count(client, input=[{"role": "user", "content": "hi"}, *items, result]) == len(prompt)
    assert client.responses.retrieve(second["id"]).model_dump() == Response.model_validate(second).model_dump()
    other = openais(app, "two")
    for wrong in (lambda: other.responses.retrieve(first.id), lambda: other.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError, match="no such response"):
            wrong()
    with pytest.raises(openai.BadRequestError, match="send the complete conversation") as error:
        count(other, input="b", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        count(other, input=references)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        count(client, input=references)
    unstored = client.responses.create(model="tiny", input="hi", store=False)
    for gone in (first.id, unstored.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)


def test_functions_of_a_namespace_have_both_names(app, client, monkeypatch):
    tools = [{"type": "namespace", "name": "s", "description": "about", "tools": TOOLS}, TOOLS[1]]
    prompt = "s.w s.n n <tool_call>;u:hi;a:"
    assert count(client, input="hi", tools=tools) == len(prompt)
    calls = '<tool_call>{"name": "s.n", "arguments": {}}</tool_call><tool_call>{"name": "n", "arguments": {}}</tool_call>'
    talking.answer_with(monkeypatch, app, calls)
    more = {"tools": tools, "max_output_tokens": None, "ignore_eos": None, "client_metadata": {"a": "b"}}
    complete = ask(app, **more)
    assert bare(complete) == bare(streamed(app, **more)[1]) and complete["tools"][0] == tools[0]
    assert [(call["name"], call.get("namespace")) for call in complete["output"]] == [("n", "s"), ("n", None)]
    again = [{"role": "user", "content": "hi"}, *complete["output"]]
    assert count(client, input=again) == len(prompt := "u:hi;a:<s.n><n>;a:")
    assert count(client, input="b", previous_response_id=complete["id"]) == len(prompt + "u:b;")
    monkeypatch.undo()
    chosen = {"type": "function", "name": "w", "namespace": "s"}
    for choice in (chosen, {"type": "allowed_tools", "mode": "required", "tools": [chosen]}):
        forced = ask(app, **more, parallel_tool_calls=False, tool_choice=choice)
        (call,) = forced["output"]
        assert (call["name"], call["namespace"]) == ("w", "s") and forced["tool_choice"] == choice
        jsonschema.validate(json.loads(call["arguments"]), COLOUR)


def test_custom_tools_are_called_with_a_text(app, monkeypatch):
    tools = [{"type": "custom", "name": "c", "description": "d", "format": {"type": "text"}}, *TOOLS]
    more = {"tools": tools, "max_output_tokens": 200, "ignore_eos": None}
    for arguments, parts in (
        ('{"input": "a\\n\\"b"}', ["a", "\n", '"', "b"]),
        ('{"text": 5}', ['{"text": 5}']),
        ('{"input": {"a": true}}', ['{"a": true}']),
    ):
        talking.answer_with(monkeypatch, app, f'<tool_call>{{"name": "c", "arguments": {arguments}}}</tool_call>')
        complete, (found, last) = ask(app, **more), streamed(app, **more)
        (call,) = complete["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "c", "".join(parts))
        assert bare(complete) == bare(last) and complete["tools"][0] == tools[0]
        assert [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"] == parts
    monkeypatch.undo()
    named = {"type": "custom", "name": "c"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        assert ask(app, **more, tool_choice=choice, parallel_tool_calls=False)["output"][0]["type"] == "custom_tool_call"
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    for sent in (call, {"type": "item_reference", "id": call["id"]}):
        again = ask(app, input=[{"role": "user", "content": "hi"}, sent, result])
        assert again["usage"]["input_tokens"] == len("u:hi;a:<c input>;t:ok;a:")


def test_the_response_store_is_bounded():
    store, message = ResponseStore(count=3, bytes=2000), plain_message("user", "x" * 100)
    for name in "abc":
        store.put(b"me", {"id": name}, [message])
    assert store.get(b"me", "a") and not store.get(b"you", "a")
    store.put(b"me", {"id": "d"}, [message])
    assert [bool(store.get(b"me", name)) for name in "abcd"] == [True, False, True, True]
    store.put(b"me", {"id": "e", "text": "x" * 1500}, [message])
    assert [bool(store.get(b"me", name)) for name in "abcde"] == [False, False, True, True, True]
    part = {"type": "output_text", "text": "x", "logprobs": [{"token": "x"}]}
    item = {"id": "item", "type": "message", "role": "assistant", "content": [part]}
    store.put(b"me", {"id": "f", "output": [item]}, [])
    # All references to an item share one object.
    assert store.item(b"me", "item") is store.item(b"me", "item") and not store.item(b"you", "item")
    assert store.item(b"me", "item").content[0].model_dump() == {"type": "output_text", "text": "x"}
    store.delete(b"me", "f")
    assert not store.item(b"me", "item") and not store._items


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"input": []}, "input", "must provide input"),
        ({"input": 5}, "input", "a string or a list of items"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type", "takes text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id", "send the item itself"),
        ({"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "custom", "name": "x"}]}]}, "tools.0.tools.0.type", "must be .function."),
        ({"tools": [{"type": "namespace", "name": "s" * 100, "tools": [{"type": "function", "name": "n" * 100}]}]}, "tools.0.tools.0.name", "at most 128"),
        ({"tools": [{"type": "namespace", "name": f"s{i}", "tools": TOOLS} for i in range(65)]}, "tools", "at most 128"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input.0.type", "'computer_call' is not supported"),
        ({"input": [{"type": "function_call", "name": "w", "arguments": "{}"}]}, "input.0.call_id", "must provide"),
        ({"input": "x" * 300}, "input", "254 tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search' is not supported by this server; it takes function"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "must provide"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format", '"not"'),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "'low', 'medium' or 'high'"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "is .enormous.; it must be"),
        ({"background": True}, "background", "not supported"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]}, "tools.0.format", "not supported"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "no such response: 'resp_x'"),
    ],
)  # fmt: skip
def test_unsupported_requests_are_a_400_that_names_the_field(client, more, param, message):
    with pytest.raises(openai.BadRequestError, match=message.replace("'", ".")) as error:
        client.post("/responses", body={"input": "hi", "max_output_tokens": 1, **more}, cast_to=object)
    assert error.value.param == param


def test_a_failed_model_ends_the_stream_with_an_error(app, monkeypatch):
    talking.answer_with(monkeypatch, app, "abc", PipelineError("broken"))
    found = talking.events(app, PATH, **ASKED)
    failed = EVENTS["response.failed"].model_validate(found[-1], strict=True)
    assert failed.response.status == "failed" and "the model failed" in failed.response.error.message
    answer = app.post(PATH, json=ASKED)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "model_failure"


def test_values_at_the_ends_of_ranges_have_their_meaning(client):
    asked = {"model": "checkpoint", "input": "hi", "max_output_tokens": 16, "extra_body": {"ignore_eos": True}}
    greedy = client.responses.create(**asked, temperature=0).output_text
    assert client.responses.create(**asked, temperature=1, top_p=0, max_tool_calls=0).output_text == greedy
    assert client.responses.create(**asked, temperature=0, text={"verbosity": "low"}).output_text == greedy
    long = [{"role": role, "content": "word " * 6} for _ in range(9) for role in ("user", "assistant")]
    answer = client.responses.create(**asked | {"input": [*long, {"role": "user", "content": "hi"}]}, truncation="auto")
    assert answer.truncation == "auto" and answer.usage.input_tokens <= talking.CONTEXT
    chat = {
        "model": "checkpoint",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 16,
        "extra_body": {"ignore_eos": True},
    }
    texts = [
        client.chat.completions.create(**chat, temperature=1, top_p=0, stop=stop).choices[0].message for stop in ("", [""])
    ]
    assert (
        texts[0].content == texts[1].content == client.chat.completions.create(**chat, temperature=0).choices[0].message.content
    )
