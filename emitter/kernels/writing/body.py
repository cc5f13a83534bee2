"""Writes the text of a kernel: typed SSA names, constants once, loops with carried values."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

STACK_BYTES = 30 << 10  # what buffers on the stack may take of the 32 KB that IREE allows a kernel
PARTS = 6  # workgroups a thread of what they take in turn: fewer than 8, from where on IREE hands out 8 at a time


def f32_literal(x: float) -> str:
    """The f32 nearest to x as MLIR's hexadecimal literal, which holds every bit of it, infinities included."""
    return f"0x{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def number(x: float) -> str:
    """A float as part of a symbol: digits, letters and underscores that hold it to nine digits."""
    return f"{x:.9g}".replace("-", "m").replace(".", "p").replace("+", "")


class Ssa(str):
    """The SSA name of a value, or a literal index; `type` is its MLIR type."""

    type: str

    def __new__(cls, name: str, type: str) -> Ssa:
        value = super().__new__(cls, name)
        value.type = type
        return value


Index = int | Ssa
Value = TypeVar("Value")


def vector_type(width: int, element: str = "f32") -> str:
    return f"vector<{width}x{element}>"


def width_of(value: Ssa) -> int:
    """Elements of a vector value."""
    return int(value.type.removeprefix("vector<").split("x")[0])


def memref_type(shape: Sequence[int], element: str = "f32") -> str:
    return "memref<" + "".join(f"{n}x" for n in shape) + element + ">"


def shape_of(buffer: Ssa) -> tuple[int, ...]:
    """Extents of a memref."""
    return tuple(map(int, buffer.type.removeprefix("memref<").split("x")[:-1]))


def element_of(type: str) -> str:
    """`f32` of `memref<2x3xf32>`, of `vector<8xf32>` and of `f32`."""
    return type.rstrip(">").split("<")[-1].split("x")[-1]


def largest_width(limit: int, *extents: int) -> int:
    """The largest power of two up to `limit` that divides every extent; extents of 0 do not count."""
    width = limit
    while any(n % width for n in extents):
        width //= 2
    return width


def batches(values: Sequence[Value], size: int) -> list[Sequence[Value]]:
    """Consecutive parts of `size` values."""
    return [values[i : i + size] for i in range(0, len(values), size)]


class Loop:
    """An open `scf.for`: `index`, the carried `values` inside it, and `results` once it is closed."""

    def __init__(self, index: Ssa, values: list[Ssa]):
        self.index, self.values = index, values
        self.results: list[Ssa] = []
        self.given: list[Ssa] = []

    def give(self, *values: Ssa) -> None:
        """What this iteration hands to the next, one value for each carried one."""
        self.given = list(values)


class Body:
    """The body of one kernel function under construction.

    fenced: no compiler joins a product with a sum into an fma that is not written.

    Index operations fold integers known in Python, so that `add(0, x)` is `x` and a constant is written once.
    """

    def __init__(self, fenced: bool = False) -> None:
        self._fenced = fenced
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

    def let(self, expression: str, type: str) -> Ssa:
        name = self.name()
        self.do(f"{name} = {expression}")
        return Ssa(name, type)

    def constant(self, literal: str, type: str) -> Ssa:
        key = f"{literal} : {type}"
        if key not in self._constants:
            self._constants[key] = Ssa(f"%c{len(self._constants)}", type)
            literal_type = literal if type == "i1" else key
            self._head.append(f"{self._constants[key]} = arith.constant {literal_type}")
        return self._constants[key]

    def f32(self, x: float) -> Ssa:
        return self.constant(f32_literal(x), "f32")

    def splat(self, x: float, width: int) -> Ssa:
        return self.constant(f"dense<{f32_literal(x)}>", vector_type(width))

    def isplat(self, n: int, width: int) -> Ssa:
        return self.constant(f"dense<{n}>", vector_type(width, "i32"))

    def steps(self, width: int) -> Ssa:
        """The vector 0, 1, ... as i32."""
        return self.constant(f"dense<{list(range(width))}>", vector_type(width, "i32"))

    def stack(self, *shape: int, element: str = "f32") -> Ssa:
        """A buffer on the stack, of which a kernel has up to STACK_BYTES."""
        buffer = Ssa(self.name(), memref_type(shape, element))
        self._head.append(f"{buffer} = memref.alloca() alignment = 64 : {buffer.type}")
        return buffer

    def index(self, i: Index) -> Ssa:
        return i if isinstance(i, Ssa) else self.constant(str(i), "index")

    def _integer(self, op: str, a: Index, b: Index) -> Ssa:
        return self.let(f"arith.{op} {self.index(a)}, {self.index(b)} : index", "index")

    def add(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 and isinstance(a, int):
            return b
        if b == 0 and isinstance(b, int):
            return a
        return self._integer("addi", a, b)

    def sub(self, a: Index, b: Index) -> Index:
        return a - b if isinstance(a, int) and isinstance(b, int) else self._integer("subi", a, b)

    def mul(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if b == 1 and isinstance(b, int):
            return a
        return self._integer("muli", a, b)

    def div(self, a: Index, b: Index) -> Index:
        """Quotient of non-negative indices."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        return a if b == 1 and isinstance(b, int) else self._integer("divui", a, b)

    def rem(self, a: Index, b: int) -> Index:
        """Remainder of a non-negative index."""
        if isinstance(a, int):
            return a % b
        return 0 if b == 1 else self._integer("remui", a, b)

    def ceildiv(self, a: Index, b: Index) -> Index:
        return self.div(self.add(a, self.sub(b, 1)), b)

    def min(self, a: Index, b: Index) -> Index:
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else self._integer("minsi", a, b)

    def max(self, a: Index, b: Index) -> Index:
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else self._integer("maxsi", a, b)

    def less(self, a: Index, b: Index) -> Ssa:
        return self.let(f"arith.cmpi slt, {self.index(a)}, {self.index(b)} : index", "i1")

    def equal(self, a: Index, b: Index) -> Ssa:
        return self.let(f"arith.cmpi eq, {self.index(a)}, {self.index(b)} : index", "i1")

    def both(self, a: Ssa, b: Ssa) -> Ssa:
        return self.let(f"arith.andi {a}, {b} : {a.type}", a.type)

    def either(self, a: Ssa, b: Ssa) -> Ssa:
        return self.let(f"arith.ori {a}, {b} : {a.type}", a.type)

    def negate(self, a: Ssa) -> Ssa:
        """Not a, of an i1."""
        return self.let(f"arith.xori {a}, {self.constant('true', 'i1')} : i1", "i1")

    def to_i32(self, i: Index) -> Ssa:
        return self.let(f"arith.index_cast {self.index(i)} : index to i32", "i32")

    def to_index(self, i: Ssa) -> Ssa:
        return self.let(f"arith.index_cast {i} : {i.type} to index", "index")

    def workgroup(self) -> Ssa:
        return self.let("stream.dispatch.workgroup.id[0] : index", "index")

    def share(self, count: Index, workgroup: Index, workgroups: int) -> tuple[Index, Index]:
        """First and past-the-last of the items, of `count`, that a workgroup of so many has.

        Where a count that is known does not divide, the first ones have one more: threads, which take them in turn, end
        within one item.
        """
        if isinstance(count, Ssa):
            low = self.div(self.mul(workgroup, count), workgroups)
            return low, self.div(self.mul(self.add(workgroup, 1), count), workgroups)
        each, more = divmod(count, workgroups)

        def first(n: Index) -> Index:
            return self.add(self.mul(n, each), self.min(n, more) if more else 0)

        return first(workgroup), first(self.add(workgroup, 1))

    def real(self, length: Ssa | None, low: Index, high: Index) -> Index:
        """Where the rows low .. high - 1 end if those from `length`, an i32 in memory, on are padding."""
        return high if length is None else self.max(self.min(self.to_index(self.load(length)), high), low)

    def binary(self, op: str, a: Ssa, b: Ssa) -> Ssa:
        return self.let(f"arith.{op} {a}, {b} : {a.type}", a.type)

    def addf(self, a: Ssa, b: Ssa) -> Ssa:
        return self.binary("addf", a, b)

    def subf(self, a: Ssa, b: Ssa) -> Ssa:
        return self.binary("subf", a, b)

    def mulf(self, a: Ssa, b: Ssa) -> Ssa:
        product = self.binary("mulf", a, b)
        if not self._fenced:
            return product
        return self.let(
            f'llvm.call_intrinsic "llvm.arithmetic.fence"({product}) : ({product.type}) -> {product.type}', product.type
        )

    def divf(self, a: Ssa, b: Ssa) -> Ssa:
        return self.binary("divf", a, b)

    def bitcast(self, vector: Ssa, width: int, element: str) -> Ssa:
        """The same bits as `width` elements of another type."""
        type = vector_type(width, element)
        return self.let(f"vector.bitcast {vector} : {vector.type} to {type}", type)

    def widened(self, x: Ssa) -> Ssa:
        """A float or a vector of them as f32, which is exact."""
        type = x.type.replace(element_of(x.type), "f32")
        return x if type == x.type else self.let(f"arith.extf {x} : {x.type} to {type}", type)

    def narrowed(self, x: Ssa, buffer: Ssa) -> Ssa:
        """f32 as the floats of a buffer, rounded to nearest even."""
        type = x.type.replace("f32", element_of(buffer.type))
        return x if type == x.type else self.let(f"arith.truncf {x} : {x.type} to {type}", type)

    def fma(self, a: Ssa, b: Ssa, c: Ssa) -> Ssa:
        return self.let(f"math.fma {a}, {b}, {c} : {a.type}", a.type)

    def sqrt(self, a: Ssa) -> Ssa:
        return self.let(f"math.sqrt {a} : {a.type}", a.type)

    def compare(self, predicate: str, a: Ssa, b: Ssa) -> Ssa:
        op = "cmpi" if element_of(a.type).startswith("i") else "cmpf"
        type = vector_type(width_of(a), "i1") if a.type.startswith("vector") else "i1"
        return self.let(f"arith.{op} {predicate}, {a}, {b} : {a.type}", type)

    def choose(self, condition: Ssa, a: Index, b: Index) -> Ssa:
        """`select` of indices."""
        return self.select(condition, self.index(a), self.index(b))

    def select(self, condition: Ssa, a: Ssa, b: Ssa) -> Ssa:
        head = f"arith.select {condition}, {a}, {b} : "
        typed = f"{condition.type}, {a.type}" if condition.type.startswith("vector") else a.type
        return self.let(head + typed, a.type)

    def maxf(self, a: Ssa, b: Ssa) -> Ssa:
        """The larger one; b where either is NaN. One instruction on x86, where `arith.maximumf` takes four."""
        return self.select(self.compare("ogt", a, b), a, b)

    def broadcast(self, scalar: Ssa, width: int) -> Ssa:
        type = vector_type(width, scalar.type)
        return self.let(f"vector.broadcast {scalar} : {scalar.type} to {type}", type)

    def extract(self, vector: Ssa, lane: int) -> Ssa:
        element = element_of(vector.type)
        return self.let(f"vector.extract {vector}[{lane}] : {element} from {vector.type}", element)

    def shuffle(self, a: Ssa, b: Ssa, lanes: Sequence[int]) -> Ssa:
        listed = ", ".join(map(str, lanes))
        type = vector_type(len(lanes), element_of(a.type))
        return self.let(f"vector.shuffle {a}, {b} [{listed}] : {a.type}, {b.type}", type)

    def _at(self, buffer: Ssa, indices: Sequence[Index]) -> str:
        return f"{buffer}[{', '.join(self.index(i) for i in indices)}]"

    def load(self, buffer: Ssa, *indices: Index) -> Ssa:
        return self.let(f"memref.load {self._at(buffer, indices)} : {buffer.type}", element_of(buffer.type))

    def store(self, value: Ssa, buffer: Ssa, *indices: Index) -> None:
        self.do(f"memref.store {value}, {self._at(buffer, indices)} : {buffer.type}")

    def vload(self, buffer: Ssa, width: int, *indices: Index) -> Ssa:
        type = vector_type(width, element_of(buffer.type))
        return self.let(f"vector.load {self._at(buffer, indices)} : {buffer.type}, {type}", type)

    def vstore(self, value: Ssa, buffer: Ssa, *indices: Index) -> None:
        self.do(f"vector.store {value}, {self._at(buffer, indices)} : {buffer.type}, {value.type}")

    def atomic_add(self, value: Ssa, buffer: Ssa, *indices: Index) -> Ssa:
        """Add to an i32 of a buffer that workgroups share; gives what stood there before.

        Acquires and releases: what the others wrote before their turn can be read after it.
        """
        target = f"{self._at(buffer, indices)} : ({value.type}, {buffer.type}) -> {value.type}"
        return self.let(f"memref.atomic_rmw addi {value}, {target}", value.type)

    def address(self, buffer: Ssa) -> Ssa:
        """Where a memref begins, as i64."""
        base = self.let(f"memref.extract_aligned_pointer_as_index {buffer} : {buffer.type} -> index", "index")
        return self.let(f"arith.index_cast {base} : index to i64", "i64")

    def touch(self, address: Ssa, offset: Index) -> None:
        """Load a word `offset` bytes from an address and forget it; the compiler neither drops nor moves it."""
        bytes_ = self.let(f"arith.index_cast {self.index(offset)} : index to i64", "i64")
        at = self.binary("addi", address, bytes_)
        pointer = self.let(f"llvm.inttoptr {at} : i64 to !llvm.ptr", "!llvm.ptr")
        self.let(f"llvm.load volatile {pointer} : !llvm.ptr -> i32", "i32")

    def prefetch(self, buffer: Ssa, *indices: Index, near: bool = True) -> None:
        """Ask for the line of an element: into the L1 cache, or no nearer than the L2 cache."""
        self.do(f"memref.prefetch {self._at(buffer, indices)}, read, locality<{3 if near else 2}>, data : {buffer.type}")

    @contextmanager
    def loop(self, low: Index, high: Index, step: Index = 1, carry: Sequence[Ssa] = ()) -> Iterator[Loop]:
        """`scf.for` from low up to high; `carry` are the first values of what iterations hand on by `Loop.give`."""
        bounds = f"{self.index(low)} to {self.index(high)} step {self.index(step)}"
        loop = Loop(Ssa(self.name(), "index"), [Ssa(self.name(), v.type) for v in carry])
        group = self.name()
        head = f"scf.for {loop.index} = {bounds}"
        types = ", ".join(v.type for v in carry)
        if carry:
            pairs = ", ".join(f"{inside} = {first}" for inside, first in zip(loop.values, carry, strict=True))
            head = f"{group}:{len(carry)} = {head} iter_args({pairs}) -> ({types})"
        self.do(head + " {")
        self._depth += 1
        yield loop
        if carry:
            if [v.type for v in loop.given] != [v.type for v in carry]:
                raise ValueError(f"a loop that carries ({types}) was given {[v.type for v in loop.given]}")
            self.do(f"scf.yield {', '.join(loop.given)} : {types}")
        self._depth -= 1
        self.do("}")
        loop.results = [Ssa(f"{group}#{i}", v.type) for i, v in enumerate(carry)]

    @contextmanager
    def when(self, condition: Ssa) -> Iterator[None]:
        self.do(f"scf.if {condition} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self.do("}")
