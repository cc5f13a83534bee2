"""Times one kernel alone, on operands as a model has them, against what the machine can do at most."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from castiron.emitter import ops
from castiron.emitter.caches import CACHES
from castiron.emitter.ir import Module, current_function
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.weights.packing import LANES, pack
from castiron.emitter.printer import print_module
from castiron.emitter.types import TensorType
from castiron.pipelines.casting.named_kernel import KINDS, named_kernel
from castiron.pipelines.measuring.bench import spread
from castiron.pipelines.measuring.kernel_times import PEAKS, bound_of, of_limit, peak_of
from castiron.pipelines.measuring.machine import LOAD_SECONDS, mean_seconds
from castiron.pipelines.measuring.random_rows import tiled_rows
from castiron.pipelines.sizes import megabytes

# Weights and caches come in turn from as much memory as no cache holds, as those of a model's layers do.
STREAMED_BYTES = 256 << 20
MOST_COPIES = 512
# An operand that is at least such a part of the largest comes in turn too: keys and values.
LARGE = 4
# A kernel with hardly any work, whose time is what a call costs besides.
NOTHING = ("argmax", "16")

Progress = Callable[[str, float], None]


class Timed:
    """A kernel compiled for this machine, with operands to run on; `seconds` is the mean of a round of calls."""

    def __init__(self, kernel: Kernel, values: Mapping[str, np.ndarray], threads: int):
        """`values` by the kernel's tensor operands. CompileError where the compiler refuses it."""
        import iree.runtime as rt

        from castiron.vmfb.aside import scratch
        from castiron.vmfb.compiler import compile_mlir
        from castiron.vmfb.device import device
        from castiron.vmfb.program import Buffer
        from castiron.vmfb.targets import resolve

        self.device = device(threads)
        with scratch("kernel") as folder:
            path = folder / "kernel.vmfb"
            compile_mlir(print_module(module_of(kernel)), resolve("host"), path)
            instance = rt.VmInstance()
            module = rt.VmModule.copy_buffer(instance, path.read_bytes())
        self._context = rt.VmContext(instance, [rt.create_hal_module(instance, self.device), module])
        self._function = module.lookup_function("call")
        self._results = rt.VmVariantList(len(kernel.results))
        sizes = {name: type_.nbytes for name, type_ in kernel.tensors.items()}
        large = {name for name, size in sizes.items() if size * LARGE >= max(sizes.values())}
        copies = min(MOST_COPIES, max(1, STREAMED_BYTES // sum(sizes[name] for name in large)))

        def buffer(type_: TensorType, value: np.ndarray | None = None) -> Buffer:
            made = Buffer(self, type_.shape, type_.dtype.name)  # type: ignore[arg-type]
            # Pages that nobody wrote are all the same page of zeros.
            made.array[...] = 0 if value is None else value
            return made

        results = [buffer(type_) for name, type_ in kernel.results.items() if name not in kernel.in_place]
        same = {name: buffer(kernel.tensors[name], values[name]) for name in sizes if name not in large}
        self._kept, self._arguments = [results, same], []
        for _ in range(copies):
            own = same | {name: buffer(kernel.tensors[name], values[name]) for name in large}
            arguments = rt.VmVariantList(len(own) + len(results))
            for operand in [*(own[name] for name in sizes), *results]:
                arguments.push_ref(operand.view)
            self._kept.append(own)
            self._arguments.append(arguments)
        self._next = 0

    def seconds(self, least: float) -> tuple[float, int]:
        """Mean seconds of a call and how many calls there were, in at least so many seconds."""

        def call() -> None:
            self._context.invoke(self._function, self._arguments[self._next], self._results)
            self._next = (self._next + 1) % len(self._arguments)

        return mean_seconds(call, least)


def module_of(kernel: Kernel) -> Module:
    """A function `call` that dispatches the kernel once. Its tensors come first, then a place for each result that is not
    updated in an operand's: a result that is allocated anew would be timed with it."""
    module = Module("kernel")
    places = {f"{name}_place": type_ for name, type_ in kernel.results.items() if name not in kernel.in_place}
    with module.function("call", **kernel.tensors, **places) as inputs:
        given = dict(zip([*kernel.tensors, *places], inputs, strict=True))
        results = ops.kernel_call(kernel, **{n: given[n] for n in kernel.tensors}, **dict.fromkeys(kernel.indices, 0))
        storage = {i: given[kernel.in_place.get(name, f"{name}_place")] for i, name in enumerate(results)}
        current_function().returns(storage, **results)
    return module


def operands(kernel: Kernel, codec: str, sizes: Sequence[int], tokens: int, position: int) -> dict[str, np.ndarray]:
    """Values for the kernel's tensors: random, the cache filled up to `position`, every expert or row in turn."""
    rng = np.random.default_rng(0)
    whole = {"length": tokens, "start": position, "position": position, "counters": 0}
    found = {}
    for name, type_ in kernel.tensors.items():
        kind = type_.dtype.name
        if name == "weight" and kind == "i8":
            rows, inner = type_.shape[0] * LANES, sizes[-1]
            value = pack(codec, tiled_rows(codec, rows, inner)).view(np.int8).reshape(type_.shape)
        elif name in whole:
            value = np.full(type_.shape, whole[name])
        elif name in ("chosen", "ids"):
            value = np.arange(type_.shape[0]) % sizes[0]
        elif kind == "i8" and name in ("k_cache", "v_cache"):
            rows = np.resize(rng.standard_normal(1 << 20) * 0.5, (*type_.shape[:3], sizes[-1]))
            value = CACHES["q8_0"].stored(rows)
        elif kind in ("i8", "i32"):
            bits = 8 if kind == "i8" else 32
            value = rng.integers(-(1 << bits - 1), 1 << bits - 1, type_.shape)
        else:
            value = np.resize(rng.standard_normal(1 << 20) * 0.5, type_.shape).astype(np.float32)
            # What a state has seen decays.
            value = -np.abs(value) if name == "rate" else value
            # Numpy has no bf16: the bits are carried.
            value = (value.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else value
        found[name] = value
    return found


@dataclass(frozen=True)
class Asked:
    """A kernel with what it was asked for by, and the position that it runs at, where its cache is full."""

    kernel: Kernel
    settings: Mapping[str, Any]
    position: int


def ask(
    kind: str, shape: str, tokens: int | None, codec: str, numerics: str, threads: int, context: int, cache: str = "f32"
) -> Asked:
    """The kernel as `named_kernel` has it for this machine's instructions; PipelineError for what does not fit."""
    from castiron.vmfb.targets import resolve

    isa = resolve("host").isa
    of_machine = {"isa": isa, "threads": threads}
    kernel = named_kernel(
        kind, shape, tokens=tokens, codec=codec, context=context, numerics=numerics, cache=cache, **of_machine
    )
    tokens = KINDS[kind].tokens[0] if tokens is None else tokens
    context = max(context, tokens)
    settings = {
        "kernel": kind, "shape": shape, "tokens": tokens, "codec": codec, "numerics": numerics, **of_machine,
        "context": context, "cache": cache,
    }  # fmt: skip
    return Asked(kernel, settings, context - (1 if kind == "attention_decode" else tokens))


def measure(asked: Asked, rounds: int, machine: Any, progress: Progress) -> dict[str, Any]:
    """The result of `castiron bench --kernel`. One round is not counted; between rounds the machine's limits are measured."""
    from castiron.pipelines.measuring.machine import describe

    kernel, settings, position = asked.kernel, asked.settings, asked.position
    threads, codec = settings["threads"], settings["codec"]
    progress("compiling the kernel", 0.0)
    sizes = [int(word) for word in settings["shape"].split("x")]
    timed = Timed(kernel, operands(kernel, codec, sizes, settings["tokens"], position), threads)
    nothing = named_kernel(*NOTHING, isa=settings["isa"], threads=threads)
    empty = Timed(nothing, operands(nothing, "f32", [16], 1, 0), threads)
    limits: dict[str, list[float]] = {"read_gb_s": [], peak_of(kernel.name): []}
    calls, besides, count = [], [], 0
    for done in range(rounds + 1):
        progress(f"timing {kernel.name}", done / (rounds + 1))
        call, number = timed.seconds(LOAD_SECONDS)
        besides += [empty.seconds(LOAD_SECONDS / 100)[0] for _ in range(10)]
        if done:
            calls.append(call)
            count += number
            for name, values in limits.items():
                values.append(getattr(machine, name)())
    # What is more than this is waiting for others, in either.
    beside = min(besides)
    own = [max(call - beside, call / 2) for call in calls]
    flops, nbytes = kernel.work(position)
    medians = {name: statistics.median(values) for name, values in limits.items()}
    seconds = statistics.median(own)
    bound, share = bound_of(kernel.name, nbytes, flops, seconds, medians)
    return {
        "kernel": kernel.name,
        "us": round(seconds * 1e6, 2),
        "besides_us": round(beside * 1e6, 2),
        "calls": count,
        "bytes": nbytes,
        "flops": flops,
        "gb_s": round(nbytes / seconds / 1e9, 2),
        "gflop_s": round(flops / seconds / 1e9, 2),
        "bound": bound,
        "limit_share": share and round(share, 4),
        "runs": {"us": spread([value * 1e6 for value in own])},
        "machine": {
            **describe(),
            **{name: round(value, 2) for name, value in medians.items()},
            "runs": {name: spread(values) for name, values in limits.items()},
        },
        "settings": {**settings, "rounds": rounds},
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for a person."""
    settings, machine, runs = result["settings"], result["machine"], result["runs"]["us"]
    threads = settings["threads"]
    bound = {"memory": "memory bound", "compute": "compute bound", "cache": "in cache"}[result["bound"]]
    peak, of = next((machine[name], of) for name, of in PEAKS.items() if name in machine)
    share = "" if result["bound"] == "cache" else f", {of_limit(result)} of the limit"
    return "\n".join(
        [
            f"{result['kernel']} on {threads} thread{'s' * (threads != 1)}, {settings['tokens']} token"
            f"{'s' * (settings['tokens'] != 1)}, {settings['isa']}",
            f"{machine['cpu']}: reads {machine['read_gb_s']:.1f} GB/s, {of} peak {peak:.0f} GFLOP/s",
            "",
            f"{result['us']:.1f} us a call ({runs['min']:.1f} to {runs['max']:.1f}), and {result['besides_us']:.1f} us besides",
            f"{megabytes(result['bytes'])} at {result['gb_s']:.1f} GB/s, {result['flops'] / 1e6:,.1f} MFLOP at "
            f"{result['gflop_s']:.1f} GFLOP/s: {bound}{share}",
        ]
    )
