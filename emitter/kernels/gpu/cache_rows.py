"""Emit GPU code that reads and writes rows of KV caches as 32-bit words.

A row is the key or the value of one kv head at one position. In a q8_0 cache, a group of elements
shares a scale d = max |x| / 127. As in the CPU kernels, an element is stored as an int8 code:
x * (127 / max |x|), rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.codecs.fixed_point import MAX_INTEGER, MIN_SCALED
from castiron.emitter.graph.types import EmitError
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.mlir.body import F32, I32, Index, Ssa
from castiron.emitter.layers.kv_cache import SCALE_BYTES


@dataclass(frozen=True)
class CacheRows:
    """Emits code that reads and writes rows of one KV cache.

    words: memref of the cache as 32-bit words. row: index of the first word of a row.
    """

    b: GpuBody
    words: Ssa
    caches: Caches
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.caches.format.name == "f16" and self.head_dim % 2:
            raise EmitError(f"f16 caches do not support an odd head_dim on GPUs: {self.head_dim}; use --kv-cache-type f32")

    @property
    def row_words(self) -> int:
        return self.caches.format.row_bytes(self.head_dim) // 4

    @property
    def group_words(self) -> int:
        """Return the number of 32-bit words of a q8_0 group: its scale and its int8 codes."""
        return (SCALE_BYTES + self.caches.format.group(self.head_dim)) // 4

    @property
    def step(self) -> int:
        """Return how many elements `load` loads at a time: 4 if 4 divides head_dim, else 2 or 1."""
        return next(n for n in (4, 2, 1) if self.head_dim % n == 0)

    def row(self, layer: Index, position: Index, head: Index) -> Index:
        """Emit code that computes where a row begins: the index of its first word in the cache."""
        b, caches = self.b, self.caches
        position = position if caches.ring is None else b.rem(position, caches.ring)
        at = b.add(b.mul(b.add(b.mul(layer, caches.positions), position), self.kv_heads), head)
        return b.mul(at, self.row_words)

    def load(self, row: Index, part: Index) -> list[Ssa]:
        """Emit code that loads elements part * step .. (part + 1) * step - 1 of a row as f32."""
        b, step, format = self.b, self.step, self.caches.format
        if format.grouped:
            word, group = self._code_word(b.mul(part, 4))
            scale, codes = self._load(row, group), self._load(row, word)
            factor = b.as_type(scale, F32)
            return [b.mulf(self._code(codes, b.i32(8 * j)), factor) for j in range(4)]
        if format.name == "f16":
            words = [self._load(row, b.add(b.mul(part, step // 2), i)) for i in range(step // 2)]
            return [x for word in words for x in b.halves(word)]
        return [b.as_type(self._load(row, b.add(b.mul(part, step), i)), F32) for i in range(step)]

    def element(self, row: Index, d: Index) -> Ssa:
        """Emit code that loads element `d` of a row as f32; the row begins at word `row`."""
        b, format = self.b, self.caches.format
        if format.grouped:
            word, group = self._code_word(d)
            shift = b.to_i32(b.mul(b.rem(d, 4), 8))
            return b.mulf(self._code(self._load(row, word), shift), b.as_type(self._load(row, group), F32))
        if format.name == "f16":
            word = self._load(row, b.div(d, 2))
            return b.half(b.bits("andi", b.binary("shrui", word, b.to_i32(b.mul(b.rem(d, 2), 16))), 0xFFFF))
        return b.as_type(self._load(row, d), F32)

    def append(self, thread: Ssa, row: Index, new: Ssa, only: Ssa | None = None) -> None:
        """Emit code with which all threads of a workgroup store a key or value in a row.

        new: shared memref f32 [head_dim], which is rounded to the values that a load would give.
        only: an i1, or None. If the i1 is false, the cache is not changed.
        """
        b, format = self.b, self.caches.format
        if format.grouped:
            group = format.group(self.head_dim)
            with b.strided(thread, self.head_dim // group) as g:
                word = b.add(row, b.mul(g.index, self.group_words))
                self._append_group(word, new, b.mul(g.index, group), group, only)
            b.barrier()
        elif format.name == "f16":
            with b.strided(thread, self.head_dim // 2) as pair:
                first = b.mul(pair.index, 2)
                low, high = (b.to_half(b.load(new, b.add(first, i))) for i in range(2))
                self._store(b.either(low, b.bits("shli", high, 16)), b.add(row, pair.index), only)
                for i, half in enumerate((low, high)):
                    b.store(b.half(half), new, b.add(first, i))
            b.barrier()
        else:
            with b.strided(thread, self.head_dim) as d:
                self._store(b.as_type(b.load(new, d.index), I32), b.add(row, d.index), only)

    def _append_group(self, word: Index, new: Ssa, first: Index, size: int, only: Ssa | None) -> None:
        b, peak = self.b, self.b.f32(0.0)
        xs = [b.load(new, b.add(first, j)) for j in range(size)]
        for x in xs:
            peak = b.maxf(b.math("absf", x), peak)
        tiny = b.compare("olt", peak, b.f32(float(MIN_SCALED)))
        inverse = b.select(tiny, b.f32(0.0), b.divf(b.f32(MAX_INTEGER[1]), peak))
        scale = b.divf(peak, b.f32(MAX_INTEGER[1]))
        self._store(b.as_type(scale, I32), word, only)
        for i in range(0, size, 4):
            codes = b.i32(0)
            for j in range(4):
                number, byte = b.rounded(b.mulf(xs[i + j], inverse))
                codes = b.either(codes, b.bits("shli", byte, 8 * j))
                b.store(b.mulf(number, scale), new, b.add(first, i + j))
            self._store(codes, b.add(word, 1 + i // 4), only)

    def _code_word(self, d: Index) -> tuple[Index, Index]:
        b, group = self.b, self.caches.format.group(self.head_dim)
        first = b.mul(b.div(d, group), self.group_words)
        return b.add(first, b.add(b.div(b.rem(d, group), 4), 1)), first

    def _code(self, codes: Ssa, shift: Ssa) -> Ssa:
        b = self.b
        return b.number(b.bits("xori", b.bits("andi", b.binary("shrui", codes, shift), 0xFF), 0x80), 128)

    def _load(self, row: Index, word: Index) -> Ssa:
        return self.b.load(self.words, self.b.add(row, word))

    def _store(self, value: Ssa, word: Index, only: Ssa | None) -> None:
        if only is None:
            self.b.store(value, self.words, word)
            return
        with self.b.when(only):
            self.b.store(value, self.words, word)
