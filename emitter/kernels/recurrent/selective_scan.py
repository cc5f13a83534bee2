"""Compute the scan of Mamba 2 (arXiv:2405.21060) token by token.

A workgroup computes one head of one sequence. The head has a state S [head_dim, n], inputs x [T,
head_dim], dt [T], B [T, n] and C [T, n], and scalars bias, rate and skip.

    for each token t: step[t] = softplus(dt[t] + bias); decay[t] = exp(rate * step[t])
    for a few rows p of S at a time, for each token t:
      S[p] = decay[t] * S[p] + step[t] * x[t, p] * B[t]                       in place
      y[t, p] = sum(S[p] * C[t]) + skip * x[t, p]
    y = 0 in rows of padding

Rows of S are independent, so a few of them stay in the L1 cache for all tokens. Computing token by
token takes three operations per element of S and token. The matmuls of the chunked form take more.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import Body, Ssa, largest_width
from castiron.emitter.kernels.mlir.isa import SUM_LANES, Isa
from castiron.emitter.kernels.mlir.vector_math import exp, lane_sums
from castiron.emitter.kernels.recurrent.tokens import Columns, Tokens, single_lane, softplus, zero_padding

STEP, DECAY = range(2)


def selective_scan(tokens: Tokens, shape: Sequence[int], columns: Mapping[str, Columns], *, isa: Isa) -> Kernel:
    """Return the kernel of the scan of Mamba 2 (`recurrences.selective_scan`).

    tokens: `tokens.count` is T. The tokens belong to one sequence, or each to a different sequence
        if `tokens.batch`. `tokens.layers` is the size of dimension 0 of the state.
    shape: (groups, heads, head_dim, n). n is Mamba's d_state. Heads of a group share B and C.
    columns: for each of the operands x, dt, B and C, the columns that the kernel reads.
    Operands: x, dt, B, C f32 [T, width]; rate, bias and skip f32 [heads]; positions i32 [T] if
        `tokens.batch`; length i32 if `tokens.length`; state f32 [layers, heads, head_dim, n];
        layer, the index of the layer.
    Results: y f32 [T, heads * head_dim], zero for padding; state, updated in place.
    """
    groups, heads, head_dim, n = shape
    T = tokens.count
    per_head, state_type = TensorType((heads,), F32), TensorType((tokens.layers, heads, head_dim, n), F32)
    operands: dict[str, TensorType | str] = {
        **{name: own.type(T) for name, own in columns.items()},
        **dict.fromkeys(("rate", "bias", "skip"), per_head),
        **tokens.operands,
        "state": state_type,
        "layer": INDEX,
    }
    width = largest_width(SUM_LANES, n)
    rows = largest_width(min(width, isa.sum_registers // 4), head_dim)

    def write(b: Body, state: Ssa, layer: Ssa, y: Ssa, **given: Ssa) -> None:
        share = tokens.share(b, heads, layer, given)
        head = share.unit
        group = b.div(head, heads // groups)
        x_at = b.add(b.mul(head, head_dim), columns["x"].first)
        b_at, c_at = (b.add(b.mul(group, n), columns[name].first) for name in "BC")
        known, first = b.stack(2, tokens.in_turn), b.mul(head, head_dim)
        with b.loop(share.low, share.end) as token:
            dt = b.load(given["dt"], token.index, b.add(head, columns["dt"].first))
            step = softplus(b, single_lane(b, b.addf(dt, b.load(given["bias"], head))))
            decay = exp(b, b.mulf(step, single_lane(b, b.load(given["rate"], head))))
            for i, number in ((STEP, step), (DECAY, decay)):
                b.store(b.extract(number, 0), known, i, b.sub(token.index, share.low))
        skip = b.load(given["skip"], head)
        with b.loop(0, head_dim, rows) as block, b.loop(share.low, share.end) as token:
            t, own = token.index, [b.add(block.index, p) for p in range(rows)]
            step, decay = (b.load(known, i, b.sub(t, share.low)) for i in (STEP, DECAY))
            left = b.broadcast(decay, width)
            new = [b.broadcast(b.mulf(step, b.load(given["x"], t, b.add(x_at, p))), width) for p in own]
            with b.loop(0, n, width, carry=[b.splat(0.0, width)] * rows) as loop:
                written, read = (
                    b.vload(given[name], width, t, b.add(at, loop.index)) for name, at in (("B", b_at), ("C", c_at))
                )
                sums = []
                for p, factor, total in zip(own, new, loop.values, strict=True):
                    where = share.at, head, p, loop.index
                    after = b.fma(factor, written, b.mulf(b.vload(state, width, *where), left))
                    b.vstore(after, state, *where)
                    sums.append(b.fma(after, read, total))
                loop.give(*sums)
            x = b.vload(given["x"], rows, t, b.add(x_at, block.index))
            total = b.fma(b.broadcast(skip, rows), x, lane_sums(b, loop.results))
            b.vstore(total, y, t, b.add(first, block.index))
        zero_padding(b, share, y, first, b.add(first, head_dim), rows)

    def reference(layer: int, state: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        x, dt = columns["x"].of(given["x"], heads, head_dim), columns["dt"].of(given["dt"], heads)
        written, read = (columns[name].of(given[name], groups, n).repeat(heads // groups, 1) for name in "BC")
        step = np.logaddexp(0, dt + given["bias"])
        decay = np.exp(given["rate"] * step)
        state, y = state.copy(), np.zeros((T, heads, head_dim))
        for at, real in tokens.real(layer, given):
            S = state[at].astype(np.float64)
            for t in real:
                S = S * decay[t][:, None, None] + np.einsum("h,hp,hn->hpn", step[t], x[t], written[t])
                y[t] = np.einsum("hpn,hn->hp", S, read[t]) + given["skip"][:, None] * x[t]
            state[at] = S
        return {"y": y.reshape(T, -1).astype(np.float32), "state": state}

    name = f"selective_scan_{tokens.suffix}_{'x'.join(map(str, shape))}_" + "_".join(k + c.name for k, c in columns.items())
    return Kernel(
        f"{name}_{isa.name}",
        operands,
        {"y": TensorType((T, heads * head_dim), F32), "state": state_type},
        tokens.sequences * heads,
        write,
        in_place={"state": "state"},
        reference=reference,
        flops=T * heads * head_dim * n * 5,
        nbytes=4 * (2 * tokens.sequences * prod(state_type.shape[1:]) + 2 * T * (heads * head_dim + groups * n)),
    )
