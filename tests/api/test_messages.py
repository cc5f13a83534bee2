"""/v1/messages with Anthropic's client: requests reach the chat, answers have its types."""

from __future__ import annotations

import json
from typing import Literal

import anthropic
import jsonschema
import pytest
from anthropic.types import ErrorResponse, Message, ModelInfo, RawMessageStreamEvent
from pydantic import BaseModel
from starlette.testclient import TestClient

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from tests.api.test_responses import COLOUR
from tests.support import talking

talking_path = talking.talking_path
PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
ASKED = {"messages": HI, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
TOOLS = [
    {"name": "w", "description": "d", "input_schema": COLOUR},
    {"name": "n", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
EVENTS = talking.event_types(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def app(talking_path):
    with TestClient(open_app(talking_path, threads=1, api_keys=["key"]), headers={"x-api-key": "key"}) as client:
        yield client


@pytest.fixture(scope="module")
def client(app):
    return anthropic.Anthropic(base_url="http://testserver", api_key="key", max_retries=0, http_client=app)


def ask(app, **more) -> dict:
    """Return a message, validated strictly as the client's type."""
    answer = app.post(PATH, json={**ASKED, **more})
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json(), strict=True)
    return answer.json()


def streamed(app, **more) -> dict:
    """Return the message that the events of a stream add up to; each is validated."""
    found = talking.events(app, PATH, **{**ASKED, **more})
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    message = dict(found[0]["message"])
    assert message["content"] == [] and message["stop_reason"] is None
    opened = False
    for event in found:
        if event["type"] != "ping":
            EVENTS[event["type"]].model_validate(event, strict=True)
        match event["type"]:
            case "content_block_start":
                assert not opened and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                opened, parts = True, ""
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                if delta["type"] == "input_json_delta":
                    parts += delta["partial_json"]
                    continue
                name = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                assert delta[name]
                block[name] += delta[name]
            case "content_block_stop":
                opened = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(parts)
            case "message_delta":
                message |= event["delta"] | {"usage": {**message["usage"], **event["usage"]}}
    assert not opened
    return message


def bare(message: dict) -> dict:
    """Return a message without the fields that differ between answers to one request."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {key: value for key, value in message.items() if key not in ("id", "usage")} | {"content": content}


def text(message: dict) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def given(usage: dict) -> int:
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]


def count(client, messages=HI, **more) -> int:
    return client.messages.count_tokens(model="tiny", messages=messages, **more).input_tokens


def test_answers_and_streams_equal_those_of_a_chat(app, client):
    generated = app.post("/v1/chat/completions", json={**ASKED}).json()["choices"][0]["message"]["content"]
    complete, last = ask(app), streamed(app)
    assert text(complete) == text(last) == generated and bare(complete) == bare(last)
    assert (complete["stop_reason"], complete["stop_sequence"]) == ("max_tokens", None)
    usage = last["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, len("u:hi;a:") - 1, 30)
    # A limit above the free context is lowered.
    assert ask(app, max_tokens=100_000)["stop_reason"] == "model_context_window_exceeded"
    stop = generated[20:22]
    for found in (ask(app, stop_sequences=["not in it", stop]), streamed(app, stop_sequences=["not in it", stop])):
        assert text(found) == generated[: generated.find(stop)]
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    with client.messages.stream(
        model="tiny", messages=HI, max_tokens=30, extra_body={"temperature": 0, "ignore_eos": True}
    ) as stream:
        assert "".join(stream.text_stream) == generated and stream.get_final_message().usage.output_tokens == 30
    sampled = {text(ask(app, temperature=None, max_tokens=20, top_k=40, top_p=0.9)) for _ in range(3)}
    assert len(sampled) > 1


def test_reasoning_text_and_calls_are_separate_blocks(app, client, monkeypatch):
    talking.answer_with(monkeypatch, app, talking.ANSWER)
    more = {"tools": TOOLS, "max_tokens": 200, "ignore_eos": None, "metadata": {"user_id": "me"},
            "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    complete, last = ask(app, **more), streamed(app, **more)
    assert bare(complete) == bare(last) and complete["stop_reason"] == "tool_use"
    assert bare(complete)["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Well."},
        *({"type": "tool_use", "name": name, "input": json.loads(arguments)} for name, arguments in talking.CALLS),
    ]  # fmt: skip
    assert 0 < complete["usage"]["output_tokens_details"]["thinking_tokens"] <= len("<think>Hm.</think>")
    with client.messages.stream(model="tiny", messages=HI, max_tokens=200, tools=TOOLS) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    omitted = ask(app, **more | {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert [block["type"] for block in omitted["content"]] == ["text", "tool_use", "tool_use"]
    single = ask(app, **more | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert [block["type"] for block in single["content"]] == ["thinking", "text", "tool_use"]
    talking.answer_with(monkeypatch, app, talking.ANSWER[: talking.ANSWER.index("]")])
    assert ask(app, **more)["content"][-1]["input"] == {}
    # An answer that is sent back renders as its own text.
    results = [{"type": "tool_result", "tool_use_id": final.content[2].id, "content": [{"type": "text", "text": "sun"}]},
               {"type": "tool_result", "tool_use_id": final.content[3].id, "content": "no", "is_error": True}, {"type": "text", "text": "so?"}]  # fmt: skip
    turns = [*HI, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
    assert count(client, turns) == len("u:hi;a:Well.<n a><n>;t:sun;t:Error: no;u:so?;a:")


def test_a_client_of_threads_falls_back_to_the_full_conversation(app, client, monkeypatch):
    """Runs Anthropic's tool runner, which requests a thread first."""
    talking.answer_with(monkeypatch, app, talking.ANSWER)

    @anthropic.beta_tool
    def n(a: list[int] | None = None) -> str:
        """Says a number."""
        return "5"

    found = client.beta.messages.tool_runner(
        model="tiny", messages=HI, max_tokens=200, tools=[n], max_iterations=2
    ).until_done()
    rendered = "n <tool_call>;u:hi;a:Well.<n a><n>;t:5;t:5;a:"
    assert found.stop_reason == "tool_use" and given(found.usage.model_dump()) == len(rendered)
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported"):
        client.beta.messages.create(model="tiny", messages=HI, max_tokens=9, thread={"type": "create"})


def test_a_forced_call_matches_the_schema(app):
    complete = ask(app, tools=TOOLS, tool_choice={"type": "tool", "name": "w"}, max_tokens=80, ignore_eos=None)
    (call,) = complete["content"]
    assert complete["stop_reason"] == "tool_use" and call["name"] == "w"
    jsonschema.validate(call["input"], COLOUR)


class City(BaseModel):
    size: Literal["small", "large"]
    old: bool


def test_text_matches_a_format(client):
    answer = client.messages.parse(model="tiny", messages=HI, max_tokens=60, output_format=City)
    assert isinstance(answer.parsed_output, City)


def test_tokens_are_counted_as_they_are_used(app, client):
    for rendered, messages, more in (
        ("u:hi;a:", HI, {}),
        ("s:bc;u:hi;a:", HI, {"system": "bc"}),
        ("s:bc;u:hi;a:", HI, {"system": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "c"}]}),
        ("w n <tool_call>;u:hi;a:", HI, {"tools": TOOLS}),
        ("u:hi;a:", HI, {"tools": TOOLS, "tool_choice": {"type": "none"}}),
        ("u:hi;a:-", HI, {"thinking": {"type": "disabled"}}),
        ("u:hi;a:++", HI, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("u:hi;a:", HI, {"output_config": {"effort": "high"}}),
        ("u:hi;a:ok;u:b;a:", [*HI, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "b"}], {}),
        # The answer continues the last message.
        ("u:hi;a:The sky ", [*HI, {"role": "assistant", "content": "The sky "}], {}),
        ("u:hi;a:The sky", [*HI, {"role": "assistant", "content": [{"type": "text", "text": "The sky"}]}], {}),
    ):  # fmt: skip
        assert count(client, messages, **more) == len(rendered)
        assert given(ask(app, messages=messages, max_tokens=1, **more)["usage"]) == len(rendered)
    going_on = ask(app, messages=[*HI, {"role": "assistant", "content": "The sky"}])
    assert text(going_on) == app.post("/v1/completions", json={
        "prompt": "u:hi;a:The sky", "max_tokens": 30, "temperature": 0, "ignore_eos": True}).json()["choices"][0]["text"]  # fmt: skip


def test_a_system_message_after_the_users_is_put_before_it(app):
    system, call = {"role": "system", "content": "bc"}, {"type": "tool_use", "id": "1", "name": "n", "input": {"a": 1}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]}
    for rendered, messages in (
        ("s:bc;u:hi;a:", [*HI, system]),
        ("u:hi;a:<n a>;t:ok;s:bc;a:", [*HI, {"role": "assistant", "content": [call]}, result, system]),
    ):
        prompt = {"prompt": rendered, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        assert text(ask(app, messages=messages)) == app.post("/v1/completions", json=prompt).json()["choices"][0]["text"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type: 'image' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}]},
         "messages.0.content.0.content.0.type: 'image' is not supported"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be a string or a list of blocks"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "n"}]}]}, "must provide messages.0.content.0.input"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "254 tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not supported"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": []}]}]}, "[] is not supported"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "the type tool needs a name"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "does not edit conversations"),
        ({"system": [IMAGE]}, "system.0.type: 'image' is not supported"),
        ({"container": "x"}, "container is not supported"),
    ],
)  # fmt: skip
def test_unsupported_requests_are_a_400_that_names_the_field(app, client, more, message):
    with pytest.raises(anthropic.BadRequestError) as error:
        client.post(PATH, body={**ASKED, **more}, cast_to=object)
    ErrorResponse.model_validate(error.value.body, strict=True)
    assert error.value.type == "invalid_request_error" and message in error.value.body["error"]["message"]


def test_errors_have_anthropics_types(app, client, monkeypatch):
    with pytest.raises(anthropic.NotFoundError, match="'claude' does not exist"):
        client.messages.create(model="claude", messages=HI, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY"):
        client.with_options(api_key="wrong").messages.create(model="tiny", messages=HI, max_tokens=1)
    bearer = anthropic.Anthropic(base_url="http://testserver", auth_token="key", max_retries=0, http_client=app)
    # The fixture adds the header x-api-key to this client's requests too.
    assert count(bearer) == len("u:hi;a:")
    page = app.get("/v1/models").json()
    assert [model.id for model in client.models.list()] == [page["first_id"]] == [page["data"][0]["id"]]
    ModelInfo.model_validate_json(json.dumps(page["data"][0]), strict=True)
    assert client.models.retrieve(page["last_id"]).max_input_tokens == talking.CONTEXT
    for url, status, kind in (("/batches", 404, "not_found_error"), ("", 405, "invalid_request_error")):
        answer = app.get(PATH + url)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    large = app.post(PATH, content=b" " * 5_000_000, headers={"content-type": "application/json"})
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
    many = app.post(PATH, json={**ASKED, "messages": HI * 16384, "system": "x"})
    assert many.status_code == 400 and "more than 65536 strings, lists and objects" in many.text
    talking.answer_with(monkeypatch, app, "abc", PipelineError("broken"))
    with pytest.raises(anthropic.InternalServerError) as error:
        client.messages.create(model="tiny", messages=HI, max_tokens=9)
    assert error.value.type == "api_error"
    last = talking.events(app, PATH, **ASKED)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "the model failed" in last["error"]["message"]
    with pytest.raises(anthropic.APIStatusError, match="the model failed"):
        list(client.messages.create(model="tiny", messages=HI, max_tokens=9, stream=True))
    monkeypatch.undo()
    monkeypatch.setattr(app.app.api.engine, "queue", -100)
    with pytest.raises(anthropic.OverloadedError) as busy:
        client.messages.create(model="tiny", messages=HI, max_tokens=1)
    assert busy.value.status_code == 529 and busy.value.type == "overloaded_error"


def test_values_at_the_ends_of_ranges_have_their_meaning(client):
    def create(extra: dict | None = None, **more):
        asked = {"model": "checkpoint", "messages": HI, "max_tokens": 20} | more
        return client.messages.create(**asked, extra_body={"ignore_eos": True, "temperature": 0} | (extra or {}))

    greedy = create()
    assert create({"temperature": 1, "top_p": 0}).content == create(stop_sequences=[""]).content == greedy.content
    warmed = create(max_tokens=0, system="warm this")
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    read = warmed.usage.input_tokens + warmed.usage.cache_read_input_tokens
    assert create(system="warm this").usage.cache_read_input_tokens >= read - 1
