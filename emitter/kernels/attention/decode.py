"""Attention of one new token over the cache: rotary embedding, append and softmax in one dispatch a layer.

Short contexts are shared out by kv head. Long ones are split by position, so that every workgroup streams whole rows of the
cache and any number of threads has equal shares; the workgroup that comes last adds up the parts, which costs no second
dispatch. The token's own key and value enter from registers: the cache row that is written is read by nobody.

    workgroup (group of `per` kv heads, slot):
      short context: one kv head, its slot; positions low .. pos - 1          slots past the heads have nothing to do
      long context:  all `per` kv heads; the slot's part of these positions
      q [per * group of query heads, head_dim] = scale * rope(norm(q))                                 stack
      values [heads, head_dim], sums, references [heads] = 0                  the softmax's recurrence, stack
      the head's own workgroup, or slot 0:
        k[layer, pos], v[layer, pos] = rope(norm(k)), v                                              memory
        values, sums, references = v, 1, q . k                                the recurrence after one position, and a sink
      for tile of positions: the recurrence of `attention.workgroup`
      short context: out [heads, head_dim] = values / sums                                           memory
      long context:
        parts[heads, slot] = values, references, sums                                                memory
        who adds the last one to the counter:
          for head: w [splits] = exp(references - max); out = sum(w * values) / sum(w * sums)

A batch of sequences, one token each, is the same work once for each row of one dispatch: to the last bit what each gets alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from castiron.emitter.caches import EXACT, Cache
from castiron.emitter.kernels.attention.heads import HeadLayout, prepared_heads
from castiron.emitter.kernels.attention.scores import NEVER, Scores, attend, by_position
from castiron.emitter.kernels.attention.workgroup import TILE, Shape, Token, Workgroup
from castiron.emitter.kernels.kernel import INDEX, Kernel, write_kernel
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import exp, lane_max, lane_sums
from castiron.emitter.types import F32, I32, TensorType

SPLIT_BYTES = 128 * 1024  # of keys and values, up to which the heads are shared out whole
UNIT = 32  # positions that parts are multiples of: fewer would prepare the queries too often, more would leave unequal shares


def attention_decode(
    layers: int,
    context: int,
    layout: HeadLayout,
    scores: Scores,
    *,
    isa: Isa,
    splits: int = 8,
    split_from: int | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    cache: Cache = EXACT,
    ring: int | None = None,
) -> Kernel:
    """One token's attention in one dispatch, at a cost that follows its position.

    qkv [1, row], (cos, sin [context, rotary_dim/2]), (q_norm, k_norm), (sinks [heads]), position i32, k_cache and v_cache
    [layers, context, kv_heads, *cache.row(head_dim)], counters i32 [n], layer -> out [1, heads*head_dim], k_cache, v_cache,
    counters, parts. Row `position` of the caches is written; of the others those in max(0, position - window + 1) ..
    position - 1 are read.

    Contexts of more than `split_from` positions are split into `splits` parts, a power of two. `counters` must be zero
    before the first call and are zero again after each; one tensor serves all layers in turn. `parts` is scratch.

    With `batch` B there are B sequences: qkv [B, row], position i32 [B], out [B, heads*head_dim], and the caches hold the
    layers of one sequence after another, so that row i has layer i * (layers / B) + layer. A row whose position is
    negative is idle: its caches stay as they are and its result is zero.

    With `chunk` T there are T tokens of one sequence instead, from position `start` on, of which `length` are real (i32 both,
    in the place of position), whose keys and values are in the caches already: qkv [T, row], out [T, heads*head_dim]. Each
    gets, to the last bit, what it gets alone. It takes more time than `attention_prefill`: tokens share nothing that is loaded.

    Rows are rounded as `cache` stores them when they are appended, the token's own too before it counts, and widened where
    they are read; everything else is f32. Of caches that are rings of `ring` rows, more than the window, these stand in place
    of context.
    """
    heads, kv_heads, hd, window = layout.heads, layout.kv_heads, layout.head_dim, scores.window
    row_bytes = cache.row_bytes(hd)
    if splits & (splits - 1) or splits < 2:
        raise ValueError(f"attention_decode takes a power of two above 1 as splits, got {splits}")
    rows = batch or chunk or 1
    if batch and layers % batch:
        raise ValueError(f"attention_decode needs layers ({layers}) that {batch} sequences share evenly")
    shape = _shape(layout, isa, cache)
    per = shape.per
    split_from = split_from or max(2 * TILE, SPLIT_BYTES // (2 * per * row_bytes))
    groups = kv_heads // per
    slots = max(per, splits)
    units = groups * slots

    caches = dict.fromkeys(("k_cache", "v_cache"), cache.type(layers, ring or context, kv_heads, hd))
    counters = {"counters": TensorType((rows * groups,), I32)}
    kept = counters if chunk else {**caches, **counters}
    scalar = TensorType((), I32)
    where = {"start": scalar, "length": scalar} if chunk else {"position": TensorType((batch,) if batch else (), I32)}
    operands: dict[str, TensorType | str] = {
        "qkv": TensorType((rows, layout.row), F32),
        **layout.operands(context),
        **scores.operands(heads),
        **where,
        **caches,
        **counters,
        "layer": INDEX,
    }
    out_type, parts_type = TensorType((rows, heads * hd), F32), TensorType((rows * heads * splits * (hd + 2),), F32)
    name = f"attention_decode_{layers}x{context}_{layout.suffix}_{scores.suffix}_{isa.name}_t{TILE}_p{splits}from{split_from}"
    name += ("" if batch is None else f"_b{batch}") + ("" if chunk is None else f"_c{chunk}")
    name += "" if ring is None else f"_ring{ring}"
    name += f"_{cache.name}" * (cache is not EXACT)

    def write(b: Body, layer: Ssa, **given: Ssa) -> None:
        unit: Index = b.workgroup()
        if not (batch or chunk):
            sequence(b, Token(given, 0, b.to_index(b.load(given["position"])), layer), unit)
            return
        row, unit = b.div(unit, units), b.rem(unit, units)
        if chunk:
            own = Ssa(b.index(b.add(b.to_index(b.load(given["start"])), row)), "index")
            idle = b.negate(b.less(row, b.to_index(b.load(given["length"]))))
        else:
            own = b.to_index(b.load(given["position"], row))
            idle = b.less(own, 0)
        with b.when(b.negate(idle)):
            sequence(b, Token(given, row, own, layer if chunk else b.add(b.mul(row, layers // rows), layer)), unit)
        with b.when(b.both(idle, b.equal(unit, 0))), b.loop(0, heads * hd, shape.width) as d:
            b.vstore(b.splat(0.0, shape.width), given["out"], row, d.index)

    def sequence(b: Body, token: Token, unit: Index) -> None:
        """Workgroup `unit` of those that a sequence's token has."""
        position, counters, out = token.position, token.given["counters"], token.given["out"]
        work = Workgroup(b, layout, isa, ring or context, shape, scores, cache, turns=ring is not None)
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
            first = b.choose(split, base, b.add(base, slot))
            work.begin(token, first, b.choose(split, b.add(base, per), b.add(first, 1)))
            with b.when(b.either(has_head, b.equal(slot, 0))):
                work.own(appended=chunk is not None)
            with b.when(has_head):
                work.attend(low, position, ahead=False)
                work.finish(out)
            with b.when(has_part):
                # The same heads as before, in a form whose number the compiler sees.
                work.first, work.end = base, b.add(base, per)
                work.attend(start, b.min(b.add(start, share), position), ahead=True)
                parts = _Parts(b, token.given["parts"], (rows, token.row), heads, splits, hd)
                parts.put(work, slot)
                count = b.ceildiv(seen, share)
                counter = b.add(b.mul(token.row, groups), group)
                before = b.atomic_add(b.constant("1", "i32"), counters, counter)
                with b.when(b.equal(b.to_index(before), b.sub(count, 1))):
                    b.store(b.constant("0", "i32"), counters, counter)
                    with b.loop(b.mul(base, layout.group), b.mul(b.add(base, per), layout.group)) as head:
                        parts.join(head.index, count, out, work.width)

    def reference(layer: int, **given: np.ndarray) -> dict[str, np.ndarray]:
        if chunk:
            return reference_of_chunk(layer, **given)
        position = given["position"]
        k_cache, v_cache = given["k_cache"].copy(), given["v_cache"].copy()
        out = np.zeros(out_type.shape, np.float32)
        for i, own in enumerate(np.reshape(position, -1).tolist()):
            if own < 0 and batch:
                continue
            at = i * (layers // rows) + layer
            q, k, v = prepared_heads(layout, given["qkv"][i : i + 1], np.array([own]), given)
            for rows_, new in (k_cache, k), (v_cache, v):
                rows_[at, own % rows_.shape[1]] = cache.stored(new[0])
            k, v = (cache.values(by_position(rows_[at], own + 1)) for rows_ in (k_cache, v_cache))
            out[i] = attend(q, k, v, [own], scores, given.get("sinks")).reshape(-1)
        idle = {"counters": np.zeros(len(given["counters"]), np.int32), "parts": np.zeros(parts_type.shape, np.float32)}
        return {"out": out, "k_cache": k_cache, "v_cache": v_cache, **idle}

    def reference_of_chunk(layer: int, start: np.ndarray, length: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        out, (first, real) = np.zeros(out_type.shape, np.float32), (int(start), int(length))
        positions = first + np.arange(real)
        q, _, _ = prepared_heads(layout, given["qkv"][:real], positions, given)
        k, v = (cache.values(by_position(given[name][layer], first + real)) for name in caches)
        out[:real] = attend(q, k, v, positions, scores, given.get("sinks")).reshape(real, -1)
        return {"out": out, "counters": np.zeros(rows * groups, np.int32), "parts": np.zeros(parts_type.shape, np.float32)}

    def seen(position: int) -> int:
        return min(position + 1, window or context)

    return write_kernel(
        name,
        operands,
        {"out": out_type, **kept, "parts": parts_type},
        rows * units,
        write,
        in_place={name: name for name in kept},
        reference=reference,
        flops=lambda position: rows * 4 * heads * hd * seen(position),
        nbytes=lambda position: rows * (2 * kv_heads * row_bytes * seen(position) + 4 * (layout.row + heads * hd)),
        fenced=isa.canonical,
    )


def head_parts(layout: HeadLayout, isa: Isa, cache: Cache) -> int:
    """In how many equal parts a kv head's query heads fit the stack of a workgroup, one after another."""
    if layout.qk_norm_row:
        return 1
    for parts in (n for n in range(1, layout.group) if layout.group % n == 0):
        if Shape(replace(layout, heads=layout.heads // parts), isa, 1, cache).stack_bytes <= STACK_BYTES:
            return parts
    return layout.group


def _shape(layout: HeadLayout, isa: Isa, cache: Cache) -> Shape:
    """The shape of the most kv heads whose state fits the stack of one workgroup."""
    for per in (n for n in range(layout.kv_heads, 0, -1) if layout.kv_heads % n == 0):
        shape = Shape(layout, isa, per, cache)
        if shape.stack_bytes <= STACK_BYTES:
            return shape
    raise ValueError(
        f"attention_decode keeps {layout.group} heads of {layout.head_dim} in {shape.stack_bytes} bytes of a workgroup's"
        f" stack, which has {STACK_BYTES}; use fewer query heads a kv head or smaller ones"
    )


class _Parts:
    """What the workgroups of a split context leave for the last of them, in one row of scratch.

    By head and split: weighted values [heads, splits, head_dim], references [heads, splits], sums [heads, splits]; `rows`
    are how many sequences have each of these, and the number of this one.
    """

    def __init__(self, b: Body, scratch: Ssa, rows: tuple[int, Index], heads: int, splits: int, hd: int):
        self.b, self.scratch, self.splits, self.hd = b, scratch, splits, hd
        count, self.row = rows
        self.before = b.mul(self.row, heads)
        self.references = count * heads * splits * hd
        self.sums = self.references + count * heads * splits
        self.weights = b.stack(splits)

    def put(self, work: Workgroup, slot: Index) -> None:
        """Store the recurrence of a workgroup's heads as that of split `slot`."""
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
        """The result of a head from its first `count` splits; the others were not written."""
        b, splits = self.b, self.splits
        row = b.mul(b.add(self.before, head), splits)
        real = b.compare("slt", b.steps(splits), b.broadcast(b.to_i32(count), splits))
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
