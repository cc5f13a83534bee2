"""A bundle comes to a node once: from a server however many want it, whole or not at all, and its bytes are checked."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from castiron.pipelines.cluster.places import bundle_at
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.manifest import BundleError, dump
from tests.pipelines import toy_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A folder with the toy bundle as a directory and packed."""
    folder = tmp_path_factory.mktemp("served")
    pack_bundle(open_bundle(toy_text.write(folder / "toy")), folder / "toy.castiron")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fetched"


@pytest.fixture
def server(toy):
    """The folder over HTTP: its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path == "/toy.castiron":
                # Long enough for the others to come and want it too.
                time.sleep(1)
            super().do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(toy))) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}", asked
        found.shutdown()
        thread.join()


def test_processes_of_a_node_fetch_a_bundle_once(toy, server, cache):
    url, asked = server
    code = "import sys; from castiron.pipelines.cluster.places import bundle_at; print(bundle_at(sys.argv[1]).path)"
    command = [sys.executable, "-c", code, f"{url}/toy.castiron"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    places = {process.communicate(timeout=120)[0].strip() for process in running}
    assert len(places) == 1 and all(process.returncode == 0 for process in running)
    assert asked.count("/toy.castiron") == 1
    assert Path(places.pop()).read_bytes() == (toy / "toy.castiron").read_bytes()


def test_a_directory_comes_as_its_manifest_names_it(toy, server, cache):
    url, asked = server
    (toy / "toy/notes.txt").write_text("of no bundle")
    try:
        found = bundle_at(f"{url}/toy")
    finally:
        (toy / "toy/notes.txt").unlink()
    assert dump(found.manifest) == dump(open_bundle(toy / "toy").manifest)
    assert {entry.name for entry in found.path.iterdir()} == {"manifest.json", *found.manifest.files}
    assert not any("notes" in path for path in asked)


def test_what_changed_behind_a_url_is_fetched_again(toy, cache):
    memory = fsspec.filesystem("memory")
    memory.put_file(str(toy / "toy.castiron"), "/changing.castiron")
    first = bundle_at("memory://changing.castiron")
    assert bundle_at("memory://changing.castiron").path == first.path
    memory.put_file(str(toy / "toy.castiron"), "/changing.castiron")
    assert bundle_at("memory://changing.castiron").path != first.path


def test_bytes_that_do_not_hold_are_refused_and_not_kept(toy, cache):
    data = bytearray((toy / "toy.castiron").read_bytes())
    part = open_bundle(toy / "toy.castiron").part("weights.irpa")
    data[part.offset + part.size - 1] ^= 1
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/spoilt.castiron", bytes(data))
    with pytest.raises(BundleError, match="memory://spoilt.castiron is no whole bundle"):
        bundle_at("memory://spoilt.castiron")
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []


class OfAStore(Exception):
    """As botocore's are."""


@pytest.mark.parametrize("kind", [OSError, OfAStore])
def test_a_fetch_that_breaks_off_leaves_nothing_and_is_a_sentence(toy, cache, monkeypatch, kind):
    from fsspec.implementations.memory import MemoryFileSystem

    fsspec.filesystem("memory").put_file(str(toy / "toy.castiron"), "/broken.castiron")

    def half(self, path, out):
        Path(out).write_bytes(self.cat_file(path)[:1000])
        raise kind("the network\nwent away")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", half)
        with pytest.raises(PipelineError, match="^memory://broken.castiron cannot be fetched: the network went away$"):
            bundle_at("memory://broken.castiron")
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []
    assert bundle_at("memory://broken.castiron").manifest.name


def test_ray_is_imported_when_it_is_asked_for_and_its_absence_is_a_sentence():
    code = """
import sys, castiron, castiron.pipelines.cli, castiron.pipelines.commands.batch, castiron.pipelines.cluster.places
assert "ray" not in sys.modules
sys.modules["ray"] = None
try:
    castiron.ray
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"castiron.ray needs ray, which is not installed: .* pip install .*\n", done.stdout)


def test_windows_of_a_cluster_grow_small_towards_the_end_and_leave_a_part_to_every_engine():
    from castiron.pipelines.cluster.batch import LEAST, WINDOW, Windows

    rows = [(SimpleNamespace(index=i), "") for i in range(2000)]
    windows, sizes = Windows(iter(rows)), list[int]()
    while not windows.done:
        sizes.append(len(windows.next(3)))
    assert sum(sizes) == 2000 and sizes == sorted(sizes, reverse=True) and sizes[0] == WINDOW and sizes[-2] == LEAST
    # Rows for one whole window are not one engine's, and those that come slowly are not waited for.
    few = Windows(iter([*rows[:WINDOW], None, rows[0]]))
    assert len(few.next(2)) == WINDOW // 4
    slow = Windows(iter([rows[0], None, None, rows[1]]))
    assert [len(slow.next(2)) for _ in range(4)] == [1, 0, 1, 0] and slow.done


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere", "nowhere:port"])
def test_a_cluster_that_is_not_there_is_a_sentence(address):
    from castiron.pipelines.cluster.batch import connected

    with pytest.raises(PipelineError, match=f"^no cluster of Ray can be joined at {address}: ") as failed, connected(address):
        pass
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memory://nothing", "there is nothing of that name"),
        ("nosuch://bucket/x", "nosuch"),
        ("http://127.0.0.1:9/x", "cannot be fetched"),
    ],
)
def test_a_url_with_nothing_behind_it_is_refused_in_a_sentence(url, says, cache):
    with pytest.raises(PipelineError, match=says) as failed:
        bundle_at(url)
    assert "\n" not in str(failed.value)
