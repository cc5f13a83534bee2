"""The text of every kind of kernel equals its golden text: a change of it changes every bundle."""

from __future__ import annotations

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.parts import KINDS
from tests.emitter.golden_kernels import FOLDER, INSTANCES, golden, kernel, kind


@pytest.mark.parametrize("name", INSTANCES)
def test_the_text_is_the_golden_one(name):
    """`python -m tests.emitter.golden_kernels` updates the files."""
    assert golden(name) == (FOLDER / f"{name}.mlir").read_text()


def test_every_kind_of_kernel_has_a_golden_text():
    assert {kind(name) for name in INSTANCES} == KINDS.keys()


@pytest.mark.parametrize("name", INSTANCES)
def test_the_command_in_a_golden_text_prints_its_kernel(name, capsys):
    program, *words = (FOLDER / f"{name}.mlir").read_text().splitlines()[0].removeprefix("// ").split()
    assert program == "castiron" and cli.main(words) == 0
    assert kernel(name).text in capsys.readouterr().out
