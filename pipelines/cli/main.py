"""The command line: the table of commands, their help, usage errors and exit status."""

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import castiron
from castiron.pipelines.cli.foreign_flags import translated
from castiron.pipelines.cli.options import check_models_exist, check_not_empty, check_threads, model_first, note_ignored
from castiron.pipelines.errors import did_you_mean, error_message, similar_path
from castiron.pipelines.terminal import protect_terminal, sanitised

# Group -> command -> summary. The module cli/NAME.py has EXAMPLES, `add_arguments(parser)` and `main(args) -> exit status`; it
# is imported only when its command runs, so that `castiron run` loads neither the compiler nor torch.
GROUPS = {
    "most used": {
        "run": "generate text with a bundle or a model",
        "chat": "have a conversation with a bundle or a model",
        "serve": "serve OpenAI's, Anthropic's and Ollama's APIs over HTTP",
        "compile": "compile a checkpoint into a bundle",
        "list": "list models of the catalogue, and bundles",
    },
    "run": {
        "batch": "run the requests of a file",
        "embed": "compute the vectors of texts with an embedding model",
    },
    "models": {
        "rm": "remove a bundle, and what was fetched for it",
        "inspect": "describe a checkpoint or a bundle",
        "quantise": "write a checkpoint as a quantised GGUF file",
        "pack": "write a bundle as one file",
        "cache": "list and clear cached files",
        "devices": "list the CPU and the GPUs that can run bundles",
    },
    "measure": {
        "verify": "compare a bundle's greedy tokens with HF transformers",
        "audit": "compute an answer again from its receipt",
        "evaluate": "measure perplexity, and KL divergence from a base",
        "bench": "measure speed and memory, against other engines",
        "explain": "show the time of each kernel in a call",
        "tune": "search for faster kernel tiles on this machine",
    },
    "develop": {
        "emit": "print the MLIR of a checkpoint or a kernel",
        "diff": "find the first module that differs from HF transformers",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
# This text and the shell's next prompt fit a terminal of 24 lines and 80 columns.
HELP = """\
usage: castiron COMMAND [OPTIONS] | help COMMAND | --version
{groups}
MODEL      GGUF file, HF directory, org/name on the hub, or name that list shows
"""
SHORT_HELP = """\
usage: castiron COMMAND [OPTIONS]

{commands}

example    castiron run smollm2-135m-instruct "Why is the sky blue?"
MODEL      GGUF file, HF directory, org/name on the hub, or name that list shows
more       castiron help COMMAND shows its options, castiron --help all commands
"""
ARGUMENTS = {"run": "MODEL PROMPT", "chat": "MODEL", "serve": "MODEL", "compile": "MODEL"}
FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
COMPLETION = "--print-completion"


class UsageError(Exception):
    """Raised for an invalid command line."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with a one-line message."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and (flag := next((word for word in unknown.split() if word.startswith("--")), "")):
            name = flag.partition("=")[0]
            known = [each for each in self._option_string_actions if each.startswith("--")]
            message = f"unknown option: {name}{did_you_mean(name, known)}"
        raise UsageError(f"{self.prog.removeprefix('castiron ')}: {message}; see {self.prog} --help")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that prints one line per option, of up to 110 characters."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status; `argv`: None for the arguments of this process."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Generated text and file names may contain characters that the locale does not have.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    protect_terminal()
    as_json = "--json" in argv
    try:
        args = _parse(argv)
        check_not_empty(args)
        check_models_exist(args)
        check_threads(args)
        note_ignored(args)
        status = args.main(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        _print_failure(str(error), "UsageError", as_json)
        raise SystemExit(USAGE) from None
    except KeyboardInterrupt:
        _print_failure("interrupted", "Interrupted", as_json)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout again when it exits, and would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        message = error_message(error)
        if message is None:
            raise
        if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
            message += similar_path(error.filename)
        _print_failure(message, type(error).__name__, as_json)
        return FAILED


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv[:1] == ["help"]:
        if len(argv) == 1:
            _print_and_exit(short_help_text())
        argv = [argv[1], "--help"]
    name = argv[0] if argv else None
    if name in ("-h", "--help"):
        _print_and_exit(help_text())
    if name == "--version":
        _print_and_exit(f"castiron {castiron.__version__}\n")
    if name == COMPLETION:
        _print_and_exit(completion(argv[1] if len(argv) > 1 else "bash"))
    if name not in COMMANDS:
        unknown = name and f"unknown command: {name}{did_you_mean(name, COMMANDS)}"
        raise UsageError(f"{unknown or 'a command is required'}; see castiron --help")
    parser = command_parser(name)
    # The words of a prompt may come before and after options.
    return parser.parse_intermixed_args(model_first(parser, list(translated(parser, name, argv[1:]))))


def command_parser(name: str, parser: Parser | None = None) -> Parser:
    """Return a parser with the options of a command, a new one unless `parser` is given."""
    module = importlib.import_module(f"castiron.pipelines.cli.{name}")
    parser = parser or Parser(prog=f"castiron {name}")
    parser.formatter_class, parser.description, parser.epilog = Formatter, module.__doc__, module.EXAMPLES
    module.add_arguments(parser)
    for action in parser._actions:
        # Names have any case: Q4_K_M is how files are called.
        if action.choices is not None and action.type is None:
            action.type = str.lower
    positional = parser._get_formatter()
    positional.add_usage(None, parser._get_positional_actions(), [], "")
    parser.usage = positional.format_help().replace("%(prog)s", "").strip().replace(parser.prog, "%(prog)s [OPTIONS]", 1)
    parser.set_defaults(command=name, main=module.main, parser=parser)
    return parser


def completion(shell: str) -> str:
    """Return a completion script with all commands and options for a shell, such as "bash"."""
    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(f"unsupported shell: {shell}; choose from {', '.join(shtab.SUPPORTED_SHELLS)}; see castiron --help")
    parser = Parser(prog="castiron")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        command_parser(name, commands.add_parser(name, help=summary))
    return shtab.complete(parser, shell) + "\n"


def help_text() -> str:
    """Return the text of `castiron --help`: all commands in groups."""
    lines = []
    for title, group in GROUPS.items():
        for name, summary in group.items():
            lines.append(f"{title:<10} {name:<9} {summary}")
            title = ""
    return HELP.format(groups="\n".join(lines))


def short_help_text() -> str:
    rows = [(f"{name} {ARGUMENTS.get(name, '')}", summary) for name, summary in GROUPS["most used"].items()]
    return SHORT_HELP.format(commands="\n".join(f"  castiron {use:<17}{summary}" for use, summary in rows))


def _print_and_exit(text: str) -> NoReturn:
    print(text, end="", flush=True)
    raise SystemExit(0)


def _open_closed_streams() -> None:
    # The next opened file would get the descriptor of a closed stream, and messages would go there.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _print_failure(message: str, kind: str, as_json: bool) -> None:
    # Stdout may be closed, or its disk full.
    with contextlib.suppress(OSError):
        print(f"castiron: {sanitised(message)}", file=sys.stderr)
        if as_json:
            print(json.dumps({"error": {"message": message, "type": kind}}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    sys.exit(main())
