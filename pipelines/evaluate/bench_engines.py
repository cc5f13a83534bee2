"""Run engines in turn on one machine for `castiron bench`, each in a process with its own memory
and threads.

`python -m castiron.pipelines.evaluate.bench_engines ENGINE MODEL THREADS CONTEXT [IDS]` runs one
engine. It reads requests as lines of JSON, {"op": "prefill" | "fill" | "decode" | "memory"}, and
answers each with a line. With IDS it prints the greedy token after them and ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from castiron.pipelines.engine.memory import peak_rss_mb
from castiron.pipelines.errors import PipelineError

# Prompt tokens for the time to first token, which includes the start of the process.
FIRST_PROMPT = 32
# Measured turns for the time to first token: HF takes many seconds to read a GGUF file.
FIRST_ROUNDS = 3
# Lets the threads of the previous engine fall asleep.
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    threads: number of threads of each engine. prompt: number of tokens to prefill. gen: number of
    tokens to decode. depth: position from which to decode. rounds: number of measured rounds.
    """

    threads: int
    prompt: int = 512
    gen: int = 64
    depth: int = 0
    rounds: int = 5

    @property
    def context(self) -> int:
        """The number of positions that every engine needs."""
        return max(self.prompt, self.depth + self.gen, FIRST_PROMPT + 1)


class EngineError(PipelineError):
    """The error of an engine whose process ended; `signal` names the signal that killed it, or is
    None."""

    def __init__(self, engine: str, status: int, errors: str):
        """`status` is the exit status of the process, `errors` its stderr."""
        self.engine, self.signal = engine, signal.Signals(-status).name if status < 0 else None
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        self.reason = f"crashed ({self.signal})" if self.signal else f"ended: {lines[-1] if lines else 'it gave no reason'}"
        super().__init__(f"{engine} {self.reason}")


@dataclass
class Engine:
    """An engine and its measurements, one value per round.

    variant: name in `reference.peers` of the engine that runs; it changes after a crash.
    weight_bytes: bytes of weights read for one decoded token, None if unknown. cache_item_bytes:
    bytes per element of the KV cache. decode, prefill: tokens/s. first: milliseconds to the first
    token.
    """

    variant: str
    model: str
    weight_bytes: float | None
    cache_item_bytes: float
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rss_mb: float = 0.0


class Worker:
    """The process of one engine, which answers requests over pipes."""

    def __init__(self, engine: str, model: str, settings: Settings):
        """Start the process; EngineError, with its last line on stderr, if it cannot load the
        model."""
        self.engine = engine
        # A file, because nobody reads a pipe before the end and a full one would stop the engine.
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(worker_command(engine, model, settings), text=True, **pipes)
        try:
            self._answer()
        except EngineError:
            self.close()
            raise

    def ask(self, op: str, **arguments) -> dict:
        """Return the engine's answer to a request; EngineError if the process ends instead."""
        # A process that has ended closes its pipe; `_answer` reports why it ended.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            raise EngineError(self.engine, status, self.errors.read())
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def worker_command(engine: str, model: str, settings: Settings) -> list[str]:
    module = "castiron.pipelines.evaluate.bench_engines"
    return [sys.executable, "-m", module, engine, model, str(settings.threads), str(settings.context)]


def time_to_first_token(engine: str, model: str, settings: Settings, tokens: Sequence[int]) -> float:
    """Return the seconds from starting the engine to its first line of output; EngineError if it
    fails."""
    ids = ",".join(map(str, tokens))
    if engine == "castiron":
        # Time the command that a user types.
        command = [sys.executable, "-m", "castiron", "run", model, "--tokens", ids, "-n", "1", "--ignore-eos",
                   "--threads", str(settings.threads), "--json"]  # fmt: skip
    else:
        command = [*worker_command(engine, model, settings), ids]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        _, errors = process.communicate()
    if process.returncode or not line:
        raise EngineError(engine, process.returncode, errors.decode(errors="replace"))
    return seconds


def measure(
    engines: dict[str, Engine],
    settings: Settings,
    tokens: Sequence[int],
    machine,
    progress: Callable[[str, float], None],
) -> tuple[dict[str, list[float]], dict[str, str], dict[str, str]]:
    """Run every engine `settings.rounds` times in turn, after one turn that warms caches and
    clocks.

    A peer that crashes is replaced by a variant without the likely cause of the crash. If it has no
    variant, or the variant fails too, it is deleted from `engines`. Either way, the measurement
    starts again. EngineError if castiron itself fails.

    Returns the machine's limits measured in every round (read_gb_s, peak_gflop_s), the reasons why
    engines are missing, and notes about variants.
    """
    from castiron.reference.peers import AFTER_CRASH

    missing: dict[str, str] = {}
    notes: dict[str, str] = {}
    while True:
        try:
            return _measure_rounds(engines, settings, tokens, machine, progress), missing, notes
        except EngineError as error:
            if error.engine == "castiron":
                raise
            for engine in engines.values():
                engine.decode, engine.prefill, engine.first = [], [], []
            name = next(name for name, engine in engines.items() if engine.variant == error.engine)
            if error.signal and name not in notes and name in AFTER_CRASH:
                engines[name].variant = AFTER_CRASH[name]
                notes[name] = f"crashed ({error.signal}); measured as {AFTER_CRASH[name]}"
                continue
            crash = notes.pop(name, "").partition(";")[0]
            missing[name] = f"{crash}, and {error}" if crash else error.reason
            del engines[name]


def _measure_rounds(engines: dict[str, Engine], settings: Settings, tokens, machine, progress) -> dict[str, list[float]]:
    workers: dict[str, Worker] = {}
    limits: dict[str, list[float]] = {"read_gb_s": [], "peak_gflop_s": []}

    def take_turns(stage, turn: Callable[[str], float], rounds: int, limit=None) -> Iterator[tuple[Engine, float]]:
        for done in range(rounds + 1):
            progress(stage, done / (rounds + 1))
            for name, engine in engines.items():
                time.sleep(PAUSE_SECONDS)
                seconds = turn(name)
                if done:
                    yield engine, seconds
            if limit and done:
                limits[limit].append(getattr(machine, limit)())
        progress(stage, 1.0)

    def decode(name: str) -> float:
        following = tokens[settings.depth : settings.depth + settings.gen]
        return workers[name].ask("decode", depth=settings.depth, tokens=following)["seconds"]

    def prefill(name: str) -> float:
        return workers[name].ask("prefill", tokens=tokens[: settings.prompt])["seconds"]

    def first(name: str) -> float:
        return time_to_first_token(engines[name].variant, engines[name].model, settings, tokens[:FIRST_PROMPT])

    try:
        for name, engine in engines.items():
            progress(f"loading {name}", 0.0)
            workers[name] = Worker(engine.variant, engine.model, settings)
            if settings.depth:
                progress(f"filling the context of {name}", 0.0)
                workers[name].ask("fill", tokens=tokens[: settings.depth])
        for engine, seconds in take_turns("decode", decode, settings.rounds, "read_gb_s"):
            engine.decode.append(settings.gen / seconds)
        for engine, seconds in take_turns("prefill", prefill, settings.rounds, "peak_gflop_s"):
            engine.prefill.append(settings.prompt / seconds)
        for name, worker in workers.items():
            engines[name].rss_mb = worker.ask("memory")["rss_mb"]
    finally:
        for worker in workers.values():
            worker.close()
    for engine, seconds in take_turns("time to first token", first, min(settings.rounds, FIRST_ROUNDS)):
        engine.first.append(seconds * 1e3)
    return limits


class Castiron:
    """castiron as a measured engine: the session of a bundle. `decode` feeds back the tokens that
    the model generates."""

    def __init__(self, model: str, threads: int, context: int):
        from castiron.vmfb.bundle import open_bundle
        from castiron.vmfb.session import Session

        self.session = Session(open_bundle(model), threads=threads)

    def prefill(self, tokens: Sequence[int]) -> float:
        self.session.rewind(0)
        start = time.perf_counter()
        self.session.prefill(tokens)
        return time.perf_counter() - start

    def fill(self, tokens: Sequence[int]) -> None:
        self.prefill(tokens)
        self.session.keep()

    def decode(self, depth: int, tokens: Sequence[int]) -> float:
        self.session.rewind(depth)
        token, step = tokens[0], self.session.step
        start = time.perf_counter()
        for _ in tokens:
            token = step(token)
        return time.perf_counter() - start


def main(name: str, model: str, threads: str, context: str, ids: str = "") -> None:
    """Run one engine until stdin ends, or until it has printed the token after `ids`."""
    # Libraries that print must not write to the pipe.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if name == "castiron":
        worker = Castiron(model, int(threads), int(context))
    else:
        from castiron.reference.peers import ENGINES

        worker = ENGINES[name](model, int(threads), int(context))
    if ids:
        print(worker.first([int(token) for token in ids.split(",")]), file=pipe, flush=True)
        return
    print(json.dumps({"ready": True}), file=pipe, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        answer = {"rss_mb": peak_rss_mb()} if op == "memory" else {"seconds": getattr(worker, op)(**request)}
        print(json.dumps(answer), file=pipe, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
