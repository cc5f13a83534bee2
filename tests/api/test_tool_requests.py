"""Tool calls over HTTP with OpenAI's client."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from castiron.pipelines.cli import main as cli
from castiron.pipelines.engine.request import Chooser
from castiron.pipelines.server.app import open_app
from castiron.pipelines.text import grammar as grammar_file
from tests.support import talking, toy_text

talking_path = talking.talking_path
PROPERTIES = {"c": {"type": "string", "maxLength": 4}, "d": {"type": "integer", "maximum": 9, "minimum": 0}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["c"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "w", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "n"}},
]


@pytest.fixture(scope="module")
def app(talking_path):
    with TestClient(open_app(talking_path, threads=1)) as client:
        yield client


@pytest.fixture(scope="module")
def client(app):
    with openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=app) as found:
        yield found


def ask(client, **more):
    given = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "temperature": 0, "max_tokens": 100}
    return client.chat.completions.create(model="tiny", **given | more)


def gathered(chunks) -> tuple[list[tuple[str, str]], str, str]:
    """Return calls, content and finish reason of a stream, joined as in OpenAI's guide."""
    calls, content, end = {}, "", None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        end = choice.finish_reason or end
        assert len(choice.delta.tool_calls or []) <= 1, "some clients read only the first call of a chunk"
        for part in choice.delta.tool_calls or []:
            if part.index not in calls:
                assert part.id and part.type == "function"
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments
    return [tuple(call) for call in calls.values()], content, end


def test_the_manifest_has_the_form_and_inspect_shows_it(talking_path, capsys):
    assert json.loads((talking_path / "manifest.json").read_text())["tool_format"]["begin"] == '<tool_call>\n{"name": "'
    assert cli.main(["inspect", str(talking_path)]) == 0
    assert '<tool_call> {"name": "name", "arguments": {…}} </tool_call>' in capsys.readouterr().out


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "w"}}])
def test_required_and_named_calls_fit_the_schema_complete_and_streamed(client, choice):
    for more in ({}, {"temperature": 1.2, "seed": 3}):
        answer = ask(client, tool_choice=choice, parallel_tool_calls=False, **more).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        assert call.id and call.function.name in ("w", "n")[: 1 if isinstance(choice, dict) else 2]
        if call.function.name == "w":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        stream = gathered(ask(client, tool_choice=choice, parallel_tool_calls=False, stream=True, **more))
        assert stream == ([(call.function.name, call.function.arguments)], "", "tool_calls")
    cut = ask(client, tool_choice=choice, max_tokens=30).choices[0]
    assert cut.finish_reason == "length"


ANSWER = {"type": "object", "properties": {"name": {"enum": ["w", "Ulm"]}}, "required": ["name"], "additionalProperties": False}


def test_a_response_format_beside_tools_allows_both(app, client):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    letter = app.app.api.tokenizer.backend.token_to_id
    likely = lambda mark: {"logit_bias": {str(letter(mark)): 100}, "response_format": form, "parallel_tool_calls": False}
    generated = ask(client, **likely("{")).choices[0]
    assert not generated.message.tool_calls and jsonschema.validate(json.loads(generated.message.content), ANSWER) is None
    called = ask(client, **likely("<")).choices[0]
    (call,) = called.message.tool_calls
    if call.function.name == "w":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert called.finish_reason == "tool_calls" and not called.message.content
    stream = gathered(ask(client, **likely("<"), stream=True))
    assert stream == ([(call.function.name, call.function.arguments)], "", "tool_calls")
    # tool_choice "required" excludes text.
    assert ask(client, **likely("{"), tool_choice="required").choices[0].message.tool_calls


@pytest.fixture
def saying(app, monkeypatch):
    return lambda words: talking.answer_with(monkeypatch, app, words)


def test_separates_unrequested_calls_from_text(client, saying):
    saying('Well. <tool_call>{"name": "n", "arguments": {}}</tool_call>')
    answer = ask(client).choices[0]
    assert answer.message.content == "Well." and answer.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in answer.message.tool_calls] == [("n", "{}")]
    assert gathered(ask(client, stream=True)) == ([("n", "{}")], "Well.", "tool_calls")
    saying('<think>Hm.</think>Well. <tool_call>{"name":"n","arguments":{}}</tool_call>')
    assert gathered(ask(client, stream=True)) == ([("n", "{}")], "Well.", "tool_calls")
    message = ask(client).choices[0].message
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == ("Hm.", "Well.", 1)
    for more in ({"tool_choice": "none"}, {"tools": openai.omit}):
        plain = ask(client, **more).choices[0]
        assert "<tool_call>" in plain.message.content and not plain.message.tool_calls and plain.finish_reason == "stop"
    saying("Just words.")
    assert (answer := ask(client).choices[0]).message.content == "Just words." and answer.finish_reason == "stop"
    saying('<tool_call>{"name":"n","arguments":{}}</tool_call>' * 2)
    assert len(ask(client).choices[0].message.tool_calls) == 2
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_unrequested_calls_of_strict_functions_fit_their_schema(app, client, monkeypatch):
    """A model that prefers an invalid argument generates it only without `strict`."""
    text = app.app.api.tokenizer
    script = text.encode('Well. <tool_call>\n{"name": "w", "arguments": {"c": 5}}\n</tool_call>')

    def pick(self, *_) -> int:
        generated = self.__dict__.setdefault("said", [])
        wanted = script[len(generated)] if len(generated) < len(script) else text.eos[0]
        if self.constraint and not self.constraint.allows(wanted):
            wanted = int(np.flatnonzero(self.constraint.mask(211))[0])
        generated.append(wanted)
        return wanted

    monkeypatch.setattr(Chooser, "pick", pick)
    loose, strict = ({**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": strict}} for strict in (False, True))
    other = {**TOOLS[1], "function": {"name": "n", "strict": True}}
    for tools, fits in (([loose], False), ([loose, other], False), ([strict], True)):
        answer = ask(client, tools=tools).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.message.content == "Well." and answer.finish_reason == "tool_calls"
        assert (json.loads(call.function.arguments) == {"c": 5}) == (not fits)
        if fits:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert gathered(ask(client, tools=tools, stream=True)) == ([("w", call.function.arguments)], "Well.", "tool_calls")


def test_the_template_gets_tools_calls_and_results(client):
    usual = ask(client, tools=openai.omit, max_tokens=1).usage.prompt_tokens
    assert ask(client, max_tokens=1).usage.prompt_tokens == usual + len("w n <tool_call>;")
    assert ask(client, max_tokens=1, tool_choice="none").usage.prompt_tokens == usual
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Ulm"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "sun"}]  # fmt: skip
    answer = ask(client, tools=openai.omit, messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == usual + len("a:<w city>;t:sun;")


@pytest.mark.parametrize(
    ("more", "param", "error_message"),
    [
        ({"tool_choice": "required", "tools": openai.omit}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x', but tools has no such function"),
        ({"tool_choice": "sometimes"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": "required", "extra_body": {"regex": "a"}}, "tool_choice", "leave one of them out"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}],
          "tool_choice": "required"}, "tools", '"not" cannot be honoured'),
    ],
)  # fmt: skip
def test_invalid_tools_are_a_400(client, more, param, error_message):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **more)
    assert error.value.param == param and error_message in error.value.message


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "loose"}}},
        {"tool_choice": "auto"},
        {"tool_choice": "auto", "response_format": {"type": "json_object"}},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_ignored_unless_the_function_is_strict(client, more):
    loose = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "phone", "pattern": "(?!a)b"}, "b": {"not": {}}},
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "loose", "parameters": loose}}]
    tools += [{"type": "function", "function": {"name": "strict", "parameters": SCHEMA, "strict": True}}]
    assert ask(client, tools=tools, max_tokens=5, **more).choices
    tools[2]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="cannot be honoured"):
        ask(client, tools=tools, max_tokens=5, **more)


def test_a_grammar_that_waits_too_long_is_a_503(client, monkeypatch):
    monkeypatch.setattr(grammar_file, "MAX_WAIT", 0.0)
    with pytest.raises(openai.InternalServerError) as error:
        client.completions.create(model="tiny", prompt="x", extra_body={"regex": "never seen"})
    assert (
        error.value.status_code == 503 and error.value.response.headers["Retry-After"] and "retry later" in error.value.message
    )


@pytest.mark.parametrize("template", [toy_text.TEMPLATE_TEXT, "{{ tools }}{{ messages[0].content }}"])
def test_a_template_without_tools_gets_a_description_of_them(tmp_path, monkeypatch, template):
    monkeypatch.setattr(toy_text, "TEMPLATE_TEXT", template)
    with TestClient(open_app(toy_text.write(tmp_path / "toy"), threads=1)) as client:
        prompt = lambda tools: client.app.api.tokenizer.render_chat([{"role": "user", "content": "b"}], tools=tools)
        assert prompt(TOOLS).count('"name": "w"') == 1 and "b" in prompt(TOOLS) and "w" not in prompt(None)
