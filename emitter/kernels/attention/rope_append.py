"""Apply rotary embedding to the queries and keys of a chunk, and append its keys and values.

A chunk is T consecutive tokens of one sequence; those from index `length` on are padding.

    each workgroup: ROWS tokens t of qkv [T, heads + 2 * kv_heads, head_dim]
      for head in heads: q[t, head] = prepared(qkv[t, head])
      if t < length: for head in kv_heads:
        k_cache[layer, start + t, head] = stored(prepared(qkv[t, heads + head]))
        v_cache[layer, start + t, head] = stored(qkv[t, heads + kv_heads + head])

prepared(x): a head after the RMS norm, if the model has one, and the rotary embedding.
stored(x): a head in the format of the KV cache, such as q8_0.
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.attention.heads import HeadLayout, Span, prepare_head, prepared_heads
from castiron.emitter.kernels.attention.rows import Caches, Rows
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import Body, Ssa, largest_width
from castiron.emitter.kernels.mlir.isa import Isa

ROWS = 4  # tokens of a workgroup


@cache
def rope_append(caches: Caches, T: int, layout: HeadLayout, *, isa: Isa) -> Kernel:
    """Return the kernel that rotates q and k of T tokens, and appends k and v to the KV caches.

    If `layout` has norms, the kernel normalises q and k before it rotates them.

    Operands:
        qkv: f32 [T, layout.row], the heads of q, then of k, then of v.
        cos, sin, q_norm, k_norm: tables and weights, see `HeadLayout.operands`.
        start: i32, position of the first token.
        length: i32, number of tokens that are not padding.
        k_cache, v_cache: the KV caches of all layers.
        layer: index of the layer.
    Results:
        q: f32 [T, heads * head_dim].
        k_cache, v_cache: updated in place; keys and values of padding are not stored.
    """
    hd = layout.head_dim
    scalar = TensorType((), I32)
    updated = caches.types(layout.kv_heads, hd)
    operands = {"qkv": TensorType((T, layout.row), F32), **layout.operands(caches.context), "start": scalar, "length": scalar}

    def write(b: Body, qkv: Ssa, start: Ssa, length: Ssa, k_cache: Ssa, v_cache: Ssa, layer: Ssa, q: Ssa, **given: Ssa) -> None:
        first = b.to_index(b.load(start))
        real = b.to_index(b.load(length))
        low = b.mul(b.workgroup(), ROWS)
        width = largest_width(isa.lanes, hd)
        keys, values = (Rows(b, buffer, caches, hd, width) for buffer in (k_cache, v_cache))
        key = Span(b.stack(hd), [], 0)
        with b.loop(low, b.min(b.add(low, ROWS), T)) as token:
            t = token.index
            position = b.add(first, t)
            with b.loop(0, layout.heads) as head:
                offset = b.mul(head.index, hd)
                source, target = Span(qkv, [t], offset), Span(q, [t], offset)
                prepare_head(b, layout, isa.lanes, "q", head.index, source, target, given, position)
            with b.when(b.less(t, real)), b.loop(0, layout.kv_heads) as head:
                offset = b.add(b.mul(head.index, hd), layout.keys)
                cached = [layer, position, head.index]
                prepare_head(b, layout, isa.lanes, "k", head.index, Span(qkv, [t], offset), key, given, position)
                keys.append(cached, lambda d: key.load(b, d, width))
                value = Span(qkv, [t], b.add(offset, layout.kv_heads * hd))
                values.append(cached, lambda d: value.load(b, d, width))

    def reference(layer: int, **given: np.ndarray) -> dict[str, np.ndarray]:
        positions, length = int(given["start"]) + np.arange(T), int(given["length"])
        q, k, v = prepared_heads(layout, given["qkv"], positions, given)
        k_cache, v_cache = given["k_cache"].copy(), given["v_cache"].copy()
        for rows, new in (k_cache, k), (v_cache, v):
            rows[layer, positions[:length] % rows.shape[1]] = caches.format.stored(new[:length])
        return {"q": q.reshape(T, -1).astype(np.float32), "k_cache": k_cache, "v_cache": v_cache}

    return Kernel(
        f"rope_append_{caches.layers}x{caches.context}_{T}_{layout.suffix}_{isa.name}_r{ROWS}{caches.suffix}",
        {**operands, **updated, "layer": INDEX},
        {"q": TensorType((T, layout.heads * hd), F32), **updated},
        -(-T // ROWS),
        write,
        in_place={name: name for name in updated},
        reference=reference,
        flops=3 * T * (layout.heads + layout.kv_heads) * (layout.rotary_dim or 0),
        nbytes=T * (4 * (layout.row + layout.keys) + 2 * layout.kv_heads * caches.format.row_bytes(hd)),
    )
