"""Time kernels, and measure the machine's limits with probe kernels.

The limits are the read bandwidth in GB/s, and the peak rates of arithmetic in f32, int8 and bf16.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.bf16_pairs import Pairs
from castiron.emitter.kernels.mlir.body import Body, Ssa, batches, vector_type
from castiron.emitter.kernels.mlir.dot import Accumulators, dot_of
from castiron.emitter.kernels.mlir.isa import ISAS, Isa
from castiron.emitter.kernels.mlir.matrix import COLUMNS, DEPTH, Matrix
from castiron.pipelines.compile.named_kernel import kernel_module

# 256 MB, several times the size of any CPU cache.
READ_FLOATS = 64 << 20
READ_GROUPS = 64
READ_STREAMS = 4
FMA_GROUPS = 16
FMA_ITERATIONS = 400_000
# The smallest and largest code of a weight, and dot products of codes and int8 that an int16 accumulator can hold.
DOT_CODES, DOTS = (0, 15), 8
DOT_ITERATIONS = FMA_ITERATIONS // DOTS
# Tiles of accumulators on a matrix unit: 2 x 2, which are four of its eight registers, as in a kernel.
HIGH = WIDE = 2
MATRIX_ITERATIONS = FMA_ITERATIONS // 16
# A 32-bit word with the bf16 number 1 in each half.
ONES = 0x3F803F80
# Bytes of operand copies that calls cycle through: more than a CPU cache, so that weights come from memory as in a model.
STREAMED_BYTES = 256 << 20
MAX_COPIES = 512
# Operands of at least 1/LARGE of the largest operand's size are copied too: both keys and values.
LARGE = 4
# Seconds of a measurement, for limits and kernels alike, so that both run at the same clock rate.
LOAD_SECONDS = 0.3

# Without other programs, repeated measurements differ by up to the first factor, and shares of limits are up to the second.
STEADY, LIKELY = 1.25, 1.05
# How many times a measurement is repeated that other programs disturbed.
ATTEMPTS = 3

# By name of a limit: its arithmetic. `_PEAK_OF`: by a part of a kernel's name, the limit of the kernel; others have f32's.
PEAKS = {"peak_gflop_s": "f32", "peak_bytes_gop_s": "bytes", "peak_pairs_gflop_s": "bf16", "peak_matrix_gflop_s": "tiles"}
_PEAK_OF = {
    **dict.fromkeys(("_int8_", "_int16_", "_int24_"), "peak_bytes_gop_s"),
    "_bf16_pairs_": "peak_pairs_gflop_s",
    "_bf16_matrix_": "peak_matrix_gflop_s",
    "_bf16_split_": "peak_matrix_gflop_s",
}


def chains_of(isa: Isa) -> int:
    """Return how many accumulators hide the latency of a multiply-add and stay in registers."""
    return 24 if isa.lanes == 4 else 12


def probes_of(isa: Isa) -> dict[str, Kernel]:
    """Return the kernels that measure the machine's limits, by name of the limit."""
    found = {"read_gb_s": _read(isa), "peak_gflop_s": _fma(isa), "peak_bytes_gop_s": _dot(isa)}
    if isa.pairs:
        found["peak_pairs_gflop_s"] = _pairs(isa)
    if isa.matrix:
        found["peak_matrix_gflop_s"] = _matrix(isa)
    return found


def _read(isa: Isa) -> Kernel:
    # Each workgroup reads four addresses in turn, as matmul kernels read several rows: one address alone does not use all
    # hardware prefetchers, and on Zen 5 gives 35 GB/s on two threads where four give 43.
    part = READ_FLOATS // READ_GROUPS // READ_STREAMS

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        group = body.workgroup()
        first = body.mul(group, part * READ_STREAMS)
        with body.loop(0, part, 16, carry=[body.splat(0.0, 16)] * READ_STREAMS) as loop:
            columns = [body.add(body.add(first, part * i), loop.index) for i in range(READ_STREAMS)]
            loop.give(*(body.addf(total, body.vload(x, 16, i)) for total, i in zip(loop.values, columns, strict=True)))
        body.vstore(reduce(body.addf, loop.results), y, group, 0)

    return _probe("read", TensorType((READ_FLOATS,), F32), (READ_GROUPS, 16), write, nbytes=READ_FLOATS * 4)


def _fma(isa: Isa) -> Kernel:
    lanes, chains = isa.lanes, chains_of(isa)

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        # Load operands from memory, because the compiler would fold constants and merge equal chains.
        *starts, factor, addend = (body.vload(x, lanes, i, 0) for i in range(chains + 2))
        with body.loop(0, FMA_ITERATIONS, carry=starts) as loop:
            loop.give(*(body.fma(value, factor, addend) for value in loop.values))
        body.vstore(reduce(body.addf, loop.results), y, body.workgroup(), 0)

    flops = FMA_GROUPS * FMA_ITERATIONS * chains * lanes * 2
    return _probe("fma", TensorType((chains + 2, lanes), F32), (FMA_GROUPS, lanes), write, flops=flops)


def _dot(isa: Isa) -> Kernel:
    # Rows of the operand: an initial vector for each chain, two vectors of codes for each quad, a row of x for two chains.
    chains = chains_of(isa)
    operands = TensorType((chains + 2 * dot_of(isa).quads + chains // 2, isa.lanes), I32)

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        dot = dot_of(isa)(body, isa, DOT_CODES)
        vectors = [body.vload(x, isa.lanes, i, 0) for i in range(chains + 2 * dot.quads)]
        codes = [dot.code(quads) for quads in batches(vectors[chains:], dot.quads)]
        rows = batches(range(len(vectors), operands.shape[0]), dot.rows)
        # As in a matmul, multiply two vectors of codes by many x from memory; the compiler would merge equal dot products.
        with body.loop(0, DOT_ITERATIONS, carry=vectors[:chains]) as loop:
            sums = [Accumulators(tuple(words)) for words in batches(loop.values, dot.rows)]
            for step in range(DOTS // dot.quads):
                column = body.rem(body.mul(body.add(loop.index, step), dot.quads), isa.lanes)
                for r, each in enumerate(rows):
                    bytes_ = dot.x(x, each, column)
                    for i, code in enumerate(codes, 2 * r):
                        sums[i] = dot.add(sums[i], code, bytes_)
            loop.give(*(words for total in sums for words in total.words))
        total = reduce(lambda a, b: body.binary("addi", a, b), loop.results)
        floats = vector_type(isa.lanes)
        body.vstore(body.let(f"arith.sitofp {total} : {total.type} to {floats}", floats), y, body.workgroup(), 0)

    flops = FMA_GROUPS * DOT_ITERATIONS * DOTS * chains * isa.lanes * 4 * 2
    return _probe("dot", operands, (FMA_GROUPS, isa.lanes), write, flops=flops)


def _pairs(isa: Isa) -> Kernel:
    def write(body: Body, x: Ssa, y: Ssa) -> None:
        pairs = Pairs(body, isa)
        a, c = (body.vload(x, isa.lanes, i, 0) for i in range(2))
        starts = [body.splat(float(i), isa.lanes) for i in range(chains_of(isa))]
        with body.loop(0, FMA_ITERATIONS, carry=starts) as loop:
            loop.give(*(pairs.add(value, a, c) for value in loop.values))
        body.vstore(reduce(body.addf, loop.results), y, body.workgroup(), 0)

    flops = FMA_GROUPS * FMA_ITERATIONS * chains_of(isa) * isa.lanes * 4
    return _probe("pairs", TensorType((2, isa.lanes), I32), (FMA_GROUPS, isa.lanes), write, flops=flops)


def _matrix(isa: Isa) -> Kernel:
    size = COLUMNS * COLUMNS * 4
    flops = FMA_GROUPS * MATRIX_ITERATIONS * HIGH * WIDE * COLUMNS * COLUMNS * DEPTH * 2

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        results = body.stack(HIGH * WIDE, COLUMNS, COLUMNS)
        matrix, at = Matrix(body, isa, COLUMNS, results), body.address(x)
        with body.loop(0, MATRIX_ITERATIONS, carry=[matrix.zero(i) for i in range(HIGH * WIDE)]) as loop:
            rows = [matrix.x(at, i * size) for i in range(HIGH)]
            weights = [matrix.weights(at, (HIGH + i) * size) for i in range(WIDE)]
            pairs = [(row, weight) for row in rows for weight in weights]
            loop.give(*(matrix.add(sums, *pair) for sums, pair in zip(loop.values, pairs, strict=True)))
        for i, sums in enumerate(loop.results):
            matrix.store(sums, i)
        rows = [body.vload(results, COLUMNS, i, 0, 0) for i in range(HIGH * WIDE)]
        body.vstore(reduce(body.addf, rows), y, body.workgroup(), 0)

    return _probe("matrix", TensorType((HIGH + WIDE, COLUMNS, COLUMNS), I32), (FMA_GROUPS, COLUMNS), write, flops=flops)


def _probe(
    name: str, x: TensorType, result: tuple[int, ...], write: Callable[..., None], *, flops: int = 0, nbytes: int = 0
) -> Kernel:
    y = {"y": TensorType(result, F32)}
    return Kernel(f"probe_{name}", {"x": x}, y, result[0], write, dict, flops=flops, nbytes=nbytes)


class TimedKernel:
    """A kernel compiled for this machine, with its operands in memory, to be timed.

    results: arrays by name, without results that the kernel writes into an operand. copies: equal
    copies of the operands, which calls use in turn, so that large ones are read from memory.
    """

    def __init__(self, kernel: Kernel, values: Mapping[str, np.ndarray], threads: int):
        import iree.runtime as rt

        from castiron.vmfb.compiler.iree_compile import compile_mlir
        from castiron.vmfb.device.cpu_device import device, lower_priority, vm_instance
        from castiron.vmfb.device.program import Buffer, new_zeros, release_at_exit
        from castiron.vmfb.targets import resolve

        self.kernel, self.device = kernel, device(threads)
        if threads > 1:
            lower_priority()  # as calls of a bundle do
        with TemporaryDirectory(prefix="castiron-") as folder:
            path = Path(folder) / "timed.vmfb"
            compile_mlir(print_module(kernel_module(kernel, storage=True)), resolve("host"), path)
            module = rt.VmModule.copy_buffer(vm_instance(), path.read_bytes())
        self._context = rt.VmContext(vm_instance(), [rt.create_hal_module(vm_instance(), self.device), module])
        self._function = module.lookup_function("call")
        self._results = rt.VmVariantList(len(kernel.results))
        sizes = {name: type_.nbytes for name, type_ in kernel.tensors.items()}
        large = {name for name, size in sizes.items() if size * LARGE >= max(sizes.values())}
        count = min(MAX_COPIES, max(1, STREAMED_BYTES // sum(sizes[name] for name in large)))

        # Weights of a bundle are in pages of 2 MB too (`LargePageWriter`), but KV caches are not.
        reads_weights = kernel.matmul is not None or kernel.name.startswith("probe_")

        def buffer(type_: TensorType, value: np.ndarray | int) -> Buffer:
            dtype = type_.dtype.name
            memory = new_zeros(prod(type_.shape), dtype, large_pages=reads_weights)
            made = Buffer(self, type_.shape, dtype, memory)  # type: ignore[arg-type]
            # Write every page, because the operating system maps all unwritten pages to one page of zeros.
            made.array[...] = value
            return made

        results = {name: buffer(type_, 0) for name, type_ in kernel.results.items() if name not in kernel.in_place}
        same = {name: buffer(kernel.tensors[name], values[name]) for name in sizes if name not in large}
        self._buffers, self._arguments = [results], []
        for _ in range(count):
            own = same | {name: buffer(kernel.tensors[name], values[name]) for name in large}
            arguments = rt.VmVariantList(len(own) + len(results))
            for operand in [*(own[name] for name in sizes), *results.values()]:
                arguments.push_ref(operand.view)
            self._buffers.append(own)
            self._arguments.append(arguments)
        self.results, *self.copies = ({name: made.array for name, made in part.items()} for part in self._buffers)
        release_at_exit(self, "_results", "_arguments", "_buffers", "_function", "_context", "device")

    def seconds(self, min_seconds: float) -> tuple[float, int]:
        """Return (mean seconds of a call, number of calls), measured for at least `min_seconds`."""
        calls, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < min_seconds or not calls:
            self._context.invoke(self._function, self._arguments[calls % len(self._arguments)], self._results)
            calls += 1
        return taken / calls, calls


class Machine:
    """A benchmark of this machine's memory bandwidth and peak rates of arithmetic."""

    def __init__(self, threads: int):
        from castiron.vmfb.targets import resolve

        self.isa = ISAS[resolve("host").isa]
        fill = {"peak_bytes_gop_s": 0x01020304, "peak_pairs_gflop_s": ONES, "peak_matrix_gflop_s": ONES}
        self.probes = {}
        for limit, kernel in probes_of(self.isa).items():
            operand = kernel.tensors["x"]
            values = np.full(operand.shape, fill.get(limit, 1.0), operand.dtype.numpy)
            if limit == "peak_gflop_s":
                values[:-2] += np.arange(chains_of(self.isa), dtype=np.float32)[:, None]
                values[-2:] = [[0.999], [1e-6]]
            self.probes[limit] = TimedKernel(kernel, {"x": values}, threads)

    def measure(self, limit: str, seconds: float = LOAD_SECONDS) -> float:
        """Return a limit in GB/s or 10^9 operations/s; 0 if the CPU lacks the instructions.

        limit: "read_gb_s", or a key of PEAKS. A multiply-add is two operations.
        """
        if (probe := self.probes.get(limit)) is None:
            return 0.0
        return max(probe.kernel.work(0)) / probe.seconds(seconds)[0] / 1e9


def peak_of(kernel: str) -> str:
    """Return the peak rate that limits a kernel of this name, as a key of PEAKS.

    A kernel with `_int24_` or `_bf16_split_` in its name computes with three or more numbers for
    each f32 activation, so it reaches at most a third of the peak.
    """
    return next((peak for part, peak in _PEAK_OF.items() if part in kernel), "peak_gflop_s")


def bound_of(kernel: str, nbytes: float, flops: float, seconds: float, limits: Mapping[str, float]) -> tuple[str, float | None]:
    """Return "memory" or "compute", as in a roofline model, and the reached share of this limit.

    If the kernel reads faster than memory can, the results are "cache" and None.
    """
    reading, computing = nbytes / limits["read_gb_s"] / 1e9, flops / limits[peak_of(kernel)] / 1e9
    bound = "compute" if computing >= reading else "memory" if reading <= seconds else "cache"
    return bound, None if bound == "cache" else max(reading, computing) / seconds


def busy_signs(measured: Mapping[str, Sequence[float]], shares: Mapping[str, float | None]) -> list[str]:
    """Return what shows that other programs ran during a measurement; [] if nothing does.

    shares: fractions of limits that a program cannot exceed, by name; None for an unknown one.
    """
    varied = [
        f"{name} {min(values):.3g} to {max(values):.3g}"
        for name, values in measured.items()
        if max(values) > STEADY * min(values)
    ]
    return varied + [f"{name} {share:.0%}" for name, share in shares.items() if share is not None and share > LIKELY]


def busy_message(signs: Sequence[str]) -> str:
    return f"other programs ran during the measurement: {', '.join(signs)}; end them and measure again"


def of_limit(row: Mapping[str, Any]) -> str:
    """Return the share of its limit that a kernel reaches: "75%", "in cache" or "?"."""
    if row["bound"] == "cache":
        return "in cache"
    return "?" if row["limit_share"] is None else f"{row['limit_share']:.0%}"


def amount(kernel: Mapping, unit: str, position: int) -> int:
    """Return the FLOP or the bytes (`unit`) of one kernel call at a KV cache position."""
    start, step, end = kernel[unit]
    return min(start + step * position, max(start, end))


def describe(limits: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return facts about this machine, the median of each limit, and all values under "runs"."""
    import platform

    from castiron.vmfb.cpu_features import host_cpu, physical_cores

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": host_cpu(),
        "cores": physical_cores(),
        "memory_gb": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: round(statistics.median(values), 2) for name, values in limits.items()},
        "runs": {name: spread(values) for name, values in limits.items()},
    }


def spread(values: Sequence[float]) -> dict:
    """Return the median, min, max and all values."""
    digits = [round(value, 3) for value in values]
    return {"median": round(statistics.median(values), 3), "min": min(digits), "max": max(digits), "values": digits}
