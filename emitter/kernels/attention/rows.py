"""Emit code that appends rows to a KV cache (`emitter.kv_cache`) and reads them as f32.

append to q8_0: for each group of the head
  d = max |x| / 127; n = round(x * (127 / max |x|))
  row[group] = d, n                                                                                  memory
read: x = f32(n) * d, one load of the scale for each group                                               registers

A cache may be a ring buffer, which stores position p in row p modulo the number of rows. Kernels
iterate over positions in order, so they give the same bits for a ring as for a full cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import as_bytes, low_bytes, numbers_of
from castiron.emitter.kv_cache import SCALE_BYTES, Cache

LINE_BITS = 512  # bits of a cache line


@dataclass(frozen=True)
class Rows:
    """Access to the rows of a KV cache, one row for each (layer, position, kv head).

    width: elements of a vector. ring: rows of a layer if the cache is a ring buffer, or None.
    """

    b: Body
    buffer: Ssa
    cache: Cache
    head_dim: int
    width: int
    ring: int | None = None

    def row(self, position: Index) -> Index:
        return position if self.ring is None else self.b.rem(position, self.ring)

    def indices(self, at: Sequence[Index]) -> list[Index]:
        """Return the buffer indices of a row; at: (layer, position, kv head)."""
        layer, position, head = at
        return [layer, self.row(position), head]

    def append(
        self, at: Sequence[Index], read: Callable[[Index], Ssa], on_store: Callable[[Index, Ssa], None] | None = None
    ) -> None:
        """Store a key or value head in the row `at`, rounded to the format of the cache.

        at: (layer, position, kv head). read(d): returns the head's f32 vector from element d on.
        on_store(d, x): called with each vector x after rounding, as f32.
        """
        b, group, at = self.b, self.cache.group(self.head_dim), self.indices(at)
        if not self.cache.grouped:
            with b.loop(0, self.head_dim, self.width) as d:
                stored = b.narrowed(read(d.index), self.buffer.type.element)
                b.vstore(stored, self.buffer, *at, d.index)
                if on_store:
                    on_store(d.index, b.widened(stored))
            return
        with b.loop(0, self.head_dim // group) as g:
            first = b.mul(g.index, group)
            offsets = range(0, group, self.width)
            shifted, scale = as_bytes(b, [read(b.add(first, k)) for k in offsets])
            b.vstore(b.bitcast(b.broadcast(scale, 1), SCALE_BYTES, "i8"), self.buffer, *at, g.index, 0)
            factor = b.broadcast(scale, self.width)
            for k, x in zip(offsets, shifted, strict=True):
                b.vstore(low_bytes(b, x), self.buffer, *at, g.index, SCALE_BYTES + k)
                if on_store:
                    on_store(b.add(first, k), b.mulf(numbers_of(b, x), factor))

    def prefetch(self, at: Sequence[Index], near: bool = True) -> None:
        """Prefetch the cache lines of the row `at` into L1 if `near`, otherwise into L2 only."""
        per_line, at = LINE_BITS // self.cache.dtype.bits, self.indices(at)
        offsets: list[tuple[int, ...]] = [(d,) for d in range(0, self.head_dim, per_line)]
        if self.cache.grouped:
            offsets = [(g, 0) for g in range(self.head_dim // self.cache.group(self.head_dim))]
        for indices in offsets:
            self.b.prefetch(self.buffer, *at, *indices, near=near)

    def part(self, at: Sequence[Index], first: Index, size: int) -> Callable[[int], Ssa]:
        """Return a function from an offset to the f32 vector at element first + offset of a row.

        at: (layer, position, kv head). size: limit of the offsets; it must divide `first`, and
        `cache.cuts` must accept it.
        """
        b, group, scales, at = self.b, self.cache.group(self.head_dim), dict[int, Ssa](), self.indices(at)
        if not self.cache.grouped:
            return lambda offset: b.widened(b.vload(self.buffer, self.width, *at, b.add(first, offset)))
        base = b.div(first, group)
        inner = b.rem(first, group) if size < group else 0

        def vector(offset: int) -> Ssa:
            within, k = divmod(offset, group)
            g = b.add(base, within)
            if within not in scales:
                d = b.bitcast(b.vload(self.buffer, SCALE_BYTES, *at, g, 0), 1, "f32")
                scales[within] = b.broadcast(b.extract(d, 0), self.width)
            codes = b.vload(self.buffer, self.width, *at, g, b.add(inner, SCALE_BYTES + k))
            return b.mulf(b.convert("sitofp", b.convert("extsi", codes, "i32"), "f32"), scales[within])

        return vector
