"""Products of small matrices of bf16 with sums in f32: rows of x, 32 k deep, times 16 columns of weights.

x is [rows, 16] of pairs of k in an i32, the weights are [16, 16], pair of k by column, both dense in memory; sums are
[rows, 16]. What is between loading and storing stands in registers, of which there are eight.

    amx    tdpbf16ps on the tiles of Intel's AMX: sums rounded to nearest, denormals as zero. The process asks Linux for
           tiles before it runs such a kernel (`vmfb.tiles`).
    plain  vectors of f32 and memory, for any CPU
"""

from __future__ import annotations

from castiron.emitter.kernels.writing.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.pairs import halves

COLUMNS = 16
DEPTH = 32  # k of one product
ROW_BYTES = 64  # of x, of weights and of sums
_TILE = "!llvm.x86_amx"

Block = tuple[Ssa, ...]  # sums: one tile, or a vector of each row
Operand = Ssa  # a tile, or where it stands


class Matrix:
    """Products of `rows`, up to 16, of x."""

    def __init__(self, b: Body, isa: Isa, rows: int):
        self.b, self.rows, self.tiled = b, rows, isa.matrix == "amx"

    def zero(self) -> Block:
        if self.tiled:
            return (self._tile("tilezero", self.rows),)
        return (self.b.splat(0.0, COLUMNS),) * self.rows

    def x(self, base: Ssa, offset: Index) -> Operand:
        """rows x 16 pairs at `offset` bytes from an address."""
        return self._load(self.rows, base, offset)

    def weights(self, base: Ssa, offset: Index) -> Operand:
        """16 x 16 pairs at `offset` bytes from an address."""
        return self._load(DEPTH // 2, base, offset)

    def add(self, sums: Block, x: Operand, weights: Operand) -> Block:
        """The sums with the products added."""
        if self.tiled:
            return (self._tile("tdpbf16ps", self.rows, self._width, *sums, x, weights),)
        with self.b.loop(0, DEPTH // 2, carry=sums) as pair:
            columns = halves(self.b, self._vector(weights, self.b.mul(pair.index, ROW_BYTES), "i32"))
            totals = []
            for row, total in enumerate(pair.values):
                word = self._at(x, self.b.add(self.b.mul(pair.index, 4), row * ROW_BYTES), "i32")
                for k, column in zip(halves(self.b, self.b.broadcast(word, COLUMNS)), columns, strict=True):
                    total = self.b.fma(k, column, total)
                totals.append(total)
            pair.give(*totals)
        return tuple(pair.results)

    def store(self, sums: Block, base: Ssa, offset: Index) -> None:
        """To rows of 16 f32 at `offset` bytes from an address."""
        if self.tiled:
            self._call("tilestored64", "()", self._extent(self.rows), self._width, self._pointer(base, offset), self._stride, *sums)
            return
        for row, total in enumerate(sums):
            pointer = self._pointer(base, self.b.add(offset, row * ROW_BYTES))
            self.b.do(f"llvm.store {total}, {pointer} : {total.type}, !llvm.ptr")

    def _load(self, rows: int, base: Ssa, offset: Index) -> Operand:
        if self.tiled:
            return self._tile("tileloadd64", rows, self._pointer(base, offset), self._stride)
        return self._address(base, offset)

    def _vector(self, base: Ssa, offset: Index, element: str) -> Ssa:
        return self._at(base, offset, vector_type(COLUMNS, element))

    def _at(self, base: Ssa, offset: Index, type: str) -> Ssa:
        return self.b.let(f"llvm.load {self._pointer(base, offset)} : !llvm.ptr -> {type}", type)

    def _address(self, base: Ssa, offset: Index) -> Ssa:
        offset = self.b.index(offset)
        return self.b.binary("addi", base, self.b.let(f"arith.index_cast {offset} : index to i64", "i64"))

    def _pointer(self, base: Ssa, offset: Index) -> Ssa:
        return self.b.let(f"llvm.inttoptr {self._address(base, offset)} : i64 to !llvm.ptr", "!llvm.ptr")

    @property
    def _width(self) -> Ssa:
        return self._extent(ROW_BYTES)

    @property
    def _stride(self) -> Ssa:
        return self.b.constant(str(ROW_BYTES), "i64")

    def _extent(self, n: int) -> Ssa:
        return self.b.constant(str(n), "i16")

    def _tile(self, name: str, rows: int, *operands: Ssa) -> Ssa:
        return Ssa(self._call(name, _TILE, self._extent(rows), self._width, *operands), _TILE)

    def _call(self, name: str, result: str, *operands: Ssa) -> str:
        listed, types = ", ".join(operands), ", ".join(operand.type for operand in operands)
        call = f'llvm.call_intrinsic "llvm.x86.{name}.internal"({listed}) : ({types}) -> {result}'
        if result == "()":
            self.b.do(call)
            return ""
        return self.b.let(call, result)
