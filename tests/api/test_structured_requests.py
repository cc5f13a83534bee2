"""Structured output over HTTP and on the command line."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from castiron.pipelines.cli import main as cli
from tests.support import served, structured
from tests.support.toy_text import read_json

path, model = structured.path, structured.model


def test_json_is_spaced_as_models_were_trained_to_write_it_or_compact(model, client, path, tmp_path, capsys):
    value = {"a": [1, {"b": None}], "c": "x"}
    schema, compact = {"const": value}, json.dumps(value, separators=(",", ":"))
    assert model.generate("Hi", json_schema=schema).text == json.dumps(value)
    assert model.generate("Hi", json_schema=schema, compact_json=True).text == compact
    # A request cannot set llguidance's options in a schema.
    assert model.generate("Hi", json_schema={**schema, "x-guidance": {"item_separator": ";"}}).text == json.dumps(value)
    for more, expected in (({}, json.dumps(value)), ({"compact_json": True}, compact)):
        generated = ask(client, extra_body={"json_schema": schema, **more}).choices[0].message.content
        assert generated == expected
    (file := tmp_path / "schema.json").write_text(json.dumps(schema))
    for more, expected in (((), json.dumps(value)), (("--compact-json",), compact)):
        assert cli.main(["run", str(path), "Hi", "--json-schema", str(file), *more]) == 0
        assert capsys.readouterr().out.strip() == expected


@pytest.fixture(scope="module")
def client(path, tmp_path_factory):
    with served.served(path, tmp_path_factory.mktemp("serve") / "log") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
            yield found
        assert "Traceback" not in server.errors, server.errors


def ask(client, **more):
    return client.chat.completions.create(model="tiny", messages=served.MESSAGES, **{"temperature": 0, "max_tokens": 90} | more)


def test_openais_client_gets_its_schema(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": structured.PERSON}}
    complete = ask(client, response_format=form, n=2)
    expected = model.chat(served.MESSAGES, json_schema=structured.PERSON, max_tokens=90)
    assert [(c.message.content, c.finish_reason) for c in complete.choices] == [(expected.text, "stop")] * 2
    chunks = list(ask(client, response_format=form, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    drawn = ask(client, response_format=form, temperature=1.5, seed=4, logprobs=True).choices[0]
    jsonschema.validate(json.loads(drawn.message.content), structured.PERSON)
    assert "".join(token.token for token in drawn.logprobs.content) == drawn.message.content
    assert ask(client, response_format={"type": "json_object"}, max_tokens=12).choices[0].message.content[0] == "{"
    cut = ask(client, response_format=form, max_tokens=4).choices[0]
    assert (cut.message.content, cut.finish_reason) == ('{"na', "length")
    assert ask(client, extra_body={"regex": "ab|cd"}).choices[0].message.content in ("ab", "cd")
    generated = client.completions.create(model="tiny", prompt="x", extra_body={"grammar": 'root ::= "ab" | "cd"'}).choices[0]
    assert generated.text in ("ab", "cd") and generated.finish_reason == "stop"


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"choice": ["a.b (c)|*", '"d\\']}},
        {"structured_outputs": {"json": {"enum": ["x"]}}},
        {"structured_outputs": {"json": '{"enum": ["x"]}'}},
        {"structured_outputs": {"regex": "ab|cd"}},
        {"structured_outputs": {"grammar": 'root ::= "ab" | "cd"'}},
        {"guided_choice": ["ab", "cd"]},
        {"guided_json": {"enum": ["x"]}},
        {"guided_regex": "ab|cd"},
        {"guided_grammar": 'start: "ab" | "cd"'},
        {"json_schema": {"enum": ["x"]}},
        {"response_format": {"type": "json_object", "schema": {"enum": ["x"]}}},
        {"response_format": {"type": "json_schema", "schema": {"enum": ["x"]}}},
    ],
)
def test_takes_the_fields_of_vllm_and_llama_cpp(client, body):
    answer = ask(client, extra_body=body).choices[0]
    assert answer.message.content in ("ab", "cd", '"x"', "a.b (c)|*", '"d\\') and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "param", "error_message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"contains": {}}}}}, "response_format",
         '"contains" cannot be honoured'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing; give it"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema", "needs the type json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"grammar": "root ::= x"}, "grammar", "'x' not found"),
        ({"regex": "a", "grammar": "start: A"}, "regex", "give one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex", "give one"),
        ({"guided_json": "{"}, "guided_json", "must be a JSON schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "needs the type json_schema"),
    ],
)  # fmt: skip
def test_an_unsupported_grammar_is_a_400(client, body, param, error_message):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, extra_body=body)
    assert error.value.param == param and error_message in error.value.message


def test_run_takes_a_grammar_and_an_expression(path, tmp_path, capsys):
    (tmp_path / "words.gbnf").write_text('root ::= "ab" | "cd"\n')
    for option, value in (("--grammar", str(tmp_path / "words.gbnf")), ("--regex", "ab|cd")):
        assert cli.main(["run", str(path), "Hello", option, value, "--json"]) == 0
        answer = read_json(capsys.readouterr().out)
        assert answer["finish_reason"] == "stop" and answer["text"] in ("ab", "cd")
    (tmp_path / "person.json").write_text("{")
    assert cli.main(["run", str(path), "Hello", "--json-schema", str(tmp_path / "person.json")]) == 1
    assert "is not JSON" in capsys.readouterr().err
