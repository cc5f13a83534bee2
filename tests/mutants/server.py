"""Runs pytest in forked children that have the large libraries loaded already, and castiron never: started by `running`.

A request is a line of JSON on stdin, {"arguments", "log", "report", "seconds", "environment"}; the answer is a line on stdout,
{"status": pytest's exit status, or minus the signal that ended it, or null where it ran past its seconds}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time

# What pytest's `status` means where all of it ran.
PASSED, FAILED = 0, 1


class Told:
    """What a run of pytest has to tell: the ids of tests that passed, and of the first that failed with its reason."""

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
        """That an example fails is enough; nobody wants the smallest."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", parent=settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def _note(self, report) -> None:
        if report.failed and self.failed is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
            self.failed = report.nodeid, next(iter(reason.strip().splitlines()), "")


def child(request: dict) -> None:
    """In the forked child: never returns."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    status = 70
    try:
        import pytest

        told = Told()
        status = int(pytest.main(request["arguments"], plugins=[told]))
        place = getattr(sys.modules.get("castiron"), "__file__", None)
        with open(request["report"], "w") as file:
            json.dump({"passed": told.passed, "failed": told.failed, "castiron": place}, file)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(process: int, seconds: float) -> int | None:
    """The exit status of a child, whose whole group is then killed; None where it ran longer."""
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
