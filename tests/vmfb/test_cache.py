"""The cache folder: where it is, what happens without it, and what clearing removes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from castiron.vmfb import cache_folder as cache
from castiron.vmfb.atomic_write import staging_folder
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.cache_folder import KINDS, cache_folder, cache_path, cache_root, claim, clear, is_own, keep, usage
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.run.session import Session
from castiron.vmfb.targets import TARGETS
from tests.vmfb.test_compiler import ADD

DAY = 86400.0


def put(path: Path, size: int = 1, age_days: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    then = time.time() - age_days * DAY
    os.utime(path, (then, then))
    return path


def put_own(path: Path, size: int = 1, age_days: float = 0.0) -> Path:
    claim(path)
    return put(path, size, age_days)


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """A file at the path of the cache folder, and no message about it yet."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_reported", [])
    return tmp_path / "file"


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
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


def test_a_user_without_a_home_gets_a_temporary_cache(monkeypatch, capsys):
    for name in ("CASTIRON_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(cache, "_reported", [])
    assert cache_folder("compile").is_dir() and cache_root().is_dir()
    assert capsys.readouterr().err.count("cannot be written (Could not determine home directory.)") == 1


def test_an_unwritable_cache_is_reported_and_nothing_fails(no_cache, tmp_path, toy_dir, capsys):
    assert Session(open_bundle(toy_dir), 1).prefill([1, 2, 3]) >= 0
    assert not keep(cache_root() / "x", b"x")
    first = compile_mlir(ADD, TARGETS["host"], tmp_path / "a" / "model.vmfb")
    assert not first.cached and (tmp_path / "a" / "model.vmfb").stat().st_size
    message = capsys.readouterr().err
    assert message.startswith(f"castiron: the cache in {no_cache} cannot be written (") and "CASTIRON_CACHE" in message
    assert message.count("\n") == 1 and len(message) < 300
    assert no_cache.read_text() == ""


def test_a_read_only_cache_is_read(tmp_path, monkeypatch):
    root = tmp_path / "shared"
    monkeypatch.setenv("CASTIRON_CACHE", str(root))
    compile_mlir(ADD, TARGETS["host"], tmp_path / "a" / "model.vmfb")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compile_mlir(ADD, TARGETS["host"], tmp_path / "b" / "model.vmfb").cached


def test_a_temporary_cache_is_removed_at_exit(no_cache, tmp_path):
    (tmp_path / "tmp").mkdir()
    code = (
        "from castiron.vmfb.cache_folder import cache_folder; p = cache_folder('compile'); (p / 'x').write_text(''); print(p)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "tmp")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_usage_counts_files_and_bytes_by_kind():
    put_own(cache_root() / "models" / "a.gguf", 100)
    put_own(cache_root() / "compile" / "failed" / "k" / "module.mlir", 7, age_days=3)
    put_own(cache_root() / "compile" / "k.vmfb", 5, age_days=1)
    put_own(cache_path("tuned"), 3)
    put(cache_root() / "notes.txt", 1000)
    found = {row.kind: row for row in usage()}
    expected = dict.fromkeys(KINDS, (0, 0)) | {"models": (1, 100), "compile": (2, 12), "tuned": (1, 3)}
    assert {kind: (row.files, row.bytes) for kind, row in found.items()} == expected
    assert found["compile"].newest == pytest.approx(time.time() - DAY, abs=60) and found["verified"].newest is None


def test_clearing_removes_only_the_given_kinds():
    remaining = [
        put(cache_root() / "notes.txt"),
        put_own(cache_root() / "models" / "a.gguf"),
        put_own(cache_root() / "compile" / "young"),
    ]
    put_own(cache_root() / "compile" / "failed" / "k" / "module.mlir", 7, age_days=31)
    (row,) = clear(["compile"], older_than_days=30)
    assert (row.kind, row.files, row.bytes) == ("compile", 1, 7)
    assert [path for path in sorted(cache_root().rglob("[!.]*")) if path.is_file()] == sorted(remaining)
    assert not (cache_root() / "compile" / "failed").exists()
    clear()
    assert [path.name for path in cache_root().iterdir()] == ["notes.txt"]


def test_files_that_vanish_meanwhile_are_ignored(monkeypatch):
    """Temporary files of a compilation vanish when it ends."""
    going, scandir = put_own(cache_root() / "compile" / "work" / "module.mlir"), os.scandir
    put_own(cache_root() / "compile" / "k.vmfb", 5)

    def looked_into(directory="."):
        if str(directory) == str(going.parent) and going.exists():
            going.unlink()
            going.parent.rmdir()
        return scandir(directory)

    monkeypatch.setattr(os, "scandir", looked_into)
    assert {row.kind: row.files for row in usage()}["compile"] == 1
    put_own(going)
    assert [row.files for row in clear(["compile"])] == [1]


def test_files_being_written_are_not_cleared():
    left = put(cache_root() / "compile" / ".work.castiron-0123abcd" / "module.mlir")
    lock = put_own(cache_root() / "fetched" / ".key.lock")
    with staging_folder(cache_root() / "bundles" / "model") as work:
        half = put(work / "model.vmfb")
        clear()
        assert half.exists() and lock.exists() and not left.parent.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_only_entries_that_castiron_wrote_are_removed(kind, tmp_path):
    """The folder is one that its owner has had before, with entries of the names that castiron uses."""
    names = [
        "model",
        "model/weights.gguf",
        "a.gguf",
        f"{'0' * 64}.json",
        f"{'0' * 32}",
        f"{'0' * 32}/{'0' * 32}.state",
        "history",
    ]
    folder = cache_path(kind)
    foreign = [folder] if kind == "tuned" else [folder / name for name in names if name not in ("model", "0" * 32)]
    for path in foreign:
        # Claiming an entry that exists does not make it castiron's.
        put(path, 10, age_days=400)
        claim(path)
        assert not is_own(path)
    own = [] if kind == "tuned" else [put_own(folder / name, 3) for name in ("own", "line\nbreak", "b/c/d", "\udcff")]
    (row,) = clear([kind])
    assert (row.files, row.bytes) == (len(own), 3 * len(own)) and len(row.others) == len(
        {p.relative_to(folder).parts[:1] for p in foreign}
    )
    assert all(path.stat().st_size == 10 for path in foreign) and not any(path.exists() for path in own)
    if kind != "tuned":
        shutil.rmtree(folder)
    else:
        folder.unlink()
    # What castiron writes after that is its own.
    assert is_own(put_own(foreign[0])) and clear([kind])[0].files == 1 and not os.path.lexists(folder)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tuned"])
def test_no_link_is_followed(kind, tmp_path):
    outside = put_own(tmp_path / "outside" / "file", 10, age_days=400)
    put_own(cache_path(kind) / "folder" / "file")
    (cache_path(kind) / "folder" / "link").symlink_to(outside.parent)
    (cache_path(kind) / "folder" / "file link").symlink_to(outside)
    claim(cache_path(kind) / "linked")
    (cache_path(kind) / "linked").symlink_to(outside.parent)
    clear([kind])
    assert outside.exists() and (cache_path(kind) / "linked").is_symlink()
    # A folder of the cache that is itself a link.
    (cache_path(kind) / "linked").unlink()
    os.rename(cache_path(kind), tmp_path / "elsewhere")
    cache_path(kind).symlink_to(tmp_path / "elsewhere")
    through = put_own(cache_path(kind) / "through")
    assert [row.others for row in clear([kind])] == [(cache_path(kind),)] and through.exists() and outside.exists()


def test_a_killed_writer_of_the_list_loses_no_other_name():
    own = put_own(cache_root() / "compile" / "a")
    with open(cache_root() / "compile" / ".written-by-castiron", "a") as file:
        file.write('"b')
    assert is_own(own) and clear(["compile"])[0].files == 1
