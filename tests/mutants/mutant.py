"""Mutants: small faults in castiron, each with the tests that must notice it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A fault: `new` replaces `old` in `file`, and one of `tests` (pytest node ids) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, root: Path = ROOT) -> str:
        """Return the file's text with the fault; ValueError unless `old` occurs exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name}: {self.file} has its text {count} times; quote text that occurs exactly once")
        return text.replace(self.old, self.new)


def read_mutants(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a file, which are separated by blank lines.

    The first line of a mutant is its name. `-` lines are the old text and `+` lines the new text.
    `file:` and `test:` lines also hold for the following mutants until others replace them.
    """
    inherited: dict[str, list[str]] = {}
    for block in path.read_text().strip().split("\n\n"):
        name, *lines = block.splitlines()
        found = defaultdict(list)
        for line in lines:
            mark, _, text = line.partition(" ")
            found[mark].append(text)
        inherited |= {mark: found[mark] for mark in ("file:", "test:") if mark in found}
        (file,), tests = inherited["file:"], inherited["test:"]
        yield Mutant(name, file, "\n".join(found["-"]), "\n".join(found["+"]), tuple(tests))


CATALOGUE = [mutant for path in sorted((ROOT / "tests/mutants/faults").glob("*.txt")) for mutant in read_mutants(path)]
