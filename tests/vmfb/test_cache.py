"""One folder for all that castiron keeps: where it is, what happens without it, and what clearing takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from castiron.vmfb import cache
from castiron.vmfb.aside import folder_aside
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.cache import KINDS, cache_folder, cache_place, cache_root, clear, held, keep
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.session import Session
from castiron.vmfb.targets import TARGETS
from tests.vmfb.test_compiler import ADD

DAY = 86400.0


def put(path: Path, size: int = 1, age_days: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    then = time.time() - age_days * DAY
    os.utime(path, (then, then))
    return path


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """A file stands where the folder belongs, and nothing was said of it yet."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_told", [])
    return tmp_path / "file"


def test_the_folder_is_what_the_variables_say(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CASTIRON_CACHE", "~/own")
    assert cache_root() == Path("/somewhere/own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CASTIRON_CACHE", "own")
    assert cache_root() == tmp_path / "own"
    monkeypatch.setenv("CASTIRON_CACHE", "")
    assert cache_root() == tmp_path / "castiron"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_root() == Path("/somewhere/.cache/castiron")


def test_a_user_without_a_home_has_a_folder_for_the_time_being(monkeypatch, capsys):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("CASTIRON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(cache, "_told", [])
    assert cache_folder("compile").is_dir() and cache_root().is_dir()
    assert capsys.readouterr().err.count("cannot be written (Could not determine home directory.)") == 1


def test_what_cannot_be_kept_is_said_once_and_fails_nothing(no_cache, tmp_path, toy_dir, capsys):
    assert Session(open_bundle(toy_dir), 1).prefill([1, 2, 3]) >= 0
    assert not keep(cache_root() / "x", b"x")
    first = compile_mlir(ADD, TARGETS["host"], tmp_path / "a" / "model.vmfb")
    assert not first.cached and (tmp_path / "a" / "model.vmfb").stat().st_size
    said = capsys.readouterr().err
    assert said.startswith(f"castiron: the cache in {no_cache} cannot be written (") and "CASTIRON_CACHE" in said
    assert said.count("\n") == 1 and len(said) < 300
    assert no_cache.read_text() == ""


def test_a_cache_that_can_only_be_read_is_read(tmp_path, monkeypatch):
    root = tmp_path / "shared"
    monkeypatch.setenv("CASTIRON_CACHE", str(root))
    compile_mlir(ADD, TARGETS["host"], tmp_path / "a" / "model.vmfb")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compile_mlir(ADD, TARGETS["host"], tmp_path / "b" / "model.vmfb").cached


def test_what_a_process_wrote_elsewhere_goes_with_it(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    code = "from castiron.vmfb.cache import cache_folder; p = cache_folder('compile'); (p / 'x').write_text(''); print(p)"
    environment = {**os.environ, "CASTIRON_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=root)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "tmp")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_held_counts_files_and_bytes_by_kind():
    put(cache_root() / "models" / "a.gguf", 100)
    put(cache_root() / "compile" / "failed" / "k" / "module.mlir", 7, age_days=3)
    put(cache_root() / "compile" / "k.vmfb", 5, age_days=1)
    put(cache_place("tuned"), 3)
    put(cache_root() / "notes.txt", 1000)
    found = {row.kind: row for row in held()}
    assert list(found) == list(KINDS)
    assert {kind: (row.files, row.bytes) for kind, row in found.items()} == {
        "models": (1, 100), "compile": (2, 12), "unpacked": (0, 0), "verified": (0, 0), "tuned": (1, 3), "shapes": (0, 0),
        "bundles": (0, 0), "fetched": (0, 0), "chat": (0, 0), "calibrated": (0, 0),
    }  # fmt: skip
    assert found["compile"].newest == pytest.approx(time.time() - DAY, abs=60) and found["verified"].newest is None


def test_clearing_takes_what_was_asked_for_and_leaves_all_else():
    kept = [put(cache_root() / "notes.txt"), put(cache_root() / "models" / "a.gguf"), put(cache_root() / "compile" / "young")]
    put(cache_root() / "compile" / "failed" / "k" / "module.mlir", 7, age_days=31)
    (row,) = clear(["compile"], older_than_days=30)
    assert (row.kind, row.files, row.bytes) == ("compile", 1, 7)
    assert [path for path in sorted(cache_root().rglob("*")) if path.is_file()] == sorted(kept)
    assert not (cache_root() / "compile" / "failed").exists()
    clear()
    assert [path.name for path in cache_root().iterdir()] == ["notes.txt"]


def test_what_goes_while_it_is_looked_for_is_passed_over(monkeypatch):
    """As what a compilation works in does when that ends."""
    going, scandir = put(cache_root() / "compile" / "work" / "module.mlir"), os.scandir
    put(cache_root() / "compile" / "k.vmfb", 5)

    def looked_into(place="."):
        if str(place) == str(going.parent) and going.exists():
            going.unlink()
            going.parent.rmdir()
        return scandir(place)

    monkeypatch.setattr(os, "scandir", looked_into)
    assert {row.kind: row.files for row in held()}["compile"] == 1
    put(going)
    assert [row.files for row in clear(["compile"])] == [1]


def test_what_a_process_is_writing_is_left_alone():
    left = put(cache_root() / "compile" / ".work.castiron-0123abcd" / "module.mlir")
    lock = put(cache_root() / "fetched" / ".key.lock")
    with folder_aside(cache_root() / "bundles" / "model") as work:
        half = put(work / "model.vmfb")
        clear()
        assert half.exists() and lock.exists() and not left.parent.exists()
