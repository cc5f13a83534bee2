"""Drives iree-compile: text in, vmfb out, with a cache, a log that is always kept, and errors a user can read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from castiron.vmfb.aside import folder_aside, write_atomically
from castiron.vmfb.cache import cache_folder, cache_root, unwritable
from castiron.vmfb.children import own_group
from castiron.vmfb.disk import reason, write_text
from castiron.vmfb.targets import Target

# The compiler answers an error with the whole module otherwise: thousands of lines, one of which matters.
QUIET_FLAGS = ("--mlir-print-op-on-diagnostic=false", "--mlir-print-stacktrace-on-diagnostic=false")
SHOWN_ERRORS, SHOWN_WIDTH = 3, 300
KEPT_BYTES, KEPT_FAILURES = 512 * 2**20, 20
# Of earlier compilations here, how many the next one's time is told from; and where there is none, a guess: 20 s a megabyte
# of text is what two cores take.
REMEMBERED, SECONDS_A_BYTE = 8, 20e-6
# Below this text the compiler's own start is most of the time, and says nothing about larger ones.
LEAST_BYTES = 50_000


class CompileError(Exception):
    """A compilation that failed; the message is what to show the user, `log` is where all of it stands, if anywhere."""

    def __init__(self, message: str, log: Path | None = None):
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class CompileResult:
    """`seconds` are those that iree-compile took, when it ran (`cached` tells); `log` is beside the output."""

    seconds: float
    cached: bool
    flags: tuple[str, ...]
    log: Path


def compiler_version() -> str:
    """The version of the installed iree-base-compiler; CompileError where there is none."""
    try:
        return importlib.metadata.version("iree-base-compiler")
    except importlib.metadata.PackageNotFoundError:
        raise CompileError("compiling needs the IREE compiler: pip install iree-base-compiler") from None


def compiler_path() -> Path:
    """The iree-compile executable itself; its Python wrapper would survive as an orphan when it is interrupted."""
    version = compiler_version()
    spec = importlib.util.find_spec("iree.compiler")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("iree-compile", "iree-compile.exe"):
            if (path := Path(package) / "_mlir_libs" / name).is_file():
                return path
    raise CompileError(f"iree-base-compiler {version} has no iree-compile in it: reinstall it")


def compile_mlir(
    text: str,
    target: Target,
    out: Path,
    *,
    extra_flags: Sequence[str] = (),
    cache_dir: Path | None = None,
) -> CompileResult:
    """Compiles `text` for `target` into the file `out`; the log stands beside it as `compile.log`.

    Equal text, flags, compiler and target are compiled once: results are kept under `cache_dir` (default
    `cache_root()/compile`), and a hit copies them while their sha256 holds. An interrupted compilation leaves nothing behind,
    and one that was killed what the next one removes. CompileError names the first errors and a log that outlives `out`'s
    directory.
    """
    flags = compile_flags(target, extra_flags)
    store = Path(cache_dir) if cache_dir else cache_root() / "compile"
    out = Path(out)
    log = out.parent / "compile.log"
    key = _key(text, flags, target)

    known = _known(store, key)
    record, product = known or _compile(text, flags, store if cache_dir else cache_folder("compile"), key)
    write_atomically(out, product)
    write_atomically(log, record["log"].encode())
    with contextlib.suppress(OSError):
        os.utime(store / f"{key}.vmfb")
    return CompileResult(record["seconds"], known is not None, flags, log)


def compile_flags(target: Target, extra_flags: Sequence[str] = ()) -> tuple[str, ...]:
    """All flags that `compile_mlir` gives iree-compile, in order; of two that contradict each other the later one holds."""
    return (*target.flags, *QUIET_FLAGS, *extra_flags)


def expected_seconds(text: str, cache_dir: Path | None = None) -> float:
    """About how long iree-compile will take for `text`, by what the last compilations on this machine took a byte."""
    store = Path(cache_dir) if cache_dir else cache_root() / "compile"
    records = (_recall(path) or {} for path in _newest_first(store.glob("*.json"))[:REMEMBERED])
    rates = [r["seconds"] / r["bytes"] for r in records if r.get("bytes", 0) >= LEAST_BYTES]
    return len(text) * (statistics.median(rates) if rates else SECONDS_A_BYTE)


def _key(text: str, flags: Sequence[str], target: Target) -> str:
    facts = [compiler_version(), list(flags), target.cpu, list(target.features), text]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _known(store: Path, key: str) -> tuple[dict, bytes] | None:
    """The facts and the bytes of a result that is kept and is what was written."""
    record = _recall(store / f"{key}.json")
    with contextlib.suppress(OSError):
        if record and hashlib.sha256(product := (store / f"{key}.vmfb").read_bytes()).hexdigest() == record.get("sha256"):
            return record, product
    return None


def _recall(facts: Path) -> dict | None:
    try:
        record = json.loads(facts.read_bytes())
    except (OSError, ValueError):
        return None
    usable = isinstance(record, dict) and isinstance(record.get("log"), str) and "seconds" in record
    return record if usable else None


def _compile(text: str, flags: tuple[str, ...], store: Path, key: str) -> tuple[dict, bytes]:
    """Runs the compiler in a directory of its own inside the store and moves what it made into place; its facts and bytes."""
    compiler = compiler_path()
    with folder_aside(store / "work") as work:
        source, product = work / "module.mlir", work / "module.vmfb"
        write_text(source, text)
        command = [str(compiler), source.name, *flags, "-o", product.name]
        start = time.perf_counter()
        status, output = _run(command, work)
        seconds = time.perf_counter() - start
        log = f"$ iree-compile {' '.join(command[1:])}\n{output}exit status {status} after {seconds:.2f} s\n"
        if full := _no_room(status, output):
            raise OSError(full, os.strerror(full), str(store))
        if status or not product.is_file():
            raise _failure(status, output, log, source, store / "failed" / key[:16])
        made = product.read_bytes()
        record = {"seconds": seconds, "log": log, "bytes": len(text), "sha256": hashlib.sha256(made).hexdigest()}
        kept = store / f"{key}.vmfb"
        try:
            os.replace(product, kept)
            # Written last: a kept result without its facts counts as absent.
            write_atomically(store / f"{key}.json", json.dumps(record).encode())
        except OSError as error:
            kept.unlink(missing_ok=True)
            unwritable(store, reason(error))
    _prune(store)
    return record, made


def _run(command: list[str], directory: Path) -> tuple[int, str]:
    """Exit status and output; whatever ends the wait, an interrupt above all, ends the compiler too."""
    # What it writes for its linker goes with the directory too.
    environment = {**os.environ, "TMPDIR": str(directory.absolute())}
    with open(directory / "output", "w+b") as output, own_group() as group:
        process = None
        try:
            # An interrupt while Popen works would leave a compiler that nobody knows.
            with _interrupt_later():
                process = subprocess.Popen(
                    command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    process_group=group, env=environment,
                )  # fmt: skip
            status = process.wait()
        except BaseException:
            if process:
                process.kill()
                process.wait()
            raise
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
    """Holds ^C back until the end of the block; only Python's main thread ever sees one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(*came[0])


def _no_room(status: int, output: str) -> int | None:
    """The number of the error, where the compiler could not write what it made."""
    if status == -signal.SIGXFSZ:
        return errno.EFBIG
    return errno.ENOSPC if status and os.strerror(errno.ENOSPC) in output else None


def _failure(status: int, output: str, log: str, source: Path, folder: Path) -> CompileError:
    """The error to show; log and module move to `folder`, since the caller's own directory may go."""
    folder.mkdir(parents=True, exist_ok=True)
    os.replace(source, folder / "module.mlir")
    write_atomically(folder / "compile.log", log.encode())
    if status < 0:
        reason = f"was killed by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            reason += ", which is what a system without free memory does"
    else:
        errors = [line.strip() for line in output.splitlines() if "error:" in line]
        shown = [line if len(line) <= SHOWN_WIDTH else line[:SHOWN_WIDTH] + " …" for line in errors[:SHOWN_ERRORS]]
        # A flag that it does not know is told without the word.
        shown = shown or [line.strip() for line in output.splitlines() if line.strip()][:1]
        shown = shown or [f"exit status {status} and no error line"]
        reason = "failed: " + "\n  ".join(shown if len(shown) == 1 else ["", *shown])
    return CompileError(f"iree-compile {reason}\nlog and module: {folder}", folder / "compile.log")


def _prune(store: Path) -> None:
    """Forgets the results longest unused once they are more than `KEPT_BYTES`, and all but the last failures."""
    with contextlib.suppress(OSError):
        total = 0
        for path in _newest_first(store.glob("*.vmfb")):
            total += path.stat().st_size
            if total > KEPT_BYTES:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        for path in _newest_first((store / "failed").glob("*"))[KEPT_FAILURES:]:
            shutil.rmtree(path)


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
