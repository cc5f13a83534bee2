"""Emit code that appends rows to a KV cache (`emitter.layers.kv_cache`) and reads them as f32.

A row is the key or the value of one kv head at one position. In a q8_0 cache, a group of elements
of a row shares a scale d:

    append: d = max |x| / 127; n = round(x * (127 / max |x|)); store d and the int8 numbers n
    read:   x = f32(n) * d

A cache may be a ring buffer of n positions, which stores position p at index p modulo n. Kernels
iterate over positions in order, so results are bitwise the same for a ring buffer and a full cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castiron.emitter.graph.types import TensorType
from castiron.emitter.kernels.mlir.body import CACHE_LINE, Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import as_integers, low_bytes, numbers_of
from castiron.emitter.layers.kv_cache import EXACT, SCALE_BYTES, Cache


@dataclass(frozen=True)
class Caches:
    """The shape and format of the two KV caches that attention kernels read and write.

    layers: size of dimension 0 of a cache: number of layers, times the number of sequences of a
        batch.
    context: max number of positions of a sequence.
    format: how the elements are stored: f32, f16 or q8_0.
    ring: number of positions that a layer stores if the caches are ring buffers, otherwise None. A
        ring buffer must be larger than the attention window. If a kernel appends chunks of T
        tokens, the ring buffer must have at least window + T positions.
    """

    layers: int
    context: int
    format: Cache = EXACT
    ring: int | None = None

    @property
    def positions(self) -> int:
        """Return the number of positions that a cache stores for each layer."""
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
    """Emits code that reads and appends rows of one KV cache; width: elements of the f32 vectors.

    at: the (layer, position, kv head) of a row.
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
        """Emit code that stores a key or value in the cache, one vector after the other.

        read(d): returns the f32 vector to store for the elements from index d on.
        on_store(d, x): called after the code that stores the vector from index d on has been
            emitted. x is this vector as a read from the cache gives it: rounded to the cache's
            format, in f32.
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
            shifted, scale = as_integers(b, [read(b.add(first, k)) for k in offsets])
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
        """Return a function load(offset), which emits a load of one f32 vector of a row.

        first: a multiple of `size`.
        size: `load` may only load elements first .. first + size - 1. In a q8_0 cache, groups of
            elements share a scale. Then these elements must be complete groups, or all of them in
            one group.
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
