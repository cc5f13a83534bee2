"""Search for tile sizes that make a model's matmuls faster on this machine.

Matmuls are timed inside the model's own functions, with its weights. Each round compiles the model
with one candidate for every matmul, and IREE's profiler times it and the default alternately. At
the end, the fastest candidate of each matmul is timed again. It is used if it is faster both times,
and if a bundle with all fastest candidates generates the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from castiron.emitter.abi import Function
from castiron.emitter.graph.ir import Module
from castiron.emitter.graph.printer import print_module
from castiron.emitter.kernels.matmul.schedule import Tiles
from castiron.emitter.kernels.matmul.selection import default_tiles, kernel_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS, Isa
from castiron.emitter.lowering import lower
from castiron.pipelines.compile.build_model import build_model, open_source
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.verify import encoded_prompts, greedy
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.manifest import WEIGHTS
from castiron.vmfb.compiler.iree_compile import CompileError, compile_mlir
from castiron.vmfb.device.profile import dispatches
from castiron.vmfb.run.session import Batch, Session

# Min speed-up of a candidate over the default tiles.
MIN_GAIN = 1.03
# Number of alternate measurements of default tiles and candidate; the shortest time of each counts.
REPEATS, REPEATS_TO_CONFIRM = 3, 6
MEASURE_SECONDS = 0.25
POSITION = 64
# Size of the token comparison: max prompts, greedy tokens after each prompt, and decode steps of a batch.
PROMPTS, TOKENS, BATCH_STEPS = 12, 32, 8

TilesByMatmul = dict[str, Tiles]
Progress = Callable[[str, float], None]


@dataclass
class MatmulSearch:
    """The search for the best tiles of one matmul, timed in one function, and its result.

    tiles: None for the default ones. gain: speed-up over the default tiles, such as 1.1.
    """

    matmul: Matmul
    function: str
    default_seconds: float = 0.0
    tiles: Tiles | None = None
    gain: float = 1.0


class Bench:
    """A model whose matmuls are timed, with default tile sizes and with others."""

    def __init__(self, model: str | Path, options: Options, functions: Sequence[str], directory: Path, progress: Progress):
        """Compile `model` with default tiles; functions: those to tune, [] for all."""
        self.model, self.options, self.directory = model, options, directory
        checkpoint = open_source(model, options, progress)
        if checkpoint.encoding:
            raise PipelineError(f"{checkpoint.path} is an embedding model; give castiron tune a model that generates text")
        self._layers = build_model(checkpoint, options)
        names = list(self._layers.functions)
        if unknown := sorted(set(functions) - set(names)):
            raise PipelineError(f"unknown function: {unknown[0]!r}; --functions takes {', '.join(names)}")
        for name in names:
            if functions and name not in functions:
                del self._layers.functions[name]
        self.bundle = self.compiled({}, "default", progress)
        self.target, self.threads = self.bundle.manifest.target, options.threads_or_cores
        self.isa = ISAS[self.target.isa]
        self.functions = [f for f in self.bundle.manifest.functions if f.name in self._layers.functions]
        self.kernels = self._kernels_of(self._lowered({}))
        self._runs: dict[str, int] = {}

    def compiled(self, tiles: TilesByMatmul, name: str, progress: Progress) -> Bundle:
        """Compile the model into the subdirectory `name`; `tiles` replace default ones."""
        chosen = {matmul: asdict(found) for matmul, found in tiles.items()}
        compile_model(self.model, self.directory / name, self.options, progress, tiles=chosen)
        return open_bundle(self.directory / name)

    def matmuls(self) -> dict[str, MatmulSearch]:
        """Return a new search for each matmul, in the first function that contains it."""
        return {name: MatmulSearch(matmul, function) for name, (matmul, function, _) in self.kernels.items()}

    def gains(self, tiles: TilesByMatmul, repeats: int) -> dict[str, tuple[float, float]]:
        """Return (seconds with default tiles, speed-up with `tiles`) of each matmul in `tiles`.

        The shortest times of `repeats` measurements count.
        """
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
            _, function_name, default = self.kernels[name]
            before, after = best[False, function_name, default], best[True, function_name, kernels[name][2]]
            found[name] = before, before / after
        return found

    def _times(self, model: Path, function: Function) -> Iterator[tuple[str, float]]:
        measure = lambda runs: dispatches(
            model, self.bundle.file(WEIGHTS), self.bundle.manifest, function, POSITION, self.threads, runs
        )
        if function.name not in self._runs:
            seconds = sum(row.seconds for row in measure(2))
            self._runs[function.name] = max(3, min(100, int(MEASURE_SECONDS / max(seconds, 1e-6))))
        for row in measure(self._runs[function.name]):
            yield row.name.removesuffix("_fn"), row.seconds / row.calls

    def _lowered(self, tiles: TilesByMatmul) -> Module:
        tiled = lambda matmul: tiles.get(matmul.name)
        return lower(self._layers, isa=self.target.isa, threads=self.threads, tiles=tiled, numerics=self.options.numerics)

    def _kernels_of(self, module: Module) -> dict[str, tuple[Matmul, str, str]]:
        found: dict[str, tuple[Matmul, str, str]] = {}
        for function in self.functions:
            for op in module.functions[function.name].ops:
                kernel = op.attrs["kernel"] if op.kind == "kernel" else None
                if kernel is not None and kernel.matmul is not None:
                    found.setdefault(kernel.matmul.name, (kernel.matmul, function.name, kernel.name))
        return found


def search(bench: Bench, searches: dict[str, MatmulSearch], progress: Progress) -> int:
    """Store the fastest tiles in `searches`; return how many rounds did not compile."""
    refused = 0
    candidates = {name: list(neighbours(found.matmul, bench.isa, bench.threads)) for name, found in searches.items()}
    rounds = max(map(len, candidates.values()), default=0)
    best: dict[str, tuple[float, Tiles]] = {}

    def measured(tiles: TilesByMatmul, repeats: int) -> Iterator[tuple[str, float]]:
        nonlocal refused
        try:
            gains = bench.gains(tiles, repeats) if tiles else {}
        except CompileError:
            refused += 1
            return
        for name, (searches[name].default_seconds, gain) in gains.items():
            yield name, gain

    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}", number / (rounds + 1))
        tiles = {name: each[number] for name, each in candidates.items() if number < len(each)}
        for name, gain in measured(tiles, REPEATS):
            if gain > max(MIN_GAIN, best[name][0] if name in best else 0):
                best[name] = gain, tiles[name]
    progress("confirming", rounds / (rounds + 1))
    for name, gain in measured({name: tiles for name, (_, tiles) in best.items()}, REPEATS_TO_CONFIRM):
        if gain > MIN_GAIN:
            searches[name].tiles, searches[name].gain = best[name][1], gain
    progress("confirming", 1.0)
    return refused


Steps = Callable[[int], Iterable[int]]
_SCALED: Steps = lambda value: (value // 2, value * 2)
_NEXT: Steps = lambda value: (value - 1, value + 1)
# Steps from a tile field's default value: fields that count registers change by 1, other fields by a factor of 2.
_STEPS: dict[str, Steps] = {"together": lambda value: (value // 2, *_NEXT(value)), "rows": _NEXT}


def neighbours(matmul: Matmul, isa: Isa, threads: int) -> Iterator[Tiles]:
    """Yield tiles that differ from the default ones in one field, and compile to another kernel."""
    default = default_tiles(matmul, isa, threads)
    seen = {None, _code(matmul, isa, threads, default)}
    for tile in fields(default):
        for value in _STEPS.get(tile.name, _SCALED)(getattr(default, tile.name)):
            tiles = replace(default, **{tile.name: value})
            if (code := _code(matmul, isa, threads, tiles)) not in seen:
                seen.add(code)
                yield tiles


def _code(matmul: Matmul, isa: Isa, threads: int, tiles: Tiles) -> str | None:
    try:
        kernel = kernel_of(matmul, isa, threads, tiles)
    except ValueError:
        return None
    return kernel.text.replace(kernel.name, "")


def prompts_of(bundle: Bundle) -> list[list[int]]:
    """Return up to PROMPTS default prompts of `castiron verify` that fit in the context."""
    context = bundle.manifest.context
    limit = context - TOKENS - max(bundle.manifest.widths("verify"), default=0)
    if found := [tokens for _, tokens in encoded_prompts(bundle) if len(tokens) <= limit][:PROMPTS]:
        return found
    raise PipelineError(f"no test prompt fits in the context: {context} tokens; tune with a larger --context")


def answers(bundle: Bundle, threads: int, prompts: list[list[int]]) -> list[list[int]]:
    """Generate tokens after `prompts` with each decoding function of a bundle."""
    session, found = Session(bundle, threads), []
    for prompt in prompts:
        tokens = greedy(session, prompt, TOKENS)
        found.append(tokens)
        for width in bundle.manifest.widths("verify"):
            session.rewind(0)
            session.prefill(prompt)
            found.append(session.verify((2 * tokens)[:width]))
    for size in bundle.manifest.widths("batch"):
        batch = Batch(bundle, threads)
        last = {slot: batch.slots[slot].prefill(prompts[slot % len(prompts)]) for slot in range(size)}
        for _ in range(BATCH_STEPS):
            last = batch.step(last)
            found.append([last[slot] for slot in range(size)])
    return found
