"""Emit code that looks up each lane of a vector in a table of 16 entries.

AVX-512, AVX2  vpermps, once for 16 lanes or twice for 8 lanes; vpshufb for bytes
NEON           tbl for bytes
plain          a tree of selects by the bits of the index, for any CPU
"""

from collections.abc import Callable, Sequence

from castiron.emitter.kernels.mlir.body import Body, Ssa, vector_type
from castiron.emitter.kernels.mlir.isa import NEON, Isa

ENTRIES = 16
_BYTES = {4: "llvm.aarch64.neon.tbl1.v16i8", 8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}


def entries(b: Body, isa: Isa, table: Sequence[int], indices: Ssa) -> Ssa:
    """Return entries of a table of 16 integers as f32 [lanes]; indices: i32 [lanes]."""
    lanes = isa.lanes
    if _plain(isa):
        return _tree(b, table, lambda entry: b.splat(float(entry), lanes), lambda bit: b.isplat(1 << bit, lanes), indices)
    if lanes == NEON.lanes:
        found = b.bitcast(byte_entries(b, isa, table, indices), lanes, "i32")
        up = b.isplat(24, lanes)
        return b.convert("sitofp", b.binary("shrsi", b.binary("shli", found, up), up), "f32")
    if lanes == ENTRIES:
        return b.intrinsic("llvm.x86.avx512.permvar.sf.512", vector_type(lanes), _floats(b, table), indices)
    halves = (_floats(b, half) for half in (table[:8], table[8:]))
    low, high = (b.intrinsic("llvm.x86.avx2.permps", half.type, half, indices) for half in halves)
    return b.select(b.compare("ugt", indices, b.isplat(7, lanes)), high, low)


def byte_entries(b: Body, isa: Isa, table: Sequence[int], indices: Ssa) -> Ssa:
    """Return entries of a table of 16 integers as bytes, four in each i32.

    indices: i32 vector, whose bytes are the indices of the entries, 0 to 15.
    """
    width = 4 * isa.lanes
    bytes_ = b.bitcast(indices, width, "i8")

    def splat(n: int) -> Ssa:
        return b.constant(f"dense<{_signed(n)}>", bytes_.type)

    if _plain(isa):
        found = _tree(b, table, splat, lambda bit: splat(1 << bit), bytes_)
    else:
        entry = b.constant(f"dense<{[_signed(n) for n in (*table,) * (width // ENTRIES)]}>", bytes_.type)
        found = b.intrinsic(_BYTES[isa.lanes], entry.type, entry, bytes_)
    return b.bitcast(found, isa.lanes, "i32")


def _plain(isa: Isa) -> bool:
    return isa.dot.startswith("plain")


def _signed(n: int) -> int:
    """Return the i8 that has the same bits as the u8 `n`."""
    return (n + 128) % 256 - 128


def _floats(b: Body, table: Sequence[int]) -> Ssa:
    return b.constant(f"dense<[{', '.join(f'{float(n):.1f}' for n in table)}]>", vector_type(len(table)))


def _tree(b: Body, table: Sequence[int], splat: Callable[[int], Ssa], mask: Callable[[int], Ssa], indices: Ssa) -> Ssa:
    found, bit = [splat(entry) for entry in table], 0
    zero = b.constant("dense<0>", indices.type)
    while len(found) > 1:
        there = b.compare("ne", b.binary("andi", indices, mask(bit)), zero)
        found = [b.select(there, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        bit += 1
    return found[0]
