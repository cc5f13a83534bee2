"""Measure engines in turn on one machine, each in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from castiron.pipelines.engine.memory import peak_rss_mb
from castiron.pipelines.errors import PipelineError

# Prompt tokens for the time to first token, which includes the start of the process.
FIRST_PROMPT = 32
# Measured turns for the time to first token: HF takes many seconds to read a GGUF file.
FIRST_ROUNDS = 3
# Wait before each turn: the threads of the previous engine fall asleep.
PAUSE_SECONDS = 0.05

# A forked process would have this one's libraries and memory.
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    threads: threads of each engine. prompt: tokens to prefill. gen: tokens to decode. depth:
    position of the first decoded token. rounds: measured rounds.
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
    """The failure of an engine; signal: name of the signal that killed its process, or None."""

    def __init__(self, engine: str, reason: str, status: int | None):
        """Make the error of `engine`; status: exit status of its process, None if still running."""
        self.engine, self.signal = engine, signal.Signals(-status).name if status and status < 0 else None
        self.reason = f"crashed ({self.signal})" if self.signal else f"ended: {reason or 'it gave no reason'}"
        super().__init__(f"{engine} {self.reason}")


@dataclass
class Engine:
    """An engine and its measurements, one value per round.

    variant: name of the engine in `reference.peers`; a crash changes it. weight_bytes: bytes of
    weights read for one decoded token, None if unknown. cache_item_bytes: bytes per element of the
    KV cache. decode, prefill: tokens/s. first: milliseconds to the first token.
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
    """The process of one engine, which answers requests over a pipe."""

    def __init__(self, engine: str, model: str, settings: Settings):
        """Start the process; EngineError if it cannot load the model."""
        self.engine = engine
        self.pipe, end = _SPAWN.Pipe()
        arguments = end, engine, model, settings.threads, settings.context
        self.process = _SPAWN.Process(target=serve_engine, args=arguments, daemon=True)
        self.process.start()
        end.close()
        self._answer()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of the engine; EngineError if it fails."""
        # If the process has ended, `_answer` reports why.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            result, error = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise EngineError(self.engine, "", self.process.exitcode) from None
        if error is not None:
            self.close()
            raise EngineError(self.engine, error, None)
        return result

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10)
        self.process.kill()


def serve_engine(pipe: Connection, name: str, model: str, threads: int, context: int) -> None:
    """Load an engine, and answer each request (method, arguments) with (result, error or None)."""
    # Libraries print progress and warnings.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    try:
        if name == "castiron":
            engine: Any = Castiron(model, threads, context)
        else:
            from castiron.reference.peers import ENGINES

            engine = ENGINES[name](model, threads, context)
        pipe.send((None, None))
        while True:
            method, arguments = pipe.recv()
            result = peak_rss_mb() if method == "memory" else getattr(engine, method)(*arguments)
            pipe.send((result, None))
    except EOFError:
        return
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[-1]
        pipe.send((None, reason if isinstance(error, PipelineError) else f"{type(error).__name__}: {reason}"))


def time_to_first_token(engine: str, model: str, settings: Settings, tokens: Sequence[int]) -> float:
    """Return the seconds from the start of a process to the first token after a prompt."""
    start = time.perf_counter()
    if engine != "castiron":
        worker = Worker(engine, model, settings)
        worker.ask("first", tokens)
        seconds = time.perf_counter() - start
        worker.close()
        return seconds
    # Time the command that a user types.
    ids = ",".join(map(str, tokens))
    command = [sys.executable, "-m", "castiron", "run", model, "--tokens", ids, "-n", "1", "--ignore-eos",
               "--threads", str(settings.threads), "--json"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as run:
        line = run.stdout.readline()
        seconds = time.perf_counter() - start
        _, errors = run.communicate()
    if run.returncode or not line:
        raise EngineError(engine, (errors.strip().splitlines() or [""])[-1], run.returncode)
    return seconds


def measure(
    engines: dict[str, Engine],
    settings: Settings,
    tokens: Sequence[int],
    machine,
    progress: Callable[[str, float], None],
) -> tuple[dict[str, list[float]], dict[str, str], dict[str, str]]:
    """Run every engine `settings.rounds` times in turn, after a turn that warms caches and clocks.

    If a peer fails, the measurement starts again without it, or with a variant that avoids the
    likely cause of its crash. EngineError if castiron fails.

    Returns the machine's limits (read_gb_s, peak_gflop_s), one value per round; why peers are
    missing; and notes about variants.
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

    def take_turns(
        stage: str, turn: Callable[[str, Engine], float], rounds: int, limit: str = ""
    ) -> list[tuple[Engine, float]]:
        measured = []
        for done in range(rounds + 1):
            progress(stage, done / (rounds + 1))
            for name, engine in engines.items():
                time.sleep(PAUSE_SECONDS)
                measured.append((engine, turn(name, engine)))
            if limit and done:
                limits[limit].append(machine.measure(limit))
        progress(stage, 1.0)
        return measured[len(engines) :]

    prompt, following = tokens[: settings.prompt], tokens[settings.depth : settings.depth + settings.gen]
    decode = lambda name, engine: workers[name].ask("decode", settings.depth, following)
    prefill = lambda name, engine: workers[name].ask("prefill", prompt)
    first = lambda name, engine: time_to_first_token(engine.variant, engine.model, settings, tokens[:FIRST_PROMPT])
    try:
        for name, engine in engines.items():
            progress(f"loading {name}", 0.0)
            workers[name] = Worker(engine.variant, engine.model, settings)
            if settings.depth:
                progress(f"filling the context of {name}", 0.0)
                workers[name].ask("fill", tokens[: settings.depth])
        for engine, seconds in take_turns("decode", decode, settings.rounds, "read_gb_s"):
            engine.decode.append(settings.gen / seconds)
        for engine, seconds in take_turns("prefill", prefill, settings.rounds, "peak_gflop_s"):
            engine.prefill.append(settings.prompt / seconds)
        for name, worker in workers.items():
            engines[name].rss_mb = worker.ask("memory")
    finally:
        for worker in workers.values():
            worker.close()
    for engine, seconds in take_turns("time to first token", first, min(settings.rounds, FIRST_ROUNDS)):
        engine.first.append(seconds * 1e3)
    return limits


class Castiron:
    """castiron as a measured engine, with the interface of those in `reference.peers`."""

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
