"""Compute attention on a GPU, for decoding and for chunks of a prompt; KV caches are not copied.

    each workgroup: one query head of up to `queries` consecutive tokens of a sequence
      q [queries, head_dim] = prepared(q)                                                     shared
      if decoding: append prepared k and v of the token to the caches; start the softmax with them
      for each block of KEYS positions that a query attends to:
        scores [queries, KEYS] = scale * (q . k_cache[positions]), four threads for each key  shared
        raise the maxima to the new scores; scale values and sums of weights down          registers
        weights = exp(scores - maxima)                                                        shared
        values += weights . v_cache[positions]; a thread has a few elements of head_dim    registers
      out[token, head] = values / sums of weights                                             memory

prepared: after the RMS norm, if the model has one, and (q and k only) the rotary embedding
(`gpu.heads`).

The run time depends on the position, not on the size of the cache. No workgroup reads a cache row
that the same dispatch writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.attention.decode import DecodeTokens
from castiron.emitter.kernels.attention.heads import HeadLayout, prepared_heads
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import NEVER, Scores, attend, by_position
from castiron.emitter.kernels.gpu.activations import tanh
from castiron.emitter.kernels.gpu.cache_rows import CacheRows
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.gpu.heads import QkvRows, TokenHead, prepare
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import Index, Ssa

THREADS, LANES = 128, 4
KEYS = THREADS // LANES
QUERIES = THREADS // KEYS  # max tokens of a chunk that share the reads of keys and values


def _reference(
    caches: Caches, layout: HeadLayout, scores: Scores, tokens: DecodeTokens, layer: int, given: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    qkv = np.concatenate([x for name, x in given.items() if name.startswith("rows")], 1)
    out = np.zeros((tokens.count, layout.keys), np.float32)
    k_cache, v_cache = given["k_cache"].copy(), given["v_cache"].copy()
    for sequence, first, positions in tokens.runs(given):
        at, rows = sequence * (caches.layers // tokens.count) + layer if tokens.kind == "batch" else layer, len(positions)
        q, k, v = prepared_heads(layout, qkv[first : first + rows], positions, given)
        if not tokens.in_cache:
            for buffer, new in (k_cache, k), (v_cache, v):
                buffer[at, positions % buffer.shape[1]] = caches.format.stored(new)
        seen_k, seen_v = (caches.format.values(by_position(x[at], positions[-1] + 1)) for x in (k_cache, v_cache))
        out[first : first + rows] = attend(q, seen_k, seen_v, positions, scores, given.get("sinks")).reshape(rows, -1)
    return {"out": out} if tokens.in_cache else {"out": out, "k_cache": k_cache, "v_cache": v_cache}


def _operands(
    caches: Caches, layout: HeadLayout, tokens: DecodeTokens, rows: QkvRows, of_scores: Mapping[str, TensorType]
) -> dict[str, TensorType | str]:
    cached, prepared = caches.types(layout.kv_heads, layout.head_dim), layout.operands(caches.context)
    return {**rows.operands(tokens.count), **prepared, **of_scores, **tokens.operands, **cached, "layer": INDEX}


@cache
def attention(caches: Caches, layout: HeadLayout, scores: Scores, tokens: DecodeTokens, rows: QkvRows) -> Kernel:
    """Return the attention kernel for one token of each sequence, or for a chunk of one sequence.

    For a chunk the caches already have its k and v; otherwise the kernel appends them.
    Operands: those of `QkvRows`, `HeadLayout`, `Scores` and `DecodeTokens`; k_cache, v_cache,
        layer.
    Results: out f32 [tokens, heads * head_dim], zero for padding and idle sequences; k_cache and
        v_cache, updated in place, not for a chunk.
    """
    cached = caches.types(layout.kv_heads, layout.head_dim)
    updated = {} if tokens.in_cache else cached
    queries = min(QUERIES, tokens.count) if tokens.in_cache else 1

    def write(b: GpuBody, layer: Ssa, **given: Ssa) -> None:
        _Writer(b, b.thread(), caches, layout, scores, tokens, rows, queries, given).write(layer)

    sizes = "x".join(map(str, rows.widths))
    return GpuKernel(
        f"gpu_attention_{caches.layers}x{caches.context}_{layout.suffix}_{scores.suffix}{tokens.suffix}{caches.suffix}_{sizes}",
        _operands(caches, layout, tokens, rows, scores.operands(layout.heads)),
        {"out": TensorType((tokens.count, layout.keys), F32), **updated},
        layout.heads * -(-tokens.count // queries),
        write,
        reference=lambda layer, **given: _reference(caches, layout, scores, tokens, layer, given),
        in_place={name: name for name in updated},
        threads=THREADS,
        heads=0 if tokens.in_cache else layout.heads,
        # A workgroup reads the query head that is its own.
        reads_rarely=("rows0",) if rows.widths[0] == layout.keys and layout.qk_norm is None else (),
    )


@cache
def append(caches: Caches, layout: HeadLayout, T: int, rows: QkvRows) -> Kernel:
    """Return the kernel that appends k and v of a chunk, without padding, to the caches.

    Operands: those of `attention` for a chunk, but no sinks. Results: k_cache and v_cache, in
        place.
    """
    hd, tokens, cached = layout.head_dim, DecodeTokens("chunk", T), caches.types(layout.kv_heads, layout.head_dim)

    def write(b: GpuBody, layer: Ssa, **given: Ssa) -> None:
        thread, unit = b.thread(), b.workgroup()
        token, head = b.div(unit, layout.kv_heads), b.rem(unit, layout.kv_heads)
        position, padding = tokens.position(b, given, token)
        assert padding is not None, "a chunk has padding"
        with b.when(b.negate(padding)):
            _append(b, thread, caches, layout, rows, (layer, position, head), token, given)

    def reference(layer: int, **given: np.ndarray) -> dict[str, np.ndarray]:
        qkv = np.concatenate([x for name, x in given.items() if name.startswith("rows")], 1)
        k_cache, v_cache = given["k_cache"].copy(), given["v_cache"].copy()
        for _, _, positions in tokens.runs(given):
            _, k, v = prepared_heads(layout, qkv[: len(positions)], positions, given)
            for buffer, new in (k_cache, k), (v_cache, v):
                buffer[layer, positions % buffer.shape[1]] = caches.format.stored(new)
        return {"k_cache": k_cache, "v_cache": v_cache}

    return GpuKernel(
        f"gpu_append_{caches.layers}x{caches.context}_{T}_{layout.suffix}{caches.suffix}_{'x'.join(map(str, rows.widths))}",
        _operands(caches, layout, tokens, rows, {}),
        cached,
        T * layout.kv_heads,
        write,
        reference=reference,
        in_place={name: name for name in cached},
        threads=1 << (min(hd, THREADS) - 1).bit_length(),
    )


def _append(
    b: GpuBody, thread: Ssa, caches: Caches, layout: HeadLayout, rows: QkvRows, at: Sequence[Index], token: Index,
    given: Mapping[str, Ssa], only: Ssa | None = None,
) -> tuple[Ssa, Ssa]:  # fmt: skip
    """Prepare and append k and v at (layer, position, kv head); return them, shared memrefs."""
    _, position, head = at
    new = b.shared(layout.head_dim), b.shared(layout.head_dim)
    heads = [(TokenHead(kind, token, head, position), target) for kind, target in zip("kv", new)]
    prepare(b, thread, layout, rows, heads, given)
    for name, target in zip(("k_cache", "v_cache"), new):
        cache = CacheRows(b, b.words(given[name]), caches, layout.kv_heads, layout.head_dim)
        cache.append(thread, cache.row(*at), target, only)
    return new


@dataclass(frozen=True)
class _Writer:
    """Emits code of a workgroup: attention of one query head for `queries` consecutive tokens.

    own_d: the elements of head_dim that this thread computes.
    subset: the index of this thread's subset of keys, if several threads compute the same element.
    """

    b: GpuBody
    thread: Ssa
    caches: Caches
    layout: HeadLayout
    scores: Scores
    tokens: DecodeTokens
    rows: QkvRows
    queries: int
    given: Mapping[str, Ssa]

    def write(self, layer: Ssa) -> None:
        b, heads, tokens = self.b, self.layout.heads, self.tokens
        unit = b.workgroup()
        head, first = b.rem(unit, heads), b.mul(b.div(unit, heads), self.queries)
        position, idle = tokens.position(b, self.given, first)
        layer = b.at(tokens.layer(b, layer, first, self.caches.layers))
        if tokens.kind != "batch":
            self._sequence(layer, head, first, position)
            return
        assert idle is not None, "sequences of a batch may be idle"
        with b.when(b.negate(idle)):
            self._sequence(layer, head, first, position)
        with b.when(idle), b.strided(self.thread, self.layout.head_dim) as d:
            b.store(b.f32(0.0), self.given["out"], first, b.add(b.mul(head, self.layout.head_dim), d.index))

    def _sequence(self, layer: Ssa, head: Index, first: Index, position: Ssa) -> None:
        b, layout, thread, hd = self.b, self.layout, self.thread, self.layout.head_dim
        end = self.tokens.count - 1
        kv_head = b.div(head, layout.group)
        q = [b.shared(hd) for _ in range(self.queries)]
        rows = [b.min(b.add(first, i), end) for i in range(self.queries)]
        last = self.caches.context - 1
        queries = [TokenHead("q", row, head, b.min(b.add(position, i), last)) for i, row in enumerate(rows)]
        prepare(b, thread, layout, self.rows, list(zip(queries, q)), self.given)
        lows, highs = zip(*(self._range(b.add(position, i), b.add(first, i)) for i in range(self.queries)))
        dims, subsets = -(-hd // THREADS), max(1, THREADS // hd)
        zero, never = b.f32(0.0), b.f32(NEVER)
        maxima, sums, values = [never] * self.queries, [zero] * self.queries, [zero] * (self.queries * dims)
        own_d = [b.min(b.add(b.rem(thread, hd) if subsets > 1 else thread, i * THREADS), hd - 1) for i in range(dims)]
        subset = b.div(thread, hd) if subsets > 1 else 0
        if not self.tokens.in_cache:
            writes = b.equal(b.rem(head, layout.group), 0)
            at = layer, position, kv_head
            k, v = _append(b, thread, self.caches, layout, self.rows, at, first, self.given, writes)
            maxima = [self._score(self._dot_shared(q[0], k))]
            # Only the first subset of threads counts the token itself.
            counts = b.equal(subset, 0) if subsets > 1 else None
            sums = [b.f32(1.0) if counts is None else b.select(counts, b.f32(1.0), zero)]
            new_values = [b.load(v, d) for d in own_d]
            values = new_values if counts is None else [b.select(counts, x, zero) for x in new_values]
        low = lows[0]
        # Bidirectional queries near the end may attend to fewer positions than earlier ones.
        high = highs[0]
        for other in highs[1:]:
            high = b.max(high, other)
        state = [*maxima, *sums, *values]
        with b.loop(low, high, KEYS, carry=state) as block:
            block.give(*self._block(block.index, high, (layer, kv_head), q, (lows, highs), own_d, subset, block.values))
        n = self.queries
        self._store(head, first, block.results[:n], block.results[n : 2 * n], block.results[2 * n :], own_d, subset)

    def _range(self, position: Index, row: Index) -> tuple[Index, Index]:
        """Emit code that finds the cached positions first .. end - 1 that a token attends to."""
        b, window = self.b, self.scores.window
        low = 0 if window is None else b.max(b.sub(b.add(position, 1), window), 0)
        if not self.tokens.in_cache:
            return low, position
        length = b.to_index(b.load(self.given["length"]))
        end = b.add(b.to_index(b.load(self.given["start"])), length)
        high = b.add(position, 1)
        if self.scores.bidirectional:
            high = end if window is None else b.min(end, b.add(position, window))
        # A token of padding attends to nothing; its position may be outside the cache.
        return low, b.select(b.less(row, length), b.at(high), 0)

    def _score(self, dot: Ssa) -> Ssa:
        """Emit code that applies the scale and the soft cap, if any, to a dot product q . k."""
        b, score = self.b, self.b.mulf(dot, self.b.f32(self.scores.scale))
        if self.scores.softcap is None:
            return score
        cap = b.f32(self.scores.softcap)
        return b.mulf(tanh(b, b.divf(score, cap)), cap)

    def _dot_shared(self, q: Ssa, k: Ssa) -> Ssa:
        """Emit the dot product of two f32 [head_dim] in shared memory; all threads get it."""
        b = self.b
        with b.strided(self.thread, self.layout.head_dim, [b.f32(0.0)]) as d:
            d.give(b.fma(b.load(q, d.index), b.load(k, d.index), d.values[0]))
        dots, at = b.sums(self.thread, d.results, THREADS)
        return b.load(dots, at)

    def _block(self, base, high, at, q, ranges, own_d, subset, state: Sequence[Ssa]) -> list[Ssa]:
        """Emit code that adds `KEYS` cached positions from `base` on to the online softmax.

        at: (layer, kv head). q: the query of each token, shared f32 [head_dim].
        """
        b, thread, n = self.b, self.thread, self.queries
        layer, kv_head = at
        hd, kv_heads = self.layout.head_dim, self.layout.kv_heads
        maxima, sums, values = state[:n], state[n : 2 * n], state[2 * n :]
        keys, cached = (CacheRows(b, b.words(self.given[name]), self.caches, kv_heads, hd) for name in ("k_cache", "v_cache"))
        partial, scores, weights = (b.shared(n * size) for size in (THREADS, KEYS, KEYS))
        lane, slot = b.rem(thread, LANES), b.div(thread, LANES)
        row = keys.row(layer, b.min(b.add(base, slot), b.sub(high, 1)), kv_head)
        with b.loop(lane, hd // keys.step, LANES, carry=[b.f32(0.0)] * n) as part:
            k, totals = keys.load(row, part.index), list(part.values)
            for i in range(n):
                for j, x in enumerate(k):
                    totals[i] = b.fma(x, b.load(q[i], b.add(b.mul(part.index, keys.step), j)), totals[i])
            part.give(*totals)
        for i, total in enumerate(part.results):
            b.store(total, partial, b.add(thread, i * THREADS))
        b.barrier()
        with b.strided(thread, n * KEYS) as item:
            query, key = b.div(item.index, KEYS), b.rem(item.index, KEYS)
            total = b.load(partial, b.mul(item.index, LANES))
            for j in range(1, LANES):
                total = b.addf(total, b.load(partial, b.add(b.mul(item.index, LANES), j)))
            position, (lows, highs) = b.add(base, key), ranges
            low, end = self._of_query(query, lows), self._of_query(query, highs)
            inside = b.both(b.negate(b.less(position, low)), b.less(position, end))
            b.store(b.select(inside, self._score(total), b.f32(NEVER)), scores, item.index)
        b.barrier()
        tops, rescale = [], []
        for i in range(n):
            with b.loop(0, KEYS, 1, carry=[maxima[i]]) as scan:
                scan.give(b.maxf(b.load(scores, b.add(scan.index, i * KEYS)), scan.values[0]))
            tops.append(scan.results[0])
            rescale.append(b.math("exp", b.subf(maxima[i], tops[i])))
        with b.strided(thread, n * KEYS) as item:
            score, top = b.load(scores, item.index), self._of_query(b.div(item.index, KEYS), tops)
            # Where every score is masked, the maximum is too, and the difference would be 0.
            weight = b.select(b.compare("ogt", score, b.f32(NEVER)), b.math("exp", b.subf(score, top)), b.f32(0.0))
            b.store(weight, weights, item.index)
        b.barrier()
        sums = [b.mulf(x, factor) for x, factor in zip(sums, rescale)]
        values = [b.mulf(x, rescale[i // len(own_d)]) for i, x in enumerate(values)]
        count = b.min(b.sub(high, base), KEYS)
        with b.loop(subset, count, max(1, THREADS // hd), carry=[*sums, *values]) as turn:
            row = cached.row(layer, b.add(base, turn.index), kv_head)
            factors = [b.load(weights, b.add(turn.index, i * KEYS)) for i in range(n)]
            xs = [cached.element(row, d) for d in own_d]
            totals = [b.addf(x, factor) for x, factor in zip(turn.values[:n], factors)]
            turn.give(*totals, *(b.fma(factors[i // len(xs)], xs[i % len(xs)], x) for i, x in enumerate(turn.values[n:])))
        return [*tops, *turn.results]

    def _of_query(self, i: Index, values: Sequence[Index]) -> Ssa:
        b, picked = self.b, values[0]
        for j, other in enumerate(values[1:], 1):
            picked = b.select(b.equal(i, j), other, picked)
        return b.at(picked) if isinstance(picked, int) else picked

    def _store(self, head, first, maxima, sums, values, own_d, subset) -> None:
        """Emit code that adds the sinks and the subsets, and stores values / sums of weights."""
        b, thread, n, hd = self.b, self.thread, self.queries, self.layout.head_dim
        subsets = max(1, THREADS // hd)
        sums, values = list(sums), list(values)
        if self.scores.sinks:
            sink = b.load(self.given["sinks"], head)
            for i in range(n):
                top = b.maxf(sink, maxima[i])
                rescale, more = (b.math("exp", b.subf(x, top)) for x in (maxima[i], sink))
                more = more if subsets == 1 else b.select(b.equal(subset, 0), more, b.f32(0.0))
                sums[i] = b.addf(b.mulf(sums[i], rescale), more)
                values[i * len(own_d) : (i + 1) * len(own_d)] = [
                    b.mulf(x, rescale) for x in values[i * len(own_d) : (i + 1) * len(own_d)]
                ]
        if subsets > 1:
            buffer = b.shared(2 * n * THREADS)
            for i, x in enumerate([*sums, *values]):
                b.store(x, buffer, b.add(thread, i * THREADS))
            b.barrier()
            found = []
            for i in range(2 * n):
                total = b.load(buffer, b.add(own_d[0], i * THREADS))
                for other in range(1, subsets):
                    total = b.addf(total, b.load(buffer, b.add(own_d[0], other * hd + i * THREADS)))
                found.append(total)
            sums, values = found[:n], found[n:]
        for i in range(n):
            token = b.add(first, i)
            # Padding attends to nothing, so its sum is 0.
            inverse = b.divf(b.f32(1.0), b.maxf(sums[i], b.f32(1e-30)))
            for j, d in enumerate(own_d):
                inside = b.both(b.less(token, self.tokens.count), b.less(b.add(thread, j * THREADS), hd))
                with b.when(inside):
                    x = b.mulf(values[i * len(own_d) + j], inverse)
                    b.store(x, self.given["out"], token, b.add(b.mul(head, hd), d))
