"""Tool calls and structured output of a real model, greedy, against expected values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from castiron.pipelines.server.app import open_app
from tests.models.checkpoints import fetch
from tests.models.test_real_generation import run

REQUESTS = json.loads((Path(__file__).parent / "requests.json").read_text(encoding="utf-8"))
TOOLS = [{"type": "function", "function": {"name": name, **rest}} for name, rest in REQUESTS["functions"].items()]
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Return a function that asks castiron for a message, given a text and fields of the request."""
    bundle = tmp_path_factory.mktemp("real") / "bundle"
    run(
        "compile",
        fetch("qwen2.5-coder-1.5b-instruct") / "model.gguf",
        "-o",
        bundle,
        "--batch",
        "none",
        "--verify-widths",
        "none",
    )
    with TestClient(open_app(bundle, threads=2)) as client:

        def message(text: str, **more) -> dict:
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 200, **more}
            return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]

        yield message


def schema_of(value) -> dict:
    if isinstance(value, dict):
        properties = {key: schema_of(each) for key, each in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    return {"type": "array", "items": schema_of(value[0])} if isinstance(value, list) else {"type": TYPES[type(value)]}


def plain(value):
    """Return a value without differences of case and full stops."""
    return json.loads(json.dumps(value).lower().replace('."', '"'))


def count_calls(ask, choice: str) -> tuple[int, int]:
    """Return the number of calls, and of calls with the expected name and arguments, of 20."""
    calls = right = 0
    for text, name, expected in REQUESTS["tools"]:
        message = ask(text, tools=TOOLS, tool_choice=choice)
        found = [each["function"] for each in message.get("tool_calls") or []]
        given = json.loads(found[0]["arguments"]) if found else {}
        fits = plain({key: value for key, value in given.items() if key in expected}) == plain(expected)
        calls, right = calls + bool(found), right + (bool(found) and found[0]["name"] == name and fits)
    return calls, right


def count_values(ask, request) -> int:
    """Return how many of 20 answers have the values of their text; `request` gives the fields."""
    right = 0
    for text, expected in REQUESTS["schemas"]:
        schema = schema_of(expected)
        if "sentiment" in expected:
            schema["properties"]["sentiment"] = {"type": "string", "enum": ["positive", "negative"]}
        answer = json.loads(ask(f"Extract the data of this text as JSON: {text}", response_format=request(schema))["content"])
        right += plain(answer) == plain(expected)
    return right


@pytest.mark.timeout(3600)
def test_calls_and_values_are_the_expected_ones(ask):
    form = lambda schema: {"type": "json_schema", "json_schema": {"name": "data", "schema": schema, "strict": True}}
    found = count_calls(ask, "auto"), count_calls(ask, "required"), count_values(ask, form)
    print(found)
    assert found[0] >= (18, 17) and found[1] >= (20, 19) and found[2] == 20


if __name__ == "__main__":
    # The same requests to llama.cpp: make bench installs llama-cpp-python.
    from llama_cpp import Llama

    model = Llama(str(fetch("qwen2.5-coder-1.5b-instruct") / "model.gguf"), n_ctx=4096, n_threads=2, verbose=False)
    message_of = lambda text, **more: model.create_chat_completion(
        [{"role": "user", "content": text}], temperature=0, max_tokens=200, **more
    )["choices"][0]["message"]
    own_form = lambda schema: {"type": "json_object", "schema": schema}
    print(count_calls(message_of, "auto"), count_calls(message_of, "required"), count_values(message_of, own_form))
