"""The command line: a table of commands, and the errors that a user sees as one sentence."""

import argparse
import contextlib
import errno
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import castiron
from castiron.pipelines.commands.options import check_threads, choose_on_hub
from castiron.pipelines.harmless import harmless
from castiron.pipelines.installing import remedy
from castiron.vmfb.cut_short import say_when_cut_short
from castiron.vmfb.disk import reason

# Name, line of help. The module commands.NAME has `add_arguments(parser)` and `main(args) -> exit status`, and
# is imported only when it is asked for: `castiron run` pays for neither the compiler nor torch.
COMMANDS = {
    "compile": "cast a checkpoint into a bundle",
    "tune": "find better tiles for a model's kernels on this machine",
    "run": "generate text from a bundle or a model",
    "chat": "talk with a bundle or a model",
    "embed": "give the vectors of texts, from a model that encodes them",
    "batch": "answer the rows of a file, as many at once as a batch has slots",
    "serve": "serve a bundle or a model over HTTP with OpenAI's API",
    "pack": "write a bundle as one file",
    "quantise": "write a checkpoint with quantised weights as a GGUF file",
    "repack": "put a module compiled by hand into a bundle",
    "verify": "compare a bundle's greedy tokens with HF transformers",
    "evaluate": "measure a bundle's perplexity, and its distance from a base",
    "bench": "measure a bundle, against the machine's limits and against peers",
    "explain": "show where the time of a call goes, kernel by kernel",
    "plan": "say how many requests a machine answers, and how many machines a rate needs",
    "list": "list the models of the catalogue and the bundles here",
    "inspect": "describe a checkpoint or a bundle",
    "emit": "print the MLIR of a checkpoint",
    "diff": "find the first module whose activations differ from HF transformers",
    "cache": "list what castiron keeps to make it only once, and clear it",
    "completion": "print the completion of commands and options for a shell",
}
EPILOG = """\
MODEL is a GGUF file, an HF directory of safetensors, a name from the catalogue, or org/name on the hub; DIR is a bundle, a
directory or a file.
run, chat, embed, batch and serve take either: a MODEL is cast when it is first named, and kept in the cache.

examples:
  castiron compile smollm2-135m-instruct -o build/smollm2-135m-instruct
  castiron run smollm2-135m-instruct "Why is the sky blue?"
  castiron verify build/smollm2-135m-instruct -n 64

castiron help COMMAND says more. Results go to stdout, everything else to stderr. Exit status: 0 done, 1 failed (one
sentence on stderr says why) or, for verify, a difference; 2 wrong usage; 130 interrupted. With --json a failure is an
object on stdout as well, {"error": {"message": ..., "type": ...}}.
"""
FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141


class Parser(argparse.ArgumentParser):
    """Tells wrong usage as JSON too, where the command line asks for JSON, and lets the last positional argument, where it
    takes any number of words, have words behind options too."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        if self.as_json:
            _print_error("UsageError", message)
        super().error(message)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore
        # argparse gives such an argument up at the first option after the one before it.
        found, unknown = super().parse_known_args(args, namespace)
        positional = self._get_positional_actions()
        if positional and (last := positional[-1]).nargs in (argparse.ZERO_OR_MORE, argparse.ONE_OR_MORE):
            words = [word for word in unknown if not word.startswith("-")]
            setattr(found, last.dest, [*getattr(found, last.dest), *words])
            unknown = [word for word in unknown if word.startswith("-")]
        return found, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: this process's) and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model's text may hold any character, and not every locale has them all; names of files may be no text, of which
        # this is what JSON writes too.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    as_json = "--json" in argv
    try:
        say_when_cut_short()
        args, unknown = build_parser(argv).parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        check_threads(args)
        choose_on_hub(args)
        status = args.main(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        _complain("interrupted", "Interrupted", as_json)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        _complain(sentence, type(error).__name__, as_json)
        return FAILED


def _open_what_is_closed() -> None:
    """Where stdin, stdout or stderr were closed nothing is: else the next file that is opened would have its number, and be
    written into."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def build_parser(argv: Sequence[str], *, whole: bool = False) -> Parser:
    """The parser of all commands, of which only the one that `argv` names knows its arguments; with `whole` all do."""
    parser = Parser(
        prog="castiron",
        description="Language models cast ahead of time: a checkpoint goes in, a bundle for the IREE runtime comes out.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"castiron {castiron.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parser.as_json = "--json" in argv
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"castiron.pipelines.commands.{name}") if whole or name == chosen else None
        command = commands.add_parser(
            name,
            help=summary,
            description=module and module.__doc__,
            epilog=module and module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module:
            module.add_arguments(command)
            command.set_defaults(main=module.main, parser=command)
            command.as_json = parser.as_json
    return parser


def explain(error: Exception) -> str | None:
    """The sentence for a failure that is the user's or the machine's; None for one that is ours."""
    from castiron.pipelines.errors import user_errors

    if isinstance(error, user_errors()):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        place = error.filename
        if place is None and error.errno == errno.ENOSPC:
            # Whatever else castiron writes is named.
            place = "stdout"
        return f"{place}: {reason(error)}" if place is not None else reason(error)
    if isinstance(error, MemoryError):
        return "out of memory; close other programs or take a smaller model or --context"
    if isinstance(error, ModuleNotFoundError) and (command := remedy(error.name)):
        return f"this needs {error.name}, which is not installed: {command}"
    return None


def _complain(sentence: str, kind: str, as_json: bool) -> None:
    """One sentence on stderr, and where JSON was asked for an object on stdout."""
    # Nobody reads it, or what it would be written on is full.
    with contextlib.suppress(OSError):
        print(f"castiron: {harmless(sentence)}", file=sys.stderr)
        if as_json:
            _print_error(kind, sentence)


def _print_error(kind: str, message: str) -> None:
    print(json.dumps({"error": {"message": message, "type": kind}}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    sys.exit(main())
