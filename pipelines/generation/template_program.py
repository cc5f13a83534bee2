"""Renders chat templates, as a program of its own within limits of time and memory: a template is one of the checkpoint's.

    python -I -S template_program.py SYS_PATH

Requests and answers, on stdin and stdout, are JSON behind eight bytes of its length: {"template", "variables"} is answered by
{"text"} or {"error"}, {"template"} alone by {"reads", "knows"}: the names that it reads and those of Jinja's own.
A request of more than `SECONDS` of the processor ends the process.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import struct
import sys
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, BinaryIO

# Of the processor, for one request; of memory, for the whole process; characters of a text.
SECONDS, BYTES, CHARACTERS = 3.0, 768 << 20, 64 << 20
HEAD = struct.Struct("<Q")


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, BYTES)):
        hard = resource.getrlimit(kind)[1]
        # Some systems, macOS among them, do not limit addresses.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    _environment()
    while data := receive(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answered = _answer(data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sys.stdout.buffer, answered)


def receive(file: BinaryIO) -> bytes:
    """The next message; nothing at the end."""
    head = file.read(HEAD.size)
    return file.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else b""


def send(file: BinaryIO, data: bytes) -> None:
    file.write(HEAD.pack(len(data)) + data)
    file.flush()


def _answer(data: bytes) -> bytes:
    try:
        return json.dumps(_answered(**json.loads(data))).encode()
    except MemoryError:
        return json.dumps({"error": f"the chat template needs more memory than the {BYTES >> 20} MB that it may have"}).encode()


def _answered(template: str, variables: dict[str, Any] | None = None) -> dict[str, Any]:
    import jinja2

    try:
        if variables is None:
            return _names(template)
        text = _compiled(template).render(**variables)
        if len(text) > CHARACTERS:
            return {"error": f"the chat template makes a text of {len(text)} characters; it may make {CHARACTERS}"}
        return {"text": text}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"the bundle's chat template is not valid Jinja (line {error.lineno}: {_short(error)})"}
    except MemoryError:
        raise
    except Exception as error:
        # Whatever its program does; it is nobody's but the template's.
        return {"error": f"the chat template does not take these messages: {_short(error)}"}


def _short(error: Exception) -> str:
    """What it says, of which a template may say much."""
    said = str(error)[:200] or type(error).__name__
    said = "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)
    return said[:180] + "..." * (len(said) > 180)


def _names(template: str) -> dict[str, list[str]]:
    from jinja2 import meta

    environment = _environment()
    found = meta.find_undeclared_variables(environment.parse(template))
    return {"reads": sorted(found), "knows": sorted(environment.globals)}


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@cache
def _environment() -> Any:
    """Source: transformers' chat_template_utils._compile_jinja_template, without its tracking of the assistant's tokens."""
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


if __name__ == "__main__":
    main()
