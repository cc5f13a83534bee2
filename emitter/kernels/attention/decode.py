"""Compute attention of one new token: rotary embedding, cache append and softmax in one dispatch.

In a short context, a workgroup computes attention to all positions, for the query heads of one kv
head. In a long context, it does so for several kv heads, but to a part of the positions only: all
threads then read equal parts of the cache in memory order.

    each workgroup:
      q [query heads, head_dim] = scale * rope(norm(q))                                                  stack
      short context, or first part of a long context:
        append rope(norm(k)) and v of the token to the caches, and start the softmax with them          memory
      for tile of positions before the token: update the softmax                  as in `attention.workgroup`
      short context: out [query heads, head_dim] = weighted sum of values / sum of weights              memory
      long context: store the weighted sum of values and the sum of weights in `parts`                  memory
        the workgroup that finishes last combines the sums of all workgroups and stores out             memory

The token's own key and value come from qkv, so no workgroup reads a cache row that this dispatch
writes.

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
from castiron.emitter.kernels.attention.scores import NEVER, Scores, attend, by_position
from castiron.emitter.kernels.attention.workgroup import TILE, Shape, Token, Workgroup
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import STACK_BYTES, Body, Index, Ssa, Type, vector_type
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import exp, lane_max, lane_sums
from castiron.emitter.layers.kv_cache import Cache

SPLIT_BYTES = 128 * 1024  # bytes of keys and values; longer contexts are split by position
UNIT = 32  # the positions of a part are a multiple of this: smaller parts repeat work on queries, larger parts are unequal


@dataclass(frozen=True)
class DecodeTokens:
    """Which tokens one call of a decode attention kernel computes.

    The kernel's operand qkv (the fused projection of q, k and v) has `count` rows, one for each
    token. A row without a token is idle, and its result is zero.

    kind: where the tokens come from.
        "one": the next token of a sequence.
        "batch": one token of each of `count` sequences. Rows with a negative position are idle.
        "chunk": consecutive tokens of one sequence, whose keys and values are already in the
            caches. The kernel's operand `start` is the position of the first token, and `length`
            the number of tokens. Rows from `length` on are idle.
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
        """Emit code that computes the position of the token in row `row` of qkv.

        Returns (position, idle). idle is an i1: whether the row has no token to compute. It is None
        for the kind "one", whose row is never idle.
        given: memrefs of the kernel's operands, by name.
        """
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
        """Return this workgroup's row of qkv, and its index among the workgroups of that row.

        units: number of workgroups of a row. The index is from 0 to units - 1.
        """
        unit = b.workgroup()
        return (0, unit) if self.kind == "one" else (b.div(unit, units), b.rem(unit, units))

    def layer(self, b: Body, layer: Index, row: Index, layers: int) -> Index:
        """Return where a layer of the token's sequence is in the caches: an index in dimension 0.

        In a batch, this dimension has all layers of the first sequence, then all layers of the
        second, and so on; otherwise the index is `layer`.

        layer: index of the layer in one sequence.
        row: row of the token in qkv; in a batch, this is also the index of its sequence.
        layers: size of dimension 0.
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
    attention. If `tokens` is a chunk of a prompt, k and v must already be in the caches, and the
    kernel does not append them.

    Operands, with T = tokens.count:
        qkv: f32 [T, layout.row], rows of the fused projection
        cos, sin, q_norm, k_norm: as in `HeadLayout.operands`
        sinks: f32 [heads], extra scores of the softmax, if `scores.sinks`
        position: i32, or i32 [T] for a batch; a chunk has start i32 and length i32 instead
        k_cache, v_cache: the caches of all layers
        counters: i32 [T * groups], shared by all layers; a group is the kv heads that one workgroup
            computes in a long context
        layer: index of the layer
    Results:
        out: f32 [T, heads * head_dim]
        k_cache, v_cache: updated in place; a chunk does not have these results
        counters: updated in place
        parts: scratch memory for partial results

    A context of more than `split_from` positions (None: a default) is divided among at most
    `splits` workgroups; `splits` must be a power of two. The counters count the workgroups that
    have finished, so that the last one combines the results. They must be zero before the first
    call, and are zero after each call.
    """
    heads, kv_heads, hd, window = layout.heads, layout.kv_heads, layout.head_dim, scores.window
    context, cache = caches.context, caches.format
    row_bytes = cache.row_bytes(hd)
    rows = tokens.count
    shape = _shape(layout, isa, cache)
    per = shape.per
    split_from = split_from or max(2 * TILE, SPLIT_BYTES // (2 * per * row_bytes))
    groups = kv_heads // per
    slots = max(per, splits)
    units = groups * slots

    cached = caches.types(kv_heads, hd)
    counters = {"counters": TensorType((rows * groups,), I32)}
    updated = counters if tokens.in_cache else {**cached, **counters}
    operands: dict[str, TensorType | str] = {
        "qkv": TensorType((rows, layout.row), F32),
        **layout.operands(context),
        **scores.operands(heads),
        **tokens.operands,
        **cached,
        **counters,
        "layer": INDEX,
    }
    out_type, parts_type = TensorType((rows, heads * hd), F32), TensorType((rows * heads * splits * (hd + 2),), F32)
    name = f"attention_decode_{caches.layers}x{context}_{layout.suffix}_{scores.suffix}_{isa.name}_t{TILE}_p{splits}"

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
        position, counters, out = token.position, token.given["counters"], token.given["out"]
        work = Workgroup(b, layout, isa, shape, scores, caches)
        low = 0 if window is None else b.max(b.sub(position, window - 1), 0)
        group, slot = b.div(unit, slots), b.rem(unit, slots)
        base = b.mul(group, per)
        seen = b.sub(position, low)
        share = b.mul(b.ceildiv(seen, splits * UNIT), UNIT)
        start = b.add(low, b.mul(slot, share))
        split = b.less(split_from, seen)
        has_head = b.both(b.negate(split), b.less(slot, per))
        has_part = b.both(split, b.less(start, position))
        with b.when(b.either(has_head, has_part)):
            first = b.select(split, base, b.add(base, slot))
            work.begin(token, first, b.select(split, b.add(base, per), b.add(first, 1)))
            with b.when(b.either(has_head, b.equal(slot, 0))):
                work.own(appended=tokens.in_cache)
            with b.when(has_head):
                work.attend(low, position, ahead=False)
                work.finish(out)
            with b.when(has_part):
                # Set the same range of heads again, so that the compiler knows its constant length.
                work.first, work.end = base, b.add(base, per)
                work.attend(start, b.min(b.add(start, share), position), ahead=True)
                parts = _Parts(b, token.given["parts"], (rows, token.row), heads, splits, hd)
                parts.put(work, slot)
                count = b.ceildiv(seen, share)
                counter = b.add(b.mul(token.row, groups), group)
                before = b.atomic_add(b.constant("1", Type("i32")), counters, counter)
                with b.when(b.equal(b.to_index(before), b.sub(count, 1))):
                    b.store(b.constant("0", Type("i32")), counters, counter)
                    with b.loop(b.mul(base, layout.group), b.mul(b.add(base, per), layout.group)) as head:
                        parts.join(head.index, count, out, work.width)

    def reference(layer: int, **given: np.ndarray) -> dict[str, np.ndarray]:
        k_cache, v_cache = given["k_cache"].copy(), given["v_cache"].copy()
        out = np.zeros(out_type.shape, np.float32)
        for sequence, first, positions in tokens.runs(given):
            own, at = slice(first, first + len(positions)), sequence * (caches.layers // rows) + layer
            q, k, v = prepared_heads(layout, given["qkv"][own], positions, given)
            for stored, new in () if tokens.in_cache else ((k_cache, k), (v_cache, v)):
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
        fenced=isa.canonical,
    )


def head_parts(layout: HeadLayout, isa: Isa, cache: Cache) -> int:
    """Return into how many kernel calls attention must be split, so that each fits on the stack.

    Each call computes an equal part of the query heads of every kv head, and has their queries and
    partial results on the stack. The result is the smallest sufficient number. It is 1 if a norm is
    computed over all heads, because such a norm cannot be split.
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
    """Partial results of attention over a long context, which several workgroups compute together.

    Each workgroup computes a part of the positions. Its partial result for a query head has a
    reference, which is close to the max score, and sums of weights w = exp(score - reference).

    scratch: memref of the partial results. It has three arrays, one after the other:
        [T, heads, splits, head_dim]: sums of w * value
        [T, heads, splits]: references
        [T, heads, splits]: sums of w
    rows: (T, row): the number of rows of qkv, and the row of the token.
    splits: the max number of workgroups among which the positions are divided. hd: head_dim.
    """

    def __init__(self, b: Body, scratch: Ssa, rows: tuple[int, Index], heads: int, splits: int, hd: int):
        self.b, self.scratch, self.splits, self.hd = b, scratch, splits, hd
        count, self.row = rows
        self.before = b.mul(self.row, heads)
        self.references = count * heads * splits * hd
        self.sums = self.references + count * heads * splits
        self.weights = b.stack(splits)

    def put(self, work: Workgroup, slot: Index) -> None:
        b = self.b
        low = b.mul(work.first, work.group)
        with b.loop(low, b.mul(work.end, work.group)) as head:
            g = b.sub(head.index, low)
            row = b.add(b.mul(b.add(self.before, head.index), self.splits), slot)
            b.store(b.load(work.references, g), self.scratch, b.add(row, self.references))
            b.store(work.total(g), self.scratch, b.add(row, self.sums))
            with b.loop(0, self.hd, work.width) as d:
                value = b.vload(work.values, work.width, g, d.index)
                b.vstore(value, self.scratch, b.add(b.mul(row, self.hd), d.index))

    def join(self, head: Ssa, count: Index, out: Ssa, width: int) -> None:
        """Emit code that combines the partial results for query head `head`, and stores the result.

        count: number of workgroups that have stored a partial result.
        out: memref f32 [T, heads * head_dim] of the combined results.
        width: number of elements of a vector.
        """
        b, splits = self.b, self.splits
        row = b.mul(b.add(self.before, head), splits)
        numbers = b.constant(f"dense<{list(range(splits))}>", vector_type(splits, "i32"))
        real = b.compare("slt", numbers, b.broadcast(b.to_i32(count), splits))
        references = b.vload(self.scratch, splits, b.add(row, self.references))
        references = b.select(real, references, b.splat(NEVER, splits))
        top = b.broadcast(lane_max(b, references), splits)
        weights = exp(b, b.subf(references, top))
        sums = b.select(real, b.vload(self.scratch, splits, b.add(row, self.sums)), b.splat(0.0, splits))
        total = lane_sums(b, [b.mulf(weights, sums)])
        b.vstore(b.divf(weights, b.broadcast(b.extract(total, 0), splits)), self.weights, 0)
        with b.loop(0, self.hd, width) as d:
            with b.loop(0, count, carry=[b.splat(0.0, width)]) as s:
                value = b.vload(self.scratch, width, b.add(b.mul(b.add(row, s.index), self.hd), d.index))
                weight = b.broadcast(b.load(self.weights, s.index), width)
                s.give(b.fma(weight, value, s.values[0]))
            b.vstore(s.results[0], out, self.row, b.add(b.mul(head, self.hd), d.index))
