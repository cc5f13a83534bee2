"""A small model with reasoning and tool calls whose answers tests set, and stream events."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest

from castiron.pipelines.engine.request import Request, Token
from tests.support import served

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>;{% endif %}{% for m in messages %}"
    "{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for k in c.function.arguments %} {{ k }}"
    "{% endfor %}>{% endfor %};{% endfor %}{% if add_generation_prompt %}a:{% if enable_thinking is defined %}"
    "{{ '++' if enable_thinking else '-' }}{% endif %}{% endif %}{# </think> #}"
)
CONTEXT = 254
# Reasoning, text, and two tool calls.
ANSWER = '<think>Hm.</think>Well. <tool_call>{"name": "n", "arguments": {"a": [1]}}</tool_call><tool_call>{"name":"n","arguments":{}}</tool_call>'
CALLS = [("n", '{"a": [1]}'), ("n", "{}")]


@pytest.fixture(scope="session")
def talking_path(tmp_path_factory) -> Path:
    """Return the bundle of a model that reasons and calls tools."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "TEMPLATE", TEMPLATE)
        patch.setattr(served, "CONTEXT", CONTEXT)
        # Tool calls contain a line break, so it must be a token.
        patch.setattr(served, "LETTERS", [*served.LETTERS[:-1], "\n"])
        return served.bundle(tmp_path_factory.getbasetemp() / "tools")


def answer_with(monkeypatch: pytest.MonkeyPatch, app, words: str, breaks: Exception | None = None) -> None:
    """Make the model answer `words`, and then end or raise `breaks`."""
    text = app.app.api.tokenizer
    script = [*text.backend.encode(words, add_special_tokens=False).ids, text.eos[0]]

    def choose(self, *_) -> Token:
        if breaks and len(self.tokens) == len(words):
            raise breaks
        return Token(script[len(self.tokens)])

    monkeypatch.setattr(Request, "_choose", choose)


def event_types(union) -> dict[str, type]:
    """Return the types of a client's union of stream events by the name of the event."""
    kinds = typing.get_args(typing.get_args(union)[0])
    return {typing.get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}


def events(app, path: str, **body) -> list[dict]:
    """Return the events of a stream; fail unless each has its type as its name."""
    answer = app.post(path, json={**body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
