"""The iree-compile driver: MLIR text to vmfb, with a cache, a log and short errors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from castiron.vmfb.atomic_write import remove_abandoned, staging_folder, write_file
from castiron.vmfb.cache_folder import cache_folder, cache_root, claim, unwritable
from castiron.vmfb.compiler.child_group import own_group
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.file_errors import reason, write_text
from castiron.vmfb.targets import Target

# Without these flags an error prints the complete module.
QUIET_FLAGS = ("--mlir-print-op-on-diagnostic=false", "--mlir-print-stacktrace-on-diagnostic=false")
SHOWN_ERRORS, SHOWN_WIDTH = 3, 300
MAX_CACHE_BYTES, MAX_FAILURES = 512 * 2**20, 20
NOT_INSTALLED = "the IREE compiler is not installed; pip install iree-base-compiler"
# Names in the cache are a hash; those of failed compilations are its first 16 digits.
_KEY = re.compile(r"[0-9a-f]{16}([0-9a-f]{48})?")
# Interval in seconds at which a waiting thread checks whether the compiler has ended.
POLL_SECONDS = 0.02


class CompileError(Exception):
    """Raised if a compilation fails; the message names the folder with the complete log."""


@dataclass(frozen=True)
class CompileResult:
    """The result of a compilation.

    seconds: time of iree-compile, summed over the modules, also if they came from the cache.
    """

    seconds: float
    cached: bool
    flags: tuple[str, ...]


def compiler_version() -> str:
    """Return the version of iree-base-compiler; raise CompileError if it is not installed."""
    try:
        return importlib.metadata.version("iree-base-compiler")
    except importlib.metadata.PackageNotFoundError:
        raise CompileError(NOT_INSTALLED) from None


def is_installed() -> bool:
    """Return whether this environment has the compiler; running a bundle does not need it."""
    try:
        return bool(compiler_version())
    except CompileError:
        return False


def compiler_path() -> Path:
    # Not the path of its Python wrapper: an interrupt would end the wrapper, but not the compiler.
    version = compiler_version()
    spec = importlib.util.find_spec("iree.compiler")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("iree-compile", "iree-compile.exe"):
            if (path := Path(package) / "_mlir_libs" / name).is_file():
                return path
    raise CompileError(f"iree-base-compiler {version} has no iree-compile; reinstall it")


def compile_mlir(
    text: str, target: Target, out: Path, *, extra_flags: Sequence[str] = (), cache_dir: Path | None = None
) -> CompileResult:
    """Compile one MLIR text into the vmfb file `out`, as `compile_modules` does."""
    out = Path(out)
    return compile_modules({out.name: text}, target, out.parent, extra_flags=extra_flags, cache_dir=cache_dir)


def compile_modules(
    texts: Mapping[str, str], target: Target, folder: Path, *, extra_flags: Sequence[str] = (), cache_dir: Path | None = None,
    cancelled: threading.Event | None = None,
) -> CompileResult:  # fmt: skip
    """Compile MLIR texts into vmfb files in `folder`, which also gets `compile.log`.

    texts: MLIR text by the name of the output file.
    cache_dir: by default the folder `compile` in castiron's cache.
    cancelled: another thread sets this event to stop the compilation.

    CompileError if a compilation fails or is stopped. One process per core runs at a time, because
    iree-compile itself hardly runs in parallel. A cached vmfb is found by a hash of the text,
    flags, compiler version and target.
    """
    cancelled = cancelled or threading.Event()
    flags = compile_flags(target, extra_flags)
    store = Path(cache_dir) if cache_dir else cache_root() / "compile"

    def compiled(text: str) -> tuple[dict, bytes, bool]:
        facts = [compiler_version(), list(flags), target.cpu, list(target.features), text]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        known = _known(store, key)
        record, data = known or _compile(text, flags, store if cache_dir else cache_folder("compile"), key, cancelled)
        with contextlib.suppress(OSError):
            os.utime(store / f"{key}.vmfb")
        return record, data, known is not None

    remove_abandoned(store)
    with ThreadPoolExecutor(physical_cores()) as pool:
        longest_first = sorted(texts, key=lambda name: -len(texts[name]))
        futures = {name: pool.submit(compiled, texts[name]) for name in longest_first}
        try:
            for future in as_completed(futures.values()):
                future.result()
        except BaseException:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
    results = [futures[name].result() for name in texts]
    for name, (_, data, _) in zip(texts, results):
        write_file(folder / name, data)
    write_file(folder / "compile.log", "".join(record["log"] for record, _, _ in results).encode())
    return CompileResult(sum(record["seconds"] for record, _, _ in results), all(known for *_, known in results), flags)


def compile_flags(target: Target, extra_flags: Sequence[str] = ()) -> tuple[str, ...]:
    """Return all flags for iree-compile: those of `target`, then `extra_flags`."""
    return (*target.flags, *QUIET_FLAGS, *extra_flags)


def _known(store: Path, key: str) -> tuple[dict, bytes] | None:
    with contextlib.suppress(OSError, ValueError):
        record, data = json.loads((store / f"{key}.json").read_bytes()), (store / f"{key}.vmfb").read_bytes()
        usable = isinstance(record, dict) and isinstance(record.get("log"), str) and "seconds" in record
        if usable and record.get("sha256") == hashlib.sha256(data).hexdigest():
            return record, data
    return None


def _compile(text: str, flags: tuple[str, ...], store: Path, key: str, cancelled: threading.Event) -> tuple[dict, bytes]:
    compiler = compiler_path()
    with staging_folder(store / "work") as work:
        source, output_file = work / "module.mlir", work / "module.vmfb"
        write_text(source, text)
        command = [str(compiler), source.name, *flags, "-o", output_file.name]
        start = time.perf_counter()
        status, output = _run(command, work, cancelled)
        seconds = time.perf_counter() - start
        log = f"$ iree-compile {' '.join(command[1:])}\n{output}exit status {status} after {seconds:.2f} s\n"
        if full := _disk_full(status, output):
            raise OSError(full, os.strerror(full), str(store))
        if status or not output_file.is_file():
            raise _failure(status, output, log, source, store / "failed" / key[:16])
        made = output_file.read_bytes()
        record = {"seconds": seconds, "log": log, "sha256": hashlib.sha256(made).hexdigest()}
        cached_file = store / f"{key}.vmfb"
        claim(cached_file)
        claim(store / f"{key}.json")
        try:
            os.replace(output_file, cached_file)
            # Written last: a result without its record counts as absent.
            write_file(store / f"{key}.json", json.dumps(record).encode())
        except OSError as error:
            cached_file.unlink(missing_ok=True)
            unwritable(store, reason(error))
    _prune(store)
    return record, made


def _run(command: list[str], directory: Path, cancelled: threading.Event) -> tuple[int, str]:
    # The compiler's linker writes temporary files, which are removed with the directory.
    environment = {**os.environ, "TMPDIR": str(directory.absolute())}
    with open(directory / "output", "w+b") as output, own_group() as group:
        process = None
        try:
            process = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                process_group=group, env=environment,
            )  # fmt: skip
            while (status := process.poll()) is None:
                if cancelled.wait(POLL_SECONDS):
                    raise CompileError("the compilation was cancelled; compile again")
        except BaseException:
            if process:
                process.kill()
                process.wait()
            raise
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


def _disk_full(status: int, output: str) -> int | None:
    if status == -signal.SIGXFSZ:
        return errno.EFBIG
    return errno.ENOSPC if status and os.strerror(errno.ENOSPC) in output else None


def _failure(status: int, output: str, log: str, source: Path, folder: Path) -> CompileError:
    claim(folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.replace(source, folder / "module.mlir")
    write_file(folder / "compile.log", log.encode())
    if status < 0:
        reason = f"was killed by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            reason += "; the system may be out of memory"
    else:
        errors = [line.strip() for line in output.splitlines() if "error:" in line]
        shown = [line if len(line) <= SHOWN_WIDTH else line[:SHOWN_WIDTH] + " …" for line in errors[:SHOWN_ERRORS]]
        # The message for an unknown flag has no "error:".
        shown = shown or [line.strip() for line in output.splitlines() if line.strip()][:1]
        shown = shown or [f"exit status {status} and no error line"]
        reason = "failed: " + "\n  ".join(shown if len(shown) == 1 else ["", *shown])
    return CompileError(f"iree-compile {reason}\nsee compile.log and module.mlir in {folder}")


def _prune(store: Path) -> None:
    with contextlib.suppress(OSError):
        total = 0
        # The folder may have other files too.
        for path in _newest_first(path for path in store.glob("*.vmfb") if _KEY.fullmatch(path.stem)):
            total += path.stat().st_size
            if total > MAX_CACHE_BYTES:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        for path in _newest_first(path for path in (store / "failed").glob("*") if _KEY.match(path.name))[MAX_FAILURES:]:
            shutil.rmtree(path)


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
