"""Compute a depthwise causal convolution over time, and an activation.

Each feature has its own filter w with n taps. The state has the last n - 1 rows of x from previous
calls; the kernel updates it. A workgroup computes up to `BLOCK` features of one sequence:

    for a few vectors of features at a time:
      window [n - 1] = state[layer]                                            in registers
      for t < length:
        y[t] = act(bias + sum over i of w[i] * window[i] + w[n - 1] * x[t])
        window = window[1:], x[t]
      state[layer] = window
    for t >= length: y[t] = 0                                                  rows of padding
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.epilogue import ACTIVATIONS
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import Body, Ssa, batches, largest_width
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.recurrent.tokens import Columns, Tokens, zero_padding

BLOCK = 512  # features of a workgroup


@cache
def causal_conv(
    tokens: Tokens, features: int, positions: int, x: Columns, *, isa: Isa, bias: bool = False, activation: str | None = None
) -> Kernel:
    """Return the kernel of a depthwise causal convolution with a state, and an activation.

    y[t] = act(bias + sum over i of weight[i] * x[t - n + 1 + i]), for n taps of the filter.

    tokens: `tokens.count` is T. The tokens belong to one sequence, or each to a different sequence
        if `tokens.batch`. `tokens.layers` is the size of dimension 0 of the state.
    positions: n, the number of taps (not related to the operand `positions`).
    x: which columns of the operand x are convolved; the operand may have more than `features`.
    Operands: x f32 [T, x.width]; weight f32 [n, features]; bias f32 [features] if `bias`; positions
        i32 [T] if `tokens.batch`; length i32 if `tokens.length`; state f32 [layers, n - 1,
        features], the last n - 1 rows of x from previous calls; layer, the index of the layer.
    Results: y f32 [T, features], zero for padding; state, updated in place.
    """
    T, n = tokens.count, positions
    row = TensorType((features,), F32)
    state_type = TensorType((tokens.layers, n - 1, features), F32)
    operands: dict[str, TensorType | str] = {
        "x": x.type(T),
        "weight": TensorType((n, features), F32),
        **({"bias": row} if bias else {}),
        **tokens.operands,
        "state": state_type,
        "layer": INDEX,
    }
    step = largest_width(isa.lanes * isa.registers // 8, features)
    width = min(step, isa.lanes)
    units = -(-features // BLOCK)

    def write(b: Body, state: Ssa, layer: Ssa, y: Ssa, weight: Ssa, **given: Ssa) -> None:
        share = tokens.share(b, units, layer, given)
        low = b.mul(share.unit, BLOCK)
        high = b.min(b.add(low, BLOCK), features)
        with b.loop(low, high, step) as loop:
            at = [b.add(loop.index, i) for i in range(0, step, width)]
            filters = [[b.vload(weight, width, i, f) for f in at] for i in range(n)]
            added = [b.vload(given["bias"], width, f) for f in at] if bias else None
            window = [b.vload(state, width, share.at, i, f) for i in range(n - 1) for f in at]
            with b.loop(share.low, share.end, carry=window) as t:
                new = [b.vload(given["x"], width, t.index, b.add(f, x.first)) for f in at]
                seen = [*batches(t.values, len(at)), new]
                for i, column in enumerate(at):
                    total = added[i] if added else None
                    for values, factors in zip(seen, filters, strict=True):
                        pair = values[i], factors[i]
                        total = b.mulf(*pair) if total is None else b.fma(*pair, total)
                    assert total is not None, "a filter has at least one position"
                    b.vstore(ACTIVATIONS[activation][0](b, total) if activation else total, y, t.index, column)
                t.give(*(value for row in seen[1:] for value in row))
            for i, value in enumerate(t.results):
                b.vstore(value, state, share.at, i // len(at), at[i % len(at)])
        zero_padding(b, share, y, low, high, width)

    def reference(layer: int, weight: np.ndarray, state: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        rows, state, y = x.of(given["x"], features), state.copy(), np.zeros((T, features), np.float32)
        for at, real in tokens.real(layer, given):
            seen = np.concatenate([state[at], rows[real]])
            total = sum(seen[i : i + len(real)] * weight[i] for i in range(n)) + given.get("bias", 0)
            y[real] = ACTIVATIONS[activation][1](total) if activation else total
            state[at] = seen[len(real) :]
        return {"y": y, "state": state}

    name = f"causal_conv_{tokens.suffix}_{n}x{features}_{x.name}" + "_bias" * bias + (f"_{activation}" if activation else "")
    return Kernel(
        f"{name}_{isa.name}",
        operands,
        {"y": TensorType((T, features), F32), "state": state_type},
        tokens.sequences * units,
        write,
        in_place={"state": "state"},
        reference=reference,
        flops=2 * T * n * features,
        nbytes=4 * features * (2 * T + n + 2 * (n - 1) * tokens.sequences),
    )
