"""Search for faster tiles of a model's matmuls on this machine, in the model's own functions and on
its own weights.

A round compiles one module with one candidate for every matmul. IREE's profiler times every
dispatch with default tiles and with the candidate in turn. The fastest candidate is measured again,
and used if it is faster again and the bundle's tokens stay the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from castiron.emitter.abi import Function
from castiron.emitter.ir import Module
from castiron.emitter.kernels.matmul.selection import default_tiles, kernel_of
from castiron.emitter.kernels.matmul.tiles import Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS, Isa
from castiron.emitter.lowering import lower
from castiron.emitter.printer import print_module
from castiron.pipelines.compile.build_model import build_model, open_source
from castiron.pipelines.compile.compiler import compile_model
from castiron.pipelines.compile.options import Options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.verify import encoded_prompts
from castiron.vmfb.batch import Batch
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.compiler import CompileError, compile_mlir
from castiron.vmfb.manifest import WEIGHTS
from castiron.vmfb.profile import dispatches
from castiron.vmfb.session import Session

# A candidate must be this much faster than the default.
MIN_GAIN = 1.03
# Measurements of default and candidate in turn; the minimum counts.
REPEATS, REPEATS_TO_CONFIRM = 3, 6
MEASURE_SECONDS = 0.25
POSITION = 64
# Size of the token comparison: prompts, greedy tokens after each, decode steps of a batch.
PROMPTS, TOKENS, BATCH_STEPS = 12, 32, 8
# Size of the decode rate measurement: runs, and decode steps of each.
RUNS, STEPS = 6, 48

TilesByMatmul = dict[str, Tiles]
Progress = Callable[[str, float], None]


@dataclass
class MatmulSearch:
    """The search for the best tiles of one matmul.

    function: name of the function in which it is timed. default_seconds: time of a call with
    default tiles. gains: (speed-up, tiles) of each candidate. tiles, gain: the confirmed best tiles
    and their speed-up; None and 1 without such tiles.
    """

    matmul: Matmul
    function: str
    default_seconds: float = 0.0
    gains: list[tuple[float, Tiles]] = field(default_factory=list)
    tiles: Tiles | None = None
    gain: float = 1.0


class Bench:
    """A model's bundle with default tiles, and modules with other tiles that run on its weights."""

    def __init__(self, model: str | Path, options: Options, functions: Sequence[str], directory: Path, progress: Progress):
        self.model, self.options, self.directory = model, options, directory
        self.bundle = self.compiled({}, "default", progress)
        self.target, self.threads = self.bundle.manifest.target, options.threads_or_cores
        self.isa = ISAS[self.target.isa]
        self.functions = [f for f in self.bundle.manifest.functions if f.name in functions or not functions]
        self._layers = build_model(open_source(model, options), options)
        for function in self.bundle.manifest.functions:
            if function not in self.functions:
                del self._layers.functions[function.name]
        self.kernels = self._kernels_of(self._lowered({}))
        self._repeats: dict[str, int] = {}

    def compiled(self, tiles: TilesByMatmul, name: str, progress: Progress):
        """Compile and open a bundle with these tiles."""
        chosen = {matmul: asdict(found) for matmul, found in tiles.items()}
        compile_model(self.model, self.directory / name, self.options, progress, tiles=chosen)
        return open_bundle(self.directory / name)

    def matmuls(self) -> dict[str, MatmulSearch]:
        """Return the matmuls of the functions by name, each in the first function that has it."""
        return {name: MatmulSearch(matmul, function) for name, (matmul, function, _) in self.kernels.items()}

    def gains(self, tiles: TilesByMatmul, repeats: int) -> dict[str, tuple[float, float]]:
        """Return (seconds with default tiles, speed-up with `tiles`) for each matmul in `tiles`."""
        module = self._lowered(tiles)
        candidate = self.directory / "candidate.vmfb"
        compile_mlir(print_module(module), self.target, candidate, cache_dir=self.directory)
        kernels = self._kernels_of(module)
        names = {kernels[name][1] for name in tiles}
        best: dict[tuple[bool, str, str], float] = {}
        for function in (f for f in self.functions if f.name in names):
            ours = self.bundle.file(self.bundle.manifest.module_of(function))
            for _ in range(repeats):
                for model in (ours, candidate):
                    for name, seconds in self._times(model, function):
                        key = (model == candidate, function.name, name)
                        best[key] = min(seconds, best.get(key, seconds))
        found = {}
        for name in tiles:
            _, function, default = self.kernels[name]
            before, after = best[False, function, default], best[True, function, kernels[name][2]]
            found[name] = before, before / after
        return found

    def _times(self, model: Path, function: Function) -> Iterable[tuple[str, float]]:
        """Return (kernel, seconds of one call) for the kernels of a function; measuring takes about
        MEASURE_SECONDS."""
        repeats = self._repeats.get(function.name, 2)
        weights, manifest = self.bundle.file(WEIGHTS), self.bundle.manifest
        rows = dispatches(model, weights, manifest, function, POSITION, self.threads, repeats)
        if function.name not in self._repeats:
            seconds = sum(row.seconds for row in rows)
            self._repeats[function.name] = max(3, min(100, int(MEASURE_SECONDS / max(seconds, 1e-6))))
            return self._times(model, function)
        return [(row.name.removesuffix("_fn"), row.seconds / row.calls) for row in rows]

    def _lowered(self, tiles: TilesByMatmul) -> Module:
        tiled = lambda matmul: tiles.get(matmul.name)
        return lower(self._layers, isa=self.target.isa, threads=self.threads, tiles=tiled, numerics=self.options.numerics)

    def _kernels_of(self, module: Module) -> dict[str, tuple[Matmul, str, str]]:
        """Return matmul name -> (matmul, name of the first function that has it, name of its
        kernel)."""
        found: dict[str, tuple[Matmul, str, str]] = {}
        for function in self.functions:
            for op in module.functions[function.name].ops:
                kernel = op.attrs["kernel"] if op.kind == "kernel" else None
                if kernel is not None and kernel.matmul is not None:
                    found.setdefault(kernel.matmul.name, (kernel.matmul, function.name, kernel.name))
        return found


def search(bench: Bench, searches: dict[str, MatmulSearch], progress: Progress) -> int:
    """Find and confirm the best tiles of each matmul, and store them in `searches`.

    Returns the number of rounds that did not compile.
    """
    isa, threads, refused = bench.isa, bench.threads, 0
    waiting = {name: list(neighbours(found.matmul, isa, threads)) for name, found in searches.items()}
    rounds = max(map(len, waiting.values()), default=0)

    def attempt(stage: str, tiles: TilesByMatmul, repeats: int, number: int) -> dict[str, tuple[float, float]]:
        nonlocal refused
        progress(stage, number / (rounds + 2))
        try:
            return bench.gains(tiles, repeats) if tiles else {}
        except CompileError:
            refused += 1
            return {}

    for number in range(rounds):
        tiles = {name: each[number] for name, each in waiting.items() if number < len(each)}
        for name, (default, gain) in attempt(f"round {number + 1} of {rounds}", tiles, REPEATS, number).items():
            searches[name].gains.append((gain, tiles[name]))
            searches[name].default_seconds = default
    together = {}
    for name, found in searches.items():
        better = [pair for pair in found.gains if pair[0] > 1.01]
        if (tiles := combined(found.matmul, isa, threads, better)) is not None:
            together[name] = tiles
    for name, (_, gain) in attempt("combinations", together, REPEATS, rounds).items():
        searches[name].gains.append((gain, together[name]))
    best = {name: max(found.gains, key=lambda pair: pair[0]) for name, found in searches.items() if found.gains}
    best = {name: tiles for name, (gain, tiles) in best.items() if gain > MIN_GAIN}
    for name, (default, gain) in attempt("confirming", best, REPEATS_TO_CONFIRM, rounds + 1).items():
        searches[name].default_seconds = default
        if gain > MIN_GAIN:
            searches[name].tiles, searches[name].gain = best[name], gain
    progress("confirming", 1.0)
    return refused


Steps = Callable[[int], Iterable[int]]
_SCALED: Steps = lambda value: (value // 2, value * 2)
_NEXT: Steps = lambda value: (value - 1, value + 1)
# Counts of registers change by one, sizes by a factor of two.
_STEPS: dict[str, Steps] = {"together": _NEXT, "chains": _NEXT, "rows": _NEXT}


def neighbours(matmul: Matmul, isa: Isa, threads: int) -> Iterator[Tiles]:
    """Yield tiles that differ from the default in one field, and whose kernels differ in code."""
    default = default_tiles(matmul, isa, threads)
    seen = {None, _code(matmul, isa, threads, default)}
    for tile in fields(default):
        for value in _STEPS.get(tile.name, _SCALED)(getattr(default, tile.name)):
            tiles = replace(default, **{tile.name: value})
            if (code := _code(matmul, isa, threads, tiles)) not in seen:
                seen.add(code)
                yield tiles


def combined(matmul: Matmul, isa: Isa, threads: int, better: Iterable[tuple[float, Tiles]]) -> Tiles | None:
    """Combine candidates that differ from the default in one field each: the best value of every
    field in `better` (gain, tiles).

    None if no kernel takes these tiles, or if only one field changes.
    """
    default, values = default_tiles(matmul, isa, threads), {}
    for _, tiles in sorted(better, key=lambda pair: pair[0]):
        values |= {f.name: getattr(tiles, f.name) for f in fields(tiles) if getattr(tiles, f.name) != getattr(default, f.name)}
    tiles = replace(default, **values)
    return tiles if len(values) > 1 and _code(matmul, isa, threads, tiles) else None


def _code(matmul: Matmul, isa: Isa, threads: int, tiles: Tiles) -> str | None:
    """Return the kernel's text without its name; None if the matmul cannot have these tiles."""
    try:
        kernel = kernel_of(matmul, isa, threads, tiles)
    except ValueError:
        return None
    return kernel.text.replace(kernel.name, "")


def max_prompt(context: int, verify: Collection[int], shortest: int = 1) -> int:
    """Return the length of the longest prompt that leaves positions for verify functions of these
    widths; PipelineError below `shortest`."""
    found = context - TOKENS - max(verify, default=0)
    if found < shortest:
        raise PipelineError(f"a context of {context} is too short to compare tokens; tune with a larger --context")
    return found


def prompts_of(bundle: Bundle) -> list[list[int]]:
    """Return some of verify's prompts that fit the context with their answers; PipelineError if
    none does."""
    manifest, prompts = bundle.manifest, [tokens for _, tokens in encoded_prompts(bundle)]
    limit = max_prompt(manifest.context, manifest.widths("verify"), min(map(len, prompts)))
    return [tokens for tokens in prompts if len(tokens) <= limit][:PROMPTS]


def answers(bundle: Bundle, threads: int, prompts: list[list[int]]) -> list[list[int]]:
    """Return the bundle's tokens for the prompts from greedy steps, verify functions and
    batches."""
    session, found = Session(bundle, threads), []
    for prompt in prompts:
        session.rewind(0)
        tokens = [session.prefill(prompt)]
        session.keep()
        while len(tokens) < TOKENS:
            tokens.append(session.step(tokens[-1]))
        found.append(tokens)
        for width in bundle.manifest.widths("verify"):
            session.rewind(len(prompt))
            found.append(session.verify((2 * tokens)[:width]))
    for size in bundle.manifest.widths("batch"):
        batch = Batch(bundle, threads)
        last = {slot: batch.slots[slot].prefill(prompts[slot % len(prompts)]) for slot in range(size)}
        for _ in range(BATCH_STEPS):
            last = batch.step(last)
            found.append([last[slot] for slot in range(size)])
    return found


def exact_part(tiles: dict, same: Callable[[dict], bool]) -> dict:
    """Return the part of `tiles` for which `same` is true: all of them, or those that pass it one
    by one and then together.

    same: returns whether a model with the given tiles generates the same tokens.
    """
    if not tiles or same(tiles):
        return tiles
    if len(tiles) == 1:
        return {}
    single = {name: found for name, found in tiles.items() if same({name: found})}
    return single if 0 < len(single) < len(tiles) and same(single) else {}


def accept(bench, prompts: list[list[int]], found: dict, progress) -> tuple[dict, dict | None]:
    """Return the tiles that keep the tokens of the prompts, and the decode rates without and with
    them."""
    if not found:
        return {}, None
    wanted = answers(bench.bundle, bench.threads, prompts)
    accepted = exact_part(
        found, lambda tiles: answers(bench.compiled(tiles, "tuned", progress), bench.threads, prompts) == wanted
    )
    if not accepted:
        return {}, None
    # exact_part compiled these last.
    sessions = [Session(bundle, bench.threads) for bundle in (bench.bundle, bench.compiled(accepted, "tuned", progress))]
    rates: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for session, times in zip(sessions, rates):
            session.rewind(0)
            token, start = session.prefill(prompts[0][:1]), time.perf_counter()
            for _ in range(min(STEPS, session.context - 1)):
                token = session.step(token)
            times.append(min(STEPS, session.context - 1) / (time.perf_counter() - start))
    default, tuned = (statistics.median(times[1:]) for times in rates)
    return accepted, {"default_tok_s": round(default, 1), "tuned_tok_s": round(tuned, 1), "ratio": round(tuned / default, 3)}
