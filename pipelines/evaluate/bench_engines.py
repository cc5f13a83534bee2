"""Measure several engines on one machine, each in its own process and in turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from castiron.pipelines.engine.memory import peak_rss_mb
from castiron.pipelines.errors import PipelineError

if TYPE_CHECKING:
    # Not imported at run time, because the start of an engine's process is timed.
    from castiron.pipelines.evaluate.machine import Machine

# Prompt tokens for the time to first token, which includes the start of the process.
FIRST_PROMPT = 32
# Max rounds for the time to first token, because HF needs many seconds to read a GGUF file.
FIRST_ROUNDS = 3
# Wait before each measurement, until the threads of the previous engine stop spinning.
PAUSE_SECONDS = 0.05

Progress = Callable[[str, float], None]

# Spawned, because a forked process would inherit the libraries and memory of this one.
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Settings:
    """A prefill of `prompt` tokens, and `gen` decode steps from position `depth`."""

    threads: int
    prompt: int = 512
    gen: int = 64
    depth: int = 0
    rounds: int = 5

    @property
    def context(self) -> int:
        return max(self.prompt, self.depth + self.gen, FIRST_PROMPT + 1)


class EngineError(PipelineError):
    """Raised if an engine's process crashed or reported an error."""

    def __init__(self, engine: str, reason: str, status: int | None):
        crash = f"crashed ({signal.Signals(-status).name})" if status and status < 0 else None
        self.engine, self.reason = engine, crash or f"ended: {reason or 'it gave no reason'}"
        super().__init__(f"{engine} {self.reason}")


@dataclass
class Engine:
    """An engine and its measurements: tokens/s and, in `first`, milliseconds of each round."""

    name: str
    model: str
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rss_mb: float = 0.0


class Worker:
    """A process that runs one engine, and receives requests and returns results over a pipe."""

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
        """Call a method of the engine and return its result; EngineError if the engine fails."""
        # If the process has ended, `_answer` reports why.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            result, error = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise EngineError(
                self.engine, "the process ended without an error message; it may have lacked memory", self.process.exitcode
            ) from None
        if error is not None:
            self.close()
            raise EngineError(self.engine, error, None)
        return result

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10)
        self.process.kill()


def serve_engine(pipe: Connection, name: str, model: str, threads: int, context: int) -> None:
    """Load an engine and run requests from `pipe`; this is the main function of a worker process.

    A request is (name of a method, arguments). The answer is (result, error message or None).
    """
    # Discard stdout and stderr, to which libraries print progress and warnings.
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
    """Return the seconds from the start of a new process to the first token after a prompt."""
    start = time.perf_counter()
    worker = Worker(engine, model, settings)
    worker.ask("first", tokens)
    seconds = time.perf_counter() - start
    worker.close()
    return seconds


def measure(
    engines: dict[str, Engine], settings: Settings, tokens: Sequence[int], machine: Machine, progress: Progress
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure engines in turns, and append the measurements to the lists in `engines`.

    An engine that fails is removed from `engines`. If castiron fails, EngineError is raised.

    tokens: ids of prompts and generated text, at least `settings.context`.

    Returns ({limit of the machine: value of each round}, {failed engine: error message}).
    """
    workers: dict[str, Worker] = {}
    limits: dict[str, list[float]] = {"read_gb_s": [], "peak_gflop_s": []}
    missing: dict[str, str] = {}

    def take_turns(
        stage: str, turn: Callable[[Engine], float], keep: Callable[[Engine, float], None], rounds: int, limit: str = ""
    ) -> None:
        for done in range(rounds + 1):
            progress(stage, done / (rounds + 1))
            for engine in list(engines.values()):
                time.sleep(PAUSE_SECONDS)
                try:
                    value = turn(engine)
                except EngineError as error:
                    if engine.name == "castiron":
                        raise
                    missing[engine.name] = error.reason
                    del engines[engine.name]
                    continue
                if done:
                    keep(engine, value)
            if limit and done:
                limits[limit].append(machine.measure(limit))
        progress(stage, 1.0)

    def load(engine: Engine) -> float:
        workers[engine.name] = Worker(engine.name, engine.model, settings)
        if settings.depth:
            workers[engine.name].ask("fill", tokens[: settings.depth])
        return 0.0

    prompt, following = tokens[: settings.prompt], tokens[settings.depth : settings.depth + settings.gen]
    decode = lambda engine: settings.gen / workers[engine.name].ask("decode", settings.depth, following)
    prefill = lambda engine: settings.prompt / workers[engine.name].ask("prefill", prompt)
    first = lambda engine: 1e3 * time_to_first_token(engine.name, engine.model, settings, tokens[:FIRST_PROMPT])
    try:
        take_turns("loading", load, lambda engine, _: None, 0)
        take_turns("decode", decode, lambda engine, rate: engine.decode.append(rate), settings.rounds, "read_gb_s")
        take_turns("prefill", prefill, lambda engine, rate: engine.prefill.append(rate), settings.rounds, "peak_gflop_s")
        for name, engine in engines.items():
            engine.rss_mb = workers[name].ask("memory")
    finally:
        for worker in workers.values():
            worker.close()
    rounds = min(settings.rounds, FIRST_ROUNDS)
    take_turns("time to first token", first, lambda engine, value: engine.first.append(value), rounds)
    return limits, missing


class Castiron:
    """castiron as an engine of the benchmark; the other engines are in `reference.peers`."""

    def __init__(self, model: str, threads: int, context: int):
        from castiron.vmfb.bundle.bundle import open_bundle
        from castiron.vmfb.run.session import Session

        self.bundle = open_bundle(model)
        self.session = Session(self.bundle.with_context(self.bundle.manifest.max_context), threads=threads)

    def prefill(self, tokens: Sequence[int]) -> float:
        self.session.rewind(0)
        start = time.perf_counter()
        self.session.prefill(tokens)
        return time.perf_counter() - start

    def first(self, tokens: Sequence[int]) -> None:
        # Encode a text too, because `castiron run` does so; llama.cpp loads its vocabulary.
        if self.bundle.tokenizer:
            from castiron.pipelines.text.tokenizer import load_tokenizer

            load_tokenizer(self.bundle, lazy=True).encode("Hi")
        self.prefill(tokens)

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
