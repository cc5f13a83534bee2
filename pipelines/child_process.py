"""Run functions of libraries that may crash or never return, in a child process with limits of time
and memory."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from castiron.pipelines.errors import PipelineError

# Stack of the thread that runs a function: libraries recurse deeply. `run_on_large_stack` has twice as much,
# so that what succeeded in a child process doesn't overflow the stack here.
CHILD_STACK_BYTES, STACK_BYTES = 32 << 20, 64 << 20
# Wall-clock time for each second of processor time, and for starting the process, on a busy machine.
PATIENCE, START_SECONDS = 10, 20
# Lower priority than the threads that run the model.
NICENESS = 10
# The child imports from where this process does.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from castiron.pipelines.child_process import main; main()"


class LimitExceeded(Exception):
    """An error: a function in a child process exceeded a limit, crashed, or raised an unexpected
    exception."""


class ChildProcess:
    """A child process that runs one function at a time.

    It starts at the first call, and again at the next call after it was killed or has ended.
    """

    def __init__(self, seconds: float, max_bytes: int, initialise: Callable[..., Any] = bool, *arguments: Any):
        """Set the limits; the process starts at the first call.

        seconds: limit of processor time per call, where the platform can set one; wall-clock time
        is limited to `PATIENCE` times as much. max_bytes: memory of the process, where the platform
        can limit it.
        `initialise(*arguments)` runs in each new process before the first call.
        """
        self.seconds, self.max_bytes, self._initialise = seconds, max_bytes, (name_of(initialise), arguments)
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(*arguments)`, run in the child process.

        `function` is defined at module level; arguments and result are JSON values. Raises
        PipelineError if the function raises it, and LimitExceeded for any other failure.
        """
        with self._lock:
            try:
                answer = self._ask(function, arguments)
            except (OSError, ValueError):
                raise LimitExceeded(self._reason()) from None
            except BaseException:
                self._kill()
                raise
        if "error" in answer:
            raise PipelineError(answer["error"])
        if "failure" in answer:
            raise LimitExceeded(answer["failure"])
        return answer["value"]

    def stop(self) -> None:
        """Kill the process, and with it a call in progress."""
        if (process := self._process) is not None and self._pid == os.getpid():
            process.kill()
            process.wait()

    def _ask(self, function: Callable[..., Any], arguments: tuple) -> dict[str, Any]:
        wait = PATIENCE * self.seconds
        if self._process is None or self._pid != os.getpid() or self._process.poll() is not None:
            command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
            self._pid, wait = os.getpid(), wait + START_SECONDS
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self._send(self.seconds, self.max_bytes)
            self._send(*self._initialise)
        timer = threading.Timer(wait, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._send(name_of(function), arguments)
            assert self._process.stdout
            return json.loads(self._process.stdout.readline())
        finally:
            timer.cancel()

    def _send(self, *message: Any) -> None:
        assert self._process and self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _reason(self) -> str:
        status = self._kill()
        if status in (-getattr(signal, "SIGPROF", 0), -getattr(signal, "SIGKILL", 0)):
            return f"it takes longer than {self.seconds:g} s"
        if status == -signal.SIGSEGV:
            return f"it nests too deep for a stack of {CHILD_STACK_BYTES >> 20} MB"
        return f"it needs more memory than {self.max_bytes >> 20} MB or ends the process (status {status})"

    def _kill(self) -> int | None:
        """Kill the process and return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A process that ended by itself has an exit status that says why.
            process.wait(0.2 if process.stdout and not process.stdout.closed else 0)
        process.kill()
        process.communicate()
        return process.returncode


def run_on_large_stack(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, run in a low-priority thread with a stack of `STACK_BYTES`."""
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        if sys.platform == "linux":
            # Only Linux has a priority per thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            result.append(function(*arguments))
        except BaseException as raised:
            error.append(raised)

    _start(run, STACK_BYTES).join()
    if error:
        raise error[0]
    return result[0]


_stack_size = threading.Lock()


def _start(function: Callable[[], None], stack_bytes: int) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    with _stack_size:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"


def main() -> None:
    """Run the functions named by lines of JSON on stdin, and write each result to stdout as a line
    of JSON, until stdin ends."""
    # Ctrl-C is for the parent. Stdout carries answers only, so what libraries print goes to the null device.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    messages = map(json.loads, sys.stdin.buffer)
    seconds, max_bytes = next(messages)
    _limit_memory(max_bytes)
    if hasattr(os, "nice"):
        os.nice(NICENESS)

    def run() -> None:
        initialise, arguments = next(messages)
        _function(initialise)(*arguments)
        for name, parameters in messages:
            function = _function(name)
            _limit_time(seconds)
            answer = json.dumps(_answer(function, parameters)).encode()
            _limit_time(0)
            answers.write(answer + b"\n")
            answers.flush()

    _start(run, CHILD_STACK_BYTES).join()


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _answer(function: Callable[..., Any], arguments: list) -> dict[str, Any]:
    try:
        return {"value": function(*arguments)}
    except PipelineError as error:
        return {"error": str(error)}
    except BaseException as error:
        # A panic of a Rust library is a BaseException.
        return {"failure": "it needs too much memory" if isinstance(error, MemoryError) else str(error)}


def _limit_memory(max_bytes: int) -> None:
    try:
        import resource
    except ModuleNotFoundError:
        return
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, max_bytes)):
        hard = resource.getrlimit(kind)[1]
        # Some systems, such as macOS, cannot limit the address space.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_time(seconds: float) -> None:
    """Let the system kill this process after `seconds` more of processor time; 0 removes the
    limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
