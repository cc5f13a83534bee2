"""The text of every kind of kernel equals its golden text: a change of it changes every bundle."""

from __future__ import annotations

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.named_kernel import KINDS
from tests.emitter.golden_kernels import FOLDER, INSTANCES, golden, kernel, kind


@pytest.mark.parametrize("name", INSTANCES)
def test_the_text_is_the_golden_one(name, capsys):
    """`python -m tests.emitter.golden_kernels` updates the files; line 1 prints a kernel."""
    text = (FOLDER / f"{name}.mlir").read_text()
    assert golden(name) == text
    program, *words = text.splitlines()[0].removeprefix("// ").split()
    assert program == "castiron" and cli.main(words) == 0
    assert kernel(name).text in capsys.readouterr().out


def test_every_kind_of_kernel_has_a_golden_text():
    assert {kind(name) for name in INSTANCES} == KINDS.keys()
