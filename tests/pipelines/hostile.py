"""Mutants of small checkpoints, and what becomes of each: every one is taken or refused in a sentence, in bounds of time and memory.

`test_hostile.py` runs some of them in one process; thousands, each under limits of time and memory, in processes that may die:

    python -m tests.pipelines.hostile --mutants 20000 --workers 2

prints how many were taken and refused, in how many places, and those that were neither; it ends with 1 if there are any. --only N
shows one. --beside takes those of what stands beside a model's weights. --corpus prints one mutant of each place that refused, for
`hostile_corpus.txt`, of which --replay takes all.
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
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.pipelines.hostile_beside import ADAPTER, BESIDE, write_beside
from tests.pipelines.hostile_mutants import mutant, source_of
from tests.pipelines.hostile_sound import write_sound

# What a refusal may be, in characters beside the path that was given; what a mutant may take of the machine.
LONGEST, SECONDS, BYTES, WAIT = 300, 5.0, 1 << 30, 120.0
CORPUS = Path(__file__).with_name("hostile_corpus.txt")
# A sound checkpoint and the number of what becomes of it.
Mutant = tuple[Path, int]


def read_whole(path: Path) -> None:
    """All that castiron does with a checkpoint before iree-compile, and the weights' packing."""
    from castiron.emitter.lowering import lower
    from castiron.emitter.printer import print_module
    from castiron.pipelines.casting.compile import Options, build_model, open_source, packed_parameter, vocab_of
    from castiron.pipelines.casting.soundness import sound

    # NumPy's warning of a number that is none would reach a user who cannot read it.
    warnings.simplefilter("error", RuntimeWarning)
    adapter = path / ADAPTER
    adapted = str(adapter) if adapter.is_dir() else None
    options = Options(batch=(), speculate=(), lowering="portable", tuned=False, adapter=adapted)
    checkpoint = open_source(path, options)
    with sound(checkpoint, vocab_of(checkpoint.config)):
        # Of all widths of a prompt one: what differs among them is no checkpoint's.
        module = lower(build_model(checkpoint, options, (8,)), options.lowering)
        print_module(module)
    for param in module.params.values():
        packed_parameter(checkpoint, param)
    json.dumps([checkpoint.config, checkpoint.generation_config], ensure_ascii=False).encode()
    (checkpoint.chat_template or "").encode()


def verdict(path: Path, read: Callable[[Path], None] = read_whole) -> str:
    """ "taken", "refused at" a place, or what is wrong and where: a traceback, a refusal of too many characters or lines."""
    from castiron.pipelines.errors import user_errors

    try:
        read(path)
    except user_errors() as error:
        said = str(error).replace(str(path), "PATH")
        where = f"{place_of(error)}: {said[:160]!r}"
        if len(said) >= LONGEST:
            return f"long ({len(said)}) at {where}"
        return f"refused at {place_of(error)}" if said.isprintable() else f"unprintable at {where}"
    except Exception as error:
        return f"traceback {type(error).__name__} at {place_of(error)}: {str(error)[:80]!r}"
    return "taken"


def fine(said: str) -> bool:
    """Whether a verdict is one that a checkpoint may have."""
    return said.startswith(("taken", "refused"))


def place_of(error: BaseException) -> str:
    """The innermost line of castiron's that the error passed."""
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "hostile.py" not in f.filename and "site-packages" not in f.filename
    ]
    own = [f for f in own if "/lib/python" not in f.filename]
    return f"{'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno}" if own else "?"


# Thousands, in processes that may die.


class Hang(BaseException):
    """More seconds of the processor than a refusal may take."""


def _hang(*_: Any) -> None:
    raise Hang


def limited(path: Path) -> str:
    """`verdict`, or "hang" with where, within the seconds that a refusal may take."""
    signal.signal(signal.SIGVTALRM, _hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)  # kills where Python does not get to run
    try:
        return verdict(path)
    except Hang as error:
        return f"hang at {place_of(error)}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def work(folder: str, sound: list[Path], mutants: Any, results: Any) -> None:
    """Reads mutants until None, and answers each with its verdict."""
    import castiron.pipelines.casting.compile  # noqa: F401

    read_whole(next(p for p in sound if p.name in ("llama", "adapted")))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    while (found := mutants.recv()) is not None:
        source, number = found
        place = Path(folder) / f"{source.name} {number}"
        place.mkdir()
        said = limited(mutant(number, source, place))
        shutil.rmtree(place)
        results.send(said)


class Worker:
    """A process that reads mutants, and is replaced when it dies or hangs."""

    def __init__(self, folder: str, sound: list[Path]):
        self.folder, self.sound, self.process = folder, sound, None
        self.mutant: Mutant | None = None

    def start(self, mutant: Mutant) -> None:
        if self.process is None:
            there, self.mutants = multiprocessing.Pipe(duplex=False)
            self.results, here = multiprocessing.Pipe(duplex=False)
            self.process = multiprocessing.Process(target=work, args=(self.folder, self.sound, there, here))
            self.process.start()
            there.close(), here.close()
        self.mutant, self.since = mutant, time.monotonic()
        self.mutants.send(mutant)

    def poll(self) -> str | None:
        """The verdict on its mutant, None while there is none."""
        try:
            if self.results.poll(0.02):
                return self.results.recv()
        except EOFError:
            self.process.join()
            code, self.process = self.process.exitcode, None
            name = signal.Signals(-code).name if code < 0 else code
            return "hang outside Python" if name in ("SIGPROF", "SIGVTALRM") else f"abort by {name}"
        if time.monotonic() - self.since > WAIT:
            self.process.kill()
            self.process.join()
            self.process = None
            return "hang without work"
        return None


def run(mutants: Sequence[Mutant], sound: list[Path], folder: str, workers: int) -> dict[str, list[tuple[str, int]]]:
    """Verdict -> the mutants it was passed on, each the name of its source and its number."""
    multiprocessing.set_start_method("fork", force=True)
    os.environ["CASTIRON_CACHE"] = f"{folder}/cache"
    found: dict[str, list[tuple[str, int]]] = {}
    waiting = iter(mutants)
    busy = [Worker(folder, sound) for _ in range(workers)]
    for worker in busy:
        worker.start(next(waiting))
    while busy:
        for worker in list(busy):
            if (said := worker.poll()) is None:
                continue
            source, number = worker.mutant
            found.setdefault(said, []).append((source.name, number))
            if (mutant := next(waiting, None)) is not None:
                worker.start(mutant)
                continue
            busy.remove(worker)
            if worker.process is not None:
                worker.mutants.send(None)
                worker.process.join()
    return found


def corpus() -> list[tuple[str, int]]:
    """The name of its source and the number of each mutant that is kept."""
    lines = [line.split() for line in CORPUS.read_text().splitlines() if not line.startswith("#")]
    return [(name, int(number)) for name, number, *_ in lines]


def sources_of(kept: list[tuple[str, int]], folder: Path) -> list[Path]:
    """The sources of mutants that are kept, and llama."""
    names = {"llama", *(name.replace("_with_", " with ") for name, _ in kept)}
    return write_sound(folder, names) + (write_beside(folder) if names & {*BESIDE} else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", type=int, help="this mutant alone, with its traceback; its files stay where it says")
    parser.add_argument("--corpus", action="store_true", help="print one mutant of each place that refused")
    parser.add_argument("--replay", action="store_true", help="those of the corpus, which are kept")
    parser.add_argument("--beside", action="store_true", help="of adapters, and of the files of encoders and classifiers")
    args = parser.parse_args()
    write = write_beside if args.beside else write_sound
    if args.only is not None:
        folder = Path(tempfile.mkdtemp())
        (folder / "sound").mkdir()
        path = mutant(args.only, source_of(args.only, write(folder / "sound")), folder)
        print(path)
        read_whole(path)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sound").mkdir()
        kept = corpus() if args.replay else []
        sound = sources_of(kept, Path(folder) / "sound") if kept else write(Path(folder) / "sound")
        by_name = {path.name: path for path in sound}
        mutants = [(by_name[name], number) for name, number in kept]
        mutants = mutants or [(source_of(number, sound), number) for number in range(args.first, args.first + args.mutants)]
        found = run(mutants, sound, folder, args.workers)
    counts: Counter = Counter()
    for said, which in sorted(found.items(), key=lambda item: -len(item[1])):
        counts[said.split()[0]] += len(which)
        if not fine(said):
            print(f"{len(which):6} {said}   e.g. {which[:3]}")
        elif args.corpus and said != "taken":
            name, number = min(which, key=lambda one: one[1])
            print(f"{name} {number}  {said}")
    counts["places"] = sum(said.startswith("refused") for said in found)
    print(json.dumps(dict(counts)))
    return int(not all(map(fine, found)))


if __name__ == "__main__":
    sys.exit(main())
