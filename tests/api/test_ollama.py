"""Ollama's API over HTTP: its answers are those of chat completions, in Ollama's format."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from starlette.testclient import TestClient

from castiron.pipelines.api.model_api import Limits
from castiron.pipelines.api.ollama.records import OllamaMessage
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import App, open_api, open_app
from castiron.pipelines.server.metrics import Metrics
from castiron.pipelines.server.served_models import ModelPool
from castiron.pipelines.text.history import normal_messages
from castiron.vmfb.bundle.bundle import open_bundle
from tests.api.test_responses import COLOUR
from tests.support import talking

talking_path = talking.talking_path
HI = [{"role": "user", "content": "hi"}]
CHAT, GENERATE = "/api/chat", "/api/generate"
ENOUGH = {"temperature": 0, "num_predict": 30}
TOOLS = [
    {"type": "function", "function": {"name": "n", "description": "d", "parameters": {"type": "object", "properties": {}}}}
]
CALL = {"name": "n", "arguments": {"a": [1]}}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def app(talking_path):
    with TestClient(open_app(talking_path, threads=1, api_keys=["key"]), headers={"x-api-key": "key"}) as client:
        yield client


def ask(app, path: str, **body) -> dict:
    """Return a complete answer; fail unless it ends with counts and durations."""
    answer = app.post(path, json={"stream": False, "options": ENOUGH, **body})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", answer.text
    return checked(answer.json())


def checked(end: dict) -> dict:
    """Return the fields of the last object that are the same in every answer to a request."""
    assert end["done"] and end["created_at"].endswith("Z") and end["prompt_eval_count"] > 0
    assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] > 0
    assert all(isinstance(end[name], int) for name in DURATIONS)
    return {name: value for name, value in end.items() if name not in (*DURATIONS, "created_at")}


def streamed(app, path: str, **body) -> dict:
    """Return the answer that the lines of a stream add up to; a stream is the default."""
    answer = app.post(path, json={"options": ENOUGH, **body})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    *parts, last = map(json.loads, answer.text.splitlines())
    assert parts and not any(part["done"] for part in parts)
    found = checked(last)
    total = found.get("message", found)
    for part in parts:
        assert part["model"] == last["model"]
        for name, value in part.get("message", part).items():
            if name in ("content", "response", "thinking", "tool_calls"):
                total[name] = total.get(name, type(value)()) + value
        found["logprobs"] = found.get("logprobs", []) + part.get("logprobs", [])
    return found if found["logprobs"] else {name: value for name, value in found.items() if name != "logprobs"}


def without_ids(answer: dict) -> dict:
    for call in answer["message"].get("tool_calls", ()):
        assert len(call.pop("id")) == 9
    return answer


def completed(app, **body) -> dict:
    answer = app.post("/v1/chat/completions", json={"messages": HI, "temperature": 0, "max_tokens": 30, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_has_the_text_and_counts_of_a_completion(app):
    found, same = ask(app, CHAT, messages=HI), completed(app)
    message, usage = same["choices"][0]["message"], same["usage"]
    assert found["message"] == {"role": "assistant", "content": message["content"]} and message["content"]
    assert (found["prompt_eval_count"], found["eval_count"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert found["done_reason"] == "length" and found == streamed(app, CHAT, messages=HI)


def test_reasoning_and_calls_are_streamed_as_they_are_answered(app, monkeypatch):
    talking.answer_with(monkeypatch, app, talking.ANSWER)
    asked = {"messages": HI, "tools": TOOLS, "options": {}}
    found = without_ids(ask(app, CHAT, **asked))
    calls = [{"function": CALL}, {"function": {"name": "n", "arguments": {}}}]
    assert found["message"] == {"role": "assistant", "content": "Well.", "thinking": "Hm.", "tool_calls": calls}
    assert found["done_reason"] == "stop" and found == without_ids(streamed(app, CHAT, **asked))
    talking.answer_with(monkeypatch, app, "<think>Hm.</think>Well.")
    found = ask(app, GENERATE, prompt="hi", options={})
    assert (found["response"], found["thinking"]) == ("Well.", "Hm.")
    assert found == streamed(app, GENERATE, prompt="hi", options={})


def test_calls_without_ids_reach_the_template_with_their_results(app):
    """The ids in OpenAI's requests are not in this template's text, so the prompts are equal."""
    given = [*HI, {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}, {"function": CALL}]},
             {"role": "tool", "tool_name": "n", "content": "5"}, {"role": "tool", "tool_name": "n", "content": "6"}]  # fmt: skip
    functions = [{"id": str(i), "type": "function", "function": {"name": "n", "arguments": '{"a": [1]}'}} for i in (1, 2)]
    same = [*HI, {"role": "assistant", "content": "", "tool_calls": functions},
            {"role": "tool", "tool_call_id": "1", "content": "5"}, {"role": "tool", "tool_call_id": "2", "content": "6"}]  # fmt: skip
    found, usage = ask(app, CHAT, messages=given, tools=TOOLS), completed(app, messages=same, tools=TOOLS)["usage"]
    assert found["prompt_eval_count"] == usage["prompt_tokens"]


def test_ids_link_results_to_the_calls_of_their_function():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("g", "f", "f")]
    given = [{"role": "assistant", "tool_calls": calls}, *results]
    first, *rest = normal_messages(OllamaMessage.model_validate(message).plain for message in given)
    f, g, other_f = (call["id"] for call in first["tool_calls"])
    assert [message["tool_call_id"] for message in rest] == [g, f, other_f] and len({f, g, other_f}) == 3


def test_a_prompt_is_a_conversation_and_continues_by_context(app):
    first = ask(app, GENERATE, prompt="hi", system="be")
    same = ask(app, CHAT, messages=[{"role": "system", "content": "be"}, *HI])
    assert first["response"] == same["message"]["content"] and first == streamed(app, GENERATE, prompt="hi", system="be")
    text = app.app.api.tokenizer
    assert text.decode(first["context"]) == "s:be;u:hi;a:" + first["response"]
    second = ask(app, GENERATE, prompt="more", context=first["context"])
    again = app.post(
        "/v1/completions",
        json={"prompt": [*first["context"], *text.encode("u:more;a:", False)], "max_tokens": 30, "temperature": 0},
    )
    assert second["response"] == again.json()["choices"][0]["text"]
    assert second["prompt_eval_count"] == len(first["context"]) + len("u:more;a:")


def test_a_raw_prompt_is_not_put_into_the_template(app):
    found = ask(app, GENERATE, prompt="abc", raw=True)
    same = app.post("/v1/completions", json={"prompt": "abc", "max_tokens": 30, "temperature": 0}).json()
    assert found["response"] == same["choices"][0]["text"] and "context" not in found


@pytest.mark.parametrize(("options", "fields"), [
    ({"temperature": 0.9, "seed": 3, "top_k": 7, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.9, "seed": 3, "top_k": 7, "top_p": 0.8, "min_p": 0.01}),
    ({"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 0.5}, {"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 0.5}),
    ({"num_predict": 4}, {"max_tokens": 4}),
    ({"num_predict": 100_000, "num_ctx": 9, "num_gpu": 1, "repeat_last_n": 64, "no_such_option": 1}, {"max_tokens": None}),
    ({"num_predict": -1, "mirostat": 0}, {"max_tokens": None}),
])  # fmt: skip
def test_options_are_fields_of_a_completion(app, options, fields):
    found, same = ask(app, CHAT, messages=HI, options=ENOUGH | options), completed(app, **fields)
    assert found["message"]["content"] == same["choices"][0]["message"]["content"] and found["message"]["content"]


def test_unknown_fields_have_no_effect_on_a_strict_server_either(app, talking_path):
    unknown = {"messages": HI, "no_such_field": 1, "options": ENOUGH | {"no_such_option": 1}}
    with TestClient(open_app(talking_path, threads=1, limits=Limits(strict_requests=True))) as strict:
        assert ask(strict, CHAT, **unknown)["message"] == ask(app, CHAT, messages=HI)["message"]


def test_a_negative_seed_is_a_random_one(app):
    random = {"temperature": 2, "num_predict": 40}
    texts = [ask(app, CHAT, messages=HI, options=random | {"seed": seed})["message"]["content"] for seed in (7, 7, -1, -1)]
    assert texts[0] == texts[1] and texts[2] != texts[3]


def test_a_stop_string_ends_the_text(app):
    text = ask(app, CHAT, messages=HI)["message"]["content"]
    found = ask(app, CHAT, messages=HI, options=ENOUGH | {"stop": [text[5]]})
    assert found["message"]["content"] == text[: text.index(text[5])] and found["done_reason"] == "stop"


def test_formats_limit_the_text(app):
    limit = {"temperature": 0, "num_predict": 200}
    found = ask(app, CHAT, messages=HI, format=COLOUR, options=limit)
    jsonschema.validate(json.loads(found["message"]["content"]), COLOUR)
    found = ask(app, GENERATE, prompt="hi", raw=True, format=COLOUR, options=limit)
    jsonschema.validate(json.loads(found["response"]), COLOUR)
    assert ask(app, GENERATE, prompt="hi", format="json")["response"].lstrip().startswith("{")
    assert ask(app, GENERATE, prompt="hi", format="")["response"] == ask(app, GENERATE, prompt="hi")["response"]


@pytest.mark.parametrize(("think", "mark"), [(None, ""), (True, "++"), (False, "-"), ("high", "++")])
def test_think_sets_the_templates_variable(app, think, mark):
    assert ask(app, CHAT, messages=HI, think=think)["prompt_eval_count"] == len("u:hi;a:" + mark)
    assert app.app.api.tokenizer.decode(ask(app, GENERATE, prompt="hi", think=think)["context"]).startswith(f"u:hi;a:{mark}")


def test_the_last_message_of_the_assistant_is_continued(app):
    given = [*HI, {"role": "assistant", "content": "We"}]
    assert ask(app, CHAT, messages=given)["prompt_eval_count"] == len("u:hi;a:We")


def test_log_probabilities_are_those_of_a_completion(app):
    found = ask(app, CHAT, messages=HI, logprobs=True, top_logprobs=2)
    same = completed(app, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in found["logprobs"]] == [row["token"] for row in same]
    assert [len(row["top_logprobs"]) for row in found["logprobs"]] == [2] * 30
    assert found == streamed(app, CHAT, messages=HI, logprobs=True, top_logprobs=2)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": "", "keep_alive": 0})]
)
def test_a_request_without_a_prompt_opens_the_model(app, path, body):
    answer = app.post(path, json=body)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["done"] and answer.json()["done_reason"] == "load"


def test_a_model_has_its_name_with_and_without_a_tag(app):
    (model,) = app.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "checkpoint:latest" and model["size"] > 0 and len(model["digest"]) == 64
    assert model["details"]["family"] == "llama"
    for name in ("checkpoint", "checkpoint:latest"):
        assert ask(app, CHAT, model=name, messages=HI)["model"] == "checkpoint"
        shown = app.post("/api/show", json={"name": name}).json()
        assert shown == app.post("/api/show", json={"model": name}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and shown["template"] == talking.TEMPLATE
    assert shown["model_info"]["llama.context_length"] == talking.CONTEXT
    (running,) = app.get("/api/ps").json()["models"]
    assert running["name"] == model["name"] and running["size"] > model["size"] and running["expires_at"] > "2100"
    assert app.get("/api/version").json()["version"].split(".")[0].isdigit()
    # Ollama's command line sends this request to find out whether a server is running.
    assert app.head("/").status_code == 200


@pytest.mark.parametrize(("path", "body", "status", "message"), [
    (CHAT, {"model": "none", "messages": HI}, 404, "'none' does not exist"),
    ("/api/show", {"model": "none"}, 404, "'none' does not exist"),
    (CHAT, {"messages": [{**HI[0], "images": ["aGk="]}]}, 400, "images is not supported"),
    (GENERATE, {"prompt": "hi", "images": ["aGk="]}, 400, "images is not supported"),
    (GENERATE, {"prompt": "hi", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
    (GENERATE, {"prompt": "hi", "suffix": "x"}, 400, "suffix"),
    (GENERATE, {"prompt": "hi", "context": [10**6]}, 400, "context has token 1000000"),
    (GENERATE, {"prompt": "hi", "format": "xml"}, 400, "format must be json or a JSON schema"),
    (GENERATE, {"prompt": "x" * 500}, 400, "maximum context length"),
    (CHAT, {"messages": HI, "options": {"mirostat": 1}}, 400, "options.mirostat: .* only the value 0"),
    (CHAT, {"messages": HI, "options": {"repeat_last_n": -2}}, 400, "options.repeat_last_n is -2"),
    (CHAT, {"messages": HI, "options": {"num_predict": "x"}}, 400, "options.num_predict is"),
    (CHAT, {"messages": HI, "options": {"temperature": "hot"}}, 400, "temperature"),
    (CHAT, {"messages": HI, "think": "a lot"}, 400, "think must be true"),
    (CHAT, {"messages": HI, "tools": [{"function": {}}]}, 400, "tools.0.function.name"),
    ("/api/embed", {"input": "hi"}, 400, "not an embedding model"),
    ("/api/pull", {"model": "x"}, 400, "cannot add, change or delete models"),
    ("/api/create", {"model": "x", "from": "y"}, 400, "castiron serve MODEL"),
    ("/api/nothing", {}, 404, "no such path"),
])  # fmt: skip
def test_an_error_is_one_string(app, path, body, status, message):
    answer = app.post(path, json=body)
    assert answer.status_code == status and answer.json().keys() == {"error"}
    assert re.search(message, answer.json()["error"])


def test_deleting_and_a_missing_key_are_errors_too(app):
    assert "cannot add" in app.delete("/api/delete").json()["error"]
    answer = app.get("/api/tags", headers={"x-api-key": ""})
    assert answer.status_code == 401 and "API key" in answer.json()["error"]


def test_a_stream_that_fails_ends_with_its_error(app, monkeypatch):
    talking.answer_with(monkeypatch, app, "abc", PipelineError("broken"))
    *parts, last = map(json.loads, app.post(CHAT, json={"messages": HI}).text.splitlines())
    assert "".join(part["message"]["content"] for part in parts) == "abc"
    assert last.keys() == {"error"} and "failed on this request" in last["error"]


def test_only_open_models_are_listed_as_running(talking_path):
    models = ModelPool([open_bundle(talking_path)], lambda bundle, name: open_api(bundle, Metrics(), threads=1), keep=60)
    with TestClient(App(models, Metrics())) as client:
        assert client.get("/api/ps").json() == {"models": []} and len(client.get("/api/tags").json()["models"]) == 1
        opened = client.post(CHAT, json={"messages": HI, "stream": False, "options": ENOUGH}).json()
        assert opened["total_duration"] > opened["load_duration"] > 1e6
        (running,) = client.get("/api/ps").json()["models"]
        assert running["name"] == "checkpoint:latest" and running["expires_at"] < "2100"
