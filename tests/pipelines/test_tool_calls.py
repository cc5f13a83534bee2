"""Calls of functions: the form of a template, calls out of text that comes in pieces, and texts that must be calls."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import AddedToken

from castiron.pipelines import cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.choosing import Chooser
from castiron.pipelines.generation.sequence import Sequence
from castiron.pipelines.generation.text import Text
from castiron.pipelines.generation.thoughts import Thought
from castiron.pipelines.generation.tool_calls import CallPart, Tools, joined
from castiron.pipelines.generation.tool_forms import FORMS, form_of
from castiron.pipelines.serve.app import open_app
from tests.pipelines import schemas, talking, toy_text

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": {"properties": {}}}
BOTH = [("weather", {"city": 'Sao "P", {x}', "days": 2}), ("now", {})]
# Two calls, as the models write them, with what they say before them where they may.
WRITTEN = {
    "hermes": 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Sao \\"P\\", {x}", "days": 2}}\n</tool_call>\n<tool_call>\n'
              '{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen-xml": "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nSao \"P\", {x}\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
                "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3": '{"name": "weather", "parameters": {"city": "Sao \\"P\\", {x}", "days": 2}}; {"name": "now", "parameters": {}}',
    "mistral": 'Well.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Sao \\"P\\", {x}", "days": 2}}, {"name": "now", "arguments": {}}]',
    "mistral-args": 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Sao \\"P\\", {x}", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "gemma4": 'Well.<|tool_call>call:weather{city:<|"|>Sao "P", {x}<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "functiongemma": 'Well.<start_function_call>call:weather{city:<escape>Sao "P", {x}<escape>,days:2}<end_function_call>'
                     "<start_function_call>call:now{}<end_function_call>",
    "lfm2": """Well.<|tool_call_start|>[weather(city='Sao "P", {x}', days=2), now()]<|tool_call_end|>""",
    "harmony": '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|><|start|>assistant'
               '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Sao \\"P\\", {x}", "days": 2}<|call|>'
               "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
}  # fmt: skip
TEMPLATES = {
    "hermes": "For each call return json within <tool_call></tool_call> tags",
    "qwen-xml": "<tool_call>\n<function=example_function_name>",
    "llama3": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}',
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "mistral-args": "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "gemma4": "{{ '<|tool_call>call:' }}",
    "functiongemma": "{{ '<start_function_call>call:' }}",
    "lfm2": "List of tools: <|tool_list_start|>",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
}


def told(tools: Tools, text: str, sizes: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, what is said, and calls of a text that comes in pieces of these sizes."""
    reader, found, at = tools.reader(), [], 0
    for size in [*sizes, len(text)]:
        found += reader.add(text[at : at + size])
        at += size
    found += reader.finish()
    words = [piece for piece in found if isinstance(piece, str)]
    thought = "".join(word for word in words if isinstance(word, Thought))
    return thought, "".join(word for word in words if not isinstance(word, Thought)), joined(
        [piece for piece in found if isinstance(piece, CallPart)]
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_template_tells_its_form(name):
    assert form_of(TEMPLATES[name]) == name and form_of("{{ messages }}") is form_of(None) is None


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), max_size=200))
def test_calls_are_read_out_of_text_however_it_comes(name, sizes):
    thought, said, calls = told(Tools(FORMS[name], SCHEMAS), WRITTEN[name], sizes)
    assert [(called, json.loads(arguments)) for called, arguments in calls] == BOTH
    assert said.strip() == ("" if name == "llama3" else "Well.") and thought == ("Hm." if name == "harmony" else "")


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"harmony"}))
@settings(max_examples=25)
@given(st.data())
def test_what_is_no_call_is_said_as_it_was_written(name, data):
    form = FORMS[name]
    marks = st.sampled_from([form.begin, form.end, '{"name', "[", "(", "x", " ", "<", "\n", form.begin[:3]])
    text = data.draw(st.lists(marks, max_size=6).map("".join))
    thought, said, calls = told(Tools(form, SCHEMAS), text, data.draw(st.lists(st.integers(1, 3), max_size=40)))
    assert not calls and not thought and "".join(said.split()) == "".join(text.split())
    if form.begin and form.begin not in text:
        assert said == text


def test_arguments_come_in_pieces_and_a_single_call_ends_the_text():
    reader = Tools(FORMS["hermes"], SCHEMAS).reader()
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    pieces = [reader.add(letter) for letter in text]
    names = [part.name for several in pieces for part in several]
    assert names[0] == "weather" and names.count(None) == len('{"city": "Ulm"}')
    for name in FORMS.keys() - {"harmony", "llama3"}:
        reader, found = Tools(FORMS[name], SCHEMAS, single=True).reader(), []
        for letter in WRITTEN[name]:
            found += reader.add(letter)
            if reader.full:
                break
        assert [name for name, _ in joined([p for p in found if isinstance(p, CallPart)])] == ["weather"] or name == "lfm2"


def with_marks(name: str) -> Text:
    """A tokenizer that has the marks of a form as special tokens."""
    form, tokenizer = FORMS[name], schemas.tokenizer()
    marks = [mark for mark in (form.begin, form.end, *form.marks) if mark]
    if name not in ("hermes", "qwen-xml"):
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return Text(tokenizer, eos=(0,), tool_form=form)


@pytest.mark.parametrize("name", FORMS)
def test_calls_that_are_asked_for_hold_to_the_functions_schema(name):
    text, form = with_marks(name), FORMS[name]
    for seed in range(12):
        parallel = seed % 3 == 0
        said, end = schemas.say(text, text.call_grammar(SCHEMAS, parallel), seed, 600)
        if end == "length":
            continue
        _, rest, calls = told(Tools(form, SCHEMAS), said, [7] * 100)
        assert not rest and calls and (parallel or len(calls) == 1)
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), {"type": "object", **SCHEMAS[called]})
    only = schemas.say(text, text.call_grammar({"now": SCHEMAS["now"] | {"additionalProperties": False}}, False), 1)[0]
    assert told(Tools(form), only, [])[2] == [("now", "{}")]


def test_tokens_of_thoughts_are_counted_in_channels_too():
    text = with_marks("harmony")
    sequence = Sequence(text.encode("x"), 2000, text=text, thoughts=True, stop_tokens=())
    for token in text.encode(
        "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant<|channel|>final<|message|>Well then."
    ):
        sequence.advance(token)
    assert 0 < sequence.thought_tokens <= len("Hm, so.")


def test_parameters_that_a_form_without_json_cannot_be_held_to_are_refused():
    for name, schema in (
        ("gemma4", {"anyOf": []}),
        ("lfm2", {"minProperties": 1}),
        ("qwen-xml", {"properties": {"a": {"type": "string", "maxLength": 3}}}),
        # What is no schema.
        ("lfm2", {"properties": []}),
        ("lfm2", {"properties": {"a": {}}, "required": 5}),
        ("gemma4", {"properties": {"a": {"enum": 5}}}),
        ("qwen-xml", {"properties": {"a": {"type": "string", "enum": 5}}}),
        ("qwen-xml", {"properties": {"a": {"type": "string", "enum": [5]}}}),
    ):
        with pytest.raises(PipelineError, match="the parameters of f cannot be held to"):
            with_marks(name).call_grammar({"f": schema}, False)


TOOLS = [
    {"type": "function", "function": {"name": "w", "description": "d", "parameters": {**WEATHER, "required": ["c"], "properties": {
        "c": {"type": "string", "maxLength": 4}, "d": {"type": "integer", "maximum": 9, "minimum": 0}}}}},
    {"type": "function", "function": {"name": "n"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return talking.bundle(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def app(path):
    with TestClient(open_app(path, threads=1)) as client:
        yield client


@pytest.fixture(scope="module")
def client(app):
    with openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=app) as found:
        yield found


def ask(client, **more):
    given = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "temperature": 0, "max_tokens": 100}
    return client.chat.completions.create(model="tiny", **given | more)


def gathered(chunks) -> tuple[list[tuple[str, str]], str, str]:
    """Calls, content and the end of a stream, as openai's guide puts deltas together."""
    calls, content, end = {}, "", None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        end = choice.finish_reason or end
        assert len(choice.delta.tool_calls or []) <= 1, "some clients read the first of a chunk alone"
        for part in choice.delta.tool_calls or []:
            if part.index not in calls:
                assert part.id and part.type == "function"
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments
    return [tuple(call) for call in calls.values()], content, end


def test_the_manifest_has_the_form_and_inspect_shows_it(path, capsys):
    assert json.loads((path / "manifest.json").read_text())["tool_form"] == "hermes"
    assert cli.main(["inspect", str(path)]) == 0
    assert "tool calls" in (out := capsys.readouterr().out) and "hermes" in out


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "w"}}])
def test_required_and_named_calls_hold_to_the_schema_whole_and_streamed(client, choice):
    for more in ({}, {"temperature": 1.2, "seed": 3}):
        answer = ask(client, tool_choice=choice, parallel_tool_calls=False, **more).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        assert call.id and call.function.name in ("w", "n")[: 1 if isinstance(choice, dict) else 2]
        if call.function.name == "w":
            jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
        stream = gathered(ask(client, tool_choice=choice, parallel_tool_calls=False, stream=True, **more))
        assert stream == ([(call.function.name, call.function.arguments)], "", "tool_calls")
    cut = ask(client, tool_choice=choice, max_tokens=30).choices[0]
    assert cut.finish_reason == "length"


ANSWER = {"type": "object", "properties": {"name": {"enum": ["w", "Ulm"]}}, "required": ["name"], "additionalProperties": False}


def test_beside_a_response_format_the_model_has_the_choice(app, client):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    letter = app.app.api.text.tokenizer.token_to_id
    likely = lambda mark: {"logit_bias": {str(letter(mark)): 100}, "response_format": form, "parallel_tool_calls": False}
    said = ask(client, **likely("{")).choices[0]
    assert not said.message.tool_calls and jsonschema.validate(json.loads(said.message.content), ANSWER) is None
    called = ask(client, **likely("<")).choices[0]
    (call,) = called.message.tool_calls
    if call.function.name == "w":
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
    assert called.finish_reason == "tool_calls" and not called.message.content
    assert gathered(ask(client, **likely("<"), stream=True)) == (
        [(call.function.name, call.function.arguments)],
        "",
        "tool_calls",
    )
    # Of calls alone there is no text.
    assert ask(client, **likely("{"), tool_choice="required").choices[0].message.tool_calls


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"harmony"}))
def test_a_form_leaves_the_choice_of_an_answer(name):
    text, functions = with_marks(name), {"now": {"properties": {}, "additionalProperties": False}, "weather": WEATHER}
    call, _ = schemas.say(text, text.call_grammar({"now": functions["now"]}, False), 1)
    grammar = text.call_grammar(functions, False, ANSWER)
    for words in (call if FORMS[name].begin else call.replace(" ", ""), '{"name":"w"}', '{"name":"Ulm"}'):
        assert not follow(constraint := grammar.constraint(), text, words), words
        assert constraint.done or constraint.allows(text.eos[0])
        _, rest, calls = told(Tools(FORMS[name], functions), words, [7] * 20)
        assert (rest, calls) == (("", [("now", "{}")]) if "now" in words else (words, []))


def follow(constraint, text: Text, words: str) -> str:
    """What is left of `words`, of which each token is allowed and is said."""
    left = words.encode()
    while left:
        allowed = [
            i
            for i in np.flatnonzero(constraint.mask(len(text.grammars.tokens)))
            if text.grammars.tokens[i] and left.startswith(text.grammars.tokens[i])
        ]
        if not allowed:
            break
        constraint.accept(int(allowed[-1]))
        left = left[len(text.grammars.tokens[allowed[-1]]) :]
    return left.decode()


@pytest.mark.parametrize("name", FORMS.keys() - {"harmony", "llama3"})
def test_of_its_own_accord_a_model_says_what_it_wants_and_calls_by_the_schema(name):
    text, place = with_marks(name), {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"]}
    grammar = text.call_grammar({"weather": place, "now": {"type": "object"}}, True, free=True)
    plain = "Well, <tool_cal and {more}, 1 < 2.\n"
    assert not follow(constraint := grammar.constraint(), text, plain) and constraint.allows(text.eos[0])
    call, _ = schemas.say(text, text.call_grammar({"weather": {**place, "additionalProperties": False}}, False), 1)
    said = told(Tools(FORMS[name], SCHEMAS), f"{plain}{call}", [5] * 100)
    assert said[1].strip() == plain.strip() and [called for called, _ in said[2]] == ["weather"]
    assert not follow(constraint := grammar.constraint(), text, plain + call) and (
        constraint.done or constraint.allows(text.eos[0])
    )
    begun = call[: call.index("weather") + len("weather")]
    assert follow(grammar.constraint(), text, plain + begun.replace("weather", "wether")).startswith("ther")
    wrong = call.replace("city", "town")
    assert wrong != call and follow(grammar.constraint(), text, plain + wrong).startswith("town")


@pytest.fixture
def saying(app, monkeypatch):
    return lambda words: talking.say(monkeypatch, app, words)


def test_calls_of_the_models_own_accord_are_told_from_its_words(client, saying):
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


def test_strict_functions_are_called_by_their_schema_of_the_models_own_accord_too(app, client, monkeypatch):
    """A model that wants to give a number where a text belongs says what fits, and what it likes to functions that are not."""
    text = app.app.api.text
    script = text.encode('Well. <tool_call>\n{"name": "w", "arguments": {"c":5}}\n</tool_call>')

    def pick(self, *_) -> int:
        said = self.__dict__.setdefault("said", [])
        wanted = script[len(said)] if len(said) < len(script) else text.eos[0]
        if self.constraint and not self.constraint.allows(wanted):
            wanted = int(np.flatnonzero(self.constraint.mask(211))[0])
        said.append(wanted)
        return wanted

    monkeypatch.setattr(Chooser, "pick", pick)
    loose, strict = [
        {**tool, "function": {**tool["function"], "strict": strict}} for strict in (False, True) for tool in TOOLS[:1]
    ]
    for tools, fits in (
        ([loose], False),
        ([loose, {**TOOLS[1], "function": {"name": "n", "strict": True}}], False),
        ([strict], True),
    ):
        answer = ask(client, tools=tools).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.message.content == "Well." and answer.finish_reason == "tool_calls"
        assert (json.loads(call.function.arguments) == {"c": 5}) == (not fits)
        if fits:
            jsonschema.validate(json.loads(call.function.arguments), strict["function"]["parameters"])
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
    ("more", "param", "says"),
    [
        ({"tool_choice": "required", "tools": openai.omit}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x', which is none"),
        ({"tool_choice": "sometimes"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": "required", "extra_body": {"regex": "a"}}, "tool_choice", "give one"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"}, "tools",
         '"not"'),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_a_400(client, more, param, says):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **more)
    assert error.value.param == param and says in error.value.message


def test_a_template_that_knows_no_tools_or_has_another_form_refuses_them(tmp_path, monkeypatch):
    for template, says in ((toy_text.TEMPLATE_TEXT, "knows of none"), ("{{ tools }}{{ messages[0].content }}", "not known")):
        monkeypatch.setattr(toy_text, "TEMPLATE_TEXT", template)
        with TestClient(open_app(toy_text.write(tmp_path / "toy"), threads=1)) as client:
            body = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 1, "tools": TOOLS}
            error = client.post("/v1/chat/completions", json=body).json()["error"]
            assert error["param"] == "tools" and says in error["message"]
