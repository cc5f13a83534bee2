"""Check names, line widths and commit subjects against CONTRIBUTING.md: `python .ci/language.py`.

Counts what is left of the old language in the complete tree and fails where a count exceeds its
limit in `.ci/language.json`. `--update` lowers the limits to the present counts and never raises
one. Commit subjects are checked from the commit that the file names, where the clone has it.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = ROOT / ".ci/language.json"
PACKAGES = ("emitter", "vmfb", "pipelines", "reference", "castiron", "tests")
PROSE_WIDTH, SUBJECT_WIDTH = 100, 72
# A word of an identifier, and what the field says.
BETTER = {
    "cast casting": "compile, build",
    "told tell tells say says said spoken": "report, return, print, callback, message",
    "place places": "path, slot, index, offset, location",
    "room": "capacity, space, free positions",
    "whole": "complete, full, entire; bidirectional (attention)",
    "most": "max",
    "least": "min",
    "kept held": "stored, cached, retained",
    "aside": "temporary file, staging",
    "product products": "matmul, projection",
    "beginning beginnings": "prefix",
    "thought thoughts": "reasoning",
    "sound soundness harmless": "valid, validation, sanitised",
    "alone": "exclusive, single",
    "once another several": "cached, other, batch, multi",
    "trial trials": "probe, validation run",
    "asker askers asks": "client",
    "sentence sentences": "error message",
    "eyes sees": "vision",
}
BANNED = {word: better for words, better in BETTER.items() for word in words.split()}
# Where such a word is the field's own.
ACCEPTED = re.compile(r"in_place|at_once|dot_product|outer_product|sentence_(files|transformers)", re.IGNORECASE)


def words_of(identifier: str) -> list[str]:
    """Words of a name in snake_case or CamelCase, in lower case."""
    parts = ACCEPTED.sub("_", identifier).split("_")
    return [word.lower() for part in parts for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part)]


def defined_names(tree: ast.AST) -> set[str]:
    """Names that a file gives: functions, classes, parameters, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def wide_docstring_lines(tree: ast.AST, lines: list[str]) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            string = node.body[0]
            yield from (n for n in range(string.lineno, string.end_lineno + 1) if len(lines[n - 1]) > PROSE_WIDTH)


def wide_page_lines(lines: list[str]) -> Iterator[int]:
    """Lines of a page's text; tables, code blocks and lines that are one long link cannot be wrapped."""
    is_code = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and len(line) > PROSE_WIDTH and not line.startswith(("|", "    ")) and " " in line[:PROSE_WIDTH]:
            yield number


def findings() -> dict[str, list[str]]:
    """What each limit counts, as `file: name` or `file:line`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        file, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        if file.parts[:2] in {("castiron", package) for package in PACKAGES}:
            continue
        tree = ast.parse(text)
        for name in sorted(defined_names(tree) | {path.stem}):
            for word in set(words_of(name)) & BANNED.keys():
                found[word].append(f"{file}: {name}")
        found["wide docstring lines"] += (f"{file}:{n}" for n in wide_docstring_lines(tree, text.splitlines()))
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        lines = path.read_text(encoding="utf-8").splitlines()
        found["wide page lines"] += (f"{path.relative_to(ROOT)}:{n}" for n in wide_page_lines(lines))
    return found


def long_subjects(base: str) -> list[str]:
    """Subjects of commits after `base`; none where the clone has no such commit."""
    log = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    done = subprocess.run(log, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if len(line.partition(" ")[2]) > SUBJECT_WIDTH]


def main(arguments: list[str]) -> int:
    limits, found, failures = json.loads(LIMITS.read_text()), findings(), []
    if arguments == ["--update"]:
        known = limits["counts"]
        limits["counts"] = {key: min(len(where), known.get(key, len(where))) for key, where in sorted(found.items())}
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n")
        return 0
    if arguments:
        print("\n".join(line for key in arguments for line in found[key]))
        return 0
    for key, where in sorted(found.items()):
        if len(where) > (limit := limits["counts"].get(key, 0)):
            remedy = f"write {BANNED[key]}" if key in BANNED else f"wrap at {PROSE_WIDTH} columns"
            failures.append(f"{key}: {len(where)}, the limit is {limit}; {remedy} (python .ci/language.py '{key}' lists them)")
    failures += [f"subject over {SUBJECT_WIDTH} characters: {line}" for line in long_subjects(limits["base"])]
    print("\n".join(failures), end="\n" if failures else "")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
