"""How far a compilation is: told by what earlier ones took, rising, and never at the end before it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading

import pytest

from castiron.pipelines import progress
from castiron.pipelines.casting import compile as compiling
from castiron.pipelines.casting.compile import Options, compile_model
from castiron.vmfb import compiler
from castiron.vmfb.compiler import LEAST_BYTES, SECONDS_A_BYTE, compile_mlir, expected_seconds
from castiron.vmfb.targets import TARGETS
from tests.pipelines.tiny_gguf import write_llama
from tests.vmfb import toy


def test_the_share_rises_with_time_and_never_reaches_the_end():
    shares = [progress.share_of(t / 100) for t in range(1, 2000)]
    assert all(a < b for a, b in zip(shares, shares[1:])) and shares[-1] < 1
    assert progress.share_of(0.5) == pytest.approx(0.45) and progress.share_of(1.0) == pytest.approx(0.9)


def test_work_that_cannot_tell_how_far_it_is_is_told_by_the_clock(monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    told, enough = [], threading.Event()

    def note(share: float) -> None:
        told.append(share)
        if len(told) == 5:
            enough.set()

    with progress.clock(note, lambda: 0.01):
        assert enough.wait(60)
    count = len(told)
    assert told == sorted(told) and told[0] > 0 and told[-1] < 1
    # Nothing comes after the block.
    assert not any(thread.is_alive() for thread in threading.enumerate() if thread.name == "clock") and len(told) == count


def test_a_compilation_is_expected_to_take_what_earlier_ones_took_a_byte(tmp_path):
    text = "x" * 1000
    assert expected_seconds(text, tmp_path) == pytest.approx(1000 * SECONDS_A_BYTE)
    small = {"log": "", "seconds": 100.0, "bytes": LEAST_BYTES - 1}
    (tmp_path / "small.json").write_text(json.dumps(small))
    (tmp_path / "old.json").write_text(json.dumps({"log": "", "seconds": 100.0}))
    (tmp_path / "broken.json").write_text("{")
    assert expected_seconds(text, tmp_path) == pytest.approx(1000 * SECONDS_A_BYTE)
    for name, seconds in (("a", 1.0), ("b", 3.0), ("c", 5.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"log": "", "seconds": seconds, "bytes": LEAST_BYTES}))
    assert expected_seconds(text, tmp_path) == pytest.approx(1000 * 3.0 / LEAST_BYTES)


def test_a_compilation_leaves_what_the_next_one_is_told_by(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "LEAST_BYTES", 1)
    text = toy.module_text(8, (4,))
    took = compile_mlir(text, TARGETS["host"], tmp_path / "out" / "toy.vmfb", cache_dir=tmp_path / "cache").seconds
    assert expected_seconds(text, tmp_path / "cache") == pytest.approx(took)


def test_compiling_a_model_tells_shares_of_its_longest_stage(tmp_path, monkeypatch):
    """The compiler is held here until a share has been told."""
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    told, came, compile_ = [], threading.Event(), compile_mlir

    def slow(*arguments, **options):
        assert came.wait(60)
        return compile_(*arguments, **options)

    def note(stage: str, done: float) -> None:
        told.append((stage, done))
        if stage == "compile" and 0 < done < 1:
            came.set()

    monkeypatch.setattr(compiling, "compile_mlir", slow)
    options = Options(context=16, batch=(), speculate=(), threads=1)
    compile_model(write_llama(tmp_path / "tiny.gguf"), tmp_path / "out", options, note)
    shares = [done for stage, done in told if stage == "compile"]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares) and len(shares) > 2


BAR = """
import time
from castiron.pipelines import progress
progress.LEFT_AFTER, progress.PATIENCE, progress.INTERVAL = 0, 0, 0.02
with progress.Progress() as shown:
    shown('compile', 0.8)
    while not shown._drawn:
        time.sleep(0.01)
    shown('compile', 0.805)
    time.sleep(0.5)
"""


def test_the_bar_says_how_long_it_will_take():
    terminal, inside = os.openpty()
    subprocess.run([sys.executable, "-c", BAR], stderr=inside, check=True)
    os.close(inside)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    # Of a stage that begins with most of it done, what it does is what counts.
    left = re.findall(r"compile +\[#+\.+\]  8\d%  \d+ s, about (\d+) s left", shown)
    assert int(left[-1]) > 9
