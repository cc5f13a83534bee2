"""Apply mutants one at a time to a copy of castiron and run the tests that must notice them.

The checkout never changes: Python imports castiron from a temporary copy of it. No run uses results
of other code: each mutated file gets a new modification time, so that Python compiles it again, and
each run gets a new castiron cache. Runs share iree-compile's results, whose keys contain the text
of the module.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from castiron.vmfb.cache import cache_root
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.server import FAILED, PASSED

COPIED = ("castiron", "emitter", "vmfb", "pipelines", "reference", "tests", "docs", "pyproject.toml", "README.md", "Makefile")
# The only pytest plugins that the tests use; the others take longer to load than most tests.
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
# Modules that the server loads before it forks the runs.
LOADED = ("numpy", "hypothesis", "pytest", *PLUGINS, "iree.runtime", "torch", "transformers.models.llama.modeling_llama")
SECONDS = 400  # limit for the tests of one mutant
UNCHANGED_SECONDS = 1800  # limit for all tests of the catalogue without a mutant


class UnchangedCodeFails(Exception):
    """The error if a test does not pass without a mutant, so that no outcome has a meaning."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of the tests of one mutant.

    status: "caught" (the test `by` failed with the message `why`), "survived", "too long" (stopped
    at the time limit), or "broken" (pytest could not run the tests).
    """

    status: str
    seconds: float
    by: str = ""
    why: str = ""


class Copy:
    """A copy of the checkout below `folder`, to which mutants are applied."""

    def __init__(self, folder: Path):
        self.root, self.current = folder / "copy", 0
        self.root.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, self.root / name)

    @contextlib.contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant, and restore its file at the end."""
        path = self.root / mutant.file
        before, original = path.stat(), path.read_bytes()
        path.write_text(mutant.mutated(self.root))
        # Python takes cached bytecode for this source if the source's second and size are the same.
        self.current += 1
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + self.current * 10**10))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Runner:
    """A server process that runs tests of a copy, each run in a forked child."""

    def __init__(self, folder: Path, copy: Copy):
        self.folder, self.copy, self.count = folder, copy, 0
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy.root),
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.server", *LOADED], cwd=copy.root, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def run(self, tests: Sequence[str], seconds: float) -> tuple[int | None, dict]:
        """Run tests up to the first failure; return the status (see `server`) and the report."""
        self.count += 1
        location = self.folder / str(self.count)
        (location / "cache").mkdir(parents=True)
        (store := cache_root() / "compile").mkdir(parents=True, exist_ok=True)
        (location / "cache" / "compile").symlink_to(store)
        root, plugins = str(self.copy.root), [word for plugin in PLUGINS for word in ("-p", plugin)]
        options = ["-x", "-q", *plugins, "-p", "no:cacheprovider", "-c", f"{root}/pyproject.toml", "--rootdir", root]
        request = {
            "arguments": [*options, "--basetemp", str(location / "tmp"), *tests],
            "log": str(location / "log"),
            "report": str(location / "report"),
            "seconds": seconds,
            "environment": {"CASTIRON_CACHE": str(location / "cache"), "TMPDIR": str(location)},
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())["status"]
        report: dict = {"passed": [], "failed": None, "castiron": None}
        with contextlib.suppress(OSError, ValueError):
            report = json.loads((location / "report").read_text())
        code_path = report["castiron"]
        if code_path and not Path(code_path).is_relative_to(self.copy.root):
            raise UnchangedCodeFails(f"the tests import castiron from {code_path}; they must import it from {self.copy.root}")
        report["log"] = (location / "log").read_text(errors="replace")
        shutil.rmtree(location, ignore_errors=True)
        return status, report


def examine(mutants: Sequence[Mutant], original: bool = True) -> Iterator[tuple[Mutant, Outcome]]:
    """Yield each mutant with its outcome, in order.

    original: run the tests of all mutants without a mutant first, and raise UnchangedCodeFails if
    one does not pass.
    """
    with tempfile.TemporaryDirectory(prefix="castiron-mutants-") as name:
        folder = Path(name)
        runner = Runner(folder, copy := Copy(folder))
        try:
            if original:
                _check_unchanged(runner, mutants)
            for mutant in mutants:
                with copy.holding(mutant):
                    yield mutant, _outcome(runner, mutant)
        finally:
            runner.close()


def _check_unchanged(runner: Runner, mutants: Sequence[Mutant]) -> None:
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    status, report = runner.run(tests, UNCHANGED_SECONDS)
    if status != PASSED:
        test, why = report["failed"] or ("pytest", report["log"].strip()[-300:])
        raise UnchangedCodeFails(f"{test} fails without a mutant: {why}")
    for test in tests:
        if not any(passed == test or passed.startswith((f"{test}[", f"{test}::")) for passed in report["passed"]):
            raise UnchangedCodeFails(f"no test ran for {test}; name a test that exists")


def _outcome(runner: Runner, mutant: Mutant) -> Outcome:
    start = time.monotonic()
    status, report = runner.run(mutant.tests, SECONDS)
    seconds = time.monotonic() - start
    test, why = report["failed"] or ("", "")
    if status == PASSED:
        return Outcome("survived", seconds)
    if status is None:
        return Outcome("too long", seconds, mutant.tests[0], f"stopped after {SECONDS} s")
    if status < 0:
        return Outcome("caught", seconds, mutant.tests[0], f"ended by signal {-status}")
    if status == FAILED and test:
        return Outcome("caught", seconds, test, why)
    return Outcome("broken", seconds, test, why or report["log"].strip()[-300:])
