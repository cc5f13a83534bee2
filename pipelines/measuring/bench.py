"""Engines taking turns on one machine: each in a process of its own, one at a time, in the same minutes."""

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring.workload import Workload

# A short prompt, for the time from starting a process to its first token.
FIRST_PROMPT = 32
# Turns that count for it: HF takes many seconds to read a GGUF file.
FIRST_ROUNDS = 3
# Lets the threads of the engine before fall asleep.
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Settings:
    """prompt and gen are tokens, depth is the position that decoding starts from, rounds counts measured turns."""

    threads: int
    prompt: int = 512
    gen: int = 64
    depth: int = 0
    rounds: int = 5

    @property
    def context(self) -> int:
        """Positions that every engine needs."""
        return max(self.prompt, self.depth + self.gen, FIRST_PROMPT + 1)


class EngineError(PipelineError):
    """An engine that ended; `signal` is the name of the one that killed it, if one did."""

    def __init__(self, engine: str, status: int, errors: str):
        """`status` is the process's, `errors` what it wrote to stderr."""
        self.engine, self.signal = engine, signal.Signals(-status).name if status < 0 else None
        self.reason = f"crashed ({self.signal})" if self.signal else f"ended: {last_line(errors)}"
        super().__init__(f"{engine} {self.reason}")


@dataclass
class Measured:
    """One engine's measurements, a value for each round; `weight_bytes` (None: unknown) are read for one decoded token."""

    name: str
    weight_bytes: float | None
    cache_item_bytes: float
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rss_mb: float = 0.0

    def clear(self) -> None:
        """Forgets what was measured."""
        for values in (self.decode, self.prefill, self.first):
            values.clear()


class Worker:
    """An engine in a process of its own, see `castiron.pipelines.measuring.bench_worker`."""

    def __init__(self, engine: str, model: str, threads: int, context: int):
        """EngineError, with the last line it wrote, if the engine cannot be loaded."""
        self.engine = engine
        command = [sys.executable, "-m", "castiron.pipelines.measuring.bench_worker", engine, model, str(threads), str(context)]
        # A file, because nobody reads a pipe before the end and a full one would stop the engine.
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        try:
            self._answer()
        except EngineError:
            self.close()
            raise

    def ask(self, op: str, **arguments) -> dict:
        """The engine's answer; EngineError if it ends instead."""
        # Whoever writes to a process that has ended learns why from its silence.
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


def last_line(text: str) -> str:
    """Of an error's text, what says why."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it gave no reason"


def first_token_command(engine: str, model: str, settings: Settings, tokens: Sequence[int]) -> list[str]:
    """The command whose time to its first output is the time to the first token; for castiron, what a user types."""
    ids = ",".join(map(str, tokens))
    if engine == "castiron":
        return [sys.executable, "-m", "castiron", "run", model, "--tokens", ids, "-n", "1", "--ignore-eos",
                "--threads", str(settings.threads), "--json"]  # fmt: skip
    return [sys.executable, "-m", "castiron.pipelines.measuring.bench_worker", engine, model, str(settings.threads),
            str(settings.context), ids]  # fmt: skip


def time_to_first_token(engine: str, command: Sequence[str]) -> float:
    """Seconds from starting the engine's `command` to its first line; EngineError if it fails."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        _, errors = process.communicate()
    if process.returncode or not line:
        raise EngineError(engine, process.returncode, errors.decode(errors="replace"))
    return seconds


@dataclass
class Engines:
    """Those that take part, with the paths of their models.

    missing: why an engine was not measured; notes: what is to be known of one that was; variants: what runs in the place
    of an engine that crashed.
    """

    models: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)

    def variant(self, engine: str) -> str:
        return self.variants.get(engine, engine)

    def lost(self, error: EngineError) -> str:
        """Puts a variant in the place of the engine that crashed, or leaves it out; returns its name."""
        from castiron.reference.peers import AFTER_CRASH

        engine = next(name for name in self.models if self.variant(name) == error.engine)
        if error.signal and engine not in self.variants and engine in AFTER_CRASH:
            self.variants[engine] = AFTER_CRASH[engine]
            self.notes[engine] = f"crashed ({error.signal}); measured as {AFTER_CRASH[engine]}"
            return engine
        first = self.notes.pop(engine, "").partition(";")[0]
        self.missing[engine] = f"{first}, and {error}" if first else error.reason
        del self.models[engine]
        return engine


def measure(
    engines: Engines,
    measured: dict[str, Measured],
    settings: Settings,
    tokens: Sequence[int],
    machine,
    progress: Callable[[str, float], None],
) -> dict[str, list[float]]:
    """Runs every engine that takes part `settings.rounds` times in turn and fills `measured`.

    One turn is not counted: it warms caches and clocks. `tokens` are as many as the longest of prompt and depth + gen.
    When a peer ends, all start again, without it or with what stands in for it: `engines` then says so. EngineError if
    castiron itself ends. Returns the machine's own measurements: read_gb_s and peak_gflop_s, a value a round.
    """
    while True:
        try:
            return _measure_once(engines, measured, settings, tokens, machine, progress)
        except EngineError as error:
            if error.engine == "castiron":
                raise
            engines.lost(error)
            for values in measured.values():
                values.clear()


def _measure_once(engines, measured, settings, tokens, machine, progress) -> dict[str, list[float]]:
    models = engines.models
    workers: dict[str, Worker] = {}
    limits: dict[str, list[float]] = {"read_gb_s": [], "peak_gflop_s": []}

    def decode(engine: str) -> float:
        following = tokens[settings.depth : settings.depth + settings.gen]
        return workers[engine].ask("decode", depth=settings.depth, tokens=following)["seconds"]

    def prefill(engine: str) -> float:
        return workers[engine].ask("prefill", tokens=tokens[: settings.prompt])["seconds"]

    def first(engine: str) -> float:
        variant = engines.variant(engine)
        return time_to_first_token(variant, first_token_command(variant, models[engine], settings, tokens[:FIRST_PROMPT]))

    def take_turns(stage, turn: Callable[[str], float], rounds: int, limit=None) -> Iterator[tuple[str, float]]:
        for done in range(rounds + 1):
            progress(stage, done / (rounds + 1))
            for engine in models:
                time.sleep(PAUSE_SECONDS)
                value = turn(engine)
                if done:
                    yield engine, value
            if limit and done:
                limits[limit].append(getattr(machine, limit)())
        progress(stage, 1.0)

    try:
        for engine, model in models.items():
            progress(f"loading {engine}", 0.0)
            workers[engine] = Worker(engines.variant(engine), model, settings.threads, settings.context)
            if settings.depth:
                progress(f"filling the context of {engine}", 0.0)
                workers[engine].ask("fill", tokens=tokens[: settings.depth])
        for engine, seconds in take_turns("decode", decode, settings.rounds, "read_gb_s"):
            measured[engine].decode.append(settings.gen / seconds)
        for engine, seconds in take_turns("prefill", prefill, settings.rounds, "peak_gflop_s"):
            measured[engine].prefill.append(settings.prompt / seconds)
        for engine, worker in workers.items():
            measured[engine].rss_mb = worker.ask("memory")["rss_mb"]
    finally:
        for worker in workers.values():
            worker.close()
    for engine, seconds in take_turns("time to first token", first, min(settings.rounds, FIRST_ROUNDS)):
        measured[engine].first.append(seconds * 1e3)
    return limits


def count(number: int, noun: str) -> str:
    """ "1 thread", "2 threads"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def spread(values: Sequence[float]) -> dict:
    """Median, extremes and the values in the order they came."""
    digits = [round(value, 3) for value in values]
    return {"median": round(statistics.median(values), 3), "min": min(digits), "max": max(digits), "values": digits}


def summarise(measured: Measured, settings: Settings, workload: Workload, limits: dict[str, float]) -> dict:
    """One engine's part of the result.

    decode_roofline is the share of read bandwidth that weights and cache of the decoded tokens take; prefill_peak_share
    that of f32 peak which the prompt's arithmetic takes (above 1 is possible for engines that round to int8). Each is
    None where the work is not known.
    """
    decode, prefill = statistics.median(measured.decode), statistics.median(measured.prefill)
    touched, flops = measured.weight_bytes, workload.prefill_flops(settings.prompt)
    if touched is not None:
        touched += workload.cache_bytes(settings.depth, settings.gen, measured.cache_item_bytes)
    return {
        "decode_tok_s": round(decode, 2),
        "prefill_tok_s": round(prefill, 2),
        "decode_roofline": _share(touched, decode, limits["read_gb_s"]),
        "prefill_peak_share": _share(flops and flops / settings.prompt, prefill, limits["peak_gflop_s"]),
        "ttft_ms": round(statistics.median(measured.first), 1),
        "rss_mb": round(measured.rss_mb, 1),
        "runs": {
            "decode_tok_s": spread(measured.decode),
            "prefill_tok_s": spread(measured.prefill),
            "ttft_ms": spread(measured.first),
        },
    }


def _share(work: float | None, rate: float, limit: float) -> float | None:
    """`work` for a token at `rate` tokens a second, of `limit` * 10^9 of it a second."""
    return None if work is None else round(work * rate / (limit * 1e9), 4)


def ratios(ours: dict, peer: dict) -> dict[str, float]:
    """How much better castiron is: above 1 is faster, or less memory."""
    return {
        "decode": round(ours["decode_tok_s"] / peer["decode_tok_s"], 3),
        "prefill": round(ours["prefill_tok_s"] / peer["prefill_tok_s"], 3),
        "ttft": round(peer["ttft_ms"] / ours["ttft_ms"], 3),
        "rss": round(peer["rss_mb"] / ours["rss_mb"], 3),
    }
