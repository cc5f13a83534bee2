"""Apply mutants one at a time to a copy of castiron and run the tests that must notice them.

The checkout never changes: pytest imports castiron from a temporary copy of it. No run uses results
of other code: each mutated file gets a new modification time, so that Python compiles it again, and
each run gets a new castiron cache. Runs share iree-compile's results, whose keys contain the text
of the module.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from castiron.vmfb.cache_folder import cache_root
from tests.mutants.mutant import ROOT, Mutant

COPIED = ("castiron", "emitter", "vmfb", "pipelines", "reference", "tests", "docs", "pyproject.toml", "README.md", "Makefile")
# The only pytest plugins that the tests use; the others take longer to load than most tests.
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
# pytest's exit status if all tests passed, and if one failed.
PASSED, FAILED = 0, 1
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


def run(copy: Copy, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run tests of a copy up to the first failure; return pytest's status and output.

    The status is minus the number of the signal that ended pytest, and None at the time limit.
    """
    with tempfile.TemporaryDirectory(prefix="run-", dir=copy.root.parent) as name:
        (folder := Path(name) / "cache").mkdir()
        (store := cache_root() / "compile").mkdir(parents=True, exist_ok=True)
        (folder / "compile").symlink_to(store)
        plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", *plugins, "-p", "no:cacheprovider", *tests]
        # Wide columns, so that pytest does not cut the summary of a failure.
        environment = {
            **os.environ, "PYTHONPATH": str(copy.root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "1000",
            "CASTIRON_HYPOTHESIS": "mutants", "CASTIRON_CACHE": str(folder), "TMPDIR": name,
        }  # fmt: skip
        process = subprocess.Popen(
            command, cwd=copy.root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def failure_of(output: str) -> tuple[str, str]:
    """Return the test that failed and its error message, or the end of the output."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", output, re.MULTILINE)
    return (found[1], found[2] or "") if found else ("", output.strip()[-300:])


def examine(mutants: Sequence[Mutant], original: bool = True) -> Iterator[tuple[Mutant, Outcome]]:
    """Yield each mutant with its outcome; if `original`, run the tests without a mutant first."""
    with tempfile.TemporaryDirectory(prefix="castiron-mutants-") as name:
        copy = Copy(Path(name))
        if original:
            _check_unchanged(copy, mutants)
        for mutant in mutants:
            with copy.holding(mutant):
                yield mutant, _outcome(copy, mutant)


def _check_unchanged(copy: Copy, mutants: Sequence[Mutant]) -> None:
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    status, output = run(copy, tests, UNCHANGED_SECONDS)
    if status != PASSED:
        raise UnchangedCodeFails("{} fails without a mutant: {}".format(*failure_of(output)))


def _outcome(copy: Copy, mutant: Mutant) -> Outcome:
    start = time.monotonic()
    status, output = run(copy, mutant.tests, SECONDS)
    seconds = time.monotonic() - start
    if status == PASSED:
        return Outcome("survived", seconds)
    if status is None:
        return Outcome("too long", seconds, mutant.tests[0], f"stopped after {SECONDS} s")
    if status < 0:
        return Outcome("caught", seconds, mutant.tests[0], f"ended by signal {-status}")
    test, why = failure_of(output)
    return Outcome("caught" if status == FAILED and test else "broken", seconds, test, why)
