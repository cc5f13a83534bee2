"""The progress bar of a compilation, and the end of the compiler after an error."""

from __future__ import annotations

import re

import numpy as np
import pytest

from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.compile import compile_model as compiling
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.vmfb.compiler.iree_compile import (
    CompileError,
)
from tests.support.terminal import at_terminal
from tests.support.tiny_gguf import HIDDEN, write_llama

BAR = """
import time
from castiron.pipelines import terminal
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
terminal.ESTIMATE_AFTER, terminal.PATIENCE, terminal.INTERVAL = 0, 0, 0.02
with terminal.Progress() as shown:
    shown('compile', 0.8)
    while not shown._drawn:
        time.sleep(0.01)
    shown('compile', 0.805)
    time.sleep(0.5)
"""


def test_the_bar_shows_the_remaining_seconds():
    _, shown = at_terminal(BAR)
    # The estimate counts only the progress since the stage began at 80 %.
    left = re.findall(r"compile +\[#+\.+\]  8\d%  \d+ s, about (\d+) s left", shown)
    assert int(left[-1]) > 9


def test_a_fault_of_the_weights_ends_the_compiler(tmp_path, monkeypatch):
    """Weights are checked and packed while modules are compiled."""
    ended = []

    def waiting(*arguments, cancelled, **options):
        ended.append(cancelled.wait(60))
        raise CompileError("the compilation was cancelled")

    monkeypatch.setattr(compiling, "compile_modules", waiting)
    path = write_llama(tmp_path / "nan.gguf", None, {"output_norm.weight": np.full(HIDDEN, np.nan, np.float32)})
    with pytest.raises(CheckpointError, match="model.norm.weight has infinities or NaNs"):
        compile_model(path, tmp_path / "out", Options(context=16, batch=(), verify_widths=(), threads=1))
    assert ended == [True] and list(tmp_path.iterdir()) == [path]
