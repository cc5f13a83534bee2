"""70 chat templates of real models render as in transformers, byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import render
from castiron.pipelines.text.derive_tool_format import tool_format_of
from castiron.pipelines.text.tool_calls import Tools, read_calls
from tests.models.checkpoints import fetch

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
