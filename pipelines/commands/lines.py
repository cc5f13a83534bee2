"""What a person types: line editing, history, completion, and messages of several lines."""

import contextlib
import json
import select
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from castiron.pipelines.progress import say
from castiron.vmfb.aside import write_atomically

PROMPT, MORE = "> ", ". "
BLOCK = '"""'
# Messages that a history holds.
REMEMBERED = 1000
# Seconds in which the next line of a paste follows where the terminal does not mark pastes; nobody types as fast.
PASTE = 0.02


class Lines:
    """Messages from stdin, with line editing at a terminal whose Python has readline.

    `complete` gives the whole lines that a beginning of a line may become. `history`: the file that keeps what was
    typed at a terminal for the next time.
    """

    def __init__(self, complete: Callable[[str], list[str]], history: Path | None = None):
        self.terminal = sys.stdin.isatty()
        self.readline = _readline() if self.terminal else None
        self.marks_pastes = self.readline is not None and not _is_libedit(self.readline)
        self.history = history if self.readline else None
        if self.readline:
            _edit(self.readline, complete)
            for message in _remembered(self.history) if self.history else ():
                self.readline.add_history(message)

    def message(self) -> tuple[str, bool] | None:
        """The next message, and whether it may be a command: one of several lines is none; None at the end of the input.

        Lines are joined that end in a backslash, those of one paste, and those between two lots of three quotes.
        KeyboardInterrupt for Ctrl-C where nothing is typed, or where it comes twice.
        """
        lines: list[str] = []
        while (line := self._line(MORE if lines else PROMPT)) is not None:
            if not lines and _opens(line):
                return self._remember(self._block(line.lstrip()[len(BLOCK) :])), False
            lines.append(line)
            if not line.endswith("\\"):
                break
            lines[-1] = line[:-1]
        if not lines:
            return None
        message = self._remember("\n".join(lines).rstrip("\n"))
        return message, "\n" not in message

    def _block(self, line: str | None) -> str:
        """The text up to the closing quotes, or to the end of the input, whose first line is `line`."""
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
        kept = ""
        while True:
            try:
                line = self._input(prompt, kept)
                while not self.marks_pastes and select.select([sys.stdin], [], [], PASTE)[0]:
                    line += "\n" + input()
                return line
            except EOFError:
                sys.stderr.write("\n")
                return None
            except KeyboardInterrupt:
                sys.stderr.write("\n")
                typed = self.readline.get_line_buffer() if self.readline else ""
                if typed in ("", kept):
                    raise
                kept = typed

    def _input(self, prompt: str, typed: str) -> str:
        """A line, of which `typed` stands there already."""
        readline = self.readline
        if readline is None:
            return input(prompt)
        readline.set_startup_hook(lambda: readline.insert_text(typed))
        try:
            return input(prompt)
        finally:
            readline.set_startup_hook(None)

    def _remember(self, message: str) -> str:
        if self.readline and message.strip():
            self.readline.add_history(message)
            if self.history:
                try:
                    # Its folder is for no one else to read.
                    self.history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with open(self.history, "a", encoding="ascii") as file:
                        file.write(json.dumps(message) + "\n")
                except OSError as error:
                    say(f"{self.history} cannot be written, so this chat leaves no history: {error.strerror}")
                    self.history = None
        return message


def _opens(line: str) -> bool:
    """Whether a block begins; what is pasted may begin with quotes of its own."""
    return line.lstrip().startswith(BLOCK) and ("\n" not in line or line.rstrip().endswith(BLOCK))


def _remembered(path: Path) -> list[str]:
    """The last messages of a history, a JSON string a line; the file keeps no more than twice as many."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
        if len(lines) > 2 * REMEMBERED:
            lines = lines[-REMEMBERED:]
            write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError:
        return []
    found: deque[str] = deque(maxlen=REMEMBERED)
    for line in lines:
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            # Readline's strings end at a zero.
            if isinstance(message, str) and "\0" not in message:
                found.append(message)
    return list(found)


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline


def _is_libedit(readline: ModuleType) -> bool:
    return "libedit" in (readline.__doc__ or "")


def _edit(readline: ModuleType, complete: Callable[[str], list[str]]) -> None:
    """Sets readline, and the terminal, up for messages."""
    readline.set_auto_history(False)
    readline.set_completer_delims(" ")

    def candidate(_: str, index: int) -> str | None:
        line, begin = readline.get_line_buffer(), readline.get_begidx()
        found = complete(line[: readline.get_endidx()])
        return found[index][begin:] if index < len(found) else None

    readline.set_completer(candidate)
    libedit = _is_libedit(readline)
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    if not libedit:
        # Python turns this off for its own prompt.
        readline.parse_and_bind("set enable-bracketed-paste on")


@contextlib.contextmanager
def typed_ahead():
    """A terminal that keeps what was typed while an answer came when Ctrl-C stops it."""
    try:
        import termios
    except ImportError:
        termios = None
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    kept = [*before]
    kept[3] |= termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
