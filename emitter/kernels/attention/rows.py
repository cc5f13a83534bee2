"""Rows of a cache (`emitter.caches`) in a kernel: f32 where they are read, rounded where they are appended.

append, of q8_0: for each group of the head
  d = max |x| / 127; n = round(x * (127 / max |x|))
  row[group] = d, n                                                                                  memory
read: x = f32(n) * d, the scale loaded once a group                                               registers

Of a ring the row of a position is its remainder by the ring's rows. Whatever goes over positions does so in their own order,
so that a ring gives the bits that rows of every position give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castiron.emitter.caches import SCALE_BYTES, Cache
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.writing.rounding import as_bytes, low_bytes, numbers_of

LINE_BITS = 512  # of the CPU's cache


@dataclass(frozen=True)
class Rows:
    """The cache `buffer` of heads of `head_dim`, in vectors of `width`, a ring of `ring` rows if that is not None.

    A row is that of (layer, position, kv head).
    """

    b: Body
    buffer: Ssa
    cache: Cache
    head_dim: int
    width: int
    ring: int | None = None

    def row(self, position: Index) -> Index:
        """Which row a position has."""
        return position if self.ring is None else self.b.rem(position, self.ring)

    def place(self, at: Sequence[Index]) -> list[Index]:
        """The indices in the buffer before those of a row's elements."""
        layer, position, head = at
        return [layer, self.row(position), head]

    def append(
        self, at: Sequence[Index], read: Callable[[Index], Ssa], kept: Callable[[Index, Ssa], None] | None = None
    ) -> None:
        """Store the head whose vector at d is `read(d)`; `kept(d, x)` gets each as whoever reads it there has it."""
        b, group, at = self.b, self.cache.group(self.head_dim), self.place(at)
        if not self.cache.grouped:
            with b.loop(0, self.head_dim, self.width) as d:
                stored = b.narrowed(read(d.index), self.buffer)
                b.vstore(stored, self.buffer, *at, d.index)
                if kept:
                    kept(d.index, b.widened(stored))
            return
        with b.loop(0, self.head_dim // group) as g:
            first = b.mul(g.index, group)
            places = range(0, group, self.width)
            shifted, scale = as_bytes(b, [read(b.add(first, k)) for k in places])
            b.vstore(b.bitcast(b.broadcast(scale, 1), SCALE_BYTES, "i8"), self.buffer, *at, g.index, 0)
            factor = b.broadcast(scale, self.width)
            for k, x in zip(places, shifted, strict=True):
                b.vstore(low_bytes(b, x), self.buffer, *at, g.index, SCALE_BYTES + k)
                if kept:
                    kept(b.add(first, k), b.mulf(numbers_of(b, x), factor))

    def prefetch(self, at: Sequence[Index], near: bool = True) -> None:
        """Ask for the lines of a row."""
        per_line, at = LINE_BITS // self.cache.dtype.bits, self.place(at)
        places: list[tuple[int, ...]] = [(d,) for d in range(0, self.head_dim, per_line)]
        if self.cache.grouped:
            places = [(g, 0) for g in range(self.head_dim // self.cache.group(self.head_dim))]
        for place in places:
            self.b.prefetch(self.buffer, *at, *place, near=near)

    def part(self, at: Sequence[Index], first: Index, size: int) -> Callable[[int], Ssa]:
        """The `size` elements of a row from `first` on, a multiple of `size`: the vector at each offset into them.

        `size` is one that `cache.cuts` allows. A scale is loaded when first asked for: where it is, it dominates.
        """
        b, group, scales, at = self.b, self.cache.group(self.head_dim), dict[int, Ssa](), self.place(at)
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
            words, floats = vector_type(self.width, "i32"), vector_type(self.width)
            wide = b.let(f"arith.extsi {codes} : {codes.type} to {words}", words)
            return b.mulf(b.let(f"arith.sitofp {wide} : {words} to {floats}", floats), scales[within])

        return vector
