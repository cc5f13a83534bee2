"""Chat templates: from messages to the text that the model was trained on, as HF's apply_chat_template renders it.

A template is a program that came with the checkpoint, so it runs in a process of its own (`template_program`), one for all
templates, which is stopped and begun anew when it takes too long.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation import template_program
from castiron.pipelines.generation.template_program import HEAD, SECONDS

# What `render` gives a template itself; tools and documents it has none of.
OWN = ("messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token")
# How many times its seconds of the processor a request may last on a machine that has other work.
PATIENCE = 5


def render(
    template: str,
    messages: Sequence[Mapping],
    *,
    special_tokens: Mapping[str, str] | None = None,
    **variables,
) -> str:
    """The text of `messages` ({"role", "content"} each) by the Jinja `template`.

    special_tokens are the names that templates use (bos_token, eos_token, ...); `variables` reach the template as they
    are, by way of JSON. PipelineError if the template is no Jinja, refuses the messages or takes too much time or memory.
    """
    known = {"add_generation_prompt": True, "tools": None, "documents": None, **(special_tokens or {}), **variables}
    return _renderer.ask({"template": template, "variables": {"messages": list(messages), **known}})["text"]


def prepare() -> None:
    """Begins the process that renders, which is then ready when it is asked."""
    _renderer.start()


def variables_of(template: str) -> list[str]:
    """The variables that a template reads and `render` does not give it, such as enable_thinking; none of one that is no
    Jinja."""
    reads, knows = _names(template)
    return sorted(reads - knows - set(OWN))


def reads_tools(template: str | None) -> bool:
    """Whether a template tells the model of the functions that it may call."""
    return "tools" in _names(template or "")[0]


def check_variables(template: str | None, given: Mapping[str, object]) -> None:
    """PipelineError, which names it, for a variable of `given` that `template` does not read."""
    known = variables_of(template) if given and template else []
    for name in given:
        if name not in known:
            has = f"; it reads {', '.join(known)}" if known else " nor any other"
            raise PipelineError(f"the model's chat template does not read {name}{has}")


@lru_cache(maxsize=8)
def _names(template: str) -> tuple[set[str], set[str]]:
    """What a template reads, and which names Jinja gives a meaning; nothing where that cannot be found out."""
    if not template:
        return set(), set()
    try:
        found = _renderer.ask({"template": template})
    except PipelineError:
        return set(), set()
    return set(found["reads"]), set(found["knows"])


class Renderer:
    """The process that renders; threads take turns."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As new: another process, the parent of this one, has what there was."""
        self.process: subprocess.Popen | None = None
        self.alone = threading.Lock()

    def start(self) -> None:
        with self.alone:
            self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer; PipelineError for an error in its place, or for none in time."""
        try:
            data = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise PipelineError(f"the messages for the chat template are not plain text, numbers and lists: {error}") from None
        with self.alone:
            try:
                answer = self._asked(data)
            except (EOFError, OSError):
                self.stop()
                raise PipelineError(f"the chat template was stopped after {SECONDS:g} s: it may take no longer") from None
            except BaseException:
                # An answer that nobody waits for would be taken for the next one.
                self.stop()
                raise
        if "error" in answer:
            raise PipelineError(answer["error"])
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _start(self) -> subprocess.Popen:
        if self.process is None or self.process.poll() is not None:
            if find_spec("jinja2") is None:
                raise ModuleNotFoundError("chat templates need jinja2", name="jinja2")
            # Without castiron's packages and what the environment says; Jinja lies where it does here.
            command = [sys.executable, "-I", "-S", str(Path(template_program.__file__)), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        return self.process

    def _asked(self, data: bytes) -> dict[str, Any]:
        process, until = self._start(), time.monotonic() + PATIENCE * SECONDS
        assert process.stdin and process.stdout
        template_program.send(process.stdin, data)
        (size,) = HEAD.unpack(_read(process.stdout.fileno(), HEAD.size, until))
        return json.loads(_read(process.stdout.fileno(), size, until))


def _read(file: int, size: int, until: float) -> bytes:
    """So many bytes; EOFError for fewer, or if they do not come in time."""
    data, waiting = bytearray(), select.poll()
    waiting.register(file, select.POLLIN)
    while len(data) < size:
        left = until - time.monotonic()
        if left <= 0 or not waiting.poll(1e3 * left):
            raise EOFError
        if not (piece := os.read(file, min(size - len(data), 1 << 20))):
            raise EOFError
        data += piece
    return bytes(data)


_renderer = Renderer()
atexit.register(lambda: _renderer.stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renderer.forget)
