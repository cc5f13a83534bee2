"""What is killed, fills a disk, runs twice at once or is changed behind its back: nothing wrong is loaded, and nothing half
written stays."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from castiron.pipelines.casting.repack import repack
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.space import need_room
from castiron.vmfb import aside, bundle, cut_short
from castiron.vmfb.bundle import Bundle, open_bundle, pack_bundle
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.manifest import MODEL, WEIGHTS, BundleError
from castiron.vmfb.program import FileChanged
from castiron.vmfb.session import Session
from castiron.vmfb.targets import TARGETS
from tests import faults
from tests.pipelines import served
from tests.vmfb import toy, toy_bundle

ROOT = Path(__file__).parents[1]
WORKS = (faults.compile_small, faults.pack_small, faults.fetch_small)
TOKENS = [1, 2, 3]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


def toy_at(place: Path, compiled: Path, scale: float = 1.0) -> Path:
    """A toy bundle whose weights are scaled, and the module is the same."""
    weights = toy.weights
    try:
        toy.weights = lambda: {name: array * np.float32(scale) for name, array in weights().items()}
        return toy_bundle.write(place, 8, (), cache_dir=compiled).path
    finally:
        toy.weights = weights


def logits(bundle: Bundle | Path) -> bytes:
    session = Session(bundle, 1)
    session.prefill(TOKENS)
    return session.logits().tobytes()


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_what_was_killed_at_any_moment_is_done_by_the_next_run_and_leaves_nothing(work, tmp_path):
    faults.finish(faults.compile_small, tmp_path / "made")
    os.rename(tmp_path / "made" / "bundle", tmp_path / "source")
    seconds = faults.finish(work, tmp_path / "whole")
    faults.kill_at_moments(work, tmp_path / "killed", seconds, seed=15)
    until = time.monotonic() + 60
    while (left := faults.running_below(tmp_path)) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []
    faults.finish(work, tmp_path / "killed")
    assert faults.contents(tmp_path / "killed") == faults.contents(tmp_path / "whole")


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_two_at_once_are_as_one(work, tmp_path):
    faults.finish(faults.compile_small, tmp_path / "made")
    os.rename(tmp_path / "made" / "bundle", tmp_path / "source")
    faults.finish(work, tmp_path / "whole")
    several = [faults.begin(work, tmp_path / "several") for _ in range(2)]
    for process in several:
        process.join()
    assert [process.exitcode for process in several] == [0, 0]
    assert faults.contents(tmp_path / "several") == faults.contents(tmp_path / "whole")


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_opened_bundle_stays_the_one_that_was_opened(exchanges, compiled, tmp_path, monkeypatch):
    """Whatever takes its place, a directory or a file, and although both have one module and one table of weights."""
    if not exchanges:
        monkeypatch.setattr(aside, "_exchange", lambda *_: False)
    one, place, packed = toy_at(tmp_path / "one", compiled), tmp_path / "place", tmp_path / "x.castiron"
    toy_at(place, compiled)
    pack_bundle(open_bundle(one), packed)
    opened = open_bundle(place), open_bundle(packed)
    expected = logits(one)
    toy_at(place, compiled, scale=2.0)
    pack_bundle(open_bundle(place), packed)
    assert [logits(bundle) == expected for bundle in (*opened, place, packed)] == [True, True, False, False]
    assert sorted(os.listdir(tmp_path)) == ["cache", "one", "place", "x.castiron"]


def test_who_opens_a_bundle_while_it_is_replaced_finds_the_old_or_the_new(compiled, tmp_path, monkeypatch):
    one, two, place = toy_at(tmp_path / "one", compiled), toy_at(tmp_path / "two", compiled, scale=2.0), tmp_path / "place"
    shutil.copytree(one, place)
    expected, part_in, renamed, rename = logits(two), bundle._part_in, [], os.rename

    def replaced_before(folder: int, name: Path):
        """The folder is open, and none of its files yet."""
        monkeypatch.setattr(bundle, "_part_in", part_in)
        repack(open_bundle(two), two / MODEL, place)
        return part_in(folder, name)

    # Either name has a folder at any time, where the system exchanges names at all.
    monkeypatch.setattr(os, "rename", lambda *names: renamed.append(names) or rename(*names))
    monkeypatch.setattr(bundle, "_part_in", replaced_before)
    assert logits(place) == expected
    assert aside._exchange(one, two) == (not renamed)


def test_a_full_disk_is_a_sentence_that_names_the_place_and_leaves_nothing(compiled, tmp_path):
    """Wherever it comes: in the compiler's text, in its module, in the weights or the archive."""
    faults.finish(faults.compile_small, tmp_path / "made")
    largest = max(path.stat().st_size for path in (tmp_path / "made" / "bundle").iterdir())
    os.rename(tmp_path / "made" / "bundle", tmp_path / "source")
    said = set()
    for work in (faults.compile_small, faults.pack_small):
        for part in (100, largest // 2, largest - 1):
            place = tmp_path / f"{work.__name__}-{part}"
            process = faults.begin(work, place, largest=part)
            process.join()
            sentence = (place / "said").read_text()
            (place / "said").unlink()
            assert process.exitcode == 3 and "File too large; allow larger files" in sentence and len(sentence) < 300
            assert str(place) in sentence
            said.add(sentence.replace(str(part), "").replace(str(tmp_path), "").split(":")[0])
            assert [path for path in place.rglob("*") if path.is_file() and path.parent.name != "verified"] == []
    assert len(said) > 2
    full = subprocess.run(
        [sys.executable, "-m", "castiron", "list"], stdout=open("/dev/full", "w"), stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert full.returncode == 1 and "castiron: stdout: No space left on device; make room there" in full.stderr


@pytest.mark.parametrize("place", ["directory", "archive"])
def test_a_session_runs_no_weights_that_were_written_into(place, compiled, tmp_path):
    bundle = toy_at(tmp_path / "bundle", compiled)
    expected, file = logits(bundle), bundle / WEIGHTS
    if place == "archive":
        file = tmp_path / "x.castiron"
        pack_bundle(open_bundle(bundle), file)
        bundle = file
    session, whole = Session(bundle, 1), file.read_bytes()
    # Touched, or written again as it was.
    os.utime(file, (1, 1))
    session.prefill(TOKENS)
    file.write_bytes(whole)
    session.rewind(0)
    session.prefill(TOKENS)
    assert session.logits().tobytes() == expected
    part = open_bundle(bundle).part(WEIGHTS)
    last = part.offset + part.size - 1
    for spoilt in (whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :], whole[:4096], b""):
        file.write_bytes(spoilt)
        os.utime(file, (time.time() + 3600,) * 2)
        with pytest.raises(FileChanged, match="was written into while it was in use"):
            session.step(1)


def told_in_a_sentence() -> bool:
    """Whether this system and its processor have the handler that says it."""
    with contextlib.suppress(OSError, AttributeError):
        return cut_short._instructions() is not None
    return False


CUT = """
import os, sys
from castiron.pipelines import cli
from castiron.vmfb.program import Call, Program
from castiron.vmfb.session import Session
Program.check_files = lambda self: None
def run(arguments):
    session = Session(sys.argv[1], int(sys.argv[2]))
    os.truncate(os.path.join(sys.argv[1], "weights.irpa"), 4096)
    session.prefill([1, 2, 3])
cli.build_parser = lambda argv: type("Parser", (), {"parse_known_args": lambda *_: (type("Args", (), {"main": run}), [])})
cli.check_threads = cli.choose_on_hub = lambda args: None
sys.exit(cli.main([]))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_weights_that_are_cut_short_while_they_are_read_end_in_a_sentence(threads, compiled, tmp_path):
    """On whichever thread it happens; where the machine is known, else with Python's report."""
    bundle = toy_at(tmp_path / "bundle", compiled)
    ended = subprocess.run([sys.executable, "-c", CUT, bundle, str(threads)], capture_output=True, cwd=ROOT)
    if told_in_a_sentence():
        assert (ended.returncode, ended.stderr, ended.stdout) == (1, cut_short.SENTENCE, b"")
    else:
        assert ended.returncode and b"Bus error" in ended.stderr


@pytest.mark.skipif(not told_in_a_sentence(), reason="the sentence is for Linux on x86-64 and aarch64")
def test_threads_that_find_it_at_once_say_it_once():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    faults.check_said_once(subprocess.Popen([sys.executable, "-c", faults.CUT_ON_THREADS], **pipes, cwd=ROOT))


def test_what_was_left_makes_room(tmp_path, monkeypatch):
    """It may be as large as what is to be written."""
    left = tmp_path / ".model.gguf.castiron-0123abcd"
    left.write_bytes(bytes(1000))
    free = lambda place: SimpleNamespace(free=0 if left.exists() else 1000)
    monkeypatch.setattr(shutil, "disk_usage", free)
    need_room(tmp_path / "other.gguf", 1000, "this")
    with pytest.raises(PipelineError, match="make room there"):
        need_room(tmp_path / "other.gguf", 1001, "this")


def test_a_clock_that_goes_back_changes_nothing(compiled, tmp_path):
    """What is kept is known by what it is, not by when it was made; what was left is known by who holds it."""
    place, cache = tmp_path / "place", tmp_path / "cache" / "compile"
    compile_mlir(faults.SMALL, TARGETS["host"], tmp_path / "a")
    bundle = toy_at(place, compiled)
    expected = logits(bundle)
    (left := cache / ".work.castiron-0123abcd").mkdir()
    (left / "module.mlir").write_text("")
    for year in (1980, 2100):
        for path in [*cache.rglob("*"), *place.iterdir(), place]:
            os.utime(path, ((year - 1970) * 31556952,) * 2)
        assert compile_mlir(faults.SMALL, TARGETS["host"], tmp_path / "b").cached and logits(place) == expected
    # Other bytes with the times of before.
    file = place / WEIGHTS
    status, data = file.stat(), file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(place)
    compile_mlir(faults.SMALL + " ", TARGETS["host"], tmp_path / "c")
    assert not left.exists()


@pytest.mark.parametrize("number", ["EROFS", "EACCES"])
def test_a_place_that_cannot_be_written_is_named_with_what_to_do(number, compiled, tmp_path, monkeypatch):
    import errno

    bundle = open_bundle(toy_at(tmp_path / "bundle", compiled))
    code, made = getattr(errno, number), os.open

    def read_only(path, flags, *more, **options):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), path)
        return made(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(BundleError, match="x.castiron cannot be written: .*; choose another place"):
        pack_bundle(bundle, tmp_path / "x.castiron")


def test_a_server_whose_weights_were_written_into_answers_so_and_ends(tmp_path_factory, tmp_path):
    place = shutil.copytree(served.bundle(tmp_path_factory.getbasetemp()), tmp_path / "bundle")
    with served.served(place, tmp_path / "log") as server:

        def ask() -> tuple[int, str]:
            body = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()
            request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        assert ask()[0] == 200
        os.truncate(place / WEIGHTS, 4096)
        status, body = ask()
        assert status == 500 and "weights.irpa was written into while it was in use" in body
        assert server.process.wait(100) == 1
        last = server.errors.splitlines()[-1]
        assert last.startswith(f"castiron: {place / WEIGHTS} was written into") and "Traceback" not in server.errors
