"""Have a conversation with a model; each turn computes only its new tokens.

/help lists the commands: /retry, /undo, /system, /set, /show, /reset, /save, /load, /quit. Ctrl-C
stops an answer and Ctrl-D ends the chat. When the context is full, castiron drops the oldest turns
but not the system message, and prints a message.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.pipelines.cli import options
from castiron.pipelines.cli.open_engine import open_engine
from castiron.pipelines.errors import PipelineError, did_you_mean, error_message
from castiron.pipelines.terminal import DIM, PLAIN, Progress, counted, print_message

if TYPE_CHECKING:
    from castiron.pipelines.text.conversation import Chat

EXAMPLES = '''\
examples:
  castiron chat smollm2-135m-instruct
  castiron chat model.castiron --system "Answer in one sentence." --temperature 0.7 --seed 1
  printf 'What is the capital of France?\\nAnd of Italy?\\n' | castiron chat build/model

Answers go to stdout, messages to stderr. A paste is one message, and so are the lines between two
""". Typed messages are stored in chat/history in castiron's cache folder (see castiron help cache).
'''
PROMPT, MORE = "> ", ". "
BLOCK = '"""'
# Command: (arguments, description)
COMMANDS = {
    "/retry": ("", "answer the last question again"),
    "/undo": ("", "remove the last question and its answer"),
    "/system": ("TEXT", "show or change the system message; /system none removes it"),
    "/set": ("NAME VALUE", "change a setting, or show them all"),
    "/show": ("", "describe the model and the settings"),
    "/reset": ("", "start a new conversation with the same system message, as /clear does"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "continue a conversation that /save wrote"),
    "/help": ("", "list the commands, as /? does"),
    "/quit": ("", "end the chat, as /exit, /bye and Ctrl-D do"),
}
# Names of commands in Ollama and llama.cpp.
ALIASES = {"/?": "/help", "/bye": "/quit", "/exit": "/quit", "/clear": "/reset"}
HELP = "\n".join(f"{f'{name} {arguments}':17}{does}" for name, (arguments, does) in COMMANDS.items())
HELP += '''
Ctrl-C stops an answer. A paste is one message, and so are the lines between two """. Tab completes commands, settings
and files; the up arrow recalls what was typed.'''
# Fields of Sampling that have an option.
SAMPLING = {"temperature": float, "top-k": int, "top-p": float, "min-p": float, "repeat-penalty": float, "repeat-last-n": int,
            "seed": int}  # fmt: skip
SETTINGS = (*SAMPLING, "max-tokens", "system")
NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message before the conversation")
    parser.add_argument("--load", metavar="FILE", help="continue a conversation that /save wrote")
    options.add_options(parser, "-n --max-tokens", "-c --context")
    parser.add_argument("--no-history", action="store_true", help="do not read or store the history of typed messages")
    parser.add_argument("--quiet", action="store_true", help="do not print speed and context after each answer")
    group = parser.add_argument_group("prompt")
    options.add_options(group, "--template-arg", "--parse-special", "--prefix-cache", "--prefix-cache-size")
    options.add_sampling_options(parser, model_default=True)
    options.add_loading(parser)


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.text.conversation import Chat
    from castiron.pipelines.text.tokenizer import load_tokenizer
    from castiron.vmfb.cache_folder import cache_root

    max_tokens = options.answer_limit(args.max_tokens)
    bundle, engine = open_engine(args)
    sampling = options.sampling_of(args, bundle.manifest.generation)
    text = load_tokenizer(bundle, dict(args.template_arg), args.parse_special, lazy=True)
    if text.chat_template is None:
        raise PipelineError(f"{bundle.path} has no chat template; use castiron run --raw to continue plain text")
    chat = Chat(
        engine, text, sampling=sampling, system=args.system, stops=args.stop, max_tokens=max_tokens,
        repetition_stop=args.repetition_stop,
    )  # fmt: skip
    if args.load:
        chat.load(args.load)
    if sys.stdin.isatty():
        print_message(f"{bundle.manifest.name}, context {engine.context}, {sampling}; type /help to list the commands")
    history = None if args.no_history else cache_root() / "chat" / "history"
    return Console(chat, quiet=args.quiet, history=history).run()


class Console:
    """The loop of a chat: reads messages from stdin and prints answers to stdout."""

    def __init__(self, chat: "Chat", quiet: bool = False, history: Path | None = None):
        self.chat, self.quiet = chat, quiet
        self.input = ChatInput(history)
        self.run_command: dict[str, Callable[[str], None]] = {
            "/retry": lambda _: self.answer(chat.retry),
            "/undo": self.undo,
            "/system": lambda rest: self.set(f"system {rest}"),
            "/set": self.set,
            "/show": self.show,
            "/reset": self.reset,
            "/save": lambda rest: self._with_file("/save", rest, chat.save, "in"),
            "/load": lambda rest: self._with_file("/load", rest, chat.load, "from"),
            "/help": lambda _: print(HELP, file=sys.stderr),
        }

    def run(self) -> int:
        failed = False
        while True:
            try:
                message = self.input.message()
            except KeyboardInterrupt:
                print_message("Ctrl-D or /quit ends the chat")
                continue
            if message is None or message[1] and ALIASES.get(message[0].strip(), message[0].strip()) == "/quit":
                return int(failed)
            try:
                self.turn(*message)
            except (KeyboardInterrupt, BrokenPipeError):
                raise
            except Exception as error:
                if (line := error_message(error)) is None:
                    raise
                print_message(line)
                # The exit status tells a script that a message failed.
                failed = failed or not self.input.terminal

    def turn(self, message: str, may_command: bool = True) -> None:
        """Answer a message, or run it as a command if it is one and `may_command` is true."""
        command, _, rest = message.strip().partition(" ")
        if not command:
            return
        command = ALIASES.get(command, command)
        if may_command and command in self.run_command:
            self.run_command[command](rest.strip())
        elif may_command and command.startswith("/") and command[1:].isalpha():
            print_message(f"{command} is not a command{did_you_mean(command, COMMANDS)}; type /help to list the commands")
        else:
            self.answer(lambda progress: self.chat.answer(message, progress))

    def undo(self, _: str) -> None:
        first, *more = self.chat.undo().splitlines() or [""]
        print_message(f"removed: {first}{' …' * bool(more)}")

    def set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.replace("_", "-")
        if value:
            change(self.chat, name, value.strip())
        for setting, shown in settings(self.chat, name).items():
            print(f"{setting:15}{shown}", file=sys.stderr)

    def show(self, _: str) -> None:
        """Print the model's properties, the context used, and the settings."""
        chat, manifest = self.chat, self.chat.engine.manifest
        used = f"{chat.engine.position} of {chat.engine.context} positions"
        facts = {"model": manifest.name, "family": manifest.config.get("model_type"), "weights": manifest.weights,
                 "numerics": manifest.numerics, "context": used}  # fmt: skip
        for name, shown in facts.items():
            print(f"{name:15}{shown}", file=sys.stderr)
        self.set("")

    def reset(self, _: str) -> None:
        self.chat.reset()
        print_message("a new conversation")

    def _with_file(self, command: str, rest: str, act: Callable[[str], None], where: str) -> None:
        if not rest:
            print_message(f"{command} needs a file: {command} FILE")
            return
        path = os.path.expanduser(rest)
        act(path)
        print_message(f"{counted(len(self.chat.messages), 'message')} {where} {path}")

    def answer(self, ask: Callable[[Callable[[int, int], None]], Iterator[str]]) -> None:
        """Print an answer; `ask(on_prefill)` starts it, and returns its pieces."""
        from castiron.pipelines.cli.run import AnswerOutput

        chat, stopped = self.chat, False
        deltas = ask(lambda done, total: progress("reading", done / total))
        if chat.dropped:
            print_message(f"the context of {chat.engine.context} is full: the {chat.dropped} oldest messages were dropped")
        with Progress(quiet=self.quiet) as progress:
            try:
                first = next(deltas, "")
            except KeyboardInterrupt:
                stopped, first = True, ""

        output = AnswerOutput()
        try:
            if not stopped:
                output.write(first)
                for text in deltas:
                    output.write(text)
        except KeyboardInterrupt:
            stopped = True
        finally:
            deltas.close()
        output.write("\n")
        if stopped:
            print_message("stopped")
        if not self.quiet and chat.stream.prefill_seconds:
            self._print_speed()

    def _print_speed(self) -> None:
        from castiron.pipelines.cli.run import rate

        chat, stream = self.chat, self.chat.stream
        parts = [f"{chat.engine.position} of {chat.engine.context} positions"]
        if speed := rate(stream.steps, stream.decode_seconds):
            parts.insert(0, f"{speed:.1f} tok/s")
        if stream.finish_reason == "context":
            parts.append("the context is full")
        if stream.repeated:
            parts.append("stopped in a repetition loop")
        if stream.finish_reason == "length":
            parts.append(f"stopped at {counted(len(stream.tokens), 'token')}; /set max-tokens -1 for no limit")
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            print(f"{DIM}{', '.join(parts)}{PLAIN}", file=sys.stderr, flush=True)
        else:
            print_message(", ".join(parts))


def settings(chat: "Chat", name: str = "") -> dict[str, str]:
    """Return {name: value as text} of all settings, or of one."""
    values = {setting: getattr(chat.sampler.sampling, setting.replace("-", "_")) for setting in SAMPLING}
    values |= {"max-tokens": chat.max_tokens or -1, "system": chat.system}
    shown = {setting: NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)
             for setting, value in values.items()}  # fmt: skip
    if name and name not in shown:
        raise _unknown(name)
    return {name: shown[name]} if name else shown


def change(chat: "Chat", name: str, value: str) -> None:
    from castiron.pipelines.engine.sampling import Sampler

    if name == "system":
        chat.set_system_prompt(None if value == NONE else value)
    elif name == "max-tokens":
        chat.max_tokens = options.answer_limit(int(_number(name, value, int)))
    elif name in SAMPLING:
        number = None if name == "seed" and value == NONE else _number(name, value, SAMPLING[name])
        field = name.replace("-", "_")
        sampling = chat.sampler.sampling.with_options(**{field: number})
        chat.sampler = Sampler(sampling)
        if field in options.DRAWING and number is not None and not sampling.temperature:
            print_message(f"{name} has no effect without a temperature: /set temperature 0.7")
    else:
        raise _unknown(name)


def _unknown(name: str) -> PipelineError:
    return PipelineError(f"unknown setting: {name}; choose from {', '.join(SETTINGS)}")


def _number(name: str, value: str, kind: type) -> float:
    try:
        return kind(value)
    except ValueError:
        raise PipelineError(f"invalid {name}: {value!r}; give {'an integer' if kind is int else 'a number'}") from None


class ChatInput:
    """A reader of messages from stdin, with a file of those typed at a terminal."""

    def __init__(self, history: Path | None = None):
        self.terminal = sys.stdin.isatty()
        self.session = _prompt_session(history) if self.terminal else None

    def message(self) -> tuple[str, bool] | None:
        """Return (next message, whether it may be a command), or None at the end."""
        if (line := self._line(PROMPT)) is None:
            return None
        if line.lstrip().startswith(BLOCK) and ("\n" not in line or line.rstrip().endswith(BLOCK)):
            return self._block(line.lstrip()[len(BLOCK) :]), False
        message = line.rstrip("\n")
        return message, "\n" not in message

    def _block(self, line: str | None) -> str:
        lines: list[str] = []
        while line is not None and not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._line(MORE)
        if line is not None:
            lines.append(line.rstrip()[: -len(BLOCK)])
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if not self.terminal:
            data = sys.stdin.buffer.readline()
            return data.decode("utf-8", "surrogateescape").rstrip("\r\n") if data else None
        try:
            return self.session.prompt(prompt) if self.session else input(prompt)
        except EOFError:
            sys.stderr.write("\n")
            return None


def is_open_block(text: str) -> bool:
    """Return whether `text` starts a block of lines with triple quotes, and does not close it."""
    return text.lstrip().startswith(BLOCK) and BLOCK not in text.lstrip()[len(BLOCK) :]


def _prompt_session(history: Path | None) -> Any:
    from castiron.vmfb.atomic_write import PRIVATE_FILE, PRIVATE_FOLDER
    from castiron.vmfb.cache_folder import claim

    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.completion import Completer, DummyCompleter, PathCompleter, WordCompleter
        from prompt_toolkit.document import Document
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.output import create_output
        from prompt_toolkit.shortcuts import CompleteStyle
    except ImportError:
        # If readline is imported, input() can edit lines.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        return None

    class LineCompleter(Completer):
        commands = WordCompleter([f"{name} " if needed else name for name, (needed, _) in COMMANDS.items()], sentence=True)
        arguments = {
            "FILE": PathCompleter(expanduser=True),
            "NAME VALUE": WordCompleter([f"{name} " for name in SETTINGS], sentence=True),
        }

        def get_completions(self, document, complete_event):
            command, space, rest = document.text_before_cursor.partition(" ")
            if not space:
                return self.commands.get_completions(document, complete_event)
            completer = self.arguments.get(COMMANDS.get(command, ("",))[0], DummyCompleter())
            return completer.get_completions(Document(rest), complete_event)

    keys = KeyBindings()

    # So that the complete block is one entry of the history.
    @keys.add("enter", filter=Condition(lambda: is_open_block(get_app().current_buffer.text)))
    def add_line(event):
        event.current_buffer.newline(copy_margin=False)

    stored = None
    if history:
        try:
            history.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            claim(history)
            history.touch(mode=PRIVATE_FILE)
            history.chmod(PRIVATE_FILE)
            stored = FileHistory(history)
        except OSError as error:
            print_message(f"{history}: {error.strerror}; this chat is not stored in the history")
    return PromptSession(
        completer=LineCompleter(), complete_while_typing=False, complete_style=CompleteStyle.READLINE_LIKE, history=stored,
        output=create_output(always_prefer_tty=True), key_bindings=keys, prompt_continuation=MORE,
    )  # fmt: skip
