"""Applies mutants one at a time to a copy of castiron and runs the tests that are to notice them.

The checkout is never changed: its folders are copied, the copy is what Python imports, and it goes at the end. Nothing that
was made of other code stands in for a mutant's: its file has a time that no other has had, by which Python knows bytecode,
every run has a cache of its own, and what of the user's cache it shares, iree-compile's results, has the module's text in its
key.
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
# Of pytest's plugins those that the tests use: others take longer to load than most tests.
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
# What is loaded once for all runs; where there are many, what takes seconds to load too.
SMALL = ("numpy", "hypothesis", "pytest", *PLUGINS, "iree.runtime")
LARGE = (*SMALL, "torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
MANY = 5
SECONDS = 400  # for the tests of one mutant
SECONDS_OF_ALL = 1800  # for all tests of the catalogue on sound code


class SoundCodeFails(Exception):
    """The tests do not pass without any mutant, so that nothing can be told; one sentence."""


@dataclass(frozen=True)
class Outcome:
    """of: "caught" by the test `by`, which said `why`; "survived"; "too long", where nobody knows; or "broken": pytest did not
    come to run its tests."""

    of: str
    seconds: float
    by: str = ""
    why: str = ""


class Copy:
    """A copy of the checkout below `folder`, in which a mutant can stand."""

    def __init__(self, folder: Path):
        self.root, self.held = folder / "copy", 0
        self.root.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, self.root / name)

    @contextlib.contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """The mutant's file has its fault."""
        path = self.root / mutant.file
        before, sound = path.stat(), path.read_bytes()
        path.write_text(mutant.mutated(self.root))
        # Bytecode counts as that of a source of this second and size.
        self.held += 1
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + self.held * 10**10))
        try:
            yield
        finally:
            path.write_bytes(sound)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Runner:
    """Runs tests of a copy in processes of their own; closed by `close`."""

    def __init__(self, folder: Path, copy: Copy, modules: Sequence[str]):
        self.folder, self.copy, self.count = folder, copy, 0
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy.root),
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.server", *modules], cwd=copy.root, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def run(self, tests: Sequence[str], seconds: float) -> tuple[int | None, dict]:
        """pytest's exit status (`server`) for these tests, up to the first that fails, and what was told."""
        self.count += 1
        place = self.folder / str(self.count)
        # The modules that iree-compile has made here before are the same ones.
        (place / "cache").mkdir(parents=True)
        (store := cache_root() / "compile").mkdir(parents=True, exist_ok=True)
        (place / "cache" / "compile").symlink_to(store)
        root, plugins = str(self.copy.root), [word for plugin in PLUGINS for word in ("-p", plugin)]
        options = ["-x", "-q", *plugins, "-p", "no:cacheprovider", "-c", f"{root}/pyproject.toml", "--rootdir", root]
        request = {
            "arguments": [*options, "--basetemp", str(place / "tmp"), *tests],
            "log": str(place / "log"),
            "report": str(place / "report"),
            "seconds": seconds,
            "environment": {"CASTIRON_CACHE": str(place / "cache"), "TMPDIR": str(place)},
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())["status"]
        report: dict = {"passed": [], "failed": None, "castiron": None}
        with contextlib.suppress(OSError, ValueError):
            report = json.loads((place / "report").read_text())
        place_of_code = report["castiron"]
        if place_of_code and not Path(place_of_code).is_relative_to(self.copy.root):
            raise SoundCodeFails(f"the tests import castiron from {place_of_code}, not from the copy with the mutants")
        report["log"] = (place / "log").read_text(errors="replace")
        shutil.rmtree(place, ignore_errors=True)
        return status, report


def examine(mutants: Sequence[Mutant], sound: bool = True) -> Iterator[tuple[Mutant, Outcome]]:
    """Each mutant with what became of it, in order. sound: the tests of all are run without any mutant first, and
    SoundCodeFails if one does not pass."""
    with tempfile.TemporaryDirectory(prefix="castiron-mutants-") as name:
        folder = Path(name)
        runner = Runner(folder, copy := Copy(folder), LARGE if len(mutants) >= MANY else SMALL)
        try:
            if sound:
                _check_sound(runner, mutants)
            for mutant in mutants:
                with copy.holding(mutant):
                    yield mutant, _outcome(runner, mutant)
        finally:
            runner.close()


def _check_sound(runner: Runner, mutants: Sequence[Mutant]) -> None:
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    status, report = runner.run(tests, SECONDS_OF_ALL)
    if status != PASSED:
        test, why = report["failed"] or ("pytest", report["log"].strip()[-300:])
        raise SoundCodeFails(f"{test} fails without a mutant: {why}")
    for test in tests:
        if not any(passed == test or passed.startswith((f"{test}[", f"{test}::")) for passed in report["passed"]):
            raise SoundCodeFails(f"no test of {test} has run, so it can notice no mutant")


def _outcome(runner: Runner, mutant: Mutant) -> Outcome:
    start = time.monotonic()
    status, report = runner.run(mutant.tests, SECONDS)
    seconds = time.monotonic() - start
    test, why = report["failed"] or ("", "")
    if status == PASSED:
        return Outcome("survived", seconds)
    if status is None:
        return Outcome("too long", seconds, mutant.tests[0], f"it ran longer than {SECONDS} s")
    if status < 0:
        return Outcome("caught", seconds, mutant.tests[0], f"signal {-status} ended it")
    if status == FAILED and test:
        return Outcome("caught", seconds, test, why)
    return Outcome("broken", seconds, test, why or report["log"].strip()[-300:])
