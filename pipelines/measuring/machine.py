"""What this machine can do at most, read and compute (f32, bytes, bf16), measured through IREE as kernels would do it."""

import os
import time
from collections.abc import Callable
from functools import reduce

import numpy as np

from castiron.emitter.kernels.kernel import write_kernel
from castiron.emitter.kernels.writing.body import Body, Ssa, batches, vector_type
from castiron.emitter.kernels.writing.dot import Total, dot_of
from castiron.emitter.kernels.writing.isa import ISAS, Isa
from castiron.emitter.kernels.writing.matrix import COLUMNS, DEPTH, Matrix
from castiron.emitter.kernels.writing.pairs import Pairs
from castiron.emitter.types import F32, I32, TensorType

# 256 MB, several times any cache.
READ_FLOATS = 64 << 20
READ_GROUPS = 64
FMA_GROUPS = 16
FMA_ITERATIONS = 400_000
# Sums of codes of so many bits times bytes, four a lane at a time, as often as they fit s16.
DOT_BITS, DOTS = 4, 8
DOT_ITERATIONS = FMA_ITERATIONS // DOTS
# Blocks of sums on a matrix unit, side by side of x: four of the eight registers, as in a kernel.
HIGH = WIDE = 2
MATRIX_ITERATIONS = FMA_ITERATIONS // 16
# bf16 ones, two in a word.
ONES = 0x3F803F80
# How long a limit is measured: as long as the work that it is set against, whose clocks and neighbours it then has.
LOAD_SECONDS = 0.3


def chains_of(isa: Isa) -> int:
    """Sums in flight: enough to cover the latency, few enough to stay in registers."""
    return 24 if isa.lanes == 4 else 12


def probe_text(isa: Isa) -> str:
    """MLIR with a function for each of `probes_of`: `read` sums READ_FLOATS floats, the others add to sums in registers."""
    write = {"read": lambda: _read(), "fma": lambda: _fma(isa), "dot": lambda: _dot(isa), "pairs": lambda: _pairs(isa)}
    write["matrix"] = lambda: _matrix(isa)
    return f"module @probe {{\n{''.join(write[name]() for name in probes_of(isa))}}}\n"


def probes_of(isa: Isa) -> dict[str, TensorType]:
    """The probes that say something of a CPU, and what each is given."""
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


def _read() -> str:
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
        # The operands come from memory: constants would be folded, and equal chains would become one.
        *starts, factor, addend = (body.vload(x, lanes, i, 0) for i in range(chains + 2))
        with body.loop(0, FMA_ITERATIONS, carry=starts) as loop:
            loop.give(*(body.fma(value, factor, addend) for value in loop.values))
        body.vstore(reduce(body.addf, loop.results), y, body.workgroup(), 0)

    return _probe("fma", probes_of(isa)["fma"], (FMA_GROUPS, lanes), write)


def _dot(isa: Isa) -> str:
    # A vector for each chain to begin with, two of codes for each quad, and half as many rows of x as chains.
    operands, chains = probes_of(isa)["dot"], chains_of(isa)

    def write(body: Body, x: Ssa, y: Ssa) -> None:
        dot = dot_of(isa)(body, isa, DOT_BITS)
        vectors = [body.vload(x, isa.lanes, i, 0) for i in range(chains + 2 * dot.quads)]
        codes = [dot.code(quads) for quads in batches(vectors[chains:], dot.quads)]
        rows = batches(range(len(vectors), operands.shape[0]), dot.rows)
        # As in a kernel two codes meet many x from memory: products that stay or that sums share would be taken once.
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
            places = [(row, weight) for row in rows for weight in weights]
            loop.give(*(matrix.add(sums, *each) for sums, each in zip(loop.values, places, strict=True)))
        for i, sums in enumerate(loop.results):
            matrix.store(sums, i)
        rows = [body.vload(results, COLUMNS, i, 0, 0) for i in range(HIGH * WIDE)]
        body.vstore(reduce(body.addf, rows), y, body.workgroup(), 0)

    return _probe("matrix", probes_of(isa)["matrix"], (FMA_GROUPS, COLUMNS), write)


def _probe(name: str, x: TensorType, result: tuple[int, ...], write: Callable[..., None]) -> str:
    """A kernel with a workgroup for each row of its result, and a function that dispatches it."""
    y = TensorType(result, F32)
    kernel = write_kernel(f"probe_{name}", {"x": x}, {"y": y}, result[0], write, reference=dict, flops=0, nbytes=0)
    return f"""{kernel.text}func.func @{name}(%x: {x}) -> {y} {{
  %y = flow.dispatch @probe_{name}::@probe_{name}_fn(%x) : ({x}) -> {y}
  return %y : {y}
}}
"""


class Machine:
    """The probes, compiled for this machine and loaded on `threads` threads.

    Needs iree-base-compiler; CompileError without it, TargetError on a CPU that castiron has no kernels for.
    """

    def __init__(self, threads: int):
        import iree.runtime as rt

        from castiron.vmfb.aside import scratch
        from castiron.vmfb.compiler import compile_mlir
        from castiron.vmfb.device import device
        from castiron.vmfb.program import Buffer
        from castiron.vmfb.targets import resolve

        target = resolve("host")
        self.threads = threads
        self.device = device(threads)
        self.isa = ISAS[target.isa]
        with scratch("probe") as folder:
            path = folder / "probe.vmfb"
            compile_mlir(probe_text(self.isa), target, path)
            instance = rt.VmInstance()
            module = rt.VmModule.copy_buffer(instance, path.read_bytes())
        self._context = rt.VmContext(instance, [rt.create_hal_module(instance, self.device), module])
        self._calls = {}
        fill = {"read": 1.0, "fma": 1.0, "dot": 0x01020304, "pairs": ONES, "matrix": ONES}
        for name, type_ in probes_of(self.isa).items():
            operand = Buffer(self, type_.shape, type_.dtype.name)
            # Pages that nobody wrote are all the same page of zeros, in cache.
            operand.array[...] = fill[name]
            if name == "fma":
                operand.array[:-2] += np.arange(chains_of(self.isa), dtype=np.float32)[:, None]
                operand.array[-2:] = [[0.999], [1e-6]]
            arguments = rt.VmVariantList(1)
            arguments.push_ref(operand.view)
            self._calls[name] = (module.lookup_function(name), arguments, operand)
        self._results = rt.VmVariantList(1)

    def read_gb_s(self, seconds: float = LOAD_SECONDS) -> float:
        """10^9 bytes read a second, the mean of so many seconds."""
        return READ_FLOATS * 4 / self._mean("read", seconds) / 1e9

    def peak_gflop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """10^9 f32 operations a second, multiply and add counted as two, the mean of so many seconds."""
        work = FMA_GROUPS * FMA_ITERATIONS * chains_of(self.isa) * self.isa.lanes * 2
        return work / self._mean("fma", seconds) / 1e9

    def peak_bytes_gop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """10^9 operations on bytes a second, counted alike, the mean of so many seconds."""
        work = FMA_GROUPS * DOT_ITERATIONS * DOTS * chains_of(self.isa) * self.isa.lanes * 4 * 2
        return work / self._mean("dot", seconds) / 1e9

    def peak_pairs_gflop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """10^9 operations on bf16 in vectors a second, counted alike, the mean of so many seconds; 0 where there are none."""
        work = FMA_GROUPS * FMA_ITERATIONS * chains_of(self.isa) * self.isa.lanes * 4
        return work / self._mean("pairs", seconds) / 1e9 if "pairs" in self._calls else 0.0

    def peak_matrix_gflop_s(self, seconds: float = LOAD_SECONDS) -> float:
        """10^9 operations on bf16 in matrix tiles a second, counted alike, the mean of so many seconds; 0 without tiles."""
        work = FMA_GROUPS * MATRIX_ITERATIONS * HIGH * WIDE * COLUMNS * COLUMNS * DEPTH * 2
        return work / self._mean("matrix", seconds) / 1e9 if "matrix" in self._calls else 0.0

    def _mean(self, name: str, least: float) -> float:
        function, arguments, _ = self._calls[name]
        return mean_seconds(lambda: self._context.invoke(function, arguments, self._results), least)[0]


def mean_seconds(call: Callable[[], object], least: float) -> tuple[float, int]:
    """Mean seconds of a call and how many calls there were, one at least, in at least so many seconds."""
    calls, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < least or not calls:
        call()
        calls += 1
    return taken / calls, calls


def describe() -> dict:
    """CPU name, cores, memory in 10^9 bytes and system."""
    import platform

    from castiron.vmfb.cpu import host_cpu, physical_cores

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": host_cpu(),
        "cores": physical_cores(),
        "memory_gb": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
