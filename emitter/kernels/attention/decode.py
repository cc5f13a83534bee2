"""Compute attention of one new token: rotary embedding, cache append and softmax in one dispatch.

In a short context, a workgroup computes attention to all positions, for the query heads of one kv
head. In a long context, it does so for several kv heads, but to some chunks of positions only: all
threads then read parts of the cache in memory order.

    each workgroup:
      q [query heads, head_dim] = scale * rope(norm(q))                                                  stack
      if it has the token's own position: append rope(norm(k)) and v to the caches                      memory
      for chunk of positions:
        values, maximum, sum of weights of each query head                          as in `attention.workgroup`
        store them in `parts`                                                                           memory
      short context: out [query heads, head_dim] = join the chunks                                      memory
      long context: the workgroup that finishes last joins the chunks of all workgroups

No workgroup reads a cache row that another workgroup writes.

One dispatch can also compute a batch: one token of each of several sequences. The results then have
the same bits as with one dispatch for each sequence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.attention.heads import HeadLayout, prepared_heads
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import CHUNK, NEVER, Scores, attend, by_position, merged, merging
from castiron.emitter.kernels.attention.workgroup import Shape, Token, Workgroup
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import STACK_BYTES, Body, Index, Ssa, Type
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import LOG2_E
from castiron.emitter.layers.kv_cache import Cache

# Contexts of more positions are divided among workgroups; chunks of one kv head always are. Fewer chunks are too unequal.
SPLIT_FROM = 3 * CHUNK


@dataclass(frozen=True)
class DecodeTokens:
    """Which tokens one call of a decode attention kernel computes.

    The kernel's operand qkv (the fused projection of q, k and v) has `count` rows, one for each
    token. A row without a token is idle, and its result is zero.

    kind: "one": the next token of a sequence. "batch": one token of each of `count` sequences; rows
        with a negative position are idle. "chunk", on GPUs: consecutive tokens of one sequence,
        from position `start` on, already in the caches; rows from `length` on are idle.
    """

    kind: str = "one"
    count: int = 1

    @property
    def in_cache(self) -> bool:
        return self.kind == "chunk"

    @property
    def suffix(self) -> str:
        return "" if self.kind == "one" else f"_{self.kind[0]}{self.count}"

    @property
    def operands(self) -> dict[str, TensorType]:
        if self.kind == "chunk":
            return dict.fromkeys(("start", "length"), TensorType((), I32))
        return {"position": TensorType((self.count,) if self.kind == "batch" else (), I32)}

    def position(self, b: Body, given: Mapping[str, Ssa], row: Index) -> tuple[Ssa, Ssa | None]:
        """Emit code that computes the position of the token in row `row` of qkv."""
        if self.kind == "one":
            return b.to_index(b.load(given["position"])), None
        if self.kind == "batch":
            position = b.to_index(b.load(given["position"], row))
            return position, b.less(position, 0)
        position = Ssa(b.index(b.add(b.to_index(b.load(given["start"])), row)), Type("index"))
        return position, b.negate(b.less(row, b.to_index(b.load(given["length"]))))

    def runs(self, given: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the tokens of each sequence, for the NumPy references of kernels.

        An item is (index of the sequence, first row of qkv, positions i64 [n]). It stands for n
        consecutive tokens, which are in n consecutive rows of qkv. Rows without a token are left
        out.
        given: the kernel's operands as NumPy arrays, by name.
        """
        if self.kind == "one":
            yield 0, 0, np.reshape(given["position"], 1)
        elif self.kind == "chunk":
            if length := int(given["length"]):
                yield 0, 0, int(given["start"]) + np.arange(length)
        else:
            yield from ((i, i, np.array([at])) for i, at in enumerate(given["position"].tolist()) if at >= 0)

    def item(self, b: Body, units: int) -> tuple[Index, Index]:
        """Return this workgroup's row of qkv, and its index among the workgroups of that row."""
        unit = b.workgroup()
        return (0, unit) if self.kind == "one" else (b.div(unit, units), b.rem(unit, units))

    def layer(self, b: Body, layer: Index, row: Index, layers: int) -> Index:
        """Return where a layer of the token's sequence is in the caches: an index in dimension 0.

        In a batch, this dimension has all layers of the first sequence, then all layers of the
        second, and so on; otherwise the index is `layer`.
        """
        return b.add(b.mul(row, layers // self.count), layer) if self.kind == "batch" else layer


@cache
def attention_decode(
    caches: Caches,
    layout: HeadLayout,
    scores: Scores,
    tokens: DecodeTokens = DecodeTokens(),
    *,
    isa: Isa,
    splits: int = 8,
    split_from: int | None = None,
) -> Kernel:
    """Return the kernel that computes attention for one token in each row of qkv.

    The kernel normalises and rotates q and k, appends k and v to the caches, and computes
    attention. `tokens` must not be a chunk.

    Operands, with T = tokens.count:
        qkv: f32 [T, layout.row], rows of the fused projection
        cos, sin, q_norm, k_norm: as in `HeadLayout.operands`
        sinks: f32 [heads], extra scores of the softmax, if `scores.sinks`
        position: i32, or i32 [T] for a batch
        k_cache, v_cache: the caches of all layers
        counters: i32 [T * groups], shared by all layers; a group is the kv heads that one workgroup
            computes in a long context
        layer: index of the layer
    Results:
        out: f32 [T, heads * head_dim]
        k_cache, v_cache, counters: updated in place
        parts: scratch memory for the sums of chunks

    A context of more than `split_from` positions (None: a default) is divided among at most
    `splits` workgroups. Counters count those that have finished, so that the last one joins the
    chunks; they are zero before and after a call.
    """
    heads, kv_heads, hd, window = layout.heads, layout.kv_heads, layout.head_dim, scores.window
    context, cache = caches.context, caches.format
    row_bytes = cache.row_bytes(hd)
    rows = tokens.count
    shape = _shape(layout, isa, cache)
    per = shape.per
    split_from = split_from or (CHUNK if kv_heads == 1 else SPLIT_FROM)
    chunks = -(-context // CHUNK) if window is None else min(-(-context // CHUNK), (window + CHUNK - 2) // CHUNK + 1)
    groups = kv_heads // per
    slots = max(per, splits)
    units = groups * slots

    cached = caches.types(kv_heads, hd)
    counters = {"counters": TensorType((rows * groups,), I32)}
    updated = {**cached, **counters}
    operands: dict[str, TensorType | str] = {
        "qkv": TensorType((rows, layout.row), F32),
        **layout.operands(context),
        **scores.operands(heads),
        **tokens.operands,
        **cached,
        **counters,
        "layer": INDEX,
    }
    out_type, parts_type = TensorType((rows, heads * hd), F32), TensorType((rows * heads * chunks * (hd + 2),), F32)
    name = f"attention_decode_{caches.layers}x{context}_{layout.suffix}_{scores.suffix}_{isa.name}_p{splits}"

    def write(b: Body, layer: Ssa, **given: Ssa) -> None:
        row, unit = tokens.item(b, units)
        position, idle = tokens.position(b, given, row)
        if idle is None:
            sequence(b, Token(given, row, position, layer), unit)
            return
        with b.when(b.negate(idle)):
            sequence(b, Token(given, row, position, tokens.layer(b, layer, row, caches.layers)), unit)
        with b.when(b.both(idle, b.equal(unit, 0))), b.loop(0, heads * hd, shape.width) as d:
            b.vstore(b.splat(0.0, shape.width), given["out"], row, d.index)

    def sequence(b: Body, token: Token, unit: Index) -> None:
        # The code of one workgroup. unit: index of the workgroup among those of this token.
        end, counters = b.add(token.position, 1), token.given["counters"]
        work = Workgroup(b, layout, isa, shape, scores, caches)
        parts = _Parts(b, token, rows, heads, chunks, hd, work.width)
        low = 0 if window is None else b.max(b.sub(end, window), 0)
        first_chunk = b.div(low, CHUNK)
        count = b.sub(b.ceildiv(end, CHUNK), first_chunk)
        group, slot = b.div(unit, slots), b.rem(unit, slots)
        base = b.mul(group, per)
        is_split = b.less(split_from, b.sub(end, low))
        # Chunks of this workgroup: `share` of them from number `start` on, or in a short context all.
        share = b.ceildiv(count, splits)
        start = b.mul(slot, share)
        has_head = b.both(b.negate(is_split), b.less(slot, per))
        has_part = b.both(is_split, b.less(start, count))

        def attend(start: Index, stop: Index, ahead: bool) -> None:
            with b.when(b.equal(stop, count)):
                work.append()
            with b.loop(start, stop) as chunk:
                at = b.mul(b.add(first_chunk, chunk.index), CHUNK)
                work.attend(b.max(at, low), b.min(b.add(at, CHUNK), end), ahead)
                parts.put(work, chunk.index)

        def join(first: Index, stop: Index) -> None:
            with b.loop(b.mul(first, layout.group), b.mul(stop, layout.group)) as head:
                parts.join(head.index, count)

        with b.when(has_head):
            first = b.add(base, slot)
            work.begin(token, first, b.add(first, 1))
            attend(0, count, ahead=False)
            join(first, b.add(first, 1))
        with b.when(has_part):
            work.begin(token, base, b.add(base, per))
            attend(start, b.min(b.add(start, share), count), ahead=True)
            counter = b.add(b.mul(token.row, groups), group)
            before = b.atomic_add(b.constant("1", Type("i32")), counters, counter)
            with b.when(b.equal(b.to_index(before), b.sub(b.ceildiv(count, share), 1))):
                b.store(b.constant("0", Type("i32")), counters, counter)
                join(base, b.add(base, per))

    def reference(layer: int, **given: np.ndarray) -> dict[str, np.ndarray]:
        k_cache, v_cache = given["k_cache"].copy(), given["v_cache"].copy()
        out = np.zeros(out_type.shape, np.float32)
        for sequence, first, positions in tokens.runs(given):
            own, at = slice(first, first + len(positions)), sequence * (caches.layers // rows) + layer
            q, k, v = prepared_heads(layout, given["qkv"][own], positions, given)
            for stored, new in (k_cache, k), (v_cache, v):
                stored[at, positions % caches.positions] = cache.stored(new)
            k, v = (cache.values(by_position(stored[at], positions[-1] + 1)) for stored in (k_cache, v_cache))
            out[own] = attend(q, k, v, positions, scores, given.get("sinks")).reshape(len(positions), -1)
        found = {"out": out, "k_cache": k_cache, "v_cache": v_cache, "counters": np.zeros(rows * groups, np.int32)}
        return {name: found[name] for name in ("out", *updated)} | {"parts": np.zeros(parts_type.shape, np.float32)}

    def seen(position: int) -> int:
        return min(position + 1, window or context)

    return Kernel(
        f"{name}from{split_from}{tokens.suffix}{caches.suffix}",
        operands,
        {"out": out_type, **updated, "parts": parts_type},
        rows * units,
        write,
        in_place={name: name for name in updated},
        reference=reference,
        flops=lambda position: rows * 4 * heads * hd * seen(position),
        nbytes=lambda position: rows * (2 * kv_heads * row_bytes * seen(position) + 4 * (layout.row + heads * hd)),
    )


def head_parts(layout: HeadLayout, isa: Isa, cache: Cache) -> int:
    """Return into how few kernel calls attention must be split so that each fits on the stack.

    Each call has a part of the query heads of every kv head. A norm over all heads cannot be split.
    """
    if layout.qk_norm_row:  # a norm over complete rows needs all heads
        return 1
    for parts in (n for n in range(1, layout.group) if layout.group % n == 0):
        if Shape(replace(layout, heads=layout.heads // parts), isa, 1, cache).stack_bytes <= STACK_BYTES:
            return parts
    return layout.group


def _shape(layout: HeadLayout, isa: Isa, cache: Cache) -> Shape:
    # Take as many kv heads as fit on the stack of a workgroup.
    for per in (n for n in range(layout.kv_heads, 0, -1) if layout.kv_heads % n == 0):
        shape = Shape(layout, isa, per, cache)
        if shape.stack_bytes <= STACK_BYTES:
            return shape
    raise ValueError(
        f"attention_decode exceeds the stack limit of {STACK_BYTES} bytes: {shape.stack_bytes} bytes for {layout.group} query "
        f"heads per kv head and head_dim {layout.head_dim}; use a model with fewer query heads per kv head, or smaller heads"
    )


class _Parts:
    """The sums of the chunks of all query heads, in scratch memory of three arrays:

    [T, heads, chunks, head_dim]: sums of weight * value
    [T, heads, chunks]: maxima of the scores
    [T, heads, chunks]: sums of weights
    """

    def __init__(self, b: Body, token: Token, rows: int, heads: int, chunks: int, hd: int, width: int):
        self.b, self.token, self.heads, self.chunks, self.hd, self.width = b, token, heads, chunks, hd, width
        self.scratch = token.given["parts"]
        self.maxima = rows * heads * chunks * hd
        self.sums = self.maxima + rows * heads * chunks

    def row(self, head: Index, chunk: Index) -> Index:
        b = self.b
        return b.add(b.mul(b.add(b.mul(self.token.row, self.heads), head), self.chunks), chunk)

    def put(self, work: Workgroup, chunk: Index) -> None:
        b = self.b
        low = b.mul(work.first, work.group)
        with b.loop(low, b.mul(work.end, work.group)) as head:
            g, row = b.sub(head.index, low), self.row(head.index, chunk)
            b.store(b.load(work.maxima, g), self.scratch, b.add(row, self.maxima))
            b.store(b.load(work.sums, g), self.scratch, b.add(row, self.sums))
            with b.loop(0, self.hd, self.width) as d:
                value = b.vload(work.values, self.width, g, d.index)
                b.vstore(value, self.scratch, b.add(b.mul(row, self.hd), d.index))

    def join(self, head: Ssa, count: Index) -> None:
        """Emit code that merges chunks 0 .. count - 1 of query head `head`, and stores its result."""
        b, width, out, sinks = self.b, self.width, self.token.given["out"], self.token.given.get("sinks")
        at = lambda d: (self.token.row, b.add(b.mul(head, self.hd), d))
        zero = b.splat(0.0, width)
        with b.loop(0, self.hd, width) as d:
            b.vstore(zero, out, *at(d.index))
        top, total = b.f32(NEVER), b.f32(0.0)
        if sinks is not None:
            top, total = b.mulf(b.load(sinks, head), b.f32(LOG2_E)), b.f32(1.0)
        top, total = (b.broadcast(x, width) for x in (top, total))
        with b.loop(0, count, carry=[top, total]) as chunk:
            row = self.row(head, chunk.index)
            maximum, added = (b.broadcast(b.load(self.scratch, b.add(row, n)), width) for n in (self.maxima, self.sums))
            top, *factors = merging(b, chunk.values[0], maximum)
            with b.loop(0, self.hd, width) as d:
                value = b.vload(self.scratch, width, b.add(b.mul(row, self.hd), d.index))
                b.vstore(merged(b, b.vload(out, width, *at(d.index)), value, *factors), out, *at(d.index))
            chunk.give(top, merged(b, chunk.values[1], added, *factors))
        inverse = b.divf(b.splat(1.0, width), chunk.results[1])
        with b.loop(0, self.hd, width) as d:
            b.vstore(b.mulf(b.vload(out, width, *at(d.index)), inverse), out, *at(d.index))
