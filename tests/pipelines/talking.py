"""A small model that thinks and calls functions, what it is made to say, and the events of its streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from castiron.pipelines.generation.sequence import Sequence, Token
from tests.pipelines import served

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>;{% endif %}{% for m in messages %}"
    "{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for k in c.function.arguments %} {{ k }}"
    "{% endfor %}>{% endfor %};{% endfor %}{% if add_generation_prompt %}a:{% if enable_thinking is defined %}"
    "{{ '++' if enable_thinking else '-' }}{% endif %}{% endif %}{# </think> #}"
)
CONTEXT = 254
# Thoughts, words, and two calls.
SAID = '<think>Hm.</think>Well. <tool_call>{"name": "n", "arguments": {"a": [1]}}</tool_call><tool_call>{"name":"n","arguments":{}}</tool_call>'
CALLS = [("n", '{"a": [1]}'), ("n", "{}")]


def bundle(base: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "TEMPLATE", TEMPLATE)
        patch.setattr(served, "CONTEXT", CONTEXT)
        # The line break that the form of its calls has is a token too.
        patch.setattr(served, "LETTERS", [*served.LETTERS[:-1], "\n"])
        return served.bundle(base / "tools")


def say(monkeypatch: pytest.MonkeyPatch, app, words: str, breaks: Exception | None = None) -> None:
    """Has the model say `words`, and then end or break."""
    text = app.app.api.text
    script = [*text.tokenizer.encode(words, add_special_tokens=False).ids, text.eos[0]]

    def choose(self, *_) -> Token:
        if breaks and len(self.tokens) == len(words):
            raise breaks
        return Token(script[len(self.tokens)], self._decoded)

    monkeypatch.setattr(Sequence, "_choose", choose)


def events(app, path: str, **body) -> list[dict]:
    """Of a stream whose events are named by their type and nothing else is in."""
    answer = app.post(path, json={**body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
