"""The terminal of a chat: messages in, commands, answers out, Ctrl-C."""

import glob
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from castiron.pipelines.cli import explain
from castiron.pipelines.commands.lines import Lines, typed_ahead
from castiron.pipelines.commands.run import rate
from castiron.pipelines.commands.settings import NAMES, change, settings
from castiron.pipelines.commands.spoken import Spoken
from castiron.pipelines.commands.wrapping import Wrapper, columns
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.progress import Progress, say

# Command, what it takes, what it does.
COMMANDS = {
    "/retry": ("", "answer the last question once more"),
    "/undo": ("", "take the last question and its answer back"),
    "/set": ("NAME VALUE", "change a setting, or show them all"),
    "/reset": ("", "begin a new conversation, with the same system message"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "go on with a conversation that /save wrote"),
    "/help": ("", "list the commands"),
    "/quit": ("", "end, as /exit and Ctrl-D do"),
}
HELP = "\n".join(f"{f'{name} {takes}':17}{does}" for name, (takes, does) in COMMANDS.items())
HELP += '''
Ctrl-C stops an answer. A paste is one message; so are the lines between two lots of """, and a line that ends in \\
continues in the next one. Tab completes commands, settings and files; the arrow up brings back what was typed.'''
ENDS = ("/quit", "/exit")


class Console:
    """Reads messages from stdin; answers go to stdout, all else to stderr. `history`: the file that remembers messages."""

    def __init__(self, chat: Chat, quiet: bool = False, history: Path | None = None):
        self.chat, self.quiet = chat, quiet
        self.lines = Lines(completions, history)
        self.run_command: dict[str, Callable[[str], None]] = {
            "/retry": lambda _: self.answer(self.chat.retry),
            "/undo": self.undo,
            "/set": self.set,
            "/reset": self.reset,
            "/save": lambda rest: self._with_file("/save", rest, self.chat.save, "in"),
            "/load": lambda rest: self._with_file("/load", rest, self.chat.load, "from"),
            "/help": lambda _: print(HELP, file=sys.stderr),
        }

    def run(self) -> int:
        """Until /quit or the end of the input; the exit status."""
        with typed_ahead():
            return self._run()

    def _run(self) -> int:
        failed = False
        while True:
            try:
                message = self.lines.message()
            except KeyboardInterrupt:
                say("Ctrl-D or /quit ends the chat")
                continue
            if message is None or message[1] and message[0].strip() in ENDS:
                return int(failed)
            try:
                self.turn(*message)
            except (KeyboardInterrupt, BrokenPipeError):
                raise
            except Exception as error:
                sentence = explain(error)
                if sentence is None:
                    raise
                say(sentence)
                # Who cannot see it learns it from the exit status.
                failed = failed or not self.lines.terminal

    def turn(self, words: str, may_command: bool = True) -> None:
        """One message, or one command where it may be one."""
        command, _, rest = words.strip().partition(" ")
        if not command:
            return
        if may_command and command in self.run_command:
            self.run_command[command](rest.strip())
        elif may_command and command.startswith("/") and command[1:].isalpha():
            say(f"{command} is not a command; /help lists them")
        else:
            self.answer(lambda progress: self.chat.answer(words, progress))

    def undo(self, _: str) -> None:
        first, *more = self.chat.undo().splitlines() or [""]
        say(f"taken back: {first}{' …' * bool(more)}")

    def set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.replace("_", "-")
        if value:
            change(self.chat, name, value.strip())
        for known, held in settings(self.chat, name).items():
            print(f"{known:15}{held}", file=sys.stderr)

    def reset(self, _: str) -> None:
        self.chat.reset()
        say("a new conversation")

    def _with_file(self, command: str, rest: str, act: Callable[[str], None], where: str) -> None:
        if not rest:
            say(f"{command} needs a file: {command} FILE")
            return
        path = os.path.expanduser(rest)
        act(path)
        count = len(self.chat.messages)
        say(f"{count} message{'s' * (count != 1)} {where} {path}")

    def answer(self, ask: Callable[[Callable[[int, int], None]], Iterator[str]]) -> None:
        """Writes what `ask` of a progress answers."""
        chat, wrapper = self.chat, Wrapper()
        stopped = False
        deltas = ask(lambda done, total: progress("reading", done / total))
        if chat.dropped:
            say(f"the context of {chat.session.context} is full: the {chat.dropped} oldest messages were dropped")
        with Progress(quiet=self.quiet) as progress:
            try:
                first = next(deltas, "")
            except KeyboardInterrupt:
                stopped, first = True, ""

        spoken = Spoken(wrap=lambda text: wrapper.wrap(text, columns(sys.stdout)))
        try:
            if not stopped:
                spoken.write(first)
                for text in deltas:
                    spoken.write(text)
        except KeyboardInterrupt:
            stopped = True
        finally:
            deltas.close()
        spoken.write("\n")
        if stopped:
            say("stopped")
        if not self.quiet and chat.generation.prefill_seconds:
            whisper(spent(chat))


def spent(chat: Chat) -> str:
    """The line after an answer: its speed, how full the context is, and why it is no longer."""
    generation = chat.generation
    speed = rate(generation.steps, generation.decode_seconds)
    parts = [f"{chat.session.position} of {chat.session.context} positions"]
    if speed:
        parts.insert(0, f"{speed:.1f} tok/s")
    if generation.finish_reason == "context":
        parts.append("the context is full")
    if generation.repeated:
        parts.append("stopped where it repeated itself")
    if generation.finish_reason == "length" and chat.usual_tokens:
        parts.append(f"stopped at {len(generation.tokens)} tokens: /set max-tokens N allows more")
    return ", ".join(parts)


def whisper(line: str) -> None:
    """A line on stderr, dimmed at a terminal that can."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        print(f"\x1b[2m{line}\x1b[0m", file=sys.stderr, flush=True)
    else:
        say(line)


def completions(line: str) -> list[str]:
    """The lines that `line`, of which a command is typed, may become."""
    command, space, rest = line.partition(" ")
    if not space:
        found = [f"{name} " if takes else name for name, (takes, _) in COMMANDS.items()]
        return [name for name in found if line and name.startswith(line)]
    if COMMANDS.get(command, ("",))[0] == "FILE":
        return [f"{command} {path}" for path in files(rest)]
    if command == "/set":
        return [f"{command} {name} " for name in NAMES if name.startswith(rest)]
    return []


def files(beginning: str) -> list[str]:
    """The paths that begin so, a folder's with its slash; a home's ~ stays."""
    place = os.path.expanduser(beginning)
    found = sorted(glob.glob(f"{glob.escape(place)}*"))
    return [beginning + path[len(place) :] + "/" * os.path.isdir(path) for path in found]
