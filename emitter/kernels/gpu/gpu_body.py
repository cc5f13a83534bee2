"""A builder of the MLIR text of GPU kernels: threads, shared memory, sums across a workgroup.

Memory is read and written as 32-bit words only, because devices without 8-bit or 16-bit storage
read such elements wrongly. Kernels use no subgroups, whose size differs between devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

from castiron.emitter.kernels.mlir.body import F32, I32, INDEX, Body, Index, Loop, Ssa, Type, memref_type

MAX_GRID = 65535  # workgroups in a dimension that every device supports
SHARED_BYTES = 16 << 10  # shared memory that every Vulkan device has
RADIX = 4  # numbers that a thread adds in a step of a sum across threads
MAGIC = 1 << 23  # the bits of the f32 2^23 + n are those of 2^23 plus n, for n < 2^23
MAGIC_BITS = 0x4B000000


def grid(workgroups: int) -> tuple[int, int]:
    """Return (x, y) of a grid of at least `workgroups`; some devices allow 65535 in a dimension."""
    rows = -(-workgroups // MAX_GRID)
    return -(-workgroups // rows), rows


@dataclass(frozen=True)
class SharedType(Type):
    def __str__(self) -> str:
        return f"memref<{'x'.join((*map(str, self.shape), self.element))}, #gpu.address_space<workgroup>>"


class Loadable(Protocol):
    """An operand that is not in memory: its elements are computed when a kernel loads them."""

    def load(self, b: GpuBody, *index: Index) -> Ssa: ...


class Storable(Protocol):
    """A result of a kernel to which other operations are applied before it is written to memory."""

    def store(self, b: GpuBody, value: Ssa, *index: Index) -> None: ...


class GpuBody(Body):
    """A builder of the body of a GPU kernel; the body runs in each thread of a workgroup.

    layout: MLIR text of the kernel's `#hal.pipeline.layout` attribute, which lists its bindings.
    """

    fenced = False

    def __init__(self, threads: int, workgroups: int, layout: str) -> None:
        super().__init__()
        self.threads, self._layout = threads, layout
        self._grid = grid(workgroups)
        self._bindings: dict[Ssa, int] = {}
        self._before = 0
        self._allocated: list[Ssa] = []
        self._reusable: list[Ssa] = []

    def bind(self, binding: int, type: Type) -> Ssa:
        """Return a memref of type `type` for the buffer at binding number `binding`."""
        memref = Ssa(self.name(), type)
        text = f"hal.interface.binding.subspan layout({self._layout}) binding({binding}) alignment(64) : {type}"
        self._head.append(f"{memref} = {text}")
        self._bindings[memref] = binding
        return memref

    def view(self, buffer: Ssa, shape: Sequence[int], element: str = "i32") -> Ssa:
        """Return the memory of a bound `buffer` as a memref of another shape and element type."""
        return self.bind(self._bindings[buffer], memref_type(shape, element))

    def words(self, buffer: Ssa) -> Ssa:
        """Return the memory of `buffer` as a one-dimensional memref of 32-bit words (i32)."""
        bits = {"f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i8": 8}[buffer.type.element]
        return self.view(buffer, (prod(buffer.type.shape) * bits // 32,))

    def load(self, buffer: Ssa | Loadable, *indices: Index) -> Ssa:
        return super().load(buffer, *indices) if isinstance(buffer, Ssa) else buffer.load(self, *indices)

    def store(self, value: Ssa, buffer: Ssa | Storable, *indices: Index) -> None:
        if isinstance(buffer, Ssa):
            super().store(value, buffer, *indices)
        else:
            buffer.store(self, value, *indices)

    def workgroup(self) -> Ssa:
        unit = self.let("hal.interface.workgroup.id[0] : index", INDEX)
        if self._grid[1] > 1:
            y = self.let("hal.interface.workgroup.id[1] : index", INDEX)
            unit = self.at(self.add(self.mul(y, self._grid[0]), unit))
        return self.at(self.sub(unit, self._before)) if self._before else unit

    @contextmanager
    def after(self, workgroups: int) -> Iterator[None]:
        """Emit the `with` block for workgroups from `workgroups` on, which count from 0 again.

        Both kernels of a dispatch may use the same shared memory, because no workgroup runs both.
        """
        with self.when(self.negate(self.less(self.workgroup(), workgroups))):
            self._before, self._reusable = self._before + workgroups, list(self._allocated)
            yield
            self._before -= workgroups

    def at(self, i: Index) -> Ssa:
        return Ssa(self.index(i), INDEX)

    def thread(self) -> Ssa:
        return self.let("gpu.thread_id x", INDEX)

    def barrier(self) -> None:
        self.do("gpu.barrier")

    def shared(self, size: int, element: str = "f32") -> Ssa:
        """Return a one-dimensional memref of at least `size` elements in shared memory."""
        fits = [old for old in self._reusable if old.type.element == element and prod(old.type.shape) >= size]
        if fits:
            self._reusable.remove(fits[0])
            return fits[0]
        buffer = Ssa(self.name(), SharedType(element, (size,), "memref"))
        self._head.append(f"{buffer} = memref.alloc() : {buffer.type}")
        self._allocated.append(buffer)
        return buffer

    @property
    def shared_bytes(self) -> int:
        return sum(4 * prod(buffer.type.shape) for buffer in self._allocated)

    def strided(self, thread: Ssa, count: Index, carry: Sequence[Ssa] = ()) -> AbstractContextManager[Loop]:
        """Append a loop over 0 .. count - 1; thread t runs iterations t, t + threads, and so on."""
        return self.loop(thread, count, self.threads, carry)

    def sums(self, thread: Ssa, values: Sequence[Ssa], lanes: int, op: str = "addf") -> tuple[Ssa, int]:
        """Emit code that adds f32 values over groups of `lanes` threads; return (memref, first).

        The sum of values[i] over group g is element first + i * (threads / lanes) + g.
        op: "addf", or "maxf" for maxima.
        """
        count = len(values) * self.threads
        sizes, width = [count], lanes
        while width > 1:
            step = min(RADIX, width)
            width //= step
            sizes.append(sizes[-1] // step)
        buffer, low = self.shared(sum(sizes)), 0
        for i, value in enumerate(values):
            self.store(value, buffer, self.add(thread, i * self.threads))
        self.barrier()
        for before, after in zip(sizes, sizes[1:]):
            with self.strided(thread, after) as item:
                at = self.add(self.mul(item.index, before // after), low)
                total = self.load(buffer, at)
                for j in range(1, before // after):
                    total = getattr(self, op)(total, self.load(buffer, self.add(at, j)))
                self.store(total, buffer, self.add(item.index, low + before))
            self.barrier()
            low += before
        return buffer, low

    def i32(self, n: int) -> Ssa:
        return self.constant(str(n - (1 << 32) if n >> 31 else n), I32)

    def bits(self, op: str, a: Ssa, n: int) -> Ssa:
        """Return `arith.{op}` of the i32 `a` and the constant `n`, or `a` if that is the same."""
        return a if n == 0 and op in ("shli", "shrui", "ori") else self.binary(op, a, self.i32(n))

    def as_type(self, x: Ssa, type: Type) -> Ssa:
        """Return the 32 bits of x reinterpreted as another 32-bit type (a bitcast)."""
        return x if x.type == type else self.let(f"arith.bitcast {x} : {x.type} to {type}", type)

    def number(self, code: Ssa, offset: int = 0) -> Ssa:
        """Return `code` - `offset`, converted to f32; `code` is an i32 from 0 to 2^23 - 1."""
        # Faster than a conversion, which takes several cycles on most GPUs.
        return self.subf(self.as_type(self.bits("ori", code, MAGIC_BITS), F32), self.f32(MAGIC + offset))

    def half(self, bits: Ssa) -> Ssa:
        """Return the f16 in the lower half of an i32, converted to f32; the f16 must be finite."""
        sign = self.bits("shli", self.bits("andi", bits, 0x8000), 16)
        wide = self.bits("shli", self.bits("andi", bits, 0x7FFF), 13)
        normal = self.as_type(self.bits("addi", wide, 112 << 23), F32)
        small = self.subf(self.as_type(self.bits("addi", wide, 113 << 23), F32), self.f32(2.0**-14))
        is_small = self.compare("ult", wide, self.i32(0x400 << 13))
        return self.as_type(self.either(self.as_type(self.select(is_small, small, normal), I32), sign), F32)

    def halves(self, word: Ssa) -> tuple[Ssa, Ssa]:
        """Return the two f16 in an i32, the lower one first, as f32."""
        return self.half(word), self.half(self.bits("shrui", word, 16))

    def bf16s(self, word: Ssa) -> tuple[Ssa, Ssa]:
        """Return the two bf16 in an i32, the lower one first, as f32."""
        return self.as_type(self.bits("shli", word, 16), F32), self.as_type(self.bits("andi", word, 0xFFFF0000), F32)

    def to_half(self, x: Ssa) -> Ssa:
        """Round an f32 to f16, ties to even; return its bits in the lower half of an i32."""
        bits = self.as_type(x, I32)
        sign = self.bits("shrui", self.bits("andi", bits, 0x80000000), 16)
        size = self.bits("andi", bits, 0x7FFFFFFF)
        odd = self.bits("andi", self.bits("shrui", size, 13), 1)
        normal = self.bits("shrui", self.binary("addi", self.bits("addi", size, 0xFFF - (112 << 23) & 0xFFFFFFFF), odd), 13)
        # The sum with 1/2 is rounded to a multiple of 2^-24, the unit of small f16.
        small = self.as_type(self.addf(self.as_type(size, F32), self.f32(0.5)), I32)
        small = self.binary("subi", small, self.i32(0x3F000000))
        half = self.select(self.compare("ult", size, self.i32(113 << 23)), small, normal)
        half = self.select(self.compare("uge", size, self.i32(0x477FF000)), self.i32(0x7C00), half)
        half = self.select(self.compare("ugt", size, self.i32(0x7F800000)), self.i32(0x7E00), half)
        return self.either(half, sign)

    def rounded(self, x: Ssa) -> tuple[Ssa, Ssa]:
        """Round x, |x| < 127.5, to even: as f32, and as an i32 with an int8 in its low byte."""
        byte = self.bits("andi", self.as_type(self.addf(x, self.f32(12582912.0)), I32), 0xFF)
        # Not the sum minus 12582912: some drivers simplify that to x.
        return self.number(self.bits("xori", byte, 0x80), 0x80), byte

    def four(self, buffer: Ssa, *indices: Index) -> list[Ssa]:
        """Load the vector<4xT> at `indices` of `buffer`, and return its four elements."""
        vector = self.load(buffer, *indices)
        type = Type(str(vector.type).removeprefix("vector<4x").removesuffix(">"))
        return [self.let(f"vector.extract {vector}[{i}] : {type} from {vector.type}", type) for i in range(4)]
