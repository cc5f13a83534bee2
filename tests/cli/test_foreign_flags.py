"""Flags of llama.cpp, vLLM, mlx-lm and Ollama mean what they mean there, or the error says what to do."""

from __future__ import annotations

import re

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli.foreign_flags import ADVICE, ALWAYS, OWN

COMMANDS = ("run", "chat", "serve", "compile", "batch", "embed")
REQUIRED = {"batch": ["in.txt", "-o", "out"]}
TEXTS = ("--system", "--stop", "--draft-model", "--json-schema", "--grammar", "--prefix-cache", "--name", "--adapter",
         "--n-gpu-layers", "--save-temps")  # fmt: skip
PARSERS = {command: cli.command_parser(command) for command in COMMANDS}
PAIRS = [
    (command, flag, own) for command in COMMANDS for flag, own in OWN
    if own in PARSERS[command]._option_string_actions and flag not in PARSERS[command]._option_string_actions
]  # fmt: skip


def parsed(command: str, *argv: str, model: str | None = "m") -> dict:
    args = cli._parse([command, *([model] if model else []), *REQUIRED.get(command, []), *argv])
    return {name: value for name, value in vars(args).items() if name not in ("parser", "main")}


def usage_error(command: str, *argv: str) -> str:
    with pytest.raises(cli.UsageError) as error:
        parsed(command, *argv)
    return str(error.value)


@pytest.mark.parametrize(("command", "flag", "own"), PAIRS)
def test_a_flag_is_castirons_own(command, flag, own):
    value = "x" if own in TEXTS else "ngram" if own == "--speculative" else "q8_0" if own == "--kv-cache-type" else "3"
    if own == "-m":
        for argv in ([flag, "org/name:Q4_K_M"], [f"{flag}=org/name:Q4_K_M"]):
            assert parsed(command, *argv, model=None) == parsed(command, model="org/name:Q4_K_M")
        return
    values = [] if PARSERS[command]._option_string_actions[own].nargs == 0 else [value]
    assert parsed(command, flag, *values) == parsed(command, own, *values) != parsed(command)
    if values:
        assert parsed(command, f"{flag}={value}") == parsed(command, own, value)


@pytest.mark.parametrize(
    ("command", "former", "flag", "value"),
    [
        ("compile", "--keep", "--save-temps", "d"), ("emit", "--cache", "--kv-cache-type", "f16"),
        ("compile", "--cache", "--kv-cache-type", "q8_0"), ("bench", "--cache", "--kv-cache-type", "f16"),
        ("tune", "--cache", "--kv-cache-type", "f16"), ("compile", "--speculate", "--verify-widths", "2,4"),
        ("emit", "--speculate", "--verify-widths", "none"), ("tune", "--speculate", "--verify-widths", "4"),
        ("run", "--speculate", "--speculative", "ngram"), ("chat", "--speculate", "--speculative", "ngram"),
        ("run", "--draft", "--draft-model", "d"), ("chat", "--draft", "--draft-model", "d"),
        ("serve", "--draft", "--draft-model", "d"), ("serve", "--keep", "--keep-alive", "9"),
        ("serve", "--grace", "--shutdown-timeout", "3"), ("serve", "--queue", "--max-queue", "5"),
    ],
)  # fmt: skip
def test_a_former_name_of_a_flag_means_the_new_one(command, former, flag, value):
    new = parsed(command, flag, value)
    assert parsed(command, former, value) == parsed(command, f"{former}={value}") == new != parsed(command)
    shown = cli.command_parser(command).format_help()
    assert f"{flag} " in shown and not re.search(rf"{former}(?![-\w])", shown)


@pytest.mark.parametrize("command", ALWAYS)
def test_a_flag_for_what_a_command_does_anyway_changes_nothing(command):
    for flags, count in ALWAYS[command].items():
        for flag in flags.split():
            assert parsed(command, flag, *["hermes"] * count) == parsed(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_any_other_flag_has_advice(command):
    always = " ".join(ALWAYS.get(command, {})).split()
    for flag, advice in ADVICE.items():
        own = PARSERS[command]._option_string_actions
        if flag not in own and flag not in always and not any(name in own for other, name in OWN if other == flag):
            assert f"{flag} is not an option of this command: {advice}; see castiron" in usage_error(command, flag, "1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["run", "a", "--tempreature", "0.5"],
            "unknown option: --tempreature; did you mean --temperature?; see castiron run --help",
        ),
        (["run", "a", "--max-token=5"], None),
        (["serve", "--api-kee", "x"], "did you mean --api-key?"),
        (["run", "a", "--bogus"], "unknown option: --bogus; see"),
    ],
)
def test_an_unknown_option_is_named_with_a_similar_one(argv, message):
    if message is None:
        assert parsed(*argv)["max_tokens"] == 5
    else:
        assert message in usage_error(*argv)


def test_words_after_two_dashes_are_not_flags():
    assert parsed("run", "--", "-t", "--jinja")["words"] == ["-t", "--jinja"]
