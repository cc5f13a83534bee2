"""Emit code that appends rows to a KV cache (`emitter.kv_cache`) and reads them as f32.

append to a q8_0 cache: for each group of elements of a head
  d = max |x| / 127; n = round(x * (127 / max |x|))
  row[group] = d, n                                                                                  memory
read: x = f32(n) * d                             d is loaded once for each group of a row          registers

A cache may be a ring buffer of n positions, which stores position p at index p modulo n. Kernels
iterate over positions in order, so they give the same bits for a ring as for a full cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castiron.emitter.kernels.mlir.body import CACHE_LINE, Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import as_bytes, low_bytes, numbers_of
from castiron.emitter.kv_cache import EXACT, SCALE_BYTES, Cache
from castiron.emitter.types import TensorType


@dataclass(frozen=True)
class Caches:
    """The shape and format of the two KV caches that attention kernels read and write.

    layers: size of dimension 0 of a cache: the layers of one sequence, or in a batch the layers of
        all its sequences.
    context: max number of positions of a sequence.
    format: storage format of the key or value of a head.
    ring: number of positions that a layer stores if the caches are ring buffers, otherwise None. It
        must exceed the attention window, and for a chunk of T tokens it must be at least window +
        T.
    """

    layers: int
    context: int
    format: Cache = EXACT
    ring: int | None = None

    @property
    def positions(self) -> int:
        """Return the number of positions that a layer of a cache stores."""
        return self.ring or self.context

    @property
    def suffix(self) -> str:
        return f"_ring{self.ring}" * (self.ring is not None) + f"_{self.format.name}" * (self.format is not EXACT)

    def types(self, kv_heads: int, head_dim: int) -> dict[str, TensorType]:
        """Return the types of the operands k_cache and v_cache, by name."""
        type_ = self.format.type(self.layers, self.positions, kv_heads, head_dim)
        return dict.fromkeys(("k_cache", "v_cache"), type_)


@dataclass(frozen=True)
class Rows:
    """A writer of code that accesses the rows of a KV cache.

    A row is one key or value of a kv head. The argument `at` of the methods is the (layer,
    position, kv head) of a row. buffer: memref of the cache. width: number of elements of a vector.
    """

    b: Body
    buffer: Ssa
    caches: Caches
    head_dim: int
    width: int

    @property
    def cache(self) -> Cache:
        return self.caches.format

    def row(self, position: Index) -> Index:
        return position if self.caches.ring is None else self.b.rem(position, self.caches.ring)

    def indices(self, at: Sequence[Index]) -> list[Index]:
        layer, position, head = at
        return [layer, self.row(position), head]

    def append(
        self, at: Sequence[Index], read: Callable[[Index], Ssa], on_store: Callable[[Index, Ssa], None] | None = None
    ) -> None:
        """Emit code that stores a key or value in the cache.

        read(d): returns the f32 vector to store, whose first element is element d of the row.
        on_store(d, x): called after each store. x is the stored vector, rounded to the cache's
        format and converted back to f32.
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
        """Emit prefetches of one row of the cache, into the L1 cache if `near`, else into L2."""
        per_line, at = 8 * CACHE_LINE // self.cache.dtype.bits, self.indices(at)
        offsets: list[tuple[int, ...]] = [(d,) for d in range(0, self.head_dim, per_line)]
        if self.cache.grouped:
            offsets = [(g, 0) for g in range(self.head_dim // self.cache.group(self.head_dim))]
        for indices in offsets:
            self.b.prefetch(self.buffer, *at, *indices, near=near)

    def part(self, at: Sequence[Index], first: Index, size: int) -> Callable[[int], Ssa]:
        """Return a function load(offset) that emits a load of one f32 vector of a row.

        The vector begins at element first + offset. size: number of elements from `first` on that
        may be loaded; it must divide `first`. In a quantised cache, in which groups of elements
        share a scale, these elements must be complete groups or be in one group.
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
