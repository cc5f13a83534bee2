"""The compile driver: its cache, its errors and what it leaves behind."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from castiron.vmfb import compiler
from castiron.vmfb.aside import sweep
from castiron.vmfb.compiler import CompileError, compile_mlir
from castiron.vmfb.targets import TARGETS

SMALL = """func.func @f(%a: !four) -> !four {{
  %b = {op} %a, %a : !four
  return %b : !four
}}""".replace("!four", "tensor<4xf32>")
ADD = SMALL.format(op="stablehlo.add")
HOST = TARGETS["host"]


def files(directory) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_the_same_text_is_compiled_once(tmp_path):
    first = compile_mlir(ADD, HOST, tmp_path / "a" / "model.vmfb", cache_dir=tmp_path / "c")
    again = compile_mlir(ADD, HOST, tmp_path / "b" / "model.vmfb", cache_dir=tmp_path / "c")
    assert (first.cached, again.cached) == (False, True)
    assert again.seconds == first.seconds > 0 and again.flags == first.flags
    assert (tmp_path / "a/model.vmfb").read_bytes() == (tmp_path / "b/model.vmfb").read_bytes()
    assert first.log.read_text() == again.log.read_text() != ""


def test_text_flags_target_and_compiler_each_make_another_result(tmp_path, monkeypatch):
    v3, less = TARGETS["x86-64-v3"], ("--iree-opt-level=O2",)
    ways = [(ADD, HOST, ()), (ADD + " ", HOST, ()), (ADD, v3, ()), (ADD, HOST, less)]

    def run(text, target, flags):
        return compile_mlir(text, target, tmp_path / "m", extra_flags=flags, cache_dir=tmp_path / "c")

    assert [run(*way).cached for way in ways] == [False] * 4
    assert [run(*way).cached for way in ways] == [True] * 4
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99.0.0")
    assert not run(*ways[0]).cached


def test_a_damaged_cache_entry_is_compiled_again(tmp_path):
    def cached() -> bool:
        return compile_mlir(ADD, HOST, tmp_path / "m", cache_dir=tmp_path / "c").cached

    assert (cached(), cached()) == (False, True)
    whole = (tmp_path / "m").read_bytes()
    (facts,), (kept,) = (tmp_path / "c").glob("*.json"), (tmp_path / "c").glob("*.vmfb")
    middle = len(whole) // 2
    for path, damage in (
        (facts, b"{"), (kept, whole[:-1]), (kept, whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]),
    ):  # fmt: skip
        path.write_bytes(damage)
        assert not cached() and (tmp_path / "m").read_bytes() == whole == kept.read_bytes()
    assert cached()


def test_an_error_shows_its_line_and_the_log_but_no_module(tmp_path):
    text = "\n".join(["module {", ADD, SMALL.format(op="stablehlo.subtrac").replace("@f", "@g"), "}"])
    with pytest.raises(CompileError) as caught:
        compile_mlir(text, HOST, tmp_path / "out" / "model.vmfb", cache_dir=tmp_path / "c")
    message, log = str(caught.value), caught.value.log
    assert "module.mlir:7:" in message and "error:" in message and str(log.parent) in message
    assert "func.func" not in message and len(message) < 600
    assert log.is_file() and (log.parent / "module.mlir").read_text() == text
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "c").glob("*.vmfb"))


def test_a_late_failure_does_not_dump_the_module(tmp_path):
    """A buffer too large for the stack is refused by the code generator, which prints all it holds by default."""
    text = """
stream.executable private @k {
  stream.executable.export public @k_fn workgroups() -> (index, index, index) {
    %c1 = arith.constant 1 : index
    stream.return %c1, %c1, %c1 : index, index, index
  }
  builtin.module {
    func.func @k_fn(%b: !stream.binding) attributes {
        translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %out = stream.binding.subspan %b[%c0] : !stream.binding -> memref<4xf32>
      %large = memref.alloca() : memref<1000000xf32>
      %x = memref.load %large[%c0] : memref<1000000xf32>
      memref.store %x, %out[%c0] : memref<4xf32>
      memref.store %x, %large[%c0] : memref<1000000xf32>
      return
    }
  }
}
func.func @f() -> tensor<4xf32> {
  %a = flow.dispatch @k::@k_fn() : () -> tensor<4xf32>
  return %a : tensor<4xf32>
}
"""
    with pytest.raises(CompileError, match="stack") as caught:
        compile_mlir(text, HOST, tmp_path / "m", cache_dir=tmp_path / "c")
    assert len(str(caught.value)) < 1500
    assert "memref.alloca" not in caught.value.log.read_text()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_a_kill_ends_the_compiler_and_leaves_nothing(how, tmp_path):
    """In a process of its own, as from a terminal, while iree-compile runs."""
    code = f"""
from pathlib import Path
from tests.vmfb import toy
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.targets import TARGETS
place = Path({str(tmp_path)!r})
compile_mlir(toy.module_text(512, tuple(range(2, 40))), TARGETS["host"], place / "out/m", cache_dir=place / "c")
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    deadline = time.monotonic() + 100
    # The compiler, and what watches over it.
    while len(pids := open(children).read().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2, "the compiler never started"
    process.send_signal(how)
    _, errors = process.communicate(timeout=100)
    # Of a killed process the children are ended by what watches, a moment later.
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline + 100:
        time.sleep(0.02)
    assert left == []
    if how == signal.SIGINT:
        assert b"KeyboardInterrupt" in errors
    else:
        assert [name[:15] for name in os.listdir(tmp_path / "c")] == [".work.castiron-"]
        sweep(tmp_path / "c")
    assert files(tmp_path) == set() and os.listdir(tmp_path / "c") == []


def runs(pid: str) -> bool:
    """Whether a process is there and not over; who adopted it may not have asked for its end yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_the_compiler_package_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(CompileError, match="pip install iree-base-compiler"):
        compile_mlir(ADD, HOST, tmp_path / "m", cache_dir=tmp_path / "c")


def test_results_longest_unused_are_forgotten(tmp_path, monkeypatch):
    store = tmp_path / "c"

    def cached(op) -> bool:
        return compile_mlir(SMALL.format(op=f"stablehlo.{op}"), HOST, tmp_path / "m", cache_dir=store).cached

    assert not cached("add") and not cached("multiply")
    for path in store.glob("*.vmfb"):
        os.utime(path, (1, 1))
    assert cached("add")
    monkeypatch.setattr(compiler, "KEPT_BYTES", sum(path.stat().st_size for path in store.glob("*.vmfb")) + 100)
    assert not cached("subtract")
    assert len(list(store.glob("*.vmfb"))) == len(list(store.glob("*.json"))) == 2
    assert cached("add") and cached("subtract") and not cached("multiply")
