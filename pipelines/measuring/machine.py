"""What this machine can do at most, read and compute (f32 and bytes), measured through IREE as kernels would do it."""

import os
import tempfile
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np

from castiron.emitter.kernels.kernel import write_kernel
from castiron.emitter.kernels.writing.body import Body, Ssa, batches, vector_type
from castiron.emitter.kernels.writing.dot import Total, dot_of
from castiron.emitter.kernels.writing.isa import ISAS, Isa
from castiron.emitter.types import F32, I32, TensorType

# 256 MB, several times any cache.
READ_FLOATS = 64 << 20
READ_GROUPS = 64
FMA_GROUPS = 16
FMA_ITERATIONS = 400_000
# Sums of codes of so many bits times bytes, four a lane at a time, as often as they fit s16.
DOT_BITS, DOTS = 4, 8
DOT_ITERATIONS = FMA_ITERATIONS // DOTS


def chains_of(isa: Isa) -> int:
    """Sums in flight: enough to cover the latency, few enough to stay in registers."""
    return 24 if isa.lanes == 4 else 12


def probe_text(isa: Isa) -> str:
    """MLIR with three functions: `read` sums READ_FLOATS floats, `fma` and `dot` add to `chains_of` vectors of sums."""
    return f"module @probe {{\n{_read()}{_fma(isa.lanes, chains_of(isa))}{_dot(isa)}}}\n"


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


def _fma(lanes: int, chains: int) -> str:
    def write(body: Body, x: Ssa, y: Ssa) -> None:
        # The operands come from memory: constants would be folded, and equal chains would become one.
        *starts, factor, addend = (body.vload(x, lanes, i, 0) for i in range(chains + 2))
        with body.loop(0, FMA_ITERATIONS, carry=starts) as loop:
            loop.give(*(body.fma(value, factor, addend) for value in loop.values))
        body.vstore(reduce(body.addf, loop.results), y, body.workgroup(), 0)

    return _probe("fma", TensorType((chains + 2, lanes), F32), (FMA_GROUPS, lanes), write)


def _dot_operands(isa: Isa) -> TensorType:
    """Of `dot`: a vector for each chain to begin with, two of codes for each quad, and half as many rows of x as chains."""
    chains = chains_of(isa)
    return TensorType((chains + 2 * dot_of(isa).quads + chains // 2, isa.lanes), I32)


def _dot(isa: Isa) -> str:
    operands, chains = _dot_operands(isa), chains_of(isa)

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

        from castiron.vmfb.compiler import compile_mlir
        from castiron.vmfb.device import device
        from castiron.vmfb.program import Buffer
        from castiron.vmfb.targets import resolve

        target = resolve("host")
        self.threads = threads
        self.device = device(threads)
        self.isa = ISAS[target.isa]
        chains, lanes = chains_of(self.isa), self.isa.lanes
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.vmfb"
            compile_mlir(probe_text(self.isa), target, path)
            instance = rt.VmInstance()
            module = rt.VmModule.copy_buffer(instance, path.read_bytes())
        self._context = rt.VmContext(instance, [rt.create_hal_module(instance, self.device), module])
        self._calls = {}
        words = _dot_operands(self.isa)
        for name, shape in (("read", (READ_FLOATS,)), ("fma", (chains + 2, lanes)), ("dot", words.shape)):
            operand = Buffer(self, shape, "i32" if name == "dot" else "f32")
            # Pages that nobody wrote are all the same page of zeros, in cache.
            operand.array[...] = 0x01020304 if name == "dot" else 1.0
            if name == "fma":
                operand.array[:-2] += np.arange(chains, dtype=np.float32)[:, None]
                operand.array[-2:] = [[0.999], [1e-6]]
            arguments = rt.VmVariantList(1)
            arguments.push_ref(operand.view)
            self._calls[name] = (module.lookup_function(name), arguments, operand)
        self._results = rt.VmVariantList(1)

    def read_gb_s(self, repeats: int = 5) -> float:
        """10^9 bytes read a second, the best of `repeats`."""
        return READ_FLOATS * 4 / self._best("read", repeats) / 1e9

    def peak_gflop_s(self, repeats: int = 5) -> float:
        """10^9 f32 operations a second, multiply and add counted as two, the best of `repeats`."""
        work = FMA_GROUPS * FMA_ITERATIONS * chains_of(self.isa) * self.isa.lanes * 2
        return work / self._best("fma", repeats) / 1e9

    def peak_bytes_gop_s(self, repeats: int = 5) -> float:
        """10^9 operations on bytes a second, counted alike, the best of `repeats`."""
        work = FMA_GROUPS * DOT_ITERATIONS * DOTS * chains_of(self.isa) * self.isa.lanes * 4 * 2
        return work / self._best("dot", repeats) / 1e9

    def _best(self, name: str, repeats: int) -> float:
        function, arguments, _ = self._calls[name]
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._context.invoke(function, arguments, self._results)
            seconds.append(time.perf_counter() - start)
        return min(seconds)


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
