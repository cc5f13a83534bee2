"""Emit matmuls of small bf16 blocks: x [rows, 32] @ weights [32, 16], accumulated in f32.

A block is contiguous in memory, as i32 with two bf16 each. The two bf16 are neighbours along the
dimension of size 32, which is summed over. So a block of x is i32 [rows, 16], and a block of
weights is i32 [16, 16]. The sums of a block are f32 [rows, 16].

    amx    tdpbf16ps on Intel's AMX tiles: rounds sums to nearest, treats denormals as zero. Sums
           stay in the eight tile registers until they are stored. The process must first request
           the use of tiles from Linux (`vmfb.cpu_features.can_use_tiles`)
    plain  shifts and fma, for every CPU. Sums are accumulated in the memory of the results
"""

from castiron.emitter.kernels.mlir.bf16_pairs import halves
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, Type, vector_type
from castiron.emitter.kernels.mlir.isa import Isa

COLUMNS = 16
DEPTH = 32  # elements of k in one `add`
ROW_BYTES = 64  # bytes of a row of x, of weights and of sums
_TILE = Type("!llvm.x86_amx")
_ROW = vector_type(COLUMNS)

Block = Ssa  # a block of sums, x or weights: an AMX tile, or an address


class Matrix:
    """A writer of code that multiplies bf16 blocks: x [rows, 32] @ weights [32, 16].

    rows: number of rows in a block of x, up to 16.
    results: memref f32 [blocks, rows, 16] in which the code stores the results.
    """

    def __init__(self, b: Body, isa: Isa, rows: int, results: Ssa):
        self.b, self.rows, self.tiled, self.results = b, rows, isa.matrix == "amx", b.address(results)

    def zero(self, number: int) -> Block:
        """Create zeroed accumulators, f32 [rows, 16]."""
        if self.tiled:
            return self._tile("tilezero", self.rows)
        address = self.b.moved(self.results, number * self.rows * ROW_BYTES)
        with self.b.loop(0, self.rows) as row:
            self._put(self.b.splat(0.0, COLUMNS), address, self.b.mul(row.index, ROW_BYTES))
        return address

    def x(self, base: Ssa, offset: Index) -> Block:
        """Load a block of x, i32 [rows, 16] of two bf16 each, from `base` + `offset` bytes."""
        return self._load(self.rows, base, offset)

    def weights(self, base: Ssa, offset: Index) -> Block:
        """Load a block of weights, i32 [16, 16] of two bf16 each, from `base` + `offset` bytes."""
        return self._load(DEPTH // 2, base, offset)

    def add(self, sums: Block, x: Block, weights: Block) -> Block:
        """Return the accumulators `sums` plus the matmul x @ weights of two bf16 blocks."""
        if self.tiled:
            return self._tile("tdpbf16ps", self.rows, self._integer(ROW_BYTES), sums, x, weights)
        b = self.b
        with b.loop(0, self.rows) as row:
            at = b.mul(row.index, ROW_BYTES)
            with b.loop(0, DEPTH // 2, carry=[self._at(sums, at, _ROW)]) as pair:
                (total,) = pair.values
                word = self._at(x, b.add(at, b.mul(pair.index, 4)), Type("i32"))
                columns = self._at(weights, b.mul(pair.index, ROW_BYTES), vector_type(COLUMNS, "i32"))
                for k, column in zip(halves(b, b.broadcast(word, COLUMNS)), halves(b, columns), strict=True):
                    total = b.fma(k, column, total)
                pair.give(total)
            self._put(pair.results[0], sums, at)
        return sums

    def store(self, sums: Block, number: int) -> None:
        """Emit code that stores the accumulators `sums` in the results, at block index `number`.

        `number` must be the same as in the call of `zero` that created the accumulators.
        """
        if self.tiled:
            address = self.b.pointer(self.results, number * self.rows * ROW_BYTES)
            sizes, stride = (self._integer(self.rows), self._integer(ROW_BYTES)), self._integer(ROW_BYTES, "i64")
            self.b.do(self._call("tilestored64", "()", *sizes, address, stride, sums))

    def _load(self, rows: int, base: Ssa, offset: Index) -> Block:
        if self.tiled:
            return self._tile("tileloadd64", rows, self.b.pointer(base, offset), self._integer(ROW_BYTES, "i64"))
        return self.b.moved(base, offset)

    def _at(self, base: Ssa, offset: Index, type: Type) -> Ssa:
        return self.b.let(f"llvm.load {self.b.pointer(base, offset)} : !llvm.ptr -> {type}", type)

    def _put(self, value: Ssa, base: Ssa, offset: Index) -> None:
        self.b.do(f"llvm.store {value}, {self.b.pointer(base, offset)} : {value.type}, !llvm.ptr")

    def _integer(self, n: int, element: str = "i16") -> Ssa:
        return self.b.constant(str(n), Type(element))

    def _tile(self, name: str, rows: int, *operands: Ssa) -> Ssa:
        return self.b.let(self._call(name, _TILE, self._integer(rows), self._integer(ROW_BYTES), *operands), _TILE)

    @staticmethod
    def _call(name: str, result: Type | str, *operands: Ssa) -> str:
        listed, types = ", ".join(operands), ", ".join(str(operand.type) for operand in operands)
        return f'llvm.call_intrinsic "llvm.x86.{name}.internal"({listed}) : ({types}) -> {result}'
