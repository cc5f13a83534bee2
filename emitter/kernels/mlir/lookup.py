"""Emit code for table lookups, with each lane of a vector as an index.

A table has 2, 4, 8 or 16 entries, which are f32 or bytes, or up to 32 bf16. The instruction depends on the CPU:

    AVX-512  vpermps for f32, vpshufb for bytes; on CPUs with AMX, vpermw for bf16, and
             vpmultishiftqb for their indices
    AVX2     vpermps for f32 (two of them for 16 entries), vpshufb for bytes
    NEON     tbl for bytes, and for f32 that are small integers
    plain    a tree of selects by the bits of the index, for any CPU
"""

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from castiron.emitter.kernels.mlir.body import Body, Ssa, vector_type
from castiron.emitter.kernels.mlir.isa import AVX2, NEON, Isa

ENTRIES = 16
T = TypeVar("T", int, float)
_PERMUTE = {8: "llvm.x86.avx2.permps", 16: "llvm.x86.avx512.permvar.sf.512"}
_BYTES = {4: "llvm.aarch64.neon.tbl1.v16i8", 8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}


def entries(b: Body, isa: Isa, table: Sequence[float], indices: Ssa) -> Ssa:
    """Emit a table lookup: return table[i] for each lane i of the vector `indices`, as f32.

    table: 2, 4, 8 or 16 constants. indices: i32 vector. For 2^n constants, only the low n bits of
    each index are used.
    """
    lanes = isa.lanes
    if lanes >= max(len(table), AVX2.lanes) and not _plain(isa):
        return permuted(b, isa, _floats(b, (*table,) * (lanes // len(table))), indices)
    indices = b.binary("andi", indices, b.isplat(len(table) - 1, lanes))
    integers = [int(entry) for entry in table]
    # NEON looks up bytes only.
    if _plain(isa) or (lanes == NEON.lanes and integers != list(table)):
        return _tree(b, table, lambda entry: b.splat(entry, lanes), lambda bit: b.isplat(1 << bit, lanes), indices)
    if lanes == NEON.lanes:
        found = b.bitcast(byte_entries(b, isa, integers, indices), lanes, "i32")
        up = b.isplat(24, lanes)
        return b.convert("sitofp", b.binary("shrsi", b.binary("shli", found, up), up), "f32")
    low, high = (permuted(b, isa, _floats(b, half), indices) for half in (table[:8], table[8:]))
    return b.select(b.compare("ugt", indices, b.isplat(7, lanes)), high, low)


def permuted(b: Body, isa: Isa, table: Ssa, indices: Ssa) -> Ssa:
    """Permute the lanes of a vector: lane i of the result is lane indices[i] of `table`.

    table: f32 vector. indices: i32 vector; only the low log2(number of lanes) bits of each index
    are used. NEON has no such instruction and is not supported.
    """
    if not _plain(isa):
        return b.intrinsic(_PERMUTE[isa.lanes], table.type, table, indices)
    entry = lambda lane: b.broadcast(b.extract(table, lane), isa.lanes)
    return _tree(b, range(isa.lanes), entry, lambda bit: b.isplat(1 << bit, isa.lanes), indices)


def shifted_index(b: Body, isa: Isa, words: Ssa, shift: int) -> Ssa:
    """Shift each i32 of a vector right by `shift` bits, to use the results as `permuted`'s indices.

    If the vector has 16 lanes, `shift` must be a multiple of 4, and only the low four bits of each
    result are valid. `permuted` ignores the other bits.
    """
    factor = 1 << 16 - shift % 16
    if isa.lanes < ENTRIES or _plain(isa) or factor == 1 << 16:
        return b.binary("shrui", words, b.isplat(shift, isa.lanes))
    # On Zen 4, shifts take the ports of vpermps; multiplications of u16 do not. LLVM would turn a multiplication by a
    # power of two back into a shift, so that this one is in assembly.
    half = b.binary("shrui", words, b.isplat(16, isa.lanes)) if shift > 16 else words
    factors = b.isplat(factor * 0x10001, isa.lanes)
    assembly = f'llvm.inline_asm "vpmulhuw $2, $1, $0", "=v,v,v" {half}, {factors}'
    return b.let(f"{assembly} : ({half.type}, {factors.type}) -> {half.type}", half.type)


def byte_entries(b: Body, isa: Isa, table: Sequence[int], indices: Ssa) -> Ssa:
    """Emit a table lookup of bytes: replace each byte i of the vector `indices` by table[i].

    table: 16 integers of 8 bits. indices: i32 vector with four indices, 0 to 15, in each lane.
    The result is an i32 vector with four entries of the table in each lane.
    """
    width = 4 * isa.lanes
    bytes_ = b.bitcast(indices, width, "i8")

    def splat(n: int) -> Ssa:
        return b.constant(f"dense<{_signed(n)}>", bytes_.type)

    if _plain(isa):
        found = _tree(b, table, splat, lambda bit: splat(1 << bit), bytes_)
    else:
        entry = b.constant(f"dense<{[_signed(n) for n in (*table,) * (width // len(table))]}>", bytes_.type)
        found = b.intrinsic(_BYTES[isa.lanes], entry.type, entry, bytes_)
    return b.bitcast(found, isa.lanes, "i32")


def has_bf16_entries(isa: Isa) -> bool:
    """Return whether the CPU has the instructions of `bit_pairs` and `bf16_entries`."""
    return isa.matrix == "amx"


def bit_pairs(b: Body, low: tuple[Ssa, int], high: tuple[Ssa, int]) -> Ssa:
    """Return a vector i32 [16] with bits of `low` in the lower halves and of `high` in the upper.

    low, high: (vector i32 [16], index of the first bit). Of each i32, the result has eight bits
        from this one on. Those after bit 31 are undefined.
    """
    word, other, first = low[0], high[0], (low[1], high[1])
    picked = _bits_from(b, word, first)
    if other == word:
        return picked
    low_half, high_half = b.isplat(0xFFFF, 16), b.isplat(-0x10000, 16)
    return b.either(b.binary("andi", picked, low_half), b.binary("andi", _bits_from(b, other, first), high_half))


def _bits_from(b: Body, word: Ssa, first: Sequence[int]) -> Ssa:
    # In both halves of each i32, put the bits from first[half] on. The instruction reads from pairs of i32.
    offsets = [32 * (lane % 2) + first[half] if byte == 0 else 0 for lane in range(16) for half in (0, 1) for byte in (0, 1)]
    type_ = vector_type(64, "i8")
    where = b.constant(f"dense<{offsets}>", type_)
    return b.bitcast(b.intrinsic("llvm.x86.avx512.pmultishift.qb.512", type_, where, b.bitcast(word, 64, "i8")), 16, "i32")


def bf16_entries(b: Body, table: Sequence[float], indices: Ssa) -> Ssa:
    """Emit a table lookup of bf16: replace both halves i of each i32 in `indices` by table[i].

    table: 2, 4, 8, 16 or 32 numbers that bf16 represents exactly. indices: i32 [16]. For 2^n
    numbers, only the low n bits of each half are used.
    """
    words = vector_type(32, "i16")
    entry = b.constant(f"dense<{[_bf16(n) for n in (*table,) * (32 // len(table))]}>", words)
    found = b.intrinsic("llvm.x86.avx512.permvar.hi.512", words, entry, b.bitcast(indices, 32, "i16"))
    return b.bitcast(found, 16, "i32")


def _bf16(n: float) -> int:
    # the bits of a number as bf16, as a signed integer
    return struct.unpack("<hh", struct.pack("<f", n))[1]


def _plain(isa: Isa) -> bool:
    return isa.dot.startswith("plain")


def _signed(n: int) -> int:
    return (n + 128) % 256 - 128


def _floats(b: Body, table: Sequence[float]) -> Ssa:
    listed = ", ".join(f"{n:.1f}" if n == int(n) else f"{n:.9e}" for n in table)
    return b.constant(f"dense<[{listed}]>", vector_type(len(table)))


def _tree(b: Body, table: Sequence[T], splat: Callable[[T], Ssa], mask: Callable[[int], Ssa], indices: Ssa) -> Ssa:
    found, bit = [splat(entry) for entry in table], 0
    zero = b.constant("dense<0>", indices.type)
    while len(found) > 1:
        there = b.compare("ne", b.binary("andi", indices, mask(bit)), zero)
        found = [b.select(there, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        bit += 1
    return found[0]
