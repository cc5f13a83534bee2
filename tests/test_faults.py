"""After kills, full disks, simultaneous runs or changed files, a result is valid or an error."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import require_free_space
from castiron.vmfb.bundle import bundle
from castiron.vmfb.bundle.bundle import Bundle, BundleWriter, open_bundle, pack_bundle
from castiron.vmfb.bundle.manifest import WEIGHTS, BundleError
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.run.session import Session
from castiron.vmfb.targets import TARGETS
from tests import faults
from tests.vmfb import toy
from tests.vmfb.hostile_bundles import flip_byte

ROOT = Path(__file__).parents[1]
WORKS = (faults.compile_small, faults.pack_small, faults.fetch_small)
TOKENS = [1, 2, 3]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    """The bundle that `pack_small` packs."""
    faults.finish(faults.compile_small, tmp_path / "made")
    os.rename(tmp_path / "made" / "bundle", tmp_path / "source")
    return tmp_path / "source"


def toy_at(folder: Path, compile_cache: Path, scale: float = 1.0) -> Path:
    """Write a toy bundle with its usual module and weights multiplied by `scale`."""
    scaled = {name: array * np.float32(scale) for name, array in toy.weights().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "weights", lambda: scaled)
        return toy.write(folder, 8, (), cache_dir=compile_cache).path


def logits(bundle: Bundle | Path) -> bytes:
    session = Session(bundle, 1)
    session.prefill(TOKENS)
    return session.logits().tobytes()


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_the_next_run_completes_a_killed_one(work, source, tmp_path):
    seconds = faults.finish(work, tmp_path / "complete")
    faults.kill_at_moments(work, tmp_path / "killed", seconds, seed=15)
    until = time.monotonic() + 60
    while (left := faults.running_below(tmp_path)) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []
    faults.finish(work, tmp_path / "killed")
    both = [faults.begin(work, tmp_path / "simultaneous") for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    expected = faults.contents(tmp_path / "complete")
    assert faults.contents(tmp_path / "killed") == faults.contents(tmp_path / "simultaneous") == expected


def test_simultaneous_commits_to_one_folder_all_succeed(source, tmp_path):
    made = open_bundle(source, run=False)

    def commit(_: int) -> Path:
        with BundleWriter(tmp_path / "out") as writer:
            for name in made.manifest.files:
                writer.link(made, name)
            return writer.commit(made.manifest).path

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(commit, range(200)))) == 200
    assert open_bundle(tmp_path / "out", run=False).manifest == made.manifest
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_an_open_bundle_is_not_affected_by_replacement(compile_cache, tmp_path):
    """A directory and an archive are replaced by bundles whose files have the same sizes."""
    one, folder, packed = toy_at(tmp_path / "one", compile_cache), tmp_path / "folder", tmp_path / "x.castiron"
    toy_at(folder, compile_cache)
    pack_bundle(open_bundle(one), packed)
    opened = open_bundle(folder), open_bundle(packed)
    expected = logits(one)
    toy_at(folder, compile_cache, scale=2.0)
    pack_bundle(open_bundle(folder), packed)
    assert [logits(bundle) == expected for bundle in (*opened, folder, packed)] == [True, True, False, False]
    assert sorted(os.listdir(tmp_path)) == ["cache", "folder", "one", "x.castiron"]


def test_readers_get_the_old_or_the_new_bundle(compile_cache, tmp_path):
    one, two = toy_at(tmp_path / "one", compile_cache), toy_at(tmp_path / "two", compile_cache, scale=2.0)
    folder = shutil.copytree(one, tmp_path / "folder")
    expected, ended = {logits(one), logits(two)}, threading.Event()

    def replace() -> None:
        while not ended.is_set():
            for source in (open_bundle(two), open_bundle(one)):
                with bundle.BundleWriter(folder) as writer:
                    for name in source.manifest.files:
                        shutil.copy(source.path / name, writer.path(name))
                    writer.commit(source.manifest)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        assert {logits(folder) for _ in range(40)} <= expected
    finally:
        ended.set()
        thread.join()


def test_a_full_disk_is_a_one_line_error_and_leaves_nothing(source, tmp_path):
    """The disk may be full for the compiler's text, its module, the weights or the archive."""
    largest = max(path.stat().st_size for path in source.iterdir())
    messages = set()
    for work in (faults.compile_small, faults.pack_small):
        for part in (100, largest // 2, largest - 1):
            folder = tmp_path / f"{work.__name__}-{part}"
            process = faults.begin(work, folder, largest=part)
            process.join()
            message = (folder / "message").read_text()
            (folder / "message").unlink()
            assert process.exitcode == 3 and "File too large; allow larger files" in message and len(message) < 300
            assert str(folder) in message
            messages.add(message.replace(str(part), "").replace(str(tmp_path), "").split(":")[0])
            assert [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "verified"] == []
    assert len(messages) > 2
    full = subprocess.run(
        [sys.executable, "-m", "castiron", "list"], stdout=open("/dev/full", "w"), stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert full.returncode == 1 and "castiron: stdout: No space left on device; free some space" in full.stderr


def test_abandoned_files_are_removed_for_space(tmp_path, monkeypatch):
    """An abandoned file may be as large as the file that is to be written."""
    left = tmp_path / ".model.gguf.castiron-0123abcd"
    left.mkdir()
    free = lambda folder: SimpleNamespace(free=0 if left.exists() else 1000)
    monkeypatch.setattr(shutil, "disk_usage", free)
    require_free_space(tmp_path / "other.gguf", 1000, "this")
    with pytest.raises(PipelineError, match="delete files there"):
        require_free_space(tmp_path / "other.gguf", 1001, "this")


def test_a_changed_clock_has_no_effect(compile_cache, tmp_path):
    """Caches are keyed by contents, not times; abandoned files are recognised by their locks."""
    folder, cache = tmp_path / "folder", tmp_path / "cache" / "compile"
    compile_mlir(faults.SMALL, TARGETS["host"], tmp_path / "a")
    bundle = toy_at(folder, compile_cache)
    expected = logits(bundle)
    (left := cache / ".work.castiron-0123abcd").mkdir()
    (left / "module.mlir").write_text("")
    for year in (1980, 2100):
        for path in [*cache.rglob("*"), *folder.iterdir(), folder]:
            os.utime(path, ((year - 1970) * 31556952,) * 2)
        assert compile_mlir(faults.SMALL, TARGETS["host"], tmp_path / "b").cached and logits(folder) == expected
    flip_byte(folder / WEIGHTS)
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder)
    compile_mlir(faults.SMALL + " ", TARGETS["host"], tmp_path / "c")
    assert not left.exists()


def test_an_unwritable_path_is_named_with_a_remedy(compile_cache, tmp_path, monkeypatch):
    bundle, open_file = open_bundle(toy_at(tmp_path / "bundle", compile_cache)), os.open

    def read_only(path, flags, *more, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return open_file(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(BundleError, match="cannot write .*x.castiron: .*; choose another path"):
        pack_bundle(bundle, tmp_path / "x.castiron")
