"""A builder of the MLIR text of a kernel, with typed SSA values, constants and loops."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import ClassVar, TypeVar

CACHE_LINE = 64  # bytes
STACK_BYTES = 30 << 10  # max bytes of a kernel's stack buffers; most of them should fit in L1
MATRIX_STACK_BYTES = 240 << 10  # for matrix units, whose buffers should fit in L2; `vmfb.targets` allows a kernel 512 KB
L2_STACK_BYTES = 480 << 10  # for GEMVs, which prepare all of x if it fits in half of an L2 cache of 1 MB
PARTS = 6  # workgroups per thread; from 8 on, IREE assigns 8 at a time to a thread


@dataclass(frozen=True)
class Type:
    """An MLIR type; kind: "vector", "memref", or "" for a scalar of type `element`."""

    element: str
    shape: tuple[int, ...] = ()
    kind: str = ""

    def __str__(self) -> str:
        """Return the type in MLIR: `index`, `vector<8xf32>`, `memref<i32>`."""
        return f"{self.kind}<{'x'.join((*map(str, self.shape), self.element))}>" if self.kind else self.element


INDEX, I1, I32, F32, POINTER = map(Type, ("index", "i1", "i32", "f32", "!llvm.ptr"))


def vector_type(width: int, element: str = "f32") -> Type:
    return Type(element, (width,), "vector")


def memref_type(shape: Sequence[int], element: str = "f32") -> Type:
    return Type(element, tuple(shape), "memref")


class Ssa(str):
    """The name of an SSA value, such as `%3`, with its MLIR type."""

    type: Type

    def __new__(cls, name: str, type: Type) -> Ssa:
        value = super().__new__(cls, name)
        value.type = type
        return value

    @property
    def width(self) -> int:
        return self.type.shape[0]


Index = int | Ssa
Value = TypeVar("Value")


def f32_literal(x: float) -> str:
    """Return the f32 nearest to x as a hexadecimal MLIR literal; x may be infinite."""
    return f"0x{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def number(x: float) -> str:
    """Return `x` with nine significant digits as text for an MLIR symbol: 1e-5 becomes "1em05"."""
    return f"{x:.9g}".replace("-", "m").replace(".", "p").replace("+", "")


def largest_width(limit: int, *extents: int) -> int:
    """Return the largest power of two up to `limit` (a power of two) that divides all extents."""
    width = limit
    while any(n % width for n in extents):
        width //= 2
    return width


def batches(values: Sequence[Value], size: int) -> list[Sequence[Value]]:
    """Split `values` into consecutive batches of `size` values; the last batch may have fewer."""
    return [values[i : i + size] for i in range(0, len(values), size)]


class Loop:
    """An `scf.for` that `Body.loop` emits: with body.loop(0, n) as loop: ...

    index, values: the index and the carried values of an iteration. results: the final values.
    """

    def __init__(self, index: Ssa, values: list[Ssa]):
        self.index, self.values = index, values
        self.results: list[Ssa] = []
        self.given: list[Ssa] = []

    def give(self, *values: Ssa) -> None:
        """Set the values that the next iteration of the loop gets (`scf.yield`)."""
        self.given = list(values)


class Body:
    """A builder of the MLIR body of a kernel function; most methods append an operation.

    Arithmetic on Python integers is computed immediately and appends no operation.
    """

    # Whether to keep compilers from fusing a multiplication and an addition into an fma, which changes the bits of the result.
    fenced: ClassVar[bool] = True

    def __init__(self) -> None:
        self._head: list[str] = []
        self._constants: dict[str, Ssa] = {}
        self._lines: list[str] = []
        self._names = 0
        self._depth = 3

    def text(self) -> str:
        return "\n".join(["      " + line for line in self._head] + self._lines)

    def name(self) -> str:
        self._names += 1
        return f"%{self._names}"

    def do(self, line: str) -> None:
        self._lines.append("  " * self._depth + line)

    def let(self, expression: str, type: Type) -> Ssa:
        name = self.name()
        self.do(f"{name} = {expression}")
        return Ssa(name, type)

    def intrinsic(self, name: str, type: Type, *operands: Ssa) -> Ssa:
        """Append a call of an LLVM intrinsic, and return its result."""
        types = ", ".join(str(operand.type) for operand in operands)
        return self.let(f'llvm.call_intrinsic "{name}"({", ".join(operands)}) : ({types}) -> {type}', type)

    def constant(self, literal: str, type: Type) -> Ssa:
        key = f"{literal} : {type}"
        if key not in self._constants:
            self._constants[key] = Ssa(f"%c{len(self._constants)}", type)
            literal_type = literal if type == I1 else key
            self._head.append(f"{self._constants[key]} = arith.constant {literal_type}")
        return self._constants[key]

    def f32(self, x: float) -> Ssa:
        return self.constant(f32_literal(x), F32)

    def splat(self, x: float, width: int) -> Ssa:
        return self.constant(f"dense<{f32_literal(x)}>", vector_type(width))

    def isplat(self, n: int, width: int) -> Ssa:
        return self.constant(f"dense<{n}>", vector_type(width, "i32"))

    def stack(self, *shape: int, element: str = "f32") -> Ssa:
        """Allocate a stack buffer of the given shape and element type; return its memref."""
        buffer = Ssa(self.name(), memref_type(shape, element))
        self._head.append(f"{buffer} = memref.alloca() alignment = 64 : {buffer.type}")
        return buffer

    def index(self, i: Index) -> Ssa:
        return i if isinstance(i, Ssa) else self.constant(str(i), INDEX)

    def _fold(self, op: str, known: Callable[[int, int], int], a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return known(a, b)
        return self.let(f"arith.{op} {self.index(a)}, {self.index(b)} : index", INDEX)

    def add(self, a: Index, b: Index) -> Index:
        return b if a == 0 else a if b == 0 else self._fold("addi", operator.add, a, b)

    def mul(self, a: Index, b: Index) -> Index:
        return a if b == 1 else self._fold("muli", operator.mul, a, b)

    def div(self, a: Index, b: Index) -> Index:
        """Return the quotient of non-negative indices, rounded down."""
        return a if b == 1 else self._fold("divui", operator.floordiv, a, b)

    def rem(self, a: Index, b: int) -> Index:
        """Return the remainder of a non-negative index divided by b."""
        return 0 if b == 1 else self._fold("remui", operator.mod, a, b)

    sub = partialmethod(_fold, "subi", operator.sub)
    min = partialmethod(_fold, "minsi", min)
    max = partialmethod(_fold, "maxsi", max)

    def ceildiv(self, a: Index, b: Index) -> Index:
        return self.div(self.add(a, self.sub(b, 1)), b)

    def _compare(self, predicate: str, a: Index, b: Index) -> Ssa:
        return self.let(f"arith.cmpi {predicate}, {self.index(a)}, {self.index(b)} : index", I1)

    less = partialmethod(_compare, "slt")
    equal = partialmethod(_compare, "eq")

    def negate(self, a: Ssa) -> Ssa:
        return self.binary("xori", a, self.constant("true", I1))

    def to_i32(self, i: Index) -> Ssa:
        return self.convert("index_cast", self.index(i), "i32")

    def to_index(self, i: Ssa) -> Ssa:
        return self.convert("index_cast", i, "index")

    def workgroup(self) -> Ssa:
        return self.let("stream.dispatch.workgroup.id[0] : index", INDEX)

    def share(self, count: Index, workgroup: Index, workgroups: int) -> tuple[Index, Index]:
        """Divide `count` items evenly among workgroups; return (first, end) for one of them."""
        if isinstance(count, Ssa):
            low = self.div(self.mul(workgroup, count), workgroups)
            return low, self.div(self.mul(self.add(workgroup, 1), count), workgroups)
        # The first workgroups get one item more, so that the items of any two workgroups differ by one at most.
        each, more = divmod(count, workgroups)
        first = lambda n: self.add(self.mul(n, each), self.min(n, more) if more else 0)
        return first(workgroup), first(self.add(workgroup, 1))

    def real(self, length: Ssa | None, low: Index, high: Index) -> Index:
        """Return the end of the rows that are not padding, among rows low .. high - 1."""
        return high if length is None else self.max(self.min(self.to_index(self.load(length)), high), low)

    def binary(self, op: str, a: Ssa, b: Ssa) -> Ssa:
        return self.let(f"arith.{op} {a}, {b} : {a.type}", a.type)

    addi = partialmethod(binary, "addi")
    addf = partialmethod(binary, "addf")
    subf = partialmethod(binary, "subf")
    divf = partialmethod(binary, "divf")
    both = partialmethod(binary, "andi")
    either = partialmethod(binary, "ori")

    def mulf(self, a: Ssa, b: Ssa) -> Ssa:
        y = self.binary("mulf", a, b)
        return self.intrinsic("llvm.arithmetic.fence", y.type, y) if self.fenced else y

    def bitcast(self, vector: Ssa, width: int, element: str) -> Ssa:
        """Reinterpret the bits of a vector as a vector of `width` elements of type `element`."""
        type = vector_type(width, element)
        return self.let(f"vector.bitcast {vector} : {vector.type} to {type}", type)

    def convert(self, op: str, x: Ssa, element: str) -> Ssa:
        """Convert a scalar or vector to element type `element` by `arith.{op}`, such as "extf"."""
        type = replace(x.type, element=element)
        return self.let(f"arith.{op} {x} : {x.type} to {type}", type)

    def widened(self, x: Ssa) -> Ssa:
        """Convert a float or a vector of floats to f32, which is exact."""
        return x if x.type.element == "f32" else self.convert("extf", x, "f32")

    def narrowed(self, x: Ssa, element: str) -> Ssa:
        """Round an f32 or a vector of f32 to the float type `element`, ties to even."""
        return x if x.type.element == element else self.convert("truncf", x, element)

    def fma(self, a: Ssa, b: Ssa, c: Ssa) -> Ssa:
        return self.let(f"math.fma {a}, {b}, {c} : {a.type}", a.type)

    def math(self, function: str, a: Ssa) -> Ssa:
        """Apply a function of MLIR's dialect `math`, such as "sqrt", to an f32 or a vector."""
        return self.let(f"math.{function} {a} : {a.type}", a.type)

    def compare(self, predicate: str, a: Ssa, b: Ssa) -> Ssa:
        op = "cmpi" if a.type.element.startswith("i") else "cmpf"
        return self.let(f"arith.{op} {predicate}, {a}, {b} : {a.type}", replace(a.type, element="i1"))

    def select(self, condition: Ssa, a: Index, b: Index) -> Ssa:
        """Return `a` where the condition is true, else `b`; for vectors, lane by lane."""
        a, b = self.index(a), self.index(b)
        types = f"{condition.type}, {a.type}" if condition.type.kind else str(a.type)
        return self.let(f"arith.select {condition}, {a}, {b} : {types}", a.type)

    def maxf(self, a: Ssa, b: Ssa) -> Ssa:
        """Return the maximum of two floats, lane by lane for vectors; `b` if either is NaN."""
        # This compiles to one x86 instruction; `arith.maximumf` takes four.
        return self.select(self.compare("ogt", a, b), a, b)

    def broadcast(self, scalar: Ssa, width: int) -> Ssa:
        type = vector_type(width, scalar.type.element)
        return self.let(f"vector.broadcast {scalar} : {scalar.type} to {type}", type)

    def extract(self, vector: Ssa, lane: int) -> Ssa:
        element = Type(vector.type.element)
        return self.let(f"vector.extract {vector}[{lane}] : {element} from {vector.type}", element)

    def shuffle(self, a: Ssa, b: Ssa, lanes: Sequence[int]) -> Ssa:
        listed = ", ".join(map(str, lanes))
        type = vector_type(len(lanes), a.type.element)
        return self.let(f"vector.shuffle {a}, {b} [{listed}] : {a.type}, {b.type}", type)

    def _at(self, buffer: Ssa, indices: Sequence[Index]) -> str:
        return f"{buffer}[{', '.join(self.index(i) for i in indices)}]"

    def load(self, buffer: Ssa, *indices: Index) -> Ssa:
        return self.let(f"memref.load {self._at(buffer, indices)} : {buffer.type}", Type(buffer.type.element))

    def store(self, value: Ssa, buffer: Ssa, *indices: Index) -> None:
        self.do(f"memref.store {value}, {self._at(buffer, indices)} : {buffer.type}")

    def vload(self, buffer: Ssa, width: int, *indices: Index) -> Ssa:
        type = vector_type(width, buffer.type.element)
        return self.let(f"vector.load {self._at(buffer, indices)} : {buffer.type}, {type}", type)

    def vstore(self, value: Ssa, buffer: Ssa, *indices: Index) -> None:
        self.do(f"vector.store {value}, {self._at(buffer, indices)} : {buffer.type}, {value.type}")

    def atomic_add(self, value: Ssa, buffer: Ssa, *indices: Index) -> Ssa:
        """Atomically add `value` to the i32 buffer[indices]; return the previous value."""
        types = f"({value.type}, {buffer.type}) -> {value.type}"
        return self.let(f"memref.atomic_rmw addi {value}, {self._at(buffer, indices)} : {types}", value.type)

    def address(self, buffer: Ssa) -> Ssa:
        base = self.let(f"memref.extract_aligned_pointer_as_index {buffer} : {buffer.type} -> index", INDEX)
        return self.convert("index_cast", base, "i64")

    def moved(self, address: Ssa, offset: Index) -> Ssa:
        return self.binary("addi", address, self.convert("index_cast", self.index(offset), "i64"))

    def pointer(self, address: Ssa, offset: Index) -> Ssa:
        """Return `address` + `offset` as an LLVM pointer; address: an i64, offset: in bytes."""
        return self.let(f"llvm.inttoptr {self.moved(address, offset)} : i64 to !llvm.ptr", POINTER)

    def touch(self, address: Ssa, offset: Index) -> None:
        """Append a load of an i32, to bring its cache line into the cache."""
        self.let(f"llvm.load volatile {self.pointer(address, offset)} : !llvm.ptr -> i32", I32)

    def prefetch(self, buffer: Ssa, *indices: Index, near: bool = True) -> None:
        """Append a prefetch of buffer[indices] into the L1 cache if `near`, otherwise into L2."""
        self.do(f"memref.prefetch {self._at(buffer, indices)}, read, locality<{3 if near else 2}>, data : {buffer.type}")

    @contextmanager
    def loop(self, low: Index, high: Index, step: Index = 1, carry: Sequence[Ssa] = ()) -> Iterator[Loop]:
        """Append an `scf.for` over low .. high - 1 whose body is the code of the `with` block."""
        bounds = f"{self.index(low)} to {self.index(high)} step {self.index(step)}"
        loop = Loop(Ssa(self.name(), INDEX), [Ssa(self.name(), v.type) for v in carry])
        group = self.name()
        head = f"scf.for {loop.index} = {bounds}"
        types = ", ".join(str(v.type) for v in carry)
        if carry:
            pairs = ", ".join(f"{inside} = {first}" for inside, first in zip(loop.values, carry, strict=True))
            head = f"{group}:{len(carry)} = {head} iter_args({pairs}) -> ({types})"
        self.do(head + " {")
        self._depth += 1
        yield loop
        if carry:
            self.do(f"scf.yield {', '.join(loop.given)} : {types}")
        self._depth -= 1
        self.do("}")
        loop.results = [Ssa(f"{group}#{i}", v.type) for i, v in enumerate(carry)]

    def unrolled(
        self,
        count: int,
        unroll: int,
        values: Sequence[Ssa],
        step: Callable[[Index, Sequence[Ssa]], Sequence[Ssa]],
        before: Callable[[Index], None] = lambda i: None,
    ) -> Sequence[Ssa]:
        """Append an unrolled loop that computes values = step(i, values) for i in 0 .. count - 1."""
        full = count // unroll * unroll
        with self.loop(0, full, unroll, carry=values) as loop:
            before(loop.index)
            inside: Sequence[Ssa] = loop.values
            for i in range(unroll):
                inside = step(self.add(loop.index, i), inside)
            loop.give(*inside)
        values = loop.results
        for i in range(full, count):
            values = step(i, values)
        return values

    @contextmanager
    def when(self, condition: Ssa) -> Iterator[None]:
        self.do(f"scf.if {condition} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self.do("}")
