"""A chat at a terminal: editing, pastes, history, completion, Ctrl-C, and answers as wide as the terminal is."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from castiron.pipelines import cli
from castiron.pipelines.commands.console import COMMANDS, completions
from castiron.pipelines.commands.settings import NAMES
from castiron.pipelines.commands.wrapping import Wrapper, cells
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.generation.text import load_text
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session
from tests.pipelines import toy_text
from tests.pipelines.terminal import Terminal

SHOWN_POSITIONS = rf"(\d+) of {toy_text.CONTEXT} positions"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy_text.write(tmp_path_factory.mktemp("chat") / "toy")


@pytest.fixture
def terminal(path, tmp_path):
    """Opens a chat of answers with two tokens, whose cache folder is the test's own."""

    def open_chat(*argv: str, **options) -> Terminal:
        return Terminal("chat", str(path), "-n", "2", *argv, **{"step": 0, "CASTIRON_CACHE": str(tmp_path), **options})

    return open_chat


def asked(folder) -> list[str]:
    """The questions of a conversation that was saved as `c`."""
    return [m["content"] for m in json.loads((folder / "c").read_text())["messages"] if m["role"] == "user"]


def test_at_a_terminal(path, tmp_path):
    """Editing, Ctrl-C in an answer and at the prompt, commands, Ctrl-D."""
    with Terminal("chat", str(path), "-n", "20", CASTIRON_CACHE=str(tmp_path)) as terminal:
        terminal.wait_for("/help lists the commands")
        terminal.prompt()
        # The cursor goes left, over what was typed, and x becomes b.
        terminal.type("xc\x1b[D\x1b[D\x1b[3~b\n")
        # The line, its end, and the first of the answer.
        terminal.wait_for("bc")
        terminal.wait_for(r"\n[^\r\n\x1b]|\n\x1b\[\?2004l\r[^\r\n]")
        terminal.type("\x03")
        terminal.wait_for("castiron: stopped")
        terminal.prompt()
        terminal.type("/help\n")
        terminal.wait_for("/quit +end")
        terminal.leave()


def test_the_last_line_is_dimmed(terminal):
    with terminal() as chat:
        chat.prompt()
        chat.type("bc\n")
        chat.wait_for(rf"\x1b\[2m[\d.]+ tok/s, {SHOWN_POSITIONS}\x1b\[0m")
        chat.leave()


@pytest.mark.parametrize("without", ["", "readline"])
def test_a_paste_is_one_message(terminal, tmp_path, without):
    """Where the terminal marks it, and where only its speed tells it."""
    with terminal(without=without) as chat:
        # A terminal marks pastes for who asks it to.
        chat.wait_for("> ") if without else chat.prompt(r"\x1b\[\?2004h> ")
        lines = ("b", " c", "/quit", "d")
        chat.type("\n".join(lines) + "\n" if without else "\x1b[200~" + "\r".join(lines) + "\x1b[201~\n")
        chat.wait_for("positions")
        chat.wait_for("> ")
        chat.type(f"/save {tmp_path}/c\n")
        chat.wait_for("2 messages in")
    assert asked(tmp_path) == ["b\n c\n/quit\nd"]


def test_ctrl_c_leaves_what_is_typed(terminal, tmp_path):
    with terminal() as chat:
        chat.prompt()
        chat.type("bcd")
        chat.wait_for("bcd")
        chat.interrupts()
        chat.type("e\n")
        chat.wait_for("positions")
        chat.prompt()
        # A second time it takes the line away, and says how to end.
        chat.type("klm")
        chat.wait_for("klm")
        chat.interrupts()
        chat.interrupts()
        chat.type("fg\n")
        chat.wait_for("positions")
        chat.prompt()
        chat.type(f"/save {tmp_path}/c\n")
        chat.wait_for("4 messages in")
        chat.leave()
    assert asked(tmp_path) == ["bcde", "fg"]


def test_ctrl_c_leaves_what_was_typed_while_an_answer_came(path, tmp_path):
    with Terminal("chat", str(path), "-n", "20", CASTIRON_CACHE=str(tmp_path)) as chat:
        chat.prompt()
        chat.type("bc\n")
        chat.wait_for(r"\n\x1b\[\?2004l\r[^\r\n]")
        chat.type("de")
        chat.wait_for("de")
        chat.type("\x03")
        chat.wait_for("castiron: stopped")
        chat.prompt()
        chat.type(f"f\n/save {tmp_path}/c\n")
        chat.wait_for("messages in")
    assert asked(tmp_path)[-1] == "def"


def test_what_was_typed_comes_back_in_the_next_session(terminal, tmp_path):
    up = "\x1b[A"
    with terminal() as chat:
        chat.prompt()
        for line in ('"""', "b", "c"):
            chat.type(f"{line}\n")
            chat.prompt(r"\. ")
        chat.type('"""\n')
        chat.wait_for("positions")
        chat.prompt()
        chat.type("d\n")
        chat.wait_for("positions")
        chat.leave()
    kept = tmp_path / "chat" / "history.jsonl"
    assert kept.parent.stat().st_mode & 0o077 == 0
    with terminal("--no-history") as chat:
        chat.prompt()
        chat.type("e\n")
        chat.wait_for("positions")
        chat.leave()
    assert [json.loads(line) for line in kept.read_text().splitlines()] == ["b\nc", "d"]
    with terminal() as chat:
        chat.prompt()
        chat.type(f"{up}{up}\n")
        chat.wait_for("positions")
        chat.prompt()
        chat.type(f"/save {tmp_path}/c\n")
        chat.wait_for("2 messages in")
        chat.leave()
    assert asked(tmp_path) == ["b\nc"]


def test_a_history_that_cannot_be_kept_or_read_stops_nobody(terminal, tmp_path):
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "history.jsonl").write_bytes(b'"b"\n\xff\n3\n"a\\u0000"\n[\n')
    with terminal() as chat:
        chat.prompt()
        chat.type("\x1b[A\n")
        chat.wait_for("positions")
        chat.leave()
    (tmp_path / "file").touch()
    with terminal(CASTIRON_CACHE=str(tmp_path / "file")) as chat:
        chat.prompt()
        chat.type("b\n")
        chat.wait_for("history.jsonl cannot be written, so this chat leaves no history")
        chat.wait_for("positions")
        chat.prompt()
        chat.type("c\n")
        assert "cannot be written" not in chat.wait_for("positions")
        chat.leave()


def test_tab_completes(terminal, tmp_path):
    (tmp_path / "my talk.json").write_text('{"messages": []}')
    with terminal() as chat:
        chat.prompt()
        chat.type(f"/l\t{tmp_path}/my t\t\n")
        chat.wait_for("0 messages from .*/my talk.json")
        chat.leave()


def test_an_answer_is_as_wide_as_the_terminal(path, terminal):
    """The toy speaks letters, all in one word, which breaks before the last cell."""
    bundle, count = open_bundle(path), str(toy_text.CONTEXT - 3)
    answer = "".join(Chat(Session(bundle, 1), load_text(bundle), max_tokens=int(count)).answer("d"))
    assert len(answer) > 20
    with terminal("-n", count, columns=20) as chat:
        chat.prompt()
        chat.type("d\n")
        assert f"{answer[:19]}\r\n{answer[19:]}\r\n" in chat.wait_for("positions")
        chat.leave()


def screen(text: str, columns: int) -> list[str]:
    """The lines of a terminal on which `text` was written."""
    lines, column = [""], 0
    for move, erase, character in re.findall(r"\x1b\[(\d+)D|(\x1b\[K)|(.)", text, re.DOTALL):
        if move:
            column -= int(move)
            assert column >= 0
        elif erase:
            lines[-1] = lines[-1][:column]
        elif character == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] += character
            column += cells(character)
            assert column < columns
    return lines


@pytest.mark.parametrize("seed", range(20))
def test_lines_break_between_words_however_the_text_comes(seed):
    """No word is broken that fits in a line, none is lost, and a line ends only where the next word does not fit."""
    draw = random.Random(seed)
    columns = draw.randrange(20, 40)
    words = ["x" * draw.choice([1, 2, 3, 5, 8, 13, 18]) for _ in range(80)]
    text = "".join(word + draw.choice([" ", " ", " ", "\n"]) for word in words)
    wrapper, written, rest = Wrapper(), "", text
    while rest:
        count = draw.randrange(1, 9)
        written += wrapper.wrap(rest[:count], columns)
        rest = rest[count:]
    shown = screen(written, columns)
    assert " ".join(shown).split() == words
    begins = {sum(len(line.split()) for line in text.split("\n")[:index]) for index in range(text.count("\n") + 1)}
    told = 0
    for line, following in zip(shown, shown[1:]):
        told += len(line.split())
        if told not in begins:
            assert len(line.rstrip()) + 1 + len(following.split()[0]) >= columns


def test_code_wide_letters_and_pipes_are_as_they_are():
    code = "```python\n" + "x = 1  # " * 9 + "\n```\n"
    assert Wrapper().wrap(code, 30) == code and Wrapper().wrap(code, 0) == code
    wrapper = Wrapper()
    assert wrapper.wrap(code + "a " * 40, 30) != code + "a " * 40
    assert screen(Wrapper().wrap("你" * 20, 21), 21) == ["你" * 10, "你" * 10]
    assert screen(Wrapper().wrap("y" * 30, 21), 21) == ["y" * 20, "y" * 10]
    assert screen(Wrapper().wrap("e\u0301" * 20, 21), 21) == ["e\u0301" * 20]


def test_lines_are_completed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a talk.json", "another.json", "[x]"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert completions("/re") == ["/retry", "/reset"] and completions("/s") == ["/set ", "/save "]
    assert completions("/set t") == ["/set temperature ", "/set top-k ", "/set top-p "]
    assert completions("/save ~/a") == ["/save ~/a talk.json", "/save ~/another.json"]
    assert completions(f"/load {tmp_path}/f") == [f"/load {tmp_path}/folder/"]
    assert completions("/load ~/[") == ["/load ~/[x]"]
    assert completions("") == completions("hello /s") == completions("/set temperature ") == completions("/undo ") == []


def test_every_command_and_setting_is_in_the_docs_and_in_help(capsys):
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
    with pytest.raises(SystemExit):
        cli.main(["chat", "--help"])
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"`{command}" in page and command in shown
    assert all(f"`{name}`" in page for name in NAMES)
