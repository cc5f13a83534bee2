"""Run a chat at a pseudo-terminal, slowed down for tests."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

SLOW = """
import sys, time
if sys.argv[2]:
    sys.modules[sys.argv[2]] = None
import castiron.vmfb.run.session
step = castiron.vmfb.run.session.Session.step
def slow(self, token):
    time.sleep(float(sys.argv[1]))
    return step(self, token)
castiron.vmfb.run.session.Session.step = slow
from castiron.pipelines.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


class Terminal:
    """A chat process at a pseudo-terminal, killed at the end of a `with` block.

    step: seconds that every decode step takes. columns: width of the terminal. without: a module
    that cannot be imported.
    """

    def __init__(self, *argv: str, step: float = 0.3, columns: int = 0, without: str = "", **environment: str):
        self.pid, self.end = pty.fork()
        if not self.pid:
            own = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
            os.execve(sys.executable, [sys.executable, "-c", SLOW, str(step), without, *argv], {**os.environ, **own})
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.shown, self._decoder = "", codecs.getincrementaldecoder("utf-8")()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.end)

    def leave(self) -> None:
        """Type Ctrl-D at an empty prompt; fail unless the chat ends with exit status 0."""
        self.prompt()
        self.type("\x04")
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        assert status == 0

    def prompt(self, pattern: str = r">[ \x08]") -> str:
        """Wait for the next prompt and its line editor; return the output before it."""
        before = self.wait_for(pattern)
        self.listens()
        return before

    def wait_for(self, pattern: str) -> str:
        """Return the output up to the first match of `pattern`, and drop it from `shown`."""
        until = time.monotonic() + 60
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.shown!r}"
            self._look()
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def _look(self) -> None:
        """Read output for up to a second; a character's bytes may arrive in two reads."""
        if select.select([self.end], [], [], 1)[0]:
            self.shown += self._decoder.decode(os.read(self.end, 4096))

    def listens(self) -> None:
        """Wait until the line editor reads single keys; it shows its prompt before that."""
        until = time.monotonic() + 60
        while termios.tcgetattr(self.end)[3] & termios.ICANON:
            assert time.monotonic() < until, "the line editor never took the terminal over"
            time.sleep(0.02)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())


def at_terminal(code: str) -> tuple[str, str]:
    """Run code with stderr at a terminal; return its stdout, and its stderr followed by `end`."""
    terminal, inside = os.openpty()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=inside, text=True, check=True)
    os.write(inside, b"end")
    os.close(inside)
    shown = b""
    # A terminal may hand over what was written in several parts.
    while not shown.endswith(b"end"):
        shown += os.read(terminal, 1 << 16)
    os.close(terminal)
    return done.stdout, shown.decode()
