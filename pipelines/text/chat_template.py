"""Chat templates: render messages as the text of a prompt, like HF's apply_chat_template.

A template is a Jinja program that belongs to the model. It runs in jinja2's immutable sandbox. The
messages may be hostile, so rendering has limits of time and of characters.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.json_record import short

# Variables that `render` itself sets, besides special tokens; tools and documents are None unless given.
OWN_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents")
# Limits of one rendering: seconds of processor time, and characters.
SECONDS, MAX_CHARACTERS = 3.0, 64 << 20
# Names of the message field for reasoning; the first one that a message has is used.
REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str, messages: Sequence[Mapping], *, special_tokens: Mapping[str, str] | None = None, **variables: Any
) -> str:
    """Render a conversation; raise PipelineError for an invalid template or rejected messages."""
    known = {"add_generation_prompt": True, "tools": None, "documents": None, **(special_tokens or {}), **variables}
    pieces, characters, deadline = [], 0, time.thread_time() + SECONDS
    compiled = _compiled(template)
    try:
        for piece in compiled.generate(messages=[_with_reasoning(message) for message in messages], **known):
            pieces.append(piece)
            characters += len(piece)
            if characters > MAX_CHARACTERS:
                raise PipelineError(f"the rendered chat template exceeds {MAX_CHARACTERS} characters; send shorter messages")
            if time.thread_time() > deadline:
                raise PipelineError(f"rendering the chat template takes longer than {SECONDS:g} s; send fewer messages")
    except PipelineError:
        raise
    except Exception as error:
        # Operations of a template may raise any exception.
        raise PipelineError(f"the chat template rejects these messages: {_short(error)}; change the messages") from None
    return "".join(pieces)


def _with_reasoning(message: Mapping) -> Mapping:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def prepare() -> None:
    """Start to import jinja2 in another thread, because the import takes 40 ms."""

    def quietly() -> None:
        # Without memory, the first rendering does the work, and reports what is missing.
        with contextlib.suppress(MemoryError, ImportError):
            _environment()

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=quietly, daemon=True).start()


def variables_of(template: str) -> list[str]:
    """Return the variables of a template that `render` does not set, such as enable_thinking."""
    reads, known = _names(template)
    return sorted(name for name in reads - known - set(OWN_VARIABLES) if not name.endswith("_token"))


def reads_tools(template: str | None) -> bool:
    """Return whether a template uses the variable `tools` to describe functions to the model."""
    return "tools" in _names(template or "")[0]


def check_variables(template: str | None, given: Mapping[str, object]) -> None:
    """Raise PipelineError if `given` has a variable that `template` does not read."""
    known = variables_of(template) if given and template else []
    for name in given:
        if name not in known:
            raise PipelineError(
                f"the model's chat template does not read {name}; it reads {', '.join(known) or 'no variables'}"
            )


@lru_cache(maxsize=8)
def _names(template: str) -> tuple[set[str], set[str]]:
    """Return (variables that the template reads, global names that Jinja defines)."""
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
    except Exception as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise PipelineError(f"the chat template is not valid Jinja ({line}{_short(error)}); correct the template") from None


@cache
def _environment() -> Any:
    """Return a Jinja environment that renders chat templates as HF transformers does."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A Jinja extension that renders {% generation %} blocks as their content."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            # A variable that is set in the block keeps its value outside, as in transformers.
            return jinja2.nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    # Replaces Jinja's tojson, which escapes HTML.
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _short(error: Exception) -> str:
    return short(str(error) or type(error).__name__, 130)
