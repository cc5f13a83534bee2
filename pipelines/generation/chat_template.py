"""Chat templates: from messages to the text that the model was trained on, as HF's apply_chat_template renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from castiron.pipelines.errors import PipelineError

if TYPE_CHECKING:
    import jinja2

# What `render` gives a template itself; tools and documents it has none of.
OWN = ("messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token")


def render(
    template: str,
    messages: Sequence[Mapping],
    *,
    special_tokens: Mapping[str, str] | None = None,
    **variables,
) -> str:
    """The text of `messages` ({"role", "content"} each) by the Jinja `template`.

    special_tokens are the names that templates use (bos_token, eos_token, ...); `variables` reach the template as they
    are. PipelineError if the template is no Jinja or refuses the messages. Source: transformers'
    chat_template_utils._compile_jinja_template, without its tracking of the assistant's tokens.
    """
    import jinja2

    known = {"add_generation_prompt": True, "tools": None, "documents": None, **(special_tokens or {}), **variables}
    try:
        return _compiled(template).render(messages=list(messages), **known)
    except jinja2.TemplateSyntaxError as error:
        raise PipelineError(f"the bundle's chat template is not valid Jinja (line {error.lineno}: {error})") from None
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise PipelineError(f"the chat template does not take these messages: {error}") from None


def variables_of(template: str) -> list[str]:
    """The variables that a template reads and `render` does not give it, such as enable_thinking; none of one that is no
    Jinja."""
    import jinja2
    from jinja2 import meta

    environment = _environment()
    try:
        found = meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateSyntaxError:
        return []
    return sorted(found - set(OWN) - set(environment.globals))


def reads_tools(template: str | None) -> bool:
    """Whether a template tells the model of the functions that it may call."""
    from jinja2 import TemplateSyntaxError, meta

    try:
        return "tools" in meta.find_undeclared_variables(_environment().parse(template or ""))
    except TemplateSyntaxError:
        return False


def check_variables(template: str | None, given: Mapping[str, object]) -> None:
    """PipelineError, which names it, for a variable of `given` that `template` does not read."""
    known = variables_of(template) if given and template else []
    for name in given:
        if name not in known:
            has = f"; it reads {', '.join(known)}" if known else " nor any other"
            raise PipelineError(f"the model's chat template does not read {name}{has}")


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@cache
def _environment() -> jinja2.Environment:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Renders {% generation %} blocks, which mark the assistant's tokens for training, as they stand."""

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
