"""Read mutants of small checkpoints: each must be accepted, or rejected with a one-line error, within
limits of time and memory.

`test_hostile_checkpoints.py` reads some in one process. This command reads thousands in a process that
may die:

python -m tests.support.hostile_checkpoints --mutants 20000

It prints how many were taken and refused, by how many lines of the sources, and all that were
neither; its status is 1 if there are any. --only N reads one mutant. --beside reads mutants of
adapters and of encoders' files. --corpus prints one mutant for each line that refuses some, for
`hostile_corpus.txt`, and --replay reads the mutants of that file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.hostile_gguf_tokenizers import ADAPTER, BESIDE, write_beside
from tests.support.hostile_mutants import mutant, source_of
from tests.support.valid_checkpoints import write_valid

# Maximum characters of an error without the path; seconds of CPU time, bytes of memory, and seconds of waiting per mutant.
LONGEST, SECONDS, BYTES, WAIT = 300, 5.0, 1 << 30, 120.0
CORPUS = Path(__file__).with_name("hostile_corpus.txt")
# A valid checkpoint and the number of its mutant.
Mutant = tuple[Path, int]


def read_fully(path: Path) -> None:
    """Do all that castiron does with a checkpoint before iree-compile, and pack the weights."""
    from castiron.emitter.lowering import lower
    from castiron.emitter.models import read_config
    from castiron.emitter.printer import print_module
    from castiron.pipelines.checkpoints.checkpoint import validate
    from castiron.pipelines.compile.build_model import build_model, open_source
    from castiron.pipelines.compile.options import Options
    from castiron.pipelines.compile.weights import pack_parameter

    # A NumPy warning about NaN would be shown to the user.
    warnings.simplefilter("error", RuntimeWarning)
    adapter = path / ADAPTER
    adapted = str(adapter) if adapter.is_dir() else None
    options = Options(prefill=(8,), batch=(), speculate=(), lowering="portable", tuned=False, adapter=adapted)
    checkpoint = open_source(path, options)
    # One width of prefill is enough: the widths do not depend on the checkpoint.
    module = lower(build_model(checkpoint, options), options.lowering)
    print_module(module)
    validate(checkpoint, read_config(checkpoint.config).vocab)
    for param in module.params.values():
        pack_parameter(checkpoint, param)
    json.dumps([checkpoint.config, checkpoint.generation_config], ensure_ascii=False).encode()
    (checkpoint.chat_template or "").encode()


def verdict(path: Path, read: Callable[[Path], None] = read_fully) -> str:
    """Return "taken", "refused at" a line of the sources, or what is wrong: a traceback, or an error
    that is too long or not printable.
    """
    from castiron.pipelines.errors import user_errors

    try:
        read(path)
    except user_errors() as error:
        message = str(error).replace(str(path), "PATH")
        where = f"{line_of(error)}: {message[:160]!r}"
        if len(message) >= LONGEST:
            return f"long ({len(message)}) at {where}"
        return f"refused at {line_of(error)}" if message.isprintable() else f"unprintable at {where}"
    except Exception as error:
        return f"traceback {type(error).__name__} at {line_of(error)}: {str(error)[:80]!r}"
    return "taken"


def fine(message: str) -> bool:
    """Return whether a verdict is "taken" or "refused"."""
    return message.startswith(("taken", "refused"))


def line_of(error: BaseException) -> str:
    """Return castiron's innermost source line in the error's traceback."""
    foreign = ("hostile.py", "site-packages", "/lib/python")
    own = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in foreign)]
    return f"{'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno}" if own else "?"


class Hang(BaseException):
    """A mutant that takes more than SECONDS of CPU time."""


def _hang(*_: Any) -> None:
    raise Hang


def limited(path: Path) -> str:
    """Return `verdict`, or "hang" and the source line after SECONDS of CPU time."""
    signal.signal(signal.SIGVTALRM, _hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)  # kills where Python does not get to run
    try:
        return verdict(path)
    except Hang as error:
        return f"hang at {line_of(error)}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def work(folder: str, valid: list[Path], mutants: Any, results: Any) -> None:
    """Receive mutants, and send the verdict on each."""
    import castiron.pipelines.compile.compiler  # noqa: F401

    read_fully(next(p for p in valid if p.name in ("llama", "adapted")))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    while True:
        source, number = mutants.recv()
        target = Path(folder) / f"{source.name} {number}"
        target.mkdir()
        message = limited(mutant(number, source, target))
        shutil.rmtree(target)
        results.send(message)


class Worker:
    """A process that reads mutants, and is replaced when it dies or hangs."""

    def __init__(self, folder: str, valid: list[Path]):
        self.folder, self.valid, self.process = folder, valid, None

    def read(self, mutant: Mutant) -> str:
        """Return the verdict on a mutant."""
        if self.process is None:
            there, self.mutants = multiprocessing.Pipe(duplex=False)
            self.results, here = multiprocessing.Pipe(duplex=False)
            self.process = multiprocessing.Process(target=work, args=(self.folder, self.valid, there, here))
            self.process.start()
            there.close(), here.close()
        self.mutants.send(mutant)
        try:
            if self.results.poll(WAIT):
                return self.results.recv()
        except EOFError:
            self.process.join()
            code, self.process = self.process.exitcode, None
            name = signal.Signals(-code).name if code < 0 else code
            return "hang outside Python" if name in ("SIGPROF", "SIGVTALRM") else f"abort by {name}"
        self.stop()
        return "hang without work"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def run(mutants: Sequence[Mutant], valid: list[Path], folder: str) -> dict[str, list[tuple[str, int]]]:
    """Return verdict -> its mutants, each as the name of its source and its number."""
    multiprocessing.set_start_method("fork", force=True)
    os.environ["CASTIRON_CACHE"] = f"{folder}/cache"
    found: dict[str, list[tuple[str, int]]] = {}
    worker = Worker(folder, valid)
    for source, number in mutants:
        found.setdefault(worker.read((source, number)), []).append((source.name, number))
    worker.stop()
    return found


def corpus() -> list[tuple[str, int]]:
    """Return the name of the source and the number of each mutant in the corpus."""
    lines = [line.split() for line in CORPUS.read_text().splitlines() if not line.startswith("#")]
    return [(name, int(number)) for name, number, *_ in lines]


def sources_of(stored: list[tuple[str, int]], folder: Path) -> list[Path]:
    """Write the valid checkpoints whose mutants are in the corpus, and llama."""
    names = {"llama", *(name.replace("_with_", " with ") for name, _ in stored)}
    return write_valid(folder, names) + (write_beside(folder) if names & {*BESIDE} else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, help="read this mutant only, with its traceback, and keep its files")
    parser.add_argument("--corpus", action="store_true", help="print one mutant for each source line that refuses some")
    parser.add_argument("--replay", action="store_true", help="read the mutants of hostile_corpus.txt")
    parser.add_argument("--beside", action="store_true", help="read mutants of adapters, encoders and classifiers")
    args = parser.parse_args()
    write = write_beside if args.beside else write_valid
    if args.only is not None:
        folder = Path(tempfile.mkdtemp())
        (folder / "sound").mkdir()
        path = mutant(args.only, source_of(args.only, write(folder / "sound")), folder)
        print(path)
        read_fully(path)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sound").mkdir()
        stored = corpus() if args.replay else []
        valid = sources_of(stored, Path(folder) / "sound") if stored else write(Path(folder) / "sound")
        by_name = {path.name: path for path in valid}
        mutants = [(by_name[name], number) for name, number in stored]
        mutants = mutants or [(source_of(number, valid), number) for number in range(args.first, args.first + args.mutants)]
        found = run(mutants, valid, folder)
    counts: Counter = Counter()
    for message, which in sorted(found.items(), key=lambda item: -len(item[1])):
        counts[message.split()[0]] += len(which)
        if not fine(message):
            print(f"{len(which):6} {message}   e.g. {which[:3]}")
        elif args.corpus and message != "taken":
            name, number = min(which, key=lambda one: one[1])
            print(f"{name} {number}  {message}")
    counts["places"] = sum(message.startswith("refused") for message in found)
    print(json.dumps(dict(counts)))
    return int(not all(map(fine, found)))


if __name__ == "__main__":
    sys.exit(main())
