"""The progress of a compilation: estimated from earlier ones, rising, and below 1 until it ends."""

from __future__ import annotations

import json
import re
import threading

import numpy as np
import pytest

from castiron.pipelines import terminal
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.compile import compiler as compiling
from castiron.pipelines.compile.compiler import compile_model
from castiron.pipelines.compile.options import Options
from castiron.vmfb import compiler
from castiron.vmfb.compiler import (
    MIN_BYTES,
    SECONDS_PER_BYTE,
    CompileError,
    compile_mlir,
    compile_modules,
    expected_seconds,
)
from castiron.vmfb.targets import TARGETS
from tests.support.terminal import at_terminal
from tests.support.tiny_gguf import HIDDEN, write_llama
from tests.vmfb import toy


def test_share_rises_with_time_and_stays_below_1():
    shares = [terminal.share_of(t / 100) for t in range(1, 2000)]
    assert all(a < b for a, b in zip(shares, shares[1:])) and shares[-1] < 1
    assert terminal.share_of(0.5) == pytest.approx(0.45) and terminal.share_of(1.0) == pytest.approx(0.9)


def test_clock_reports_rising_shares_and_stops(monkeypatch):
    monkeypatch.setattr(terminal, "INTERVAL", 0.001)
    reports, enough = [], threading.Event()

    def note(share: float) -> None:
        reports.append(share)
        if len(reports) == 5:
            enough.set()

    with terminal.clock(note, lambda: 0.01):
        assert enough.wait(60)
    count = len(reports)
    assert reports == sorted(reports) and reports[0] > 0 and reports[-1] < 1
    # The clock reports nothing after the block.
    assert not any(thread.is_alive() for thread in threading.enumerate() if thread.name == "clock") and len(reports) == count


def test_expected_seconds_are_the_median_per_byte_of_earlier_compilations(tmp_path):
    text = "x" * 1000
    assert expected_seconds([text], tmp_path) == pytest.approx(1000 * SECONDS_PER_BYTE)
    small = {"log": "", "seconds": 100.0, "bytes": MIN_BYTES - 1}
    (tmp_path / "small.json").write_text(json.dumps(small))
    (tmp_path / "old.json").write_text(json.dumps({"log": "", "seconds": 100.0}))
    (tmp_path / "broken.json").write_text("{")
    assert expected_seconds([text], tmp_path) == pytest.approx(1000 * SECONDS_PER_BYTE)
    for name, seconds in (("a", 1.0), ("b", 3.0), ("c", 5.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"log": "", "seconds": seconds, "bytes": MIN_BYTES}))
    assert expected_seconds([text], tmp_path) == pytest.approx(1000 * 3.0 / MIN_BYTES)
    # The longest text, however many processes share the others.
    assert expected_seconds([text, "x", "x"], tmp_path) == pytest.approx(1000 * 3.0 / MIN_BYTES, rel=0.01)


def test_a_compilation_records_its_seconds_for_the_next_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "MIN_BYTES", 1)
    text = toy.module_text(8, (4,))
    took = compile_mlir(text, TARGETS["host"], tmp_path / "out" / "toy.vmfb", cache_dir=tmp_path / "cache").seconds
    assert expected_seconds([text], tmp_path / "cache") == pytest.approx(took)


def test_compile_model_reports_shares_of_its_longest_stage(tmp_path, monkeypatch):
    """The compiler waits until a share was reported."""
    monkeypatch.setattr(terminal, "INTERVAL", 0.001)
    reports, came, compile_ = [], threading.Event(), compile_modules

    def slow(*arguments, **options):
        assert came.wait(60)
        return compile_(*arguments, **options)

    def note(stage: str, done: float) -> None:
        reports.append((stage, done))
        if stage == "compile" and 0 < done < 1:
            came.set()

    monkeypatch.setattr(compiling, "compile_modules", slow)
    options = Options(context=16, batch=(), speculate=(), threads=1)
    compile_model(write_llama(tmp_path / "tiny.gguf"), tmp_path / "out", options, note)
    shares = [done for stage, done in reports if stage == "compile"]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares) and len(shares) > 2


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
        compile_model(path, tmp_path / "out", Options(context=16, batch=(), speculate=(), threads=1))
    assert ended == [True] and not (tmp_path / "out").exists()
