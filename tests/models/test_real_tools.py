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
def client(tmp_path_factory):
    bundle = tmp_path_factory.mktemp("real") / "bundle"
    run("compile", fetch("qwen2.5-coder-1.5b-instruct") / "model.gguf", "-o", bundle, "--batch", "none", "--speculate", "none")
    with TestClient(open_app(bundle, threads=2)) as found:
        yield found


def ask(client, text: str, **more) -> dict:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 200, **more}
    return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]


def schema_of(value) -> dict:
    if isinstance(value, dict):
        properties = {key: schema_of(each) for key, each in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    return {"type": "array", "items": schema_of(value[0])} if isinstance(value, list) else {"type": TYPES[type(value)]}


def plain(value):
    """Return a value without differences of case and full stops."""
    return json.loads(json.dumps(value).lower().replace('."', '"'))


# Calls, and calls with the expected name and arguments, of 20.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("choice", "min_calls", "min_right"), [("auto", 18, 17), ("required", 20, 19)])
def test_calls_have_the_expected_name_and_arguments(client, choice, min_calls, min_right):
    calls, wrong = 0, []
    for text, name, expected in REQUESTS["tools"]:
        message = ask(client, text, tools=TOOLS, tool_choice=choice)
        found = [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or []
        ]
        calls += bool(found)
        given = {key: value for key, value in found[0][1].items() if key in expected} if found else {}
        if not found or found[0][0] != name or plain(given) != plain(expected):
            wrong.append((text, found or message["content"]))
    print(f"{choice}: {calls} calls, {20 - len(wrong)} right", *wrong, sep="\n")
    assert calls >= min_calls and 20 - len(wrong) >= min_right, wrong


@pytest.mark.timeout(3600)
def test_values_of_schemas_are_the_expected_ones(client):
    for text, expected in REQUESTS["schemas"]:
        schema = schema_of(expected)
        if "sentiment" in expected:
            schema["properties"]["sentiment"] = {"enum": ["positive", "negative"]}
        form = {"type": "json_schema", "json_schema": {"name": "data", "schema": schema, "strict": True}}
        message = ask(client, f"Extract the data of this text as JSON: {text}", response_format=form)
        assert plain(json.loads(message["content"])) == plain(expected), text
