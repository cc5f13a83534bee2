"""The terminal of a chat: lines in, commands, answers out, Ctrl-C."""

import os
import sys

from castiron.pipelines.cli import explain
from castiron.pipelines.commands.run import speed
from castiron.pipelines.commands.spoken import Spoken
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.progress import Progress, say

PROMPT, MORE = "> ", ". "
HELP = """\
/reset       begin a new conversation, with the same system message
/save FILE   write the conversation to a file
/load FILE   go on with a conversation that /save wrote
/help        list the commands
/exit        end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ continues in the next one."""


class Console:
    """Reads turns from stdin, with line editing at a terminal; answers go to stdout, all else to stderr."""

    def __init__(self, chat: Chat, quiet: bool = False):
        self.chat, self.quiet = chat, quiet
        self.terminal = sys.stdin.isatty()

    def run(self) -> int:
        """Until /exit or the end of the input; the exit status."""
        if self.terminal:
            edit_lines()
        failed = False
        while True:
            try:
                words = self.read()
            except KeyboardInterrupt:
                # At the prompt there is nothing to stop but the line.
                sys.stderr.write("\n")
                continue
            if words is None or words.strip() == "/exit":
                return int(failed)
            try:
                self.turn(words)
            except (KeyboardInterrupt, BrokenPipeError):
                raise
            except Exception as error:
                sentence = explain(error)
                if sentence is None:
                    raise
                say(sentence)
                # Who cannot see it learns it from the exit status.
                failed = failed or not self.terminal

    def read(self) -> str | None:
        """A turn, lines joined that end in a backslash; None at the end of the input."""
        lines: list[str] = []
        while True:
            line = self._line(MORE if lines else PROMPT)
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        if not self.terminal:
            data = sys.stdin.buffer.readline()
            return data.decode("utf-8", "surrogateescape").rstrip("\r\n") if data else None
        try:
            return input(prompt)
        except EOFError:
            sys.stderr.write("\n")
            return None

    def turn(self, words: str) -> None:
        command, _, rest = words.strip().partition(" ")
        rest = os.path.expanduser(rest.strip())
        if not command:
            return
        if command == "/help":
            print(HELP, file=sys.stderr)
        elif command == "/reset":
            self.chat.reset()
            say("a new conversation")
        elif command in ("/save", "/load"):
            if not rest:
                say(f"{command} needs a file: {command} FILE")
                return
            (self.chat.save if command == "/save" else self.chat.load)(rest)
            count = len(self.chat.messages)
            say(f"{count} message{'s' * (count != 1)} {'in' if command == '/save' else 'from'} {rest}")
        elif command.startswith("/") and command[1:].isalpha():
            say(f"{command} is not a command; /help lists them")
        else:
            self.answer(words)

    def answer(self, words: str) -> None:
        chat = self.chat
        stopped = False
        deltas = chat.answer(words, lambda done, total: progress("reading", done / total))
        if chat.dropped:
            say(f"the context of {chat.session.context} is full: the {chat.dropped} oldest messages were dropped")
        with Progress(quiet=self.quiet) as progress:
            try:
                first = next(deltas, "")
            except KeyboardInterrupt:
                stopped, first = True, ""
        try:
            if not stopped:
                spoken = Spoken()
                spoken.write(first)
                for text in deltas:
                    spoken.write(text)
        except KeyboardInterrupt:
            stopped = True
        finally:
            deltas.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if stopped:
            say("stopped")
        if not self.quiet and chat.generation.prefill_seconds:
            print(speed(chat.generation, chat.usual_tokens), file=sys.stderr)


def edit_lines() -> None:
    """Line editing and a history for input(), where the system has readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_history_length(1000)
