"""Prints what a shell needs to complete castiron's commands, options and their values.

It is made from the very parsers that read the command line.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

EXAMPLES = """\
examples:
  source <(castiron completion bash)                          # in ~/.bashrc
  source <(castiron completion zsh)                           # in ~/.zshrc, after compinit
  castiron completion fish > ~/.config/fish/completions/castiron.fish
"""


@dataclass(frozen=True)
class Option:
    """`words` are its spellings; `values` what it can be given; `takes` whether it is given anything."""

    words: tuple[str, ...]
    help: str
    values: tuple[str, ...]
    takes: bool


@dataclass(frozen=True)
class Command:
    """A command, its options, and the words that its arguments may be; `files` whether they may be files besides."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[str, ...]
    files: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell")


def main(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell](list(commands())), end="")
    return 0


def commands() -> Iterator[Command]:
    """Of every command what its parser knows; a MODEL may be a name from the catalogue."""
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE
    from castiron.pipelines.cli import COMMANDS, build_parser

    whole = build_parser((), whole=True)
    (subparsers,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in subparsers.choices.items():
        options, arguments, files = [], [], True
        for action in parser._actions:
            values = tuple(map(str, action.choices or ()))
            if action.option_strings:
                words = action.option_strings
                options.append(Option(tuple(words), _plain(action.help), values, action.nargs != 0))
            else:
                arguments += values or (CATALOGUE if "MODEL" in str(action.metavar) else ())
                files = not values
        yield Command(name, COMMANDS[name], tuple(options), tuple(arguments), files)
    yield Command("help", "say more about a command", (), tuple(COMMANDS), False)


def spelled(found: list[Command]) -> Iterator[tuple[str, Option]]:
    """Every option in every spelling, behind the name of its command."""
    for command in found:
        for option in command.options:
            for word in option.words:
                yield f"{command.name} {word}", option


def bash(found: list[Command]) -> str:
    values = [f'    "{word}") words="{" ".join(option.values)}" ;;' for word, option in spelled(found) if option.values]
    free = [f'    "{word}") return ;;' for word, option in spelled(found) if option.takes and not option.values]
    options = [f'      {c.name}) words="{" ".join(w for o in c.options for w in o.words)}" ;;' for c in found if c.options]
    arguments = [f'      {c.name}) words="{" ".join(c.arguments)}" ;;' for c in found if c.arguments]
    either = "|".join(c.name for c in found if c.arguments and c.files)
    # With no reply of its own the shell completes names of files, by `-o default`.
    return "\n".join([
        "_castiron() {",
        '  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" = 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(c.name for c in found)}" -- "$word"))',
        "    return",
        "  fi",
        '  case "${COMP_WORDS[1]} $before" in',
        *values,
        *free,
        "  esac",
        '  if [ -n "$words" ]; then :; elif [[ $word == -* ]]; then',
        '    case "${COMP_WORDS[1]}" in',
        *options,
        "    esac",
        "  else",
        '    case "${COMP_WORDS[1]}" in',
        *arguments,
        "    esac",
        '    case "${COMP_WORDS[1]}" in',
        f'      {either}) COMPREPLY=($(compgen -f -- "$word")) ;;',
        "    esac",
        "  fi",
        '  COMPREPLY+=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _castiron castiron",
        "",
    ])  # fmt: skip


def zsh(found: list[Command]) -> str:
    def described(word: str, words: str) -> str:
        return shlex.quote(f"{word}:{words}")

    values = [
        f"    ({shlex.quote(word)}) compadd -- {' '.join(option.values)}; return ;;"
        for word, option in spelled(found)
        if option.values
    ]
    options = [
        f"      ({c.name}) found=({' '.join(described(w, o.help) for o in c.options for w in o.words)}) ;;"
        for c in found
        if c.options
    ]
    arguments = [
        f"      ({c.name}) compadd -- {' '.join(c.arguments)}{'' if c.files else '; return'} ;;" for c in found if c.arguments
    ]
    return "\n".join([
        "#compdef castiron",
        "_castiron() {",
        "  local -a found",
        "  if (( CURRENT == 2 )); then",
        f"    found=({' '.join(described(c.name, c.help) for c in found)})",
        "    _describe command found",
        "    return",
        "  fi",
        '  case "$words[2] $words[CURRENT-1]" in',
        *values,
        "  esac",
        "  if [[ $PREFIX == -* ]]; then",
        "    case $words[2] in",
        *options,
        "    esac",
        "    _describe option found",
        "  else",
        "    case $words[2] in",
        *arguments,
        "    esac",
        "    _files",
        "  fi",
        "}",
        'if [ "$funcstack[1]" = _castiron ]; then _castiron "$@"; else compdef _castiron castiron; fi',
        "",
    ])  # fmt: skip


def fish(found: list[Command]) -> str:
    lines = []
    for command in found:
        lines.append(f"complete -c castiron -n __fish_use_subcommand -f -a {command.name} -d {_fish(command.help)}")
        here = f"complete -c castiron -n '__fish_seen_subcommand_from {command.name}'"
        if command.arguments:
            lines.append(f"{here}{'' if command.files else ' -f'} -a {_fish(' '.join(command.arguments))}")
        for option in command.options:
            spelled = [f"-l {w[2:]}" if w.startswith("--") else f"-s {w[1:]}" for w in option.words]
            given = f" -x -a {_fish(' '.join(option.values))}" if option.values else " -r" if option.takes else ""
            lines.append(f"{here} {' '.join(spelled)}{given} -d {_fish(option.help)}")
    return "\n".join([*lines, ""])


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _plain(text: str | None) -> str:
    """A help text in one line, up to its first pause, as a shell has room for."""
    return " ".join((text or "").split()).partition(";")[0].partition(" (")[0]


SHELLS: dict[str, Callable[[list[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
