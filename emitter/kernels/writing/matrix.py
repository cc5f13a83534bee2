"""Products of small matrices of bf16 with sums in f32: rows of x, 32 k deep, times 16 columns of weights.

x is [rows, 16] of pairs of k in an i32, the weights are [16, 16], pair of k by column, both dense in memory; sums are
[rows, 16], and stand in registers, of which there are eight for all of these, until they are stored.

    amx    tdpbf16ps on the tiles of Intel's AMX: sums rounded to nearest, denormals as zero. The process asks Linux for
           tiles before it runs such a kernel (`vmfb.cpu.tiles_given`).
    plain  shifts and fma on memory, for any CPU: sums are where they will be stored
"""

from __future__ import annotations

from castiron.emitter.kernels.writing.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.pairs import halves

COLUMNS = 16
DEPTH = 32  # k of one product
ROW_BYTES = 64  # of x, of weights and of sums
_TILE = "!llvm.x86_amx"
_ROW = vector_type(COLUMNS)

Block = Ssa  # sums, x or weights: a tile, or where it stands


class Matrix:
    """Products of `rows`, up to 16, of x. `results` is [blocks, rows, 16] of f32, where sums are stored."""

    def __init__(self, b: Body, isa: Isa, rows: int, results: Ssa):
        self.b, self.rows, self.tiled, self.results = b, rows, isa.matrix == "amx", b.address(results)

    def zero(self, number: int) -> Block:
        """Sums that will be block `number` of the results."""
        if self.tiled:
            return self._tile("tilezero", self.rows)
        place = self._address(self.results, number * self.rows * ROW_BYTES)
        with self.b.loop(0, self.rows) as row:
            self._put(self.b.splat(0.0, COLUMNS), place, self.b.mul(row.index, ROW_BYTES))
        return place

    def x(self, base: Ssa, offset: Index) -> Block:
        """rows x 16 pairs at `offset` bytes from an address."""
        return self._load(self.rows, base, offset)

    def weights(self, base: Ssa, offset: Index) -> Block:
        """16 x 16 pairs at `offset` bytes from an address."""
        return self._load(DEPTH // 2, base, offset)

    def add(self, sums: Block, x: Block, weights: Block) -> Block:
        """The sums with the products added."""
        if self.tiled:
            return self._tile("tdpbf16ps", self.rows, self._width, sums, x, weights)
        b = self.b
        with b.loop(0, self.rows) as row:
            at = b.mul(row.index, ROW_BYTES)
            with b.loop(0, DEPTH // 2, carry=[self._at(sums, at, _ROW)]) as pair:
                (total,) = pair.values
                word = self._at(x, b.add(at, b.mul(pair.index, 4)), "i32")
                columns = self._at(weights, b.mul(pair.index, ROW_BYTES), vector_type(COLUMNS, "i32"))
                for k, column in zip(halves(b, b.broadcast(word, COLUMNS)), halves(b, columns), strict=True):
                    total = b.fma(k, column, total)
                pair.give(total)
            self._put(pair.results[0], sums, at)
        return sums

    def store(self, sums: Block, number: int) -> None:
        """Block `number` of the results."""
        if self.tiled:
            place = self._pointer(self.results, number * self.rows * ROW_BYTES)
            self.b.do(self._call("tilestored64", "()", self._extent(self.rows), self._width, place, self._stride, sums))

    def _load(self, rows: int, base: Ssa, offset: Index) -> Block:
        if self.tiled:
            return self._tile("tileloadd64", rows, self._pointer(base, offset), self._stride)
        return self._address(base, offset)

    def _at(self, base: Ssa, offset: Index, type: str) -> Ssa:
        return self.b.let(f"llvm.load {self._pointer(base, offset)} : !llvm.ptr -> {type}", type)

    def _put(self, value: Ssa, base: Ssa, offset: Index) -> None:
        self.b.do(f"llvm.store {value}, {self._pointer(base, offset)} : {value.type}, !llvm.ptr")

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
        return self.b.let(self._call(name, _TILE, self._extent(rows), self._width, *operands), _TILE)

    @staticmethod
    def _call(name: str, result: str, *operands: Ssa) -> str:
        listed, types = ", ".join(operands), ", ".join(operand.type for operand in operands)
        return f'llvm.call_intrinsic "llvm.x86.{name}.internal"({listed}) : ({types}) -> {result}'
