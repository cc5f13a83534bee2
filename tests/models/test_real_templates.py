"""70 chat templates of real models render as in transformers, byte for byte."""

from __future__ import annotations

import json
import re
from os.path import commonprefix
from pathlib import Path
from random import Random

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import render
from castiron.pipelines.text.derive_tool_format import tool_format_of
from castiron.pipelines.text.history import text_of
from castiron.pipelines.text.tool_calls import Tools, read_calls
from tests.models.checkpoints import fetch
from tests.support.histories import PARAMETERS as ODD_PARAMETERS
from tests.support.histories import SPECIAL as OWN_SPECIAL
from tests.support.histories import Histories, api_of, prompt_of, tokenizer_of

CITY = {"type": "string", "description": 'the <city>: Zürich & "more"'}
PARAMETERS = {"type": "object", "properties": {"city": CITY, "days": {"enum": [1, 2]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Get it.", "parameters": PARAMETERS}}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"sky": "clear"}'}
USER = {"role": "user", "content": "How is  the weather in Zürich?\n"}
AGAIN = {"role": "user", "content": "And 明日?"}
ANSWER = {"role": "assistant", "content": "Sunny <b>&amp;</b>."}
REASONED = {"role": "assistant", "content": "", "reasoning_content": "Look it up.", "tool_calls": [CALL]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]}
# Messages, and variables of the template.
CONVERSATIONS = {
    "user": ([USER], {}),
    "system": ([{"role": "system", "content": " Be brief. "}, USER], {}),
    "turns": ([USER, ANSWER, AGAIN], {}),
    "without a generation prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "tools": ([USER], {"tools": TOOLS}),
    "calls": ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT], {"tools": TOOLS}),
    "reasoning": ([USER, ANSWER | {"reasoning_content": "Look it up."}, AGAIN], {"enable_thinking": True}),
    "reasoning and calls": ([USER, REASONED, RESULT], {"tools": TOOLS}),
    "no reasoning": ([USER], {"enable_thinking": False}),
    "parts": ([PARTS], {}),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


# Templates of models that were not trained to call tools.
NO_CALLS = ("gemma-2-2b-it", "Phi-3.5-mini", "rwkv-world")
# Templates that write no calls, or reject messages with calls; their formats are known by a text.
WRITES_NONE = (
    "command-r-plus", "Kimi-K2-", "LFM2-8B", "LFM2.5-Instruct", "granite-3.3", "llama-cpp-deepseek-r1", "firefunction", "R1-Distill-Llama",
)  # fmt: skip
TRICKY = {"city": 'Zürich & "more" <b>,\n[x]', "days": 2}


def templates() -> dict[str, str]:
    found = {path.stem: path.read_text(encoding="utf-8") for path in (fetch("llama.cpp") / "templates").glob("*.jinja")}
    assert len(found) == 70
    return found


def test_calls_that_templates_write_are_read_back():
    """At least 60 of 67 formats are known, and none of those loses or changes a call."""
    known, read = [], []
    for name, template in templates().items():
        form = tool_format_of(template, SPECIAL)
        if form is None or any(part in name for part in NO_CALLS):
            continue
        known.append(name)
        for as_text in (False, True):
            arguments = json.dumps(TRICKY) if as_text else TRICKY
            call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
            try:
                given = {"tools": TOOLS, "add_generation_prompt": False}
                text = render(
                    template,
                    [USER, {"role": "assistant", "content": "", "tool_calls": [call]}],
                    special_tokens=SPECIAL,
                    **given,
                )
            except PipelineError:
                continue
            answer = text.rpartition(USER["content"].strip())[2]
            calls = read_calls(Tools(form, {"weather": PARAMETERS}), answer)
            if "weather" in answer and [(n, json.loads(a)) for n, a in calls] == [("weather", TRICKY)]:
                read.append(name)
                break
    assert len(known) >= 60, known
    assert not [name for name in set(known) - set(read) if not any(part in name for part in WRITES_NONE)]


ANY: dict = {}
# Schemas of an argument, and its value.
TYPED = [
    *(({"type": "string"}, value) for value in ("12345", "True", "None", "", "a 'b' \"c\"", "[1, 'a']", "x\ny")),
    *(({"type": ["string", "null"]}, value) for value in (None, "x")), ({"type": ["string", "integer"]}, 7), ({"type": "null"}, None),
    *(({"type": "number"}, value) for value in (5, -1, 0.5, 1e30)), *(({"type": "boolean"}, value) for value in (True, False)),
    ({"type": "array", "items": {"type": "string"}}, ["a", "5"]), ({"type": ["array", "null"]}, ["a", None]),
    *(({"type": "array"}, value) for value in ([], [1, True, None, 0.5], ["it's", '"q"'], ["a\nb", "é"], [[1, 2], ["x"]], [{"a": 1}, {"b": None}], ["True", "1"])),
    *(({"type": "object"}, value) for value in (
        {}, {"a": 1, "b": "x"}, {"a": None, "b": True, "c": [1, {"d": "it's"}]}, {"a": {"b": {"c": []}}}, {"a": "1"}, {"a": "<b>&amp;"},
    )),
    *((ANY, value) for value in ({"a": [1]}, [None, True], {"a": "x"})), ({"anyOf": [{"type": "object"}, {"type": "string"}]}, {"a": True}),
    ({"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}}, [{"x": "5", "n": 5}, {"x": "true"}]),
]  # fmt: skip


def test_arguments_of_every_type_are_read_back():
    """Only MiniMax-M3's template writes two values as one text: it leaves out null and quotes."""
    compared, differ = 0, []
    for name, template in templates().items():
        form = tool_format_of(template, SPECIAL)
        for schema, value in TYPED if form else ():
            parameters = {"type": "object", "properties": {"a": schema, "z": {"type": "string"}}, "required": ["z"]}
            tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}}]

            def written(arguments: object, template=template, tools=tools) -> str:
                call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
                try:
                    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
                    text = render(template, messages, special_tokens=SPECIAL, tools=tools, add_generation_prompt=False)
                except PipelineError:
                    return ""
                return text.rpartition(USER["content"].strip())[2]

            arguments = {"a": value, "z": "end"}
            texts = [text for each in (arguments, json.dumps(arguments)) if "weather" in (text := written(each))]
            compared += bool(texts)
            reads = [read_calls(Tools(form, {"weather": parameters}), text) for text in texts]
            # The template of Gemma 4 sorts keys; True is not 1.
            same = lambda read, arguments=arguments: json.dumps(read, sort_keys=True) == json.dumps(arguments, sort_keys=True)
            if texts and not any(len(read) == 1 and read[0][0] == "weather" and same(json.loads(read[0][1])) for read in reads):
                differ.append(name)
                assert written(json.loads(reads[0][0][1])).lower() == texts[0].lower(), (name, schema, value)
    assert compared > 1_900
    assert differ == ["MiniMax-M3"] * 10, (compared, differ)


def test_the_page_has_the_format_of_every_template():
    page = (Path(__file__).parents[2] / "docs/structured.md").read_text().partition("| format | templates |")[2]
    rows = re.findall(r"^\| (\w+)[^|]* \| ([^|]+) \|$", page, re.MULTILINE)
    listed = {name: style.lower() for style, names in rows for name in names.split(", ")}
    forms = {name: tool_format_of(template, SPECIAL) for name, template in templates().items()}
    assert {name: form.style if form else "none" for name, form in forms.items()} == listed


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_templates_render_as_in_transformers(name):
    """A template that rejects the conversation in transformers rejects it in castiron too."""
    messages, given = CONVERSATIONS[name]
    variables = {"add_generation_prompt": True, **given}
    rejected = []
    for file, template in templates().items():
        try:
            (expected,), _ = render_jinja_template([messages], chat_template=template, **SPECIAL, **variables)
        except Exception:
            rejected.append(file)
            with pytest.raises(PipelineError, match="the chat template rejects"):
                render(template, messages, special_tokens=SPECIAL, **variables)
        else:
            assert render(template, messages, special_tokens=SPECIAL, **variables) == expected, file
    # Some templates need a system message, arguments as text, or text instead of parts.
    assert len(rejected) <= (26 if name == "parts" else 7), rejected


# It reads the variable `functions`, without which transformers cannot render it either.
UNUSABLE = "firefunction"
# Their text before the last user's message depends on that message: tools or a default text are put before it, or the
# names of functions called so far into the first message.
MOVING = ("Mistral-Nemo", "Mistral-Small", "Apriel-1.5", "muse-glimmer")
# They write the turns after the last user's message in another way, even without reasoning.
LAST_TURNS = ("StepFun", "Qwen3.5", "gpt-oss")
HISTORIES = 25


def usable() -> dict[str, str]:
    return {name: template for name, template in templates().items() if UNUSABLE not in name}


def test_every_text_of_an_odd_history_is_in_the_prompt():
    """No template rejects a history, and none loses the content, calls or results in it."""
    for name, template in usable().items():
        api = api_of(template)
        for seed in range(HISTORIES):
            history = Histories(Random(seed))
            body = {"messages": history.messages(seed % 7), "tools": history.tools()}
            prompt = prompt_of(api, body)
            assert not [text for text in history.texts if text not in prompt], (name, seed)


def test_histories_that_transformers_renders_completely_are_rendered_as_there():
    same = 0
    for name, template in usable().items():
        tokenizer, has_format = tokenizer_of(template), tool_format_of(template, OWN_SPECIAL) is not None
        for seed in range(HISTORIES):
            history = Histories(Random(seed), is_odd=False)
            messages, tools = history.messages(seed % 5), history.tools(ODD_PARAMETERS[:1])
            # Tools are described as text if the format of calls is unknown.
            tools = tools if has_format else None
            given = {"tools": tools, "chat_template": template, "add_generation_prompt": True, **OWN_SPECIAL}
            try:
                (expected,), _ = render_jinja_template([messages], **given)
            except Exception:
                continue
            if all(text in expected for text in history.texts) and (not tools or "look" in expected.partition("text1.")[0]):
                assert tokenizer.render_chat(messages, tools=tools) == expected, (name, seed)
                same += 1
    assert same > 0.6 * 69 * HISTORIES


@pytest.mark.parametrize("reasons", [False, True])
def test_a_turn_leaves_the_prompt_before_it_as_it_is(reasons):
    """A turn never lowers the number of cached characters, and all up to the last question stay cached.

    The first does not hold for templates that leave out the reasoning of answers before the last question.
    """
    for name, template in usable().items():
        if any(part in name for part in MOVING):
            continue
        api = api_of(template)
        for seed in range(HISTORIES // 2):
            history = Histories(Random(seed), is_odd=False)
            messages, tools = history.messages(0), history.tools(ODD_PARAMETERS)
            history.is_odd = True
            before, cached, asked = "", 0, 0
            for _ in range(6):
                prompt = prompt_of(api, {"messages": messages, "tools": tools})
                now = len(commonprefix([prompt, before]))
                assert now >= asked, (name, seed, before, prompt)
                assert now >= cached or reasons or any(part in name for part in LAST_TURNS), (name, seed, before, prompt)
                questions = [
                    text for message in messages if message["role"] == "user" and (text := text_of(message["content"]))
                ]
                before, cached, asked = prompt, now, prompt.rfind(questions[-1]) + len(questions[-1])
                turn = history.agent_turn()
                if not reasons:
                    turn = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in turn]
                messages = messages + turn
