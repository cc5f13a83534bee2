"""Run pytest in forked children of a process that has loaded the large libraries, not castiron.

`running` starts this process. A request is a line of JSON on stdin with "arguments", "log",
"report", "seconds" and "environment". The response is a line of JSON on stdout with "status":
pytest's exit status, minus the number of the signal that ended it, or null at the time limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time

# pytest's exit status if all tests passed, and if one failed.
PASSED, FAILED = 0, 1


class Report:
    """A pytest plugin that records the tests that passed and the first failure with its message."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: tuple[str, str] | None = None

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)
        self._note(report)

    def pytest_collectreport(self, report) -> None:
        self._note(report)

    def pytest_collection_finish(self) -> None:
        """Disable shrinking: any failing example is enough."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", parent=settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def _note(self, report) -> None:
        if report.failed and self.failed is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
            self.failed = report.nodeid, next(iter(reason.strip().splitlines()), "")


def child(request: dict) -> None:
    """Run pytest in the forked child and exit."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    status = 70
    try:
        import pytest

        report = Report()
        status = int(pytest.main(request["arguments"], plugins=[report]))
        location = getattr(sys.modules.get("castiron"), "__file__", None)
        with open(request["report"], "w") as file:
            json.dump({"passed": report.passed, "failed": report.failed, "castiron": location}, file)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(process: int, seconds: float) -> int | None:
    """Return a child's exit status, None at the time limit; then kill its process group."""
    end, status = time.monotonic() + seconds, None
    while time.monotonic() < end:
        ended, word = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(word)
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            child(request)
        print(json.dumps({"status": wait(process, request["seconds"])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
