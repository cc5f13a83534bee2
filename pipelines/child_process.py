"""Run functions that may crash or hang in a child process, with limits on time and memory."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from castiron.pipelines.errors import PipelineError

# Stack sizes of the threads that run a function in the child process and in `run_on_large_stack`.
# Libraries recurse deeply; a function that succeeded in the child doesn't overflow the larger stack.
CHILD_STACK_BYTES, STACK_BYTES = 32 << 20, 64 << 20
# Limits for a busy machine: wall-clock seconds per second of processor time, seconds to start a process.
PATIENCE, START_SECONDS = 10, 20
# Added to the nice value, so that functions have a lower priority than the threads of the model.
NICENESS = 10
# The child gets this process's `sys.path`, so that it imports the same modules.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from castiron.pipelines.child_process import main; main()"


class LimitExceeded(Exception):
    """Raised if a function in a child process exceeds a limit, crashes, or raises an exception.

    A PipelineError of the function is raised as such.
    """


class Interrupted(LimitExceeded):
    """Raised if a call was stopped, or the machine is too busy for its processor time."""


class ChildProcess:
    """A child process that runs one function at a time; a call starts it if it is not running."""

    def __init__(
        self, seconds: float, max_bytes: int, initialise: Callable[..., Any] = bool, *arguments: Any, niceness: int = NICENESS
    ):  # fmt: skip
        """Store the limits; seconds: max processor time of a call. max_bytes: of the process.

        initialise: function that each new process calls first, with `arguments`.
        """
        self.seconds, self.max_bytes, self._initialise = seconds, max_bytes, (name_of(initialise), arguments)
        self.niceness = niceness
        # Processor time that the last call used; at least `seconds` if it exceeded a limit.
        self.used = 0.0
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def call(self, function: Callable[..., Any], *arguments: Any, wall_seconds: float | None = None) -> Any:
        """Run `function(*arguments)` in the child; the arguments and the result are JSON values.

        wall_seconds: max wall-clock time without the start of the process; by default PATIENCE
        times the processor time.
        """
        with self._lock:
            self.used = self.seconds
            try:
                answer = self._ask(function, arguments, PATIENCE * self.seconds if wall_seconds is None else wall_seconds)
                self.used = answer["used"]
            except (OSError, ValueError):
                raise self._reason() from None
            except BaseException:
                self._kill()
                raise
        if "error" in answer:
            raise PipelineError(answer["error"])
        if "failure" in answer:
            raise LimitExceeded(answer["failure"])
        return answer["value"]

    def stop(self) -> None:
        """Kill the process. A call in progress raises Interrupted."""
        if (process := self._process) is not None and self._pid == os.getpid():
            process.kill()
            process.wait()

    def _ask(self, function: Callable[..., Any], arguments: tuple, wait: float) -> dict[str, Any]:
        if self._process is None or self._pid != os.getpid() or self._process.poll() is not None:
            command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
            self._pid, wait = os.getpid(), wait + START_SECONDS
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self._send(self.seconds, self.max_bytes, self.niceness)
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

    def _reason(self) -> LimitExceeded:
        status = self._kill()
        if status == -getattr(signal, "SIGKILL", 0) and hasattr(signal, "setitimer"):
            return Interrupted("the machine is too busy to run it for the time that it may take")
        if status in (-getattr(signal, "SIGPROF", 0), -getattr(signal, "SIGKILL", 0)):
            return LimitExceeded(f"it takes longer than {self.seconds:g} s")
        if status == -signal.SIGSEGV:
            return LimitExceeded(f"it nests too deep for a stack of {CHILD_STACK_BYTES >> 20} MB")
        return LimitExceeded(f"it needs more memory than {self.max_bytes >> 20} MB or ends the process (status {status})")

    def _kill(self) -> int | None:
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
    """Run a function in a low-priority thread with a stack of 64 MiB; return its result."""
    future: Future[Any] = Future()

    def run() -> None:
        if sys.platform == "linux":
            # Only Linux has a priority per thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    _start(run, STACK_BYTES)
    return future.result()


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
    """Run as the child process: read function calls from stdin, and write their results to stdout.

    The first line of JSON has the limits, the second the function to call first.
    """
    # The parent handles Ctrl-C. What libraries print goes to the null device, so that the pipe to
    # the parent has answers only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    messages = map(json.loads, sys.stdin.buffer)
    seconds, max_bytes, niceness = next(messages)
    _limit_memory(max_bytes)
    if hasattr(os, "nice"):
        os.nice(niceness)

    def run() -> None:
        initialise, arguments = next(messages)
        _function(initialise)(*arguments)
        for name, parameters in messages:
            function = _function(name)
            start = time.process_time()
            _limit_time(seconds)
            answer = _answer(function, parameters)
            _limit_time(0)
            answer = json.dumps({**answer, "used": time.process_time() - start}).encode()
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
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
