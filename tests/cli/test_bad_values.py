"""Every option of every command gets bad values: a command ends without a traceback."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import stat
from pathlib import Path

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.errors import PipelineError
from castiron.reference.tiny import tiny_model
from castiron.vmfb.compiler.iree_compile import CompileError
from tests.cli.test_cli import complaint
from tests.support import toy_text
from tests.support.tiny_gguf import write_llama

FEW = ["-1", "0", "nan", "x", "99,1"]
MANY = ["", "1e99", "inf", "-inf", "1.5", str(10**30), "1" * 5000, "a" * 5000, "\x1b[2J", "in.jsonl", "folder",
        "=", "-", "x=y", '{"a":', "none:", "cpu:-1", "cpu:99", "vulkan:x"]  # fmt: skip
# Arguments with which each command passes its checks; B is a bundle, G a checkpoint.
ARGUMENTS = {
    "run": "B a -n 1", "chat": "B", "serve": "B --port 0", "compile": "G -o out", "list": "", "batch": "B in.jsonl -o out.jsonl",
    "embed": "B a", "rm": "nothing", "inspect": "B", "quantise": "G -o out.gguf", "pack": "B -o out.castiron", "cache": "list",
    "devices": "", "verify": "B -n 1", "audit": "answer.json B", "evaluate": "B", "bench": "B", "explain": "B", "tune": "G", "emit": "G",
    "diff": "G --tokens 1,2",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    location = tmp_path_factory.mktemp("bad")
    toy_text.write(location / "B")
    write_llama(location / "G")
    (location / "folder").mkdir()
    (location / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n')
    assert cli.main(["run", str(location / "B"), "a", "-n", "1", "--receipt", str(location / "answer.json")]) == 0
    return location


@pytest.fixture
def here(folder, monkeypatch):
    """Run commands in `folder`, and end them where their work begins."""

    def stop(*_, **__):
        raise PipelineError("stopped")

    def stop_compiling(*_, **__):
        raise CompileError("stopped")

    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setenv("CASTIRON_CACHE", str(folder / "cache"))
    monkeypatch.setattr("castiron.pipelines.compile.compile_model.compile_modules", stop_compiling)
    monkeypatch.setattr("castiron.pipelines.server.http_server.serve", lambda *_: None)
    for work in ("evaluate.bench.bench", "evaluate.verify.load_reference", "cli.evaluate.bundle_logits", "evaluate.tune.Bench",
                 "cli.explain.Machine", "evaluate.diff.compare"):  # fmt: skip
        monkeypatch.setattr(f"castiron.pipelines.{work}", stop)
    if importlib.util.find_spec("ray"):  # without it `castiron batch --actors` says how to install it
        monkeypatch.setattr("castiron.pipelines.cluster.actors.connected", stop)


def with_value(command: str, action: argparse.Action, positional: list[argparse.Action], value: str) -> list[str]:
    """Return a command line in which an argument has `value`; positional: all without a name."""
    words = ARGUMENTS[command].split()
    if action.option_strings:
        return [command, *words, f"{max(action.option_strings, key=len)}={value}"]
    at = positional.index(action)
    words[at : at + 1] = [value]
    return [command, *words[len(positional) :], "--", *words[: len(positional)]]


@pytest.mark.parametrize("command", cli.COMMANDS)
@pytest.mark.parametrize("values", [FEW, MANY], ids=["few", "many"])
def test_no_value_ends_in_a_traceback(here, command, values, capsys):
    actions = list(cli.command_parser(command)._actions)
    positional = [action for action in actions if not action.option_strings]
    for action in actions:
        if action.nargs == 0 or isinstance(action, argparse._HelpAction | argparse.BooleanOptionalAction):
            continue
        for value in values:
            argv = with_value(command, action, positional, value)
            try:
                status = cli.main(argv)
            except SystemExit as stop:
                status = stop.code
            lines = capsys.readouterr().err.splitlines()
            assert status in (0, 1, 2), argv
            if status:
                # A failed compilation has a second line, with its log.
                assert any(line.startswith("castiron: ") for line in lines[-2:]), (argv, lines)
            assert status != 2 or len(lines) == 1, (argv, lines)


def test_every_command_is_walked():
    assert list(ARGUMENTS) == list(cli.COMMANDS)


@pytest.mark.parametrize("tokens", ["99,1", f"1,{10**30}"])
def test_token_ids_outside_the_vocabulary_are_refused(folder, monkeypatch, tokens, capsys):
    monkeypatch.chdir(folder)
    model = str(tiny_model("llama", folder / "tiny", vocab_size=50))
    for argv in (["run", "B", "--tokens", tokens], ["verify", "B", "--tokens", tokens], ["diff", model, "--tokens", tokens]):
        assert cli.main(argv) == 1
        message = complaint(capsys)
        assert (
            f"token {max(tokens.split(','), key=int)} is outside the vocabulary; give ids from 0 to {49 if argv[0] == 'diff' else 31}"
            in message
        )


def test_an_empty_path_is_not_an_option_that_is_absent(folder, monkeypatch, capsys):
    """`--adapter "$ADAPTER"` with an unset variable compiled the model without an adapter."""
    monkeypatch.chdir(folder)
    for argv, name in (
        (["compile", "G", "--adapter", ""], "--adapter"), (["compile", "G", "--save-temps", ""], "--save-temps"), (["run", ""], "DIR|MODEL"),
        (["quantise", "G", "-o", ""], "-o/--output"), (["serve", "B", ""], "DIR|MODEL"), (["run", "B", "--draft-model", ""], "--draft-model"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            cli.main(argv)
        assert f"argument {name} is empty; give a value" in complaint(capsys)
    assert cli.main(["quantise", "G", "-o", "folder"]) == 1
    assert "folder: not a regular file; give the path of a file" in complaint(capsys)
    Path("latin1").write_bytes(b"caf\xe9")
    assert cli.main(["verify", "B", "--prompts", "latin1"]) == 1
    assert "latin1 is not UTF-8 text: invalid byte at offset 3; convert the file" in complaint(capsys)
    assert cli.main(["diff", "G", "--tokens", "1,2", "--tolerance", "nan"]) == 1
    assert "--tolerance is nan; give a number of at least 0" in complaint(capsys)


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(folder, monkeypatch, capsys):
    """As root, `-o /dev/null` replaced the device for all programs."""
    monkeypatch.chdir(folder)
    os.mkfifo("pipe")
    for argv in (["quantise", "G", "-o", "pipe"], ["pack", "B", "-o", "pipe"], ["batch", "B", "in.jsonl", "-o", "pipe"],
                 ["compile", "G", "-o", "pipe"]):  # fmt: skip
        assert cli.main(argv) == 1
        assert "pipe" in complaint(capsys) and stat.S_ISFIFO(os.lstat("pipe").st_mode)
