"""The text of every kind of kernel is what it was: a change of it is a change of every bundle, and is made on purpose."""

from __future__ import annotations

import pytest

from castiron.pipelines import cli
from castiron.pipelines.casting.named_kernel import KINDS
from tests.emitter.golden_kernels import FOLDER, INSTANCES, golden, kernel, kind


@pytest.mark.parametrize("name", INSTANCES)
def test_the_text_is_the_golden_one(name):
    """`python -m tests.emitter.golden_kernels` writes the files anew."""
    assert golden(name) == (FOLDER / f"{name}.mlir").read_text()


def test_every_kind_of_kernel_has_one():
    assert {kind(name) for name in INSTANCES} == KINDS.keys()


@pytest.mark.parametrize("name", INSTANCES)
def test_the_command_that_a_golden_text_names_prints_its_kernel(name, capsys):
    program, *words = (FOLDER / f"{name}.mlir").read_text().splitlines()[0].removeprefix("// ").split()
    assert program == "castiron" and cli.main(words) == 0
    assert kernel(name).text in capsys.readouterr().out
