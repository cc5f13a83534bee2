"""A chat at a pseudo-terminal, as slow as a test can look."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time

SLOW = """
import sys, time
if sys.argv[2]:
    sys.modules[sys.argv[2]] = None
import castiron.vmfb.session
step = castiron.vmfb.session.Session.step
def slow(self, token):
    time.sleep(float(sys.argv[1]))
    return step(self, token)
castiron.vmfb.session.Session.step = slow
from castiron.pipelines.cli import main
sys.exit(main(sys.argv[3:]))
"""


class Terminal:
    """A chat at a pseudo-terminal of so many `columns`, whose steps take `step` seconds, `without` a module; killed at the
    end of a `with` if it still runs."""

    def __init__(self, *argv: str, step: float = 0.3, columns: int = 0, without: str = "", **environment: str):
        self.pid, self.end = pty.fork()
        if not self.pid:
            own = {"TERM": "xterm", "INPUTRC": os.devnull, **environment}
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
        """Ctrl-D at an empty prompt; AssertionError if that is not the end of a good chat."""
        self.prompt()
        self.type("\x04")
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        assert status == 0

    def prompt(self, pattern: str = "> ") -> str:
        """What is shown up to the next prompt, at which readline listens then."""
        before = self.wait_for(pattern)
        self.listens()
        return before

    def wait_for(self, pattern: str) -> str:
        """What is shown up to the first match of `pattern`, which is taken away."""
        until = time.monotonic() + 60
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.shown!r}"
            self._look()
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def interrupts(self) -> None:
        """Ctrl-C at the prompt, until there is a new one: between two keys readline may sleep over a signal."""
        until = 0.0
        while "> " not in self.shown:
            if time.monotonic() > until:
                self.type("\x03")
                until = time.monotonic() + 5
            self._look()
        self.prompt()

    def _look(self) -> None:
        """Takes what has come within a second; a character may come in two pieces."""
        if select.select([self.end], [], [], 1)[0]:
            self.shown += self._decoder.decode(os.read(self.end, 4096))

    def listens(self) -> None:
        """Waits until readline takes single keys; its prompt shows before that."""
        until = time.monotonic() + 60
        while termios.tcgetattr(self.end)[3] & termios.ICANON:
            assert time.monotonic() < until, "readline never took the terminal over"
            time.sleep(0.02)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())
