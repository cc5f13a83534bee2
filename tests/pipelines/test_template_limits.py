"""A chat template is a program of the checkpoint's: it gets so much time and memory and no more, and what asks for it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation import chat_template, template_program
from castiron.pipelines.generation.chat_template import Renderer, reads_tools, render, variables_of

MESSAGES = [{"role": "user", "content": "Hi"}]
PLAIN = "{{ messages[0].content }}{{ tools }}{{ thinking }}"


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A renderer that gives a template 0.3 s."""
    program = tmp_path / "template_program.py"
    text = open(template_program.__file__).read()
    program.write_text(text.replace("SECONDS, BYTES, CHARACTERS = 3.0", "SECONDS, BYTES, CHARACTERS = 0.3"))
    monkeypatch.setattr(template_program, "__file__", str(program))
    renderer = Renderer()
    monkeypatch.setattr(chat_template, "_renderer", renderer)
    yield renderer
    renderer.stop()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "was stopped"),
        ("{{ lipsum(n=10**5) }}", "was stopped"),
        ("{{ 10**(10**8) }}", "was stopped"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{{ 'a' | center(10**10) }}", "memory"),
        (
            "{% set n = namespace(a='aaaaaaaa') %}{% for _ in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
            "memory|was stopped",
        ),
        ("{{ 'a' * 7 * 10**7 }}", "70000000 characters|was stopped"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('\x1b[2J' * 999) }}", "x1b"),
    ],
)
def test_a_template_without_measure_is_one_sentence(quick, template, says):
    start = time.monotonic()
    with pytest.raises(PipelineError, match=says) as error:
        render(template, MESSAGES)
    assert str(error.value).isprintable() and len(str(error.value)) < 300
    # Sooner than who asks gives up.
    assert time.monotonic() - start < chat_template.PATIENCE * template_program.SECONDS
    # Neither do its names take longer, and the next template is rendered.
    assert variables_of(template) == [] and not reads_tools(template)
    assert render(PLAIN, MESSAGES, thinking=1) == "HiNone1"
    assert variables_of(PLAIN) == ["thinking"] and reads_tools(PLAIN)


def test_messages_that_are_no_json_are_one_sentence():
    for alien in (b"x", object(), float):
        with pytest.raises(PipelineError, match="not plain text"):
            render(PLAIN, [{"role": "user", "content": alien}])
    assert render(PLAIN, [{"role": "user", "content": "\ud800é"}]) == "\ud800éNone"


def test_threads_and_a_fork_have_answers_of_their_own():
    found = {}
    ask = lambda n: found.update({n: [render(PLAIN, [{"content": f"{n} {i}"}]) for i in range(20)]})
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    if (child := os.fork()) == 0:
        os._exit(0 if render(PLAIN, MESSAGES) == "HiNone" else 1)
    [thread.join() for thread in threads]
    assert found == {n: [f"{n} {i}None" for i in range(20)] for n in range(4)}
    assert os.waitpid(child, 0)[1] == 0


def worked(pid: int) -> int:
    """Ticks of the processor that a process has had."""
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11])


def test_an_interrupt_leaves_no_answer_behind():
    """And the process that renders ends with the one that asks, however that ends."""
    code = (
        "import signal, sys\nfrom castiron.pipelines.generation.chat_template import render, _renderer\n"
        "render('x', []); print(_renderer.process.pid, flush=True)\n"
        "try: render('{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}', [])\n"
        "except KeyboardInterrupt: print(render('after', []), _renderer.process.pid, flush=True)\n"
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        first = int(process.stdout.readline())
        ticks, until = worked(first), time.monotonic() + 60
        # Until it is under way.
        while worked(first) < ticks + 0.1 * os.sysconf("SC_CLK_TCK"):
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        after, second = process.stdout.readline().split()
        process.kill()
    assert after == "after" and int(second) != first
    until = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}/stat") and " Z " not in open(f"/proc/{pid}/stat").read() for pid in (first, second)):
        assert time.monotonic() < until
        time.sleep(0.01)
