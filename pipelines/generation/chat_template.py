"""Chat templates: from messages to the text that the model was trained on, as HF's apply_chat_template renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from castiron.pipelines.errors import PipelineError


def render(
    template: str,
    messages: Sequence[Mapping],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **variables,
) -> str:
    """The text of `messages` ({"role", "content"} each) by the Jinja `template`.

    special_tokens are the names that templates use (bos_token, eos_token, ...); `variables` reach the template as they
    are. PipelineError if the template is no Jinja or refuses the messages. Source: transformers'
    chat_template_utils._compile_jinja_template, without its tracking of the assistant's tokens.
    """
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
    known = {"tools": None, "documents": None, **(special_tokens or {}), **variables}
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **known
        )
    except jinja2.TemplateSyntaxError as error:
        raise PipelineError(f"the bundle's chat template is not valid Jinja (line {error.lineno}: {error})") from None
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise PipelineError(f"the chat template does not take these messages: {error}") from None


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
