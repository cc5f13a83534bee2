"""A chat answers as if every turn were read anew, feeds only what is new, and survives Ctrl-C and a full context."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from castiron.pipelines import cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.speculate import Speculator
from castiron.pipelines.generation.text import Text, load_text
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.session import Session
from tests.pipelines import toy_text

CONTEXT, EOS = toy_text.CONTEXT, toy_text.EOS


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy_text.write(tmp_path_factory.mktemp("chat") / "toy")


@pytest.fixture
def make(path):
    bundle = open_bundle(path)

    def chat(template=None, **options) -> Chat:
        text = load_text(bundle)
        if template:
            text = Text(text.tokenizer, template, text.bos, text.eos)
        return Chat(Counting(bundle, 1), text, **{"max_tokens": 2, **options})

    return chat


class Counting(Session):
    """Counts the tokens that are fed, and is interrupted in a given step."""

    fed = steps = 0
    interrupt_at = None

    def prefill(self, tokens, progress=None):
        self.fed += len(tokens)
        return super().prefill(tokens, progress)

    def step(self, token):
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        return super().step(token)


def say(chat: Chat, words: str) -> str:
    return "".join(chat.answer(words))


def anew(chat: Chat, messages: list[dict]) -> str:
    """What a session that has read nothing answers."""
    session = chat.session.fork()
    session.rewind(0)
    prompt = chat.text.encode_chat(messages)
    return chat.text.decode(list(Generation(session, prompt, max_tokens=2, stop_tokens=[EOS])))


REWRITING = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}a{% else %}{{ m.role[0] }}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.mark.parametrize("template", [None, REWRITING])
def test_every_answer_is_the_one_that_reading_all_anew_gives(make, template):
    chat = make(template)
    for words in ("bc", "d", "efg"):
        messages = [*chat.messages, {"role": "user", "content": words}]
        expected = anew(chat, messages)
        assert say(chat, words) == expected and not chat.dropped
        assert chat.messages == [*messages, {"role": "assistant", "content": expected}]


def test_a_turn_feeds_only_what_is_new(make):
    chat = make()
    say(chat, "bcd")
    first, answer = chat.session.fed, chat.messages[-1]["content"]
    assert first == len("ubcda")
    say(chat, "ef")
    # The last token of the answer was never fed.
    assert chat.session.fed - first == len(answer[-1:] + "uefa") and chat.generation.prompt_tokens < 6


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_message(make):
    chat = make(system="xy")
    turns = ["bcd", "efg", "hij", "klm"]
    dropped = []
    for words in turns:
        say(chat, words)
        dropped.append(chat.dropped)
        assert chat.messages[0] == {"role": "system", "content": "xy"}
        assert [m["role"] for m in chat.messages[1:]] == ["user", "assistant"] * (len(chat.messages) // 2)
        assert chat.messages[-2]["content"] == words and chat.session.position <= CONTEXT
    assert dropped[0] == 0 and any(count and count % 2 == 0 for count in dropped)


def test_a_message_that_does_not_fit_alone_changes_nothing(make):
    chat = make()
    say(chat, "bc")
    before = list(chat.messages)
    with pytest.raises(PipelineError, match=f"context is {CONTEXT}"):
        chat.answer("b" * CONTEXT)
    assert chat.messages == before
    assert say(chat, "d") == anew(chat, [*before, {"role": "user", "content": "d"}])


@pytest.mark.parametrize(("usual", "reason"), [(3, "length"), (1000, "context"), (None, "context")])
def test_a_usual_length_gives_way_to_the_context(make, usual, reason):
    chat = make(max_tokens=None, usual_tokens=usual)
    chat.text.eos = ()
    say(chat, "bcd")
    room = CONTEXT - len("ubcda") + 1
    assert chat.generation.finish_reason == reason and len(chat.generation.tokens) == (3 if usual == 3 else room)
    with pytest.raises(PipelineError, match="1000 for the answer"):
        make(max_tokens=1000).answer("bcd")


def test_an_interrupt_while_tokens_are_checked_leaves_no_trace(make, monkeypatch):
    """Between the call that has fed proposed tokens and the one that takes them back."""
    monkeypatch.setattr(Speculator, "_width", lambda self, most: 4 if self.ngrams.length else 1)
    chat = make(max_tokens=8, speculate=True)
    chat.text.eos = ()
    chat.session.manifest = SimpleNamespace(widths=lambda role: (4,), prefill_widths=toy_text.WIDTHS)
    chat.session.verify = lambda tokens: [chat.session.step(token) for token in tokens]

    def interrupted():
        raise KeyboardInterrupt

    chat.session.margins = interrupted
    with pytest.raises(KeyboardInterrupt):
        say(chat, "bcbcbcbc")
    kept = list(chat.messages)
    assert kept[-1]["role"] == "assistant"
    chat.max_tokens, chat.speculate, chat.text.eos = 2, False, (EOS,)
    fed = chat.session.fed
    assert say(chat, "d") == anew(chat, [*kept, {"role": "user", "content": "d"}])
    # What was said stays in the cache, its last token too, which the check had fed.
    assert chat.session.fed - fed == len("uda")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_stops_the_answer_and_the_chat_goes_on(make, at):
    chat = make(max_tokens=8)
    chat.text.eos = ()
    chat.session.interrupt_at = chat.session.steps + at
    with pytest.raises(KeyboardInterrupt):
        say(chat, "bc")
    kept = chat.messages[-1]["content"]
    assert chat.messages[-1]["role"] == "assistant" and len(kept) <= at
    chat.max_tokens, chat.text.eos = 2, (EOS,)
    assert say(chat, "d") == anew(chat, [*chat.messages[:2], {"role": "user", "content": "d"}])


def test_who_stops_listening_keeps_what_was_said(make):
    chat = make(max_tokens=8)
    answer = chat.answer("bc")
    first = next(answer)
    answer.close()
    assert chat.messages[-1] == {"role": "assistant", "content": first}


def test_stop_strings_end_an_answer_before_them(make):
    whole = make(max_tokens=8)
    whole.text.eos = ()
    words = say(whole, "bc")
    cut = make(max_tokens=8, stops=[words[2:4]])
    cut.text.eos = ()
    assert say(cut, "bc") == words[: words.index(words[2:4])] and cut.generation.finish_reason == "stop"


def test_a_saved_chat_goes_on_elsewhere(make, tmp_path):
    chat, other = make(system="x"), make()
    say(chat, "bc")
    chat.save(tmp_path / "chat.json")
    other.load(tmp_path / "chat.json")
    assert other.messages == chat.messages and say(other, "d") == say(chat, "d")
    other.reset()
    assert other.messages == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize("data", ["", "[]", '{"messages": 3}', '{"messages": {}}', '{"messages": [{"role": "user"}]}', "\xff",
                                  '{"messages": [{"role": "x", "content": "y"}]}', '{"messages": [3]}', "[" * 100_000,
                                  '{"messages": [{"role": "user", "content": 5}]}',
                                  '{"messages": [{"role": "user", "content": "\\ud800"}]}'])  # fmt: skip
def test_a_file_that_is_no_chat_is_refused(make, tmp_path, data):
    (tmp_path / "bad").write_bytes(data.encode("latin-1"))
    chat = make(system="x")
    with pytest.raises(PipelineError, match="/save"):
        chat.load(tmp_path / "bad")
    assert chat.messages == [{"role": "system", "content": "x"}]


def test_what_cannot_be_saved_is_one_sentence_and_harms_nothing(make, tmp_path):
    chat = make(system="x")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", Path("/proc/none")):
        with pytest.raises(PipelineError, match=f"{place} cannot be written"):
            chat.save(place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def piped(path, words: str, *argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", "chat", str(path), "-n", "2", *argv]
    return subprocess.run(command, input=words, capture_output=True, text=True, timeout=120, check=False)


def test_without_a_terminal_answers_alone_are_on_stdout(path, make, tmp_path):
    done = piped(path, f"bc\n\n/save {tmp_path}/c\nd\n/reset\n/nonsense\nbc\n/exit\nnever\n")
    chat = make()
    assert done.stdout.splitlines() == [say(chat, "bc"), say(chat, "d"), say(make(), "bc")]
    assert done.returncode == 0 and done.stderr.count("tok/s") >= 1 and "/help lists" in done.stderr


def test_a_packed_bundle_chats_as_its_directory(path, tmp_path):
    pack_bundle(open_bundle(path), tmp_path / "toy.castiron")
    assert piped(tmp_path / "toy.castiron", "bc\nd\n").stdout == piped(path, "bc\nd\n").stdout != ""


def test_an_error_without_a_terminal_shows_in_the_exit_status(path):
    done = piped(path, f"{'b' * CONTEXT}\nbc\n")
    assert done.returncode == 1 and "castiron: this message needs" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_lines_that_end_in_a_backslash_go_on(path, make):
    assert piped(path, "b\\\nc\n").stdout.splitlines() == [say(make(), "b\nc")]


def test_refusals_come_before_the_first_turn(path, capsys):
    for argv, says in ((["-n", "0"], "-n"), (["--stop", ""], "--stop"), (["--temperature", "-1"], "temperature")):
        assert cli.main(["chat", str(path), *argv]) == 1
        assert says in capsys.readouterr().err


SLOW = """
import sys, time
import castiron.vmfb.session
step = castiron.vmfb.session.Session.step
def slow(self, token):
    time.sleep(0.3)
    return step(self, token)
castiron.vmfb.session.Session.step = slow
from castiron.pipelines.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A chat at a pseudo-terminal."""

    def __init__(self, *argv: str):
        self.pid, self.end = pty.fork()
        if not self.pid:
            os.execv(sys.executable, [sys.executable, "-c", SLOW, *argv])
        self.shown = ""

    def wait_for(self, pattern: str) -> str:
        """What is shown up to the first match of `pattern`, which is taken away."""
        until = time.monotonic() + 60
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.shown!r}"
            if select.select([self.end], [], [], 1)[0]:
                self.shown += os.read(self.end, 4096).decode()
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def interrupts(self) -> None:
        """Ctrl-C at the prompt, until there is a new one: between two keys readline may sleep over a signal."""
        until = 0.0
        while "> " not in self.shown:
            if time.monotonic() > until:
                self.type("\x03")
                until = time.monotonic() + 5
            if select.select([self.end], [], [], 1)[0]:
                self.shown += os.read(self.end, 4096).decode()
        self.wait_for("> ")
        self.listens()

    def listens(self) -> None:
        """Waits until readline takes single keys; its prompt shows before that."""
        until = time.monotonic() + 60
        while termios.tcgetattr(self.end)[3] & termios.ICANON:
            assert time.monotonic() < until, "readline never took the terminal over"
            time.sleep(0.02)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())


def test_at_a_terminal(path):
    """Editing, Ctrl-C in an answer and at the prompt, commands, Ctrl-D."""
    terminal = Terminal("chat", str(path), "-n", "20")
    try:
        terminal.wait_for("/help lists the commands")
        terminal.wait_for("> ")
        # The cursor goes left, over what was typed, and x becomes b.
        terminal.type("xc\x1b[D\x1b[D\x1b[3~b\n")
        # The line, its end, and the first of the answer.
        terminal.wait_for("bc")
        terminal.wait_for(r"\n[^\r\n]")
        terminal.type("\x03")
        terminal.wait_for("castiron: stopped")
        terminal.wait_for("> ")
        terminal.listens()
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.interrupts()
        terminal.type("/help\n")
        terminal.wait_for("/exit +end")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 0
        terminal.pid = 0
    finally:
        if terminal.pid:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        os.close(terminal.end)
