"""The search of `castiron tune`: tiles are tried where they will run, in the model's own functions on its own weights.

In a round every product has one candidate, so that a round is one compilation however many products there are. Times are
IREE's own of each dispatch, of the default and of the candidates in turn. What was fastest is measured against the
default once more, and stays only if it is faster again and the bundle still gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from castiron.emitter.ir import Module
from castiron.emitter.kernels.products.frame import Tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.emitter.lowering import lower
from castiron.emitter.printer import print_module
from castiron.pipelines.casting.compile import Options, build_model, compile_model, open_source
from castiron.pipelines.tuning.candidates import combined, neighbours
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.compiler import CompileError, compile_mlir
from castiron.vmfb.manifest import MODEL, WEIGHTS, EntryPoint
from castiron.vmfb.profile import dispatches

# What a candidate has to gain to be worth its place, over the default measured beside it.
LEAST_GAIN = 1.03
LOOKS, LOOKS_TO_CONFIRM = 3, 6  # turns of default and candidate, of which the shortest counts
LOOK_SECONDS = 0.25
POSITION = 64

TilesByProduct = dict[str, Tiles]
Progress = Callable[[str, float], None]


@dataclass
class Trial:
    """What was measured of a product: seconds of a call, `tiles` is the best but the default, `gain` confirmed."""

    product: Product
    function: str
    default_seconds: float = 0.0
    gains: list[tuple[float, Tiles]] = field(default_factory=list)
    tiles: Tiles | None = None
    gain: float = 1.0


class Bench:
    """A model's bundle with default tiles, and modules with others that run on its weights."""

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

    def compiled(self, tiles: TilesByProduct, name: str, progress: Progress):
        """A whole bundle with these tiles, opened."""
        chosen = {product: asdict(found) for product, found in tiles.items()}
        compile_model(self.model, self.directory / name, self.options, progress, tiles=chosen)
        return open_bundle(self.directory / name)

    def products(self) -> dict[str, Trial]:
        """Those of the functions, by name, in the function where each comes first."""
        return {name: Trial(product, function) for name, (product, function, _) in self.kernels.items()}

    def gains(self, tiles: TilesByProduct, looks: int) -> dict[str, tuple[float, float]]:
        """Of each product that has tiles: (seconds of a call by default, how many times as fast it is with them)."""
        module = self._lowered(tiles)
        candidate = self.directory / "candidate.vmfb"
        compile_mlir(print_module(module), self.target, candidate, cache_dir=self.directory)
        kernels = self._kernels_of(module)
        names = {kernels[product][1] for product in tiles}
        ours, theirs = self.bundle.file(MODEL), candidate
        best: dict[tuple[Path, str, str], float] = {}
        for function in (f for f in self.functions if f.name in names):
            for _ in range(looks):
                for model in (ours, theirs):
                    for name, seconds in self._look(model, function):
                        key = (model, function.name, name)
                        best[key] = min(seconds, best.get(key, seconds))
        found = {}
        for product in tiles:
            _, function, default = self.kernels[product]
            before, after = best[ours, function, default], best[theirs, function, kernels[product][2]]
            found[product] = before, before / after
        return found

    def _look(self, model: Path, function: EntryPoint) -> Iterable[tuple[str, float]]:
        """Kernel and seconds of one call of it, in a run of about LOOK_SECONDS."""
        repeats = self._repeats.get(function.name, 2)
        rows = dispatches(model, self.bundle.file(WEIGHTS), function, position=POSITION, threads=self.threads, repeats=repeats)
        if function.name not in self._repeats:
            seconds = sum(row.seconds for row in rows)
            self._repeats[function.name] = max(3, min(100, int(LOOK_SECONDS / max(seconds, 1e-6))))
            return self._look(model, function)
        return [(row.name.removesuffix("_fn"), row.seconds / row.calls) for row in rows]

    def _lowered(self, tiles: TilesByProduct) -> Module:
        tiled = lambda product: tiles.get(product.name)
        return lower(self._layers, isa=self.target.isa, threads=self.threads, tiles=tiled, numerics=self.options.numerics)

    def _kernels_of(self, module: Module) -> dict[str, tuple[Product, str, str]]:
        """Product, function and kernel by the product's name."""
        found: dict[str, tuple[Product, str, str]] = {}
        for function in self.functions:
            for op in module.functions[function.name].ops:
                kernel = op.attrs["kernel"] if op.kind == "kernel" else None
                if kernel is not None and kernel.product is not None:
                    found.setdefault(kernel.product.name, (kernel.product, function.name, kernel.name))
        return found


def search(bench: Bench, trials: dict[str, Trial], told: Progress) -> int:
    """Finds the best tiles of every trial and confirms them; returns how many rounds the compiler refused."""
    isa, threads, refused = bench.isa, bench.threads, 0
    waiting = {name: list(neighbours(trial.product, isa, threads)) for name, trial in trials.items()}
    rounds = max(map(len, waiting.values()), default=0)

    def attempt(stage: str, tiles: TilesByProduct, looks: int, number: int) -> dict[str, tuple[float, float]]:
        nonlocal refused
        told(stage, number / (rounds + 2))
        try:
            return bench.gains(tiles, looks) if tiles else {}
        except CompileError:
            refused += 1
            return {}

    for number in range(rounds):
        tiles = {name: found[number] for name, found in waiting.items() if number < len(found)}
        for name, (default, gain) in attempt(f"round {number + 1} of {rounds}", tiles, LOOKS, number).items():
            trials[name].gains.append((gain, tiles[name]))
            trials[name].default_seconds = default
    together = {}
    for name, trial in trials.items():
        better = [pair for pair in trial.gains if pair[0] > 1.01]
        if (tiles := combined(trial.product, isa, threads, better)) is not None:
            together[name] = tiles
    for name, (_, gain) in attempt("combinations", together, LOOKS, rounds).items():
        trials[name].gains.append((gain, together[name]))
    best = {name: max(trial.gains, key=lambda pair: pair[0]) for name, trial in trials.items() if trial.gains}
    best = {name: tiles for name, (gain, tiles) in best.items() if gain > LEAST_GAIN}
    for name, (default, gain) in attempt("confirming", best, LOOKS_TO_CONFIRM, rounds + 1).items():
        trials[name].default_seconds = default
        if gain > LEAST_GAIN:
            trials[name].tiles, trials[name].gain = best[name], gain
    told("confirming", 1.0)
    return refused
