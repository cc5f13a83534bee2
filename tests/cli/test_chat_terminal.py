"""Test a chat at a terminal: editing, pastes, history, completion and Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli.chat import COMMANDS, SETTINGS
from tests.support import toy_text
from tests.support.terminal import Terminal

SHOWN_POSITIONS = rf"(\d+) of {toy_text.CONTEXT} positions"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy_text.write(tmp_path_factory.mktemp("chat") / "toy")


@pytest.fixture
def terminal(path, tmp_path):
    """Return a function that opens a chat with two tokens per answer and its own cache folder."""

    def open_chat(*argv: str, **options) -> Terminal:
        return Terminal("chat", str(path), "-n", "2", *argv, **{"step": 0, "CASTIRON_CACHE": str(tmp_path), **options})

    return open_chat


def asked(folder) -> list[str]:
    """Return the questions of the conversation saved as `c`."""
    return [m["content"] for m in json.loads((folder / "c").read_text())["messages"] if m["role"] == "user"]


def test_keys_edit_the_line_and_ctrl_c_stops_an_answer(path, tmp_path):
    with Terminal("chat", str(path), "-n", "20", CASTIRON_CACHE=str(tmp_path)) as terminal:
        terminal.wait_for("type /help to list the commands")
        terminal.prompt()
        # The cursor goes left, over what was typed, and x becomes b.
        terminal.type("xc\x1b[D\x1b[D\x1b[3~b\r")
        # The editor leaves the line; a redrawn prompt has no line break.
        terminal.wait_for(r"\r\n\x1b\[J.*?\x1b\[\?2004l")
        terminal.wait_for("[a-z]")
        terminal.type("\x03")
        terminal.wait_for("castiron: stopped")
        terminal.prompt()
        terminal.type("/help\r")
        terminal.wait_for("/quit +end the chat")
        terminal.leave()


def test_a_paste_is_one_message(terminal, tmp_path):
    with terminal() as chat:
        chat.prompt()
        chat.type("\x1b[200~" + "\r".join(("b", " c", "/quit", "d")) + "\x1b[201~\r")
        # The line of figures is dimmed.
        chat.wait_for(rf"\x1b\[2m[\d.]+ tok/s, {SHOWN_POSITIONS}, stopped at 2 tokens[^\r]*\x1b\[0m")
        chat.prompt()
        chat.type(f"/save {tmp_path}/c\r")
        chat.wait_for("2 messages in")
    assert asked(tmp_path) == ["b\n c\n/quit\nd"]


def test_the_up_arrow_recalls_a_complete_block(terminal, tmp_path):
    with terminal() as chat:
        chat.prompt()
        chat.type('"""b\r')
        chat.wait_for(r"\.[ \x08]")
        chat.type(' c\rd"""\r')
        chat.wait_for("positions")
        chat.prompt()
        chat.type("\x1b[A\r")
        chat.wait_for("positions")
        chat.prompt()
        chat.type(f"/save {tmp_path}/c\r")
        chat.wait_for("4 messages in")
        chat.prompt()
        chat.type(f"/save {tmp_path}/absent/c\r")
        chat.wait_for(f"cannot write {tmp_path}/absent/c: no such folder: {tmp_path}/absent; create it, or give another path")
    assert asked(tmp_path) == ["b\n c\nd"] * 2 and not (tmp_path / "absent").exists()


def test_without_prompt_toolkit_a_chat_reads_plain_lines(terminal, tmp_path):
    with terminal(without="prompt_toolkit") as chat:
        for line in ('"""b', 'c"""', f"/save {tmp_path}/c"):
            chat.type(f"{line}\n")
        chat.wait_for("2 messages in")
    assert asked(tmp_path) == ["b\nc"]


def test_ctrl_c_discards_the_line_and_names_the_way_out(terminal, tmp_path):
    with terminal() as chat:
        chat.prompt()
        chat.type("klm\x03")
        chat.wait_for("Ctrl-D or /quit ends the chat")
        chat.prompt()
        chat.type("fg\r")
        chat.wait_for("positions")
        chat.prompt()
        chat.type(f"/save {tmp_path}/c\r")
        chat.wait_for("2 messages in")
        chat.leave()
    assert asked(tmp_path) == ["fg"]


def test_history_is_private_and_recalled_in_the_next_session(terminal, tmp_path):
    for argv, keys in (((), "d\r"), (("--no-history",), "e\r"), ((), "\x1b[A\r")):
        with terminal(*argv) as chat:
            chat.prompt()
            chat.type(keys)
            chat.wait_for("positions")
            chat.leave()
    history = tmp_path / "chat" / "history"
    assert history.parent.stat().st_mode & 0o077 == 0
    assert [line for line in history.read_text().splitlines() if line.startswith("+")] == ["+d"]


def test_a_history_that_cannot_be_written_is_reported_and_the_chat_goes_on(terminal, tmp_path):
    (tmp_path / "file").touch()
    with terminal(CASTIRON_CACHE=str(tmp_path / "file")) as chat:
        chat.wait_for("this chat is not stored in the history")
        chat.prompt()
        chat.type("b\r")
        chat.wait_for("positions")
        chat.leave()


def test_tab_completes(terminal, tmp_path):
    (tmp_path / "my talk.json").write_text('{"messages": []}')
    with terminal() as chat:
        chat.prompt()
        chat.type(f"/l\t{tmp_path}/my t\t\r")
        chat.wait_for("0 messages from .*/my talk.json")
        chat.prompt()
        chat.type("/set te\t0.5\r")
        chat.wait_for("temperature +0.5")
        chat.leave()


def test_every_command_and_setting_is_in_the_docs_and_in_help(capsys):
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
    with pytest.raises(SystemExit):
        cli.main(["chat", "--help"])
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"`{command}" in page and command in shown
    assert all(f"`{name}`" in page for name in SETTINGS)
