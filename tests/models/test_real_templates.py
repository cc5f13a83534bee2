"""70 chat templates of real models render as in transformers, byte for byte."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import render
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


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_templates_render_as_in_transformers(name):
    """A template that rejects the conversation in transformers rejects it in castiron too."""
    messages, given = CONVERSATIONS[name]
    variables = {"add_generation_prompt": True, **given}
    templates = {path.name: path.read_text(encoding="utf-8") for path in (fetch("llama.cpp") / "templates").glob("*.jinja")}
    assert len(templates) == 70
    rejected = []
    for file, template in templates.items():
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
