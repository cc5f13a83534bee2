"""Tools shown as text to models whose chat template shows none."""

from __future__ import annotations

import pytest

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.pipelines.text.tool_formats import ToolFormat
from tests.support import schemas

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Get <it>.", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
RESULTS = "[user]<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"


def rendered(template: str, form: ToolFormat | None = None, messages=MESSAGES) -> str:
    return Tokenizer(schemas.tokenizer(), template, eos=(0,), tool_format=form).render_chat(messages, tools=TOOLS)


def test_the_system_message_describes_tools_and_calls_are_text():
    text = rendered(TURNS)
    assert text.startswith("[system]Be brief.\n\n# Tools") and text.count("Get <it>.") == 1
    assert text.endswith(f"[user]Hi[assistant]Well.\n{WRITTEN}\n{WRITTEN}{RESULTS}")


def test_without_a_system_role_the_first_message_describes_tools():
    text = rendered(NO_SYSTEM)
    assert text.startswith("[user]Be brief.\n\n# Tools") and "\n\nHi[assistant]Well." in text and text.endswith(RESULTS)
    assert rendered(NO_SYSTEM, messages=MESSAGES[1:2]).startswith("[user]# Tools")


def test_a_template_that_writes_calls_and_shows_no_tools_gets_only_the_description():
    form = ToolFormat("json", "<call>", "<args>", "</call>")
    text = rendered(
        TURNS.replace("{% endfor %}", "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}"), form
    )
    assert (
        "<call><function-name><args><args-json-object></call>" in text
        and "[assistant]Well.<weather><weather>[tool]sun[tool]rain" in text
    )


@pytest.mark.parametrize("calls", [5, [{}], [{"function": {"arguments": "{}"}}], [{"function": {"name": 5}}], ["x"]])
def test_calls_that_are_not_in_openais_format_are_rejected(calls):
    with pytest.raises(PipelineError, match="not in OpenAI's format"):
        rendered(TURNS, messages=[{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize("template", [TURNS, NO_SYSTEM])
def test_without_tools_messages_stay_as_they_are(template):
    text = Tokenizer(schemas.tokenizer(), template, eos=(0,)).render_chat(MESSAGES[1:2])
    assert text == "[user]Hi"
