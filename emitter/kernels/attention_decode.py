"""Attention of one new token over the cache: rotary embedding, append and softmax in one dispatch a layer.

Short contexts are shared out by kv head. Long ones are split by position, so that every workgroup streams whole rows of the
cache and any number of threads has equal shares; the workgroup that comes last adds up the parts, which costs no second
dispatch. The token's own key and value enter from registers: the cache row that is written is read by nobody.
"""

from __future__ import annotations

import numpy as np

from emitter.kernels.decode_workgroup import TILE, Shape, Workgroup
from emitter.kernels.isa import Isa
from emitter.kernels.kernel import INDEX, Kernel
from emitter.kernels.rope_append import Heads, number, prepared_heads
from emitter.kernels.scores import NEVER, attend
from emitter.kernels.text import Body, Index, Value, executable
from emitter.kernels.vector_math import exp, lane_max, lane_sums
from emitter.types import F32, I32, TensorType

SPLIT_BYTES = 128 * 1024  # of keys and values, up to which the heads are shared out whole
UNIT = 32  # positions that parts are multiples of: fewer would prepare the queries too often, more would leave unequal shares
STACK = 30 * 1024  # bytes a workgroup may use; IREE refuses more than 32 KB


def attention_decode(
    layers: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    isa: Isa,
    rope: int | None,
    scale: float,
    interleaved: bool = False,
    qk_norm: float | None = None,
    qk_norm_row: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
    split_from: int | None = None,
    tile: int = TILE,
) -> Kernel:
    """One token's attention in one dispatch, at a cost that follows its position.

    qkv [1, row], (cos, sin [context, rotary_dim/2]), (q_norm, k_norm), pos i32, k and v
    [layers, context, kv_heads, head_dim], (counters i32 [n]), layer -> out [1, heads*head_dim], k, v, (counters, parts).
    Row `pos` of the caches is written; of the others those in max(0, pos - window + 1) .. pos - 1 are read. Scores are
    (q . k) * scale, then softcap * tanh(score / softcap). The options of rotary embedding and norms are those of `Heads`;
    `rope` is its rotary_dim.

    With `splits` above 1, a power of two, contexts of more than `split_from` positions are split into that many parts.
    `counters` must be zero before the first call and are zero again after each; one tensor serves all layers in turn.
    `parts` is scratch. `tile` positions are taken at a time.
    """
    hd = head_dim
    layout = Heads(heads, kv_heads, head_dim, rope, interleaved, qk_norm, qk_norm_row)
    if splits & (splits - 1) or splits < 1:
        raise ValueError(f"attention_decode takes a power of two as splits, got {splits}")
    shape = _shape(layout, isa, tile, splits)
    per = shape.per
    split_from = split_from or max(2 * tile, SPLIT_BYTES // (8 * per * hd))
    groups = kv_heads // per
    slots = max(per, splits) if splits > 1 else 1

    cache = TensorType((layers, context, kv_heads, hd), F32)
    operands = [TensorType((1, layout.row), F32), *layout.operands(context), TensorType((), I32), cache, cache]
    place = len(operands) - 2
    results, tied = [TensorType((1, heads * hd), F32), cache, cache], [None, place, place + 1]
    if splits > 1:
        operands.append(TensorType((groups,), I32))
        results += [operands[-1], TensorType((heads * splits * (hd + 2),), F32)]
        tied += [place + 2, None]
    operands.append(INDEX)
    name = "_".join(
        [f"attention_decode_{layers}x{context}_{layout.suffix}_s{number(scale)}"]
        + [f"w{window}"] * (window is not None)
        + [f"cap{number(softcap or 0)}"] * (softcap is not None)
        + [isa.name, f"t{tile}"]
        + [f"p{splits}from{split_from}"] * (splits > 1)
    )

    def write(b: Body, qkv: Value, *arguments: Value) -> None:
        given, rest = arguments[: place - 2], arguments[place - 2 :]
        pos, k_cache, v_cache, *counters, layer, out = rest[: 5 + (splits > 1)]
        work = Workgroup(b, layout, isa, context, shape, softcap, scale)
        position = b.to_index(b.load(pos))
        low = 0 if window is None else b.max(b.sub(position, window - 1), 0)

        def prepare(first: Index, end: Index) -> None:
            work.begin(qkv, layout.split(given), position, (k_cache, v_cache, layer), (first, end))

        unit = b.workgroup()
        if splits == 1:
            prepare(unit, b.add(unit, 1))
            work.own()
            work.attend(low, position, ahead=False)
            work.finish(out)
            return
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
            prepare(first, b.choose(split, b.add(base, per), b.add(first, 1)))
            with b.when(b.either(has_head, b.equal(slot, 0))):
                work.own()
            with b.when(has_head):
                work.attend(low, position, ahead=False)
                work.finish(out)
            with b.when(has_part):
                # The same heads as before, in a form whose number the compiler sees.
                work.first, work.end = base, b.add(base, per)
                work.attend(start, b.min(b.add(start, share), position), ahead=True)
                parts = _Parts(b, rest[-1], heads, splits, hd)
                parts.put(work, slot)
                count = b.ceildiv(seen, share)
                before = b.atomic_add(b.constant("1", "i32"), counters[0], group)
                with b.when(b.equal(b.to_index(before), b.sub(count, 1))):
                    b.store(b.constant("0", "i32"), counters[0], group)
                    with b.loop(b.mul(base, layout.group), b.mul(b.add(base, per), layout.group)) as head:
                        parts.join(head.index, count, out, work.width)

    def reference(qkv: np.ndarray, *arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        given, rest = arguments[: place - 2], arguments[place - 2 :]
        pos, k_cache, v_cache, *counters, layer = rest
        tables, norms = layout.split(given)
        position = int(pos)
        q, k, v = prepared_heads(layout, qkv, np.array([position]), tables, norms)
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        k_cache[layer, position], v_cache[layer, position] = k[0], v[0]
        out = attend(q, k_cache[layer], v_cache[layer], [position], scale, window, softcap)
        scratch = [np.zeros(t.shape, t.dtype.numpy) for t in results[3:]]
        return (out.reshape(1, -1).astype(np.float32), k_cache, v_cache, *scratch)

    def seen(position: int) -> int:
        return min(position + 1, window or context)

    return Kernel(
        name=name,
        operands=tuple(operands),
        results=tuple(results),
        tied=tuple(tied),
        text=executable(name, operands, results, tied, groups * slots if splits > 1 else kv_heads, write),
        reference=reference,
        flops=lambda position: 4 * heads * hd * seen(position),
        bytes=lambda position: 4 * (2 * kv_heads * hd * seen(position) + layout.row + heads * hd),
    )



def _shape(layout: Heads, isa: Isa, tile: int, splits: int) -> Shape:
    """With splits, the shape of the most kv heads whose state fits the stack of one workgroup; else that of one."""
    kv_heads = layout.kv_heads if splits > 1 else 1
    for per in (n for n in range(kv_heads, 0, -1) if kv_heads % n == 0):
        shape = Shape(layout, isa, per, tile)
        if shape.stack_bytes <= STACK:
            return shape
    raise ValueError(
        f"attention_decode keeps {layout.group} heads of {layout.head_dim} in {shape.stack_bytes} bytes of a workgroup's"
        f" stack, which has {STACK}; use fewer query heads a kv head or smaller ones"
    )


class _Parts:
    """What the workgroups of a split context leave for the last of them, in one row of scratch.

    By head and split: weighted values [heads, splits, head_dim], references [heads, splits], sums [heads, splits].
    """

    def __init__(self, b: Body, scratch: Value, heads: int, splits: int, hd: int):
        self.b, self.scratch, self.splits, self.hd = b, scratch, splits, hd
        self.references = heads * splits * hd
        self.sums = self.references + heads * splits
        self.weights = b.stack(splits)

    def put(self, work: Workgroup, slot: Value) -> None:
        """Store the recurrence of a workgroup's heads as that of split `slot`."""
        b = self.b
        low = b.mul(work.first, work.group)
        with b.loop(low, b.mul(work.end, work.group)) as head:
            g = b.sub(head.index, low)
            row = b.add(b.mul(head.index, self.splits), slot)
            b.store(b.load(work.references, g), self.scratch, b.add(row, self.references))
            b.store(work.total(g), self.scratch, b.add(row, self.sums))
            with b.loop(0, self.hd, work.width) as d:
                value = b.vload(work.values, work.width, g, d.index)
                b.vstore(value, self.scratch, b.add(b.mul(row, self.hd), d.index))

    def join(self, head: Value, count: Index, out: Value, width: int) -> None:
        """The result of a head from its first `count` splits; the others were not written."""
        b, splits = self.b, self.splits
        row = b.mul(head, splits)
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
            b.vstore(s.results[0], out, 0, b.add(b.mul(head, self.hd), d.index))
