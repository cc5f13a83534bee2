"""What a mutant is: one small fault, as text, and the tests that are to notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """In `file` the text `old`, which stands there once, becomes `new`; then one of `tests`, pytest's node ids, fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, root: Path = ROOT) -> str:
        """The file's text with the fault; ValueError unless `old` stands there once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name}: {self.file} has its text {count} times, not once; write the fault anew")
        return text.replace(self.old, self.new)


def models(*cases: str) -> tuple[str, ...]:
    """A family's tiny model against HF, by the interpreter: `llama-0` is the first of its shapes."""
    return tuple(f"tests/emitter/test_models.py::test_logits_are_those_of_hf_after_every_token[{case}]" for case in cases)


def fused(*cases: str) -> tuple[str, ...]:
    """The same through the kernels lowering, its kernels by their NumPy definitions."""
    name = "test_the_kernels_lowering_gives_the_logits_of_hf"
    return tuple(f"tests/emitter/test_models_kernels.py::{name}[{case}]" for case in cases)
