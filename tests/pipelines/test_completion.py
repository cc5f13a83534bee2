"""Completion is what the parsers know: bash is asked, zsh and fish too where they are, and all texts are read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.pipelines import cli
from castiron.pipelines.commands.completion import SHELLS, commands
from castiron.pipelines.commands.options import WEIGHTS


@pytest.fixture(scope="module")
def found():
    return list(commands())


@pytest.fixture(scope="module")
def complete(tmp_path_factory, found):
    """`complete(words)`: what bash offers for the last of them, in a folder with `model.gguf`."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "model.gguf").touch()
    (folder / "script").write_text(SHELLS["bash"](found))

    def ask(line: str) -> list[str]:
        words = [*shlex.split(line), *([""] if line.endswith(" ") else [])]
        program = (
            f". ./script; COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; _castiron; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-u", "-c", program], cwd=folder, capture_output=True, text=True)
        assert not done.stderr, done.stderr
        return done.stdout.split()

    return ask


def test_commands(complete):
    assert set(complete("castiron ")) == {*cli.COMMANDS, "help"}
    assert complete("castiron comp") == ["compile", "completion"]
    assert set(complete("castiron help ")) == set(cli.COMMANDS)


def test_options_are_all_that_the_parser_has(complete):
    parser = cli.build_parser(["compile"])._subparsers._group_actions[0].choices["compile"]
    options = {word for action in parser._actions for word in action.option_strings}
    assert set(complete("castiron compile -")) == options
    assert complete("castiron run build/x --spec") == ["--speculate"]


def test_values_are_the_choices(complete):
    assert complete("castiron compile x --weights ") == list(WEIGHTS)
    assert complete("castiron compile x --cache ") == ["f32", "f16", "q8_0"]
    assert complete("castiron compile x --target x86-64-v4") == ["x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16"]
    assert complete("castiron completion ") == list(SHELLS)


def test_a_model_is_a_file_or_a_name(complete):
    assert set(complete("castiron compile ")) >= {"model.gguf", "smollm2-135m-instruct"}
    assert complete("castiron compile smol") == ["smollm2-135m-instruct"]
    # Left to the shell, which knows files best.
    assert complete("castiron pack ") == [] == complete("castiron compile x -o ")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_every_option(shell, found, capsys):
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == SHELLS[shell](found)
    for command in found:
        assert command.name in text
        for word in (word for option in command.options for word in option.words if word.startswith("--")):
            assert (f"-l {word[2:]}" if shell == "fish" else word) in text, word


def test_the_script_is_one_that_bash_reads(tmp_path: Path, found):
    for shell in ("bash", "zsh"):
        (tmp_path / shell).write_text(SHELLS[shell](found))
    assert subprocess.run(["bash", "-n", str(tmp_path / "bash")], env=os.environ).returncode == 0


# The completion system's own functions print what they are given.
ZSH = """
compdef() {}
_describe() { print -l -- ${(P)2%%:*} }
compadd() { shift; print -l -- $@ }
_files() { print -l -- *(N) }
source ./script; words=("$@"); CURRENT=$#; PREFIX=${@[-1]}; _castiron
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("castiron ", {*cli.COMMANDS, "help"}),
        ("castiron help ", set(cli.COMMANDS)),
        ("castiron compile x --weights ", set(WEIGHTS)),
        ("castiron run build/x --templ", {"--template-arg"}),
        ("castiron compile m", {"model.gguf"}),
        ("castiron compile smol", {"smollm2-135m-instruct"}),
        ("castiron pack m", {"model.gguf"}),
    ],
)
def test_every_shell_that_is_here_offers_the_same(line, offered, complete, found, tmp_path):
    words = line.split(" ")
    answers = {"bash": complete(line)}
    (tmp_path / "model.gguf").touch()
    if shutil.which("fish"):
        (tmp_path / "script").write_text(SHELLS["fish"](found))
        program = f"source ./script; complete -C {shlex.quote(line)}"
        done = subprocess.run(["fish", "--no-config", "-c", program], cwd=tmp_path, capture_output=True, text=True)
        assert not done.stderr, done.stderr
        answers["fish"] = [row.partition("\t")[0] for row in done.stdout.splitlines()]
    if shutil.which("zsh"):
        (tmp_path / "script").write_text(SHELLS["zsh"](found))
        done = subprocess.run(["zsh", "-f", "-c", ZSH, "zsh", *words], cwd=tmp_path, capture_output=True, text=True)
        assert not done.stderr, done.stderr
        answers["zsh"] = done.stdout.splitlines()
    for shell, answer in answers.items():
        fitting = {word for word in answer if word.startswith(words[-1])} - {"script"}
        # Where nothing is offered bash's own completion takes over, with the files.
        assert fitting == offered or (shell == "bash" and line == "castiron pack m" and not answer), shell


@pytest.mark.parametrize("command", ["completion bash", "list", "inspect", "help compile"])
def test_a_runtime_environment_is_enough(command):
    """Neither compiler nor torch nor the server's packages are there."""
    absent = "torch transformers iree.compiler gguf safetensors starlette uvicorn pydantic matplotlib llama_cpp"
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent.split()!r}))\n"
        "from castiron.pipelines.cli import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program, *command.split()], capture_output=True, text=True)
    assert done.returncode == 0 and "smollm2-135m-instruct" in done.stdout, done.stderr
