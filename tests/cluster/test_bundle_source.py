"""A node fetches a bundle once, completely or not at all, and checks its hashes."""

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
from fsspec.implementations.memory import MemoryFileSystem

from castiron.pipelines.cluster.bundle_source import bundle_at
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle
from castiron.vmfb.bundle.manifest import BundleError
from tests.support import toy_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A folder with the toy bundle as a directory and as an archive."""
    folder = tmp_path_factory.mktemp("served")
    pack_bundle(open_bundle(toy_text.write(folder / "toy")), folder / "toy.castiron")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fetched"


def fetched(cache: Path) -> list[str]:
    return [entry.name for entry in cache.iterdir() if not entry.name.endswith((".lock", ".written-by-castiron"))]


@pytest.fixture
def server(toy):
    """The folder over HTTP: the address, and the paths of requests."""
    requested: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
            if self.path == "/toy.castiron":
                # Long enough for the other processes to request the file too.
                time.sleep(1)
            super().do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(toy))) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}", requested
        found.shutdown()
        thread.join()


def test_processes_of_a_node_share_one_fetch(toy, server, cache):
    url, requested = server
    code = "import sys; from castiron.pipelines.cluster.bundle_source import bundle_at; print(bundle_at(sys.argv[1]).path)"
    command = [sys.executable, "-c", code, f"{url}/toy.castiron"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert len(paths) == 1 and all(process.returncode == 0 for process in running)
    assert requested.count("/toy.castiron") == 1
    assert Path(paths.pop()).read_bytes() == (toy / "toy.castiron").read_bytes()


def test_a_changed_url_is_fetched_again(toy, cache):
    memory = fsspec.filesystem("memory")
    memory.put_file(str(toy / "toy.castiron"), "/changing.castiron")
    first = bundle_at("memory://changing.castiron")
    assert bundle_at("memory://changing.castiron").path == first.path
    memory.put_file(str(toy / "toy.castiron"), "/changing.castiron")
    assert bundle_at("memory://changing.castiron").path != first.path


def test_a_damaged_fetch_is_rejected_and_removed(toy, cache):
    data = bytearray((toy / "toy.castiron").read_bytes())
    part = open_bundle(toy / "toy.castiron").part("weights.irpa")
    data[part.offset + part.size - 1] ^= 1
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/spoilt.castiron", bytes(data))
    with pytest.raises(BundleError, match="invalid bundle at memory://spoilt.castiron; replace it"):
        bundle_at("memory://spoilt.castiron")
    assert fetched(cache) == []


class StoreError(Exception):
    """An error of a store's own kind, such as botocore's."""


def test_an_interrupted_fetch_leaves_nothing(toy, cache, monkeypatch):
    fsspec.filesystem("memory").put_file(str(toy / "toy.castiron"), "/broken.castiron")

    def half(self, path, out):
        Path(out).write_bytes(self.cat_file(path)[:1000])
        raise StoreError("the network\nwent away")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", half)
        with pytest.raises(
            PipelineError, match="^cannot fetch memory://broken.castiron: the network went away; check the URL$"
        ):
            bundle_at("memory://broken.castiron")
    assert fetched(cache) == []
    assert bundle_at("memory://broken.castiron").manifest.name


def test_ray_is_imported_on_demand():
    code = """
import sys, castiron, castiron.pipelines.cli.main, castiron.pipelines.cli.batch, castiron.pipelines.cluster.bundle_source
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


def test_windows_get_smaller_towards_the_end():
    # Importing Ray takes seconds.
    from castiron.pipelines.cluster.actors import MAX_WINDOW, MIN_WINDOW, Windows

    rows = [(SimpleNamespace(index=i), "") for i in range(2000)]
    windows, sizes = Windows(iter(rows)), list[int]()
    while not windows.done:
        sizes.append(len(windows.next(3)))
    assert sum(sizes) == 2000 and sizes == sorted(sizes, reverse=True) and sizes[0] == MAX_WINDOW and sizes[-2] == MIN_WINDOW
    # A window is shared among actors, and does not wait for rows that arrive slowly.
    few = Windows(iter([*rows[:MAX_WINDOW], None, rows[0]]))
    assert len(few.next(2)) == MAX_WINDOW // 4
    slow = Windows(iter([rows[0], None, None, rows[1]]))
    assert [len(slow.next(2)) for _ in range(4)] == [1, 0, 1, 0] and slow.done


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere"])
def test_an_unreachable_cluster_is_a_one_line_error(address):
    from castiron.pipelines.cluster.actors import connected

    with pytest.raises(PipelineError, match=rf"^cannot connect to the Ray cluster at {address}: .*\Z"), connected(address):
        pass


@pytest.mark.parametrize(
    ("url", "message"),
    [("memory://nothing", "no such file or directory"), ("nosuch://x", "nosuch"), ("http://127.0.0.1:9/x", "cannot fetch")],
)
def test_a_missing_url_is_a_one_line_error(url, message, cache):
    with pytest.raises(PipelineError, match=message) as failed:
        bundle_at(url)
    assert "\n" not in str(failed.value)
