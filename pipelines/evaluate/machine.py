"""Measure the machine's limits with kernels that run through IREE: read bandwidth, and peak
arithmetic in f32, int8 and bf16."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from castiron.emitter.kernels.kernel import write_kernel
from castiron.emitter.kernels.mlir.bf16_pairs import Pairs
from castiron.emitter.kernels.mlir.body import Body, Ssa, batches, vector_type
from castiron.emitter.kernels.mlir.dot import Total, dot_of
from castiron.emitter.kernels.mlir.isa import ISAS, Isa
from castiron.emitter.kernels.mlir.matrix import COLUMNS, DEPTH, Matrix
from castiron.emitter.types import F32, I32, TensorType

# 256 MB, several times any cache.
READ_FLOATS = 64 << 20
READ_GROUPS = 64
FMA_GROUPS = 16
FMA_ITERATIONS = 400_000
# Dot products of 4-bit codes and bytes, as many as fit s16.
DOT_BITS, DOTS = 4, 8
DOT_ITERATIONS = FMA_ITERATIONS // DOTS
# 2 x 2 tiles of sums on a matrix unit: four of its eight registers, as in a kernel.
HIGH = WIDE = 2
MATRIX_ITERATIONS = FMA_ITERATIONS // 16
# Two bf16 ones in a 32-bit word.
ONES = 0x3F803F80
# Seconds of a measurement: as long as the work that it is compared with, so that clock rates are equal.
LOAD_SECONDS = 0.3

# Name of a limit -> name of its arithmetic. `_PEAK_OF`: part of a kernel's name -> its limit; other kernels are f32.
PEAKS = {"peak_gflop_s": "f32", "peak_bytes_gop_s": "bytes", "peak_pairs_gflop_s": "bf16", "peak_matrix_gflop_s": "tiles"}
_PEAK_OF = {
    "_int8_": "peak_bytes_gop_s",
    "_bf16_pairs_": "peak_pairs_gflop_s",
    "_bf16_matrix_": "peak_matrix_gflop_s",
    "_bf16_split_": "peak_matrix_gflop_s",
}


def chains_of(isa: Isa) -> int:
    """Return the number of independent accumulators in a probe: enough to hide the instructions'
    latency, few enough for the registers."""
    return 24 if isa.lanes == 4 else 12


def probe_text(isa: Isa) -> str:
    """Return MLIR with a function for each probe: `read` sums READ_FLOATS floats, the others do
    arithmetic on accumulators in registers."""
    writers = {"read": _read, "fma": _fma, "dot": _dot, "pairs": _pairs, "matrix": _matrix}
    return f"module @probe {{\n{''.join(writers[name](isa) for name in probes_of(isa))}}}\n"


def probes_of(isa: Isa) -> dict[str, TensorType]:
    """Return the type of the operand of each probe that this CPU can run, by the probe's name."""
    chains, lanes = chains_of(isa), isa.lanes
    found = {
        "read": TensorType((READ_FLOATS,), F32),
        "fma": TensorType((chains + 2, lanes), F32),
        "dot": TensorType((chains + 2 * dot_of(isa).quads + chains // 2, lanes), I32),
    }
    if isa.pairs:
        found["pairs"] = TensorType((2, lanes), I32)
    if isa.matrix:
        found["matrix"] = TensorType((HIGH + WIDE, COLUMNS, COLUMNS), I32)
    return found


def _read(isa: Isa) -> str:
    part = READ_FLOATS // READ_GROUPS

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        group = body.workgroup()
        first = body.mul(group, part)
        with body.loop(first, body.add(first, part), 4 * 16, carry=[body.splat(0.0, 16)] * 4) as loop:
            loads = [body.vload(x, 16, body.add(loop.index, 16 * i)) for i in range(4)]
            loop.give(*map(body.addf, loop.values, loads))
        body.vstore(reduce(body.addf, loop.results), y, group, 0)

    return _probe("read", TensorType((READ_FLOATS,), F32), (READ_GROUPS, 16), write)


def _fma(isa: Isa) -> str:
    lanes, chains = isa.lanes, chains_of(isa)

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        # Operands come from memory: the compiler would fold constants and merge equal chains.
        *starts, factor, addend = (body.vload(x, lanes, i, 0) for i in range(chains + 2))
        with body.loop(0, FMA_ITERATIONS, carry=starts) as loop:
            loop.give(*(body.fma(value, factor, addend) for value in loop.values))
        body.vstore(reduce(body.addf, loop.results), y, body.workgroup(), 0)

    return _probe("fma", probes_of(isa)["fma"], (FMA_GROUPS, lanes), write)


def _dot(isa: Isa) -> str:
    # A start vector for each chain, two of codes for each quad, and half as many rows of x as chains.
    operands, chains = probes_of(isa)["dot"], chains_of(isa)

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        dot = dot_of(isa)(body, isa, DOT_BITS)
        vectors = [body.vload(x, isa.lanes, i, 0) for i in range(chains + 2 * dot.quads)]
        codes = [dot.code(quads) for quads in batches(vectors[chains:], dot.quads)]
        rows = batches(range(len(vectors), operands.shape[0]), dot.rows)
        # As in a kernel, two codes meet many x from memory; otherwise equal dot products would be computed once.
        with body.loop(0, DOT_ITERATIONS, carry=vectors[:chains]) as loop:
            sums = [Total(tuple(words)) for words in batches(loop.values, dot.rows)]
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

    return _probe("dot", operands, (FMA_GROUPS, isa.lanes), write)


def _pairs(isa: Isa) -> str:
    def write(body: Body, x: Ssa, y: Ssa) -> None:
        pairs = Pairs(body, isa)
        a, c = (body.vload(x, isa.lanes, i, 0) for i in range(2))
        starts = [body.splat(float(i), isa.lanes) for i in range(chains_of(isa))]
        with body.loop(0, FMA_ITERATIONS, carry=starts) as loop:
            loop.give(*(pairs.add(value, a, c) for value in loop.values))
        body.vstore(reduce(body.addf, loop.results), y, body.workgroup(), 0)

    return _probe("pairs", probes_of(isa)["pairs"], (FMA_GROUPS, isa.lanes), write)


def _matrix(isa: Isa) -> str:
    size = COLUMNS * COLUMNS * 4

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

    return _probe("matrix", probes_of(isa)["matrix"], (FMA_GROUPS, COLUMNS), write)


def _probe(name: str, x: TensorType, result: tuple[int, ...], write: Callable[..., None]) -> str:
    """Return MLIR of a kernel with one workgroup per row of its result, and of a function that
    dispatches it."""
    y = TensorType(result, F32)
    kernel = write_kernel(f"probe_{name}", {"x": x}, {"y": y}, result[0], write, reference=dict, flops=0, nbytes=0)
    return f"""{kernel.text}func.func @{name}(%x: {x}) -> {y} {{
  %y = flow.dispatch @probe_{name}::@probe_{name}_fn(%x) : ({x}) -> {y}
  return %y : {y}
}}
"""


class Machine:
    """The probes, compiled for this machine and loaded on `threads` threads.

    Raises CompileError without iree-base-compiler, and TargetError on a CPU that castiron has no
    kernels for.
    """

    def __init__(self, threads: int):
        import iree.runtime as rt

        from castiron.vmfb.program import Buffer, release_at_exit
        from castiron.vmfb.targets import resolve

        self.threads = threads
        self.isa = ISAS[resolve("host").isa]
        self.device, self._context, module = load_module(probe_text(self.isa), threads)
        self._calls = {}
        fill = {"read": 1.0, "fma": 1.0, "dot": 0x01020304, "pairs": ONES, "matrix": ONES}
        for name, type_ in probes_of(self.isa).items():
            operand = Buffer(self, type_.shape, type_.dtype.name)
            # Unwritten pages are all the same page of zeros, in cache.
            operand.array[...] = fill[name]
            if name == "fma":
                operand.array[:-2] += np.arange(chains_of(self.isa), dtype=np.float32)[:, None]
                operand.array[-2:] = [[0.999], [1e-6]]
            arguments = rt.VmVariantList(1)
            arguments.push_ref(operand.view)
            self._calls[name] = (module.lookup_function(name), arguments, operand)
        self._results = rt.VmVariantList(1)
        release_at_exit(self, "_results", "_calls", "_context", "device")

    def read_gb_s(self, seconds: float = LOAD_SECONDS) -> float:
        """Return the read bandwidth in GB/s, the mean over `seconds`."""
        return self._rate("read", READ_FLOATS * 4, seconds)

    def peak_gflop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """Return the f32 peak in GFLOP/s, the mean over `seconds`; a multiply-add counts as two."""
        return self._rate("fma", FMA_GROUPS * FMA_ITERATIONS * chains_of(self.isa) * self.isa.lanes * 2, seconds)

    def peak_bytes_gop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """Return the peak of int8 dot products in 10^9 operations/s; a multiply-add counts as
        two."""
        return self._rate("dot", FMA_GROUPS * DOT_ITERATIONS * DOTS * chains_of(self.isa) * self.isa.lanes * 4 * 2, seconds)

    def peak_pairs_gflop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """Return the peak of bf16 vector instructions in GFLOP/s; 0 on a CPU without them."""
        return self._rate("pairs", FMA_GROUPS * FMA_ITERATIONS * chains_of(self.isa) * self.isa.lanes * 4, seconds)

    def peak_matrix_gflop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """Return the peak of bf16 matrix tiles in GFLOP/s; 0 on a CPU without them."""
        return self._rate("matrix", FMA_GROUPS * MATRIX_ITERATIONS * HIGH * WIDE * COLUMNS * COLUMNS * DEPTH * 2, seconds)

    def _rate(self, name: str, work: int, seconds: float) -> float:
        if name not in self._calls:
            return 0.0
        function, arguments, _ = self._calls[name]
        return work / mean_seconds(lambda: self._context.invoke(function, arguments, self._results), seconds)[0] / 1e9


def load_module(text: str, threads: int) -> tuple[Any, Any, Any]:
    """Compile MLIR text for this machine and load it on `threads` threads; return (device, context,
    module)."""
    import iree.runtime as rt

    from castiron.vmfb.compiler import compile_mlir
    from castiron.vmfb.device import device
    from castiron.vmfb.targets import resolve

    cpu = device(threads)
    with TemporaryDirectory(prefix="castiron-") as folder:
        path = Path(folder) / "timed.vmfb"
        compile_mlir(text, resolve("host"), path)
        instance = rt.VmInstance()
        module = rt.VmModule.copy_buffer(instance, path.read_bytes())
    return cpu, rt.VmContext(instance, [rt.create_hal_module(instance, cpu), module]), module


def mean_seconds(call: Callable[[], object], min_seconds: float) -> tuple[float, int]:
    """Repeat a call for at least `min_seconds`; return the mean seconds of a call and the number of
    calls."""
    calls, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < min_seconds or not calls:
        call()
        calls += 1
    return taken / calls, calls


def peak_of(kernel: str) -> str:
    """Return the key of PEAKS that limits the arithmetic of the kernel with this name.

    Exact matmuls on matrix tiles split x into three bf16 parts or more, so that they reach at most
    a third of the limit.
    """
    return next((peak for part, peak in _PEAK_OF.items() if part in kernel), "peak_gflop_s")


def bound_of(kernel: str, nbytes: float, flops: float, seconds: float, limits: Mapping[str, float]) -> tuple[str, float | None]:
    """Return what bounds a kernel that took `seconds`, and its share of that limit.

    The bound is `memory`, `compute`, or `cache` (it read faster than memory does), which has no
    share.
    """
    reading, computing = nbytes / limits["read_gb_s"] / 1e9, flops / limits[peak_of(kernel)] / 1e9
    bound = "compute" if computing >= reading else "memory" if reading <= seconds else "cache"
    return bound, None if bound == "cache" else max(reading, computing) / seconds


def of_limit(row: Mapping[str, Any]) -> str:
    """Format a kernel's share of its limit: `75%`, `in cache`, or `?` if its work is unknown."""
    if row["bound"] == "cache":
        return "in cache"
    return "?" if row["limit_share"] is None else f"{row['limit_share']:.0%}"


def amount(kernel: Mapping, unit: str, position: int) -> int:
    """Return the FLOP or bytes of one call at `position`.

    unit: key in `kernel` of the list [amount at position 0, increase per position, maximum].
    """
    start, step, end = kernel[unit]
    return min(start + step * position, max(start, end))


def describe() -> dict:
    """Return the machine's CPU name, cores, memory in GB and system."""
    import platform

    from castiron.vmfb.cpu import host_cpu, physical_cores

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": host_cpu(),
        "cores": physical_cores(),
        "memory_gb": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def spread(values: Sequence[float]) -> dict:
    """Return the median, the extremes and the values in the order of measurement."""
    digits = [round(value, 3) for value in values]
    return {"median": round(statistics.median(values), 3), "min": min(digits), "max": max(digits), "values": digits}
