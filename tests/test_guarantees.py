"""Every guarantee of docs/guarantees.md and SECURITY.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECURITY, GUARANTEES = ((ROOT / name).read_text(encoding="utf-8") for name in ("SECURITY.md", "docs/guarantees.md"))
# What reads code or makes objects of any class out of a file.
RUNS = re.compile(
    r"^\s*(?:from|import) +(?:pickle|marshal|shelve|dill|joblib|cloudpickle|yaml)\b|(?<![\w.])(?:eval|exec)\("
    r"|\btorch\.load\(|trust_remote_code|allow_pickle=True",
    re.MULTILINE,
)


def named(text: str) -> list[tuple[str, str]]:
    """(file, name) of every test that a page names."""
    return [tuple(test.split("::", 1)) for test in re.findall(r"`(\S+?\.py::[^`]*)`", text)]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests in a file, none if there is no such file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def missing(text: str) -> list[str]:
    return [f"{path}::{name}" for path, name in named(text) if name not in names_in(ROOT / path)]


def rows(text: str) -> list[str]:
    """The lines of a page's tables, without their heads."""
    return [line for line in text.splitlines() if re.match(r"\| (?!.*\| test \|$)", line)]


def test_every_test_that_is_named_is_there():
    assert named(SECURITY) and named(GUARANTEES) and missing(SECURITY) == missing(GUARANTEES) == []
    gone = ["tests/test_guarantees.py::test_gone", "tests/gone.py::test_a", "tests/test_guarantees.py::missing"]
    assert missing(" ".join(f"`{test}`" for test in gone)) == gone


def test_every_guarantee_and_every_boundary_names_its_test():
    assert [row for row in rows(GUARANTEES) + rows(SECURITY) if not named(row)] == []
    boundaries = re.split(r"^### ", SECURITY.partition("\n## Not trusted\n")[2], flags=re.MULTILINE)[1:]
    assert len(boundaries) > 9 and [text.splitlines()[0] for text in boundaries if not named(text)] == []


def test_nothing_of_castirons_runs_what_a_file_holds():
    paths = [
        path for package in ("emitter", "vmfb", "pipelines", "reference", "castiron") for path in (ROOT / package).rglob("*.py")
    ]
    assert len(paths) > 200
    assert [str(path) for path in paths if RUNS.search(path.read_text(encoding="utf-8"))] == []
    for line in ("import pickle", "    from yaml import load", "x = eval(text)", "f(trust_remote_code=True)"):
        assert RUNS.search(line)
    assert not RUNS.search("self.llama.eval(tokens)")
