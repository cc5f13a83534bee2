"""The compile driver: its cache, its errors and what it leaves behind."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from castiron.vmfb.atomic_write import remove_abandoned
from castiron.vmfb.compiler import iree_compile
from castiron.vmfb.compiler.iree_compile import CompileError, compile_mlir, compile_modules
from castiron.vmfb.targets import TARGETS

SMALL = """func.func @f(%a: !four) -> !four {{
  %b = {op} %a, %a : !four
  return %b : !four
}}""".replace("!four", "tensor<4xf32>")
ADD = SMALL.format(op="stablehlo.add")
HOST = TARGETS["host"]


def files(directory) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_each_of_several_texts_is_compiled_into_a_file(tmp_path):
    texts = {"a.vmfb": ADD, "b.vmfb": SMALL.format(op="stablehlo.multiply"), "c.vmfb": SMALL.format(op="stablehlo.maximum")}
    first, again = (compile_modules(texts, HOST, tmp_path / out, cache_dir=tmp_path / "c") for out in ("1", "2"))
    assert (first.cached, again.cached) == (False, True) and files(tmp_path / "1") == {*texts, "compile.log"}
    assert (tmp_path / "1/compile.log").read_text().count("$ iree-compile") == 3
    for name, text in texts.items():
        compile_mlir(text, HOST, tmp_path / "single" / name, cache_dir=tmp_path / "other")
        assert (tmp_path / "single" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_an_error_in_one_of_several_texts_leaves_nothing(tmp_path):
    texts = {"a.vmfb": ADD, "b.vmfb": SMALL.format(op="stablehlo.nonsense")}
    with pytest.raises(CompileError, match="stablehlo.nonsense"):
        compile_modules(texts, HOST, tmp_path / "out", cache_dir=tmp_path / "c")
    assert not (tmp_path / "out").exists()


def test_results_are_cached_by_text_flags_target_and_compiler(tmp_path, monkeypatch):
    v3, less = TARGETS["x86-64-v3"], ("--iree-opt-level=O2",)
    inputs = [(ADD, HOST, ()), (ADD + " ", HOST, ()), (ADD, v3, ()), (ADD, HOST, less)]

    def run(folder, text, target, flags):
        return compile_mlir(text, target, tmp_path / folder / "m", extra_flags=flags, cache_dir=tmp_path / "c")

    first, *others = [run("a", *given) for given in inputs]
    again = run("b", *inputs[0])
    assert not first.cached and not any(other.cached for other in others) and again.cached
    assert again.seconds == first.seconds > 0 and again.flags == first.flags and (tmp_path / "b/compile.log").read_text()
    assert [run("a", *given).cached for given in inputs[::-1]] == [True] * 4
    assert (tmp_path / "a/m").read_bytes() == (tmp_path / "b/m").read_bytes()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99.0.0")
    assert not run("a", *inputs[0]).cached


def test_a_damaged_cache_entry_is_compiled_again(tmp_path):
    def cached() -> bool:
        return compile_mlir(ADD, HOST, tmp_path / "m", cache_dir=tmp_path / "c").cached

    assert (cached(), cached()) == (False, True)
    complete = (tmp_path / "m").read_bytes()
    (facts,), (stored,) = (tmp_path / "c").glob("*.json"), (tmp_path / "c").glob("*.vmfb")
    changed = complete[:-1] + bytes([complete[-1] ^ 1])
    for path, damage in ((facts, b"{"), (stored, complete[:-1]), (stored, changed)):
        path.write_bytes(damage)
        assert not cached() and (tmp_path / "m").read_bytes() == complete == stored.read_bytes()
    assert cached()


def test_an_error_shows_its_line_and_the_log_but_no_module(tmp_path):
    text = "\n".join(["module {", ADD, SMALL.format(op="stablehlo.subtrac").replace("@f", "@g"), "}"])
    with pytest.raises(CompileError) as caught:
        compile_mlir(text, HOST, tmp_path / "out" / "model.vmfb", cache_dir=tmp_path / "c")
    message, (log,) = str(caught.value), (tmp_path / "c/failed").glob("*/compile.log")
    assert "module.mlir:7:" in message and "error:" in message and str(log.parent) in message
    assert "func.func" not in message and len(message) < 600
    assert log.is_file() and (log.parent / "module.mlir").read_text() == text
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "c").glob("*.vmfb"))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_a_kill_ends_the_compiler_and_leaves_nothing(how, tmp_path):
    code = f"""
from pathlib import Path
from tests.vmfb import toy
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.targets import TARGETS
folder = Path({str(tmp_path)!r})
compile_mlir(toy.module_text(512, tuple(range(2, 40))), TARGETS["host"], folder / "out/m", cache_dir=folder / "c")
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment)
    tasks = Path(f"/proc/{process.pid}/task")
    deadline = time.monotonic() + 100
    # The compiler and the guard of its process group.
    while len(pids := children(tasks)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2, "the compiler never started"
    process.send_signal(how)
    _, errors = process.communicate(timeout=100)
    # The guard ends the children of a killed process a moment later.
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline + 100:
        time.sleep(0.02)
    assert left == []
    if how == signal.SIGINT:
        assert b"KeyboardInterrupt" in errors
    else:
        assert [name[:15] for name in os.listdir(tmp_path / "c")] == [".work.castiron-"]
        remove_abandoned(tmp_path / "c")
    assert files(tmp_path) == set() and os.listdir(tmp_path / "c") == []


def children(tasks: Path) -> list[str]:
    """Return the process ids of the children of all threads."""
    found = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):
            found += (task / "children").read_text().split()
    return found


def runs(pid: str) -> bool:
    """Return whether a process runs; a process that ended may be a zombie still."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_names_the_missing_compiler_package(tmp_path, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(CompileError, match="pip install iree-base-compiler"):
        compile_mlir(ADD, HOST, tmp_path / "m", cache_dir=tmp_path / "c")


def test_the_results_unused_for_longest_are_removed(tmp_path, monkeypatch):
    store = tmp_path / "c"

    def cached(op) -> bool:
        return compile_mlir(SMALL.format(op=f"stablehlo.{op}"), HOST, tmp_path / "m", cache_dir=store).cached

    assert not cached("add") and not cached("multiply")
    for path in store.glob("*.vmfb"):
        os.utime(path, (1, 1))
    assert cached("add")
    monkeypatch.setattr(iree_compile, "MAX_CACHE_BYTES", sum(path.stat().st_size for path in store.glob("*.vmfb")) + 100)
    assert not cached("subtract")
    assert len(list(store.glob("*.vmfb"))) == len(list(store.glob("*.json"))) == 2
    assert cached("add") and cached("subtract") and not cached("multiply")
