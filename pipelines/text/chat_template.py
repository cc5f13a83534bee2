"""Chat templates: from messages to the text that the model was trained on, as HF's
apply_chat_template renders it.

The operator chose the model and with it the template, a Jinja program, which runs in jinja2's
immutable sandbox. Clients choose the messages, so rendering ends at limits of time and of
characters.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from castiron.pipelines.errors import PipelineError

# Variables that `render` itself passes to a template; tools and documents are empty unless given.
OWN_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token")
# Limits of one rendering: processor time, checked at each piece of text, and characters.
SECONDS, MAX_CHARACTERS = 3.0, 64 << 20
MAX_ERROR = 200


def render(
    template: str, messages: Sequence[Mapping], *, special_tokens: Mapping[str, str] | None = None, **variables: Any
) -> str:
    """Return the text of `messages` ({"role", "content"} each) by the Jinja `template`.

    special_tokens: the names that templates use (bos_token, eos_token, ...); `variables` are passed
    as they are. PipelineError if the template is not valid Jinja, rejects the messages or exceeds a
    limit.
    """
    known = {"add_generation_prompt": True, "tools": None, "documents": None, **(special_tokens or {}), **variables}
    pieces, characters, deadline = [], 0, time.thread_time() + SECONDS
    compiled = _compiled(template)
    try:
        for piece in compiled.generate(messages=list(messages), **known):
            pieces.append(piece)
            characters += len(piece)
            if characters > MAX_CHARACTERS:
                raise PipelineError(f"chat template: its text exceeds {MAX_CHARACTERS} characters; send less")
            if time.thread_time() > deadline:
                raise PipelineError(f"chat template: rendering takes longer than {SECONDS:g} s; send fewer messages")
    except PipelineError:
        raise
    except Exception as error:
        # Operations of a template may raise any exception.
        raise PipelineError(f"chat template: it rejects these messages: {_short(error)}") from None
    return "".join(pieces)


def prepare() -> None:
    """Import jinja2 in a thread: it takes 40 ms."""
    threading.Thread(target=_environment, daemon=True).start()


def variables_of(template: str) -> list[str]:
    """Return the variables that a template reads and `render` does not pass, such as
    enable_thinking; none for invalid Jinja."""
    reads, known = _names(template)
    return sorted(reads - known - set(OWN_VARIABLES))


def reads_tools(template: str | None) -> bool:
    """Whether a template shows the model the functions that it may call."""
    return "tools" in _names(template or "")[0]


def check_variables(template: str | None, given: Mapping[str, object]) -> None:
    """Raise PipelineError for a variable of `given` that `template` does not read."""
    known = variables_of(template) if given and template else []
    for name in given:
        if name not in known:
            has = f"; it reads {', '.join(known)}" if known else " nor any other"
            raise PipelineError(f"the model's chat template does not read {name}{has}")


@lru_cache(maxsize=8)
def _names(template: str) -> tuple[set[str], set[str]]:
    """Return the variables that a template reads, and Jinja's own names; none for invalid Jinja."""
    if not template:
        return set(), set()
    from jinja2 import TemplateError, meta

    environment = _environment()
    try:
        return meta.find_undeclared_variables(environment.parse(template)), set(environment.globals)
    except (TemplateError, RecursionError):
        return set(), set()


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise PipelineError(f"chat template: not valid Jinja (line {error.lineno}: {_short(error)})") from None
    except Exception as error:
        raise PipelineError(f"chat template: not valid Jinja ({_short(error)})") from None


@cache
def _environment() -> Any:
    """Return the Jinja environment of chat templates.

    Source: transformers' chat_template_utils._compile_jinja_template, without its tracking of the
    assistant's tokens.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Renders {% generation %} blocks, which mark the assistant's tokens for training, as they
        are."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    # Jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _short(error: Exception) -> str:
    """Return the error's text in one short line: a template may write anything into it."""
    text = str(error)[:MAX_ERROR] or type(error).__name__
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text[:180] + "..." * (len(text) > 180)
