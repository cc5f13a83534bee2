"""Histories of chats as clients send them, and small templates that reject or lose parts of them."""

from __future__ import annotations

import asyncio
import json
from random import Random
from types import SimpleNamespace
from typing import Any

from castiron.pipelines.api.callable_tools import callable_tools
from castiron.pipelines.api.generation import Generation
from castiron.pipelines.api.generation_api import GenerationApi
from castiron.pipelines.api.model_api import Limits
from castiron.pipelines.api.openai.chat import parse_chat
from castiron.pipelines.api.openai.records import ChatRequest
from castiron.pipelines.api.request_body import parse_record
from castiron.pipelines.text.derive_tool_format import tool_format_of
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.pipelines.text.tool_formats import ToolFormat
from tests.support import schemas

SPECIAL = {"bos_token": "</s>", "eos_token": "</s>"}


def _template(calls: str, before: str = "", message: str = "", turn: str = "<{{ m.role }}>{{ m.content }}") -> str:
    """Return a template. before, message: checks of all messages and of each. calls, turn: text of a message."""
    return (
        f"{before}{{% for m in messages %}}{message}{turn}{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def _reject(condition: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"


_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_JSON = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
_ITEMS = (
    "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
_ALTERNATE = (
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    + _reject("(m.role == 'user') != (ns.n % 2 == 0)") + "{% set ns.n = ns.n + 1 %}{% endfor %}"
)  # fmt: skip
# Templates of real models, each reduced to what it requires of a history.
KINDS = {
    "all": _template(_JSON, _TOOLS),
    "mistral": _template(
        "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
        _TOOLS + "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
        + _ALTERNATE,
        _reject("m.role == 'system'") + _reject("m.role == 'assistant' and not m.content and not m.tool_calls")
        + "{% for c in m.tool_calls or [] %}" + _reject("c.id | length != 9") + "{% endfor %}"
,
        "<{{ m.role }}>{% if loop.last and s is defined and m.role == 'user' %}{{ s }}\n\n{% endif %}"
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}",
    ),
    "gemma": "{{ bos_token }}" + _reject("messages[0].role == 'system'") + "{% for m in messages %}"
    + _reject("(m.role == 'user') != (loop.index0 % 2 == 0)")
    + "<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "qwen": _template(
        _ITEMS, _TOOLS + "{% if not messages | selectattr('role', 'equalto', 'user') | list %}" + _reject("true") + "{% endif %}",
        _reject("m.role == 'system' and not loop.first"),
    ),
    "llama": _template(
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
        "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
        "{% if tools %}" + _reject("not messages") + "<user>{{ tools | tojson }}{{ messages[0].content }}"
        "{% set messages = messages[1:] %}{% endif %}",
        "{% if m.tool_calls %}" + _reject("m.tool_calls | length != 1") + "{% endif %}",
        "<{{ m.role }}>{% if not m.tool_calls %}{{ m.content }}{% endif %}",
    ),
    "harmony": _template(
        "<call>{{ c.function.name }}<args>{{ c.function.arguments | tojson }}</call>",
        _TOOLS + "{% set ns = namespace(last=none) %}",
        "{% if m.tool_calls %}{% set ns.last = m.tool_calls[0].function.name %}" + _reject("m.content and m.thinking")
        + "{% set m = {'role': m.role, 'content': m.content or m.thinking, 'tool_calls': m.tool_calls[:1]} %}{% endif %}"
        + _reject("m.role == 'tool' and ns.last is none"),
        "{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}",
    ),
    "text arguments": _template("<f>{{ c.function.name }}<a>{{ '' + c.function.arguments }}</f>", _TOOLS),
    "text hides calls": _template(
        "{% if not m.content %}" + _JSON + "{% endif %}",
        _TOOLS + "{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}<system>{{ ns.s }}",
        turn="{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}",
    ).replace(_TOOLS, _TOOLS + "{% set ns = namespace(s='') %}"),
    "tools only": _template(_JSON, "{% for t in tools %}{{ t.function.name }}: {{ t.function.description + '' }}"
        "{% for k, v in t.function.parameters.properties.items() %}{{ k }} {{ v.type + '' }} {{ v.description + '' }}"
        "{% endfor %}{% endfor %}"),
    "no calls": _template("", _TOOLS + "{# <|tool_call_start|> #}"),
    "no results": _template("", "", "{% if m.role != 'tool' %}").replace("\n{% endfor %}", "{% endif %}\n{% endfor %}"),
    "results in turns": _template(_JSON, _TOOLS, _reject(
        "m.role == 'tool' and not (not loop.first and (loop.previtem.role == 'tool' or loop.previtem.tool_calls))")),
    "parts": _template(_JSON, _TOOLS, turn="<{{ m.role }}>{{ m.content[0].text }}"),
}  # fmt: skip
EMPTY = (
    None,
    {},
    {"type": "object"},
    {"type": "object", "properties": None},
    {"$schema": "https://json-schema.org/draft-07/schema#"},
)
PARAMETERS = (
    {"type": "object", "properties": {"a": {"type": "string", "description": "d"}, "b": {"type": "integer", "description": "e"}}},
    *EMPTY,
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": True}, "required": None},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "b": {"enum": [1, "x", None]}}},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 5}}, "b": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}},
)  # fmt: skip
# Arguments of calls: JSON objects, other JSON, and what a model wrote in its place.
ARGUMENTS = (
    '{"a": "TEXT", "b": 1}', '{"a": "TEXT"}', "{}", "", "null", "[1]", "5", '"x"', '{"a": NaN}', '{"a": "TEXT', "TEXT in words",
    '{"a": "\\ud83d"}',
)  # fmt: skip


class Histories:
    """A generator of messages in OpenAI's format.

    texts: those of the messages so far that a prompt must have. is_odd: whether to generate what
    HF's `apply_chat_template` does not accept, or what many templates reject.
    """

    def __init__(self, random: Random, is_odd: bool = True):
        self.random, self.is_odd, self.texts, self.count = random, is_odd, list[str](), 0

    def text(self) -> str:
        self.count += 1
        self.texts.append(f"text{self.count}.")
        return self.texts[-1]

    def content(self) -> Any:
        if not self.is_odd:
            return self.text()
        kind = self.random.randrange(8)
        return None if kind == 0 else "" if kind == 1 else [{"type": "text", "text": self.text()}] if kind == 2 else self.text()

    def call(self) -> dict[str, Any]:
        self.count += 1
        ids = [f"call{self.count:05}", *([f"call_{self.count}", f"toolu_01AbCdEfGh{self.count}"] if self.is_odd else [])]
        arguments = self.random.choice(ARGUMENTS[: None if self.is_odd else 1])
        if "TEXT" in arguments:
            arguments = arguments.replace("TEXT", self.text())
        function = {"name": "look", "arguments": arguments if self.is_odd else json.loads(arguments)}
        return {"id": self.random.choice(ids), "type": "function", "function": function}

    def turn(self) -> list[dict[str, Any]]:
        """Return messages that a client adds to a chat: the last answer, results or a question."""
        kinds = [self._question, self._calls, self._calls]
        if self.is_odd:
            kinds += [self._system, self._result, self._answer, self._calls_only, self._interruption]
        return self.random.choice(kinds)()

    def agent_turn(self) -> list[dict[str, Any]]:
        """Return what a coding agent adds between two requests."""
        return (
            self.random.choice([self._question, self._calls, self._calls])() + self.random.choice([list, list, self._system])()
        )

    def _question(self) -> list[dict[str, Any]]:
        return [*self._answer(), {"role": "user", "content": self.content()}]

    def _answer(self) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": self.content()}]

    def _interruption(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.content()}]

    def _system(self) -> list[dict[str, Any]]:
        return [{"role": self.random.choice(["system", "developer"]), "content": self.content()}]

    def _result(self) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": self.random.choice(["", "x"]), "content": self.content()}]

    def _calls_only(self) -> list[dict[str, Any]]:
        calls = [self.call() for _ in range(self.random.choice([1, 1, 2]))]
        message = {
            "role": "assistant",
            "tool_calls": calls,
            "content": self.random.choice(["", "Look.", *[None] * self.is_odd]),
        }
        if self.is_odd and self.random.random() < 0.3:
            message["reasoning_content"] = "Hm."
        return [message]

    def _calls(self) -> list[dict[str, Any]]:
        (message,) = self._calls_only()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.content()} for call in message["tool_calls"]]
        return [message, *(result | ({} if self.is_odd else {"name": "look"}) for result in results)]

    def messages(self, turns: int) -> list[dict[str, Any]]:
        """Return the messages of a chat of some turns."""
        count = self.random.choice([0, 1, 1, 2 if self.is_odd else 0])
        first = [{"role": "system", "content": self.text()} for _ in range(count)]
        if not self.is_odd or self.random.random() < 0.8:
            first.append({"role": "user", "content": self.text()})
        return [*first, *(message for _ in range(turns) for message in self.turn())] or self._answer()

    def tools(self, parameters: Any = PARAMETERS) -> list[dict[str, Any]] | None:
        function = {"name": "look", "description": "Look.", "parameters": self.random.choice(parameters)}
        return self.random.choice([None, [{"type": "function", "function": function}]])


def tokenizer_of(template: str) -> Tokenizer:
    """Return a tokenizer of bytes with a chat template."""
    form: ToolFormat | None = tool_format_of(template, SPECIAL)
    return Tokenizer(schemas.tokenizer(), template, bos=0, eos=(0,), tool_format=form)


def api_of(template: str) -> GenerationApi:
    """Return the API of a model with a chat template; it renders prompts and generates nothing."""
    manifest: Any = SimpleNamespace(context=10**6, vocab=10**6, generation={}, encoder=None)
    engine: Any = SimpleNamespace()
    return GenerationApi(engine, tokenizer_of(template), ["model"], manifest, Limits())


def prompt_of(api: GenerationApi, body: dict[str, Any] | Generation) -> str:
    """Return the prompt of a request to /v1/chat/completions."""
    generation = body if isinstance(body, Generation) else parse_chat(parse_record(ChatRequest, body))
    ids = asyncio.run(api.prompt(generation, callable_tools(generation, api.tokenizer.tool_format)))
    return api.tokenizer.backend.decode(ids, skip_special_tokens=False)
