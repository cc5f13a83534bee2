"""Compute the gated delta rule (arXiv:2412.06464) token by token, and the gated norm after it.

A workgroup computes one head of one sequence. The head has a state S [k_dim, v_dim]. q, k, v, beta
and decay belong to token t; q and k are divided by their L2 norms.

    for a few columns of S at a time, for each token t:
      new = beta * (v[columns] - decay * (k @ S))
      S = decay * S + outer(k, new)            in place, or for several tokens in a copy on the stack
      out[t, columns] = q @ S / sqrt(k_dim)
    out = out / rms(out) * weight * silu(z)                if there is a norm
    out = 0                                                in rows of padding

Columns of S are independent, so a few of them stay in the L1 cache for all tokens. Computing token
by token takes four operations per element of S and token. The matmuls of the chunked form take
more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.epilogue import ACTIVATIONS
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import STACK_BYTES, Body, Index, Ssa, largest_width, number
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import exp, inverse_rms, rms_normed, square_sum, tree
from castiron.emitter.kernels.recurrent.tokens import Columns, Share, Tokens, sigmoid, single_lane, softplus, zero_padding

LENGTH_EPS = 1e-6  # added to the squared length of q and of k
DECAY, BETA, OF_K, OF_Q = range(4)  # rows of `_Head.known`: decay, beta, 1 / |k|, 1 / (|q| sqrt(k_dim)) of each token


def gated_delta(
    tokens: Tokens, shape: Sequence[int], columns: Mapping[str, Columns], *, isa: Isa, norm_eps: float | None = None
) -> Kernel:
    """Return the kernel of the gated delta rule (`recurrences.gated_delta`) and a gated norm.

    The rule's decay is exp(rate * softplus(alpha + bias)), and its beta is sigmoid(beta), where
    `alpha` and `beta` are operands.

    tokens: `tokens.count` is T. The tokens belong to one sequence, or each to a different sequence
        if `tokens.batch`. `tokens.layers` is the size of dimension 0 of the state.
    shape: (k_heads, heads, k_dim, v_dim): q and k have k_heads heads, v has `heads` heads.
    columns: for each of the operands q, k, v, alpha, beta and z, the columns that the kernel reads.
    norm_eps: epsilon of an RMS norm over each head of the result, which is then multiplied by
        silu(z); None for neither.
    Operands: q, k, v, alpha, beta and (with a norm) z, f32 [T, width]; rate, bias f32 [heads]; norm
        f32 [v_dim], the norm's weight; positions i32 [T] if `tokens.batch`; length i32 if
        `tokens.length`; state f32 [layers, heads, k_dim, v_dim]; layer, the index of the layer.
    Results: out f32 [T, heads * v_dim], zero for padding; state, updated in place.
    """
    k_heads, heads, k_dim, v_dim = shape
    T = tokens.count
    per_head, state_type = TensorType((heads,), F32), TensorType((tokens.layers, heads, k_dim, v_dim), F32)
    operands: dict[str, TensorType | str] = {
        **{name: own.type(T) for name, own in columns.items()},
        "rate": per_head,
        "bias": per_head,
        **({} if norm_eps is None else {"norm": TensorType((v_dim,), F32)}),
        **tokens.operands,
        "state": state_type,
        "layer": INDEX,
    }
    width = largest_width(isa.lanes, v_dim)
    vectors, copied = _block(tokens, isa, k_dim, v_dim // width, width)

    def write(b: Body, layer: Ssa, **given: Ssa) -> None:
        share = tokens.share(b, heads, layer, given)
        group = b.div(share.unit, heads // k_heads)
        sizes: dict[str, tuple[Index, int]] = {"q": (group, k_dim), "k": (group, k_dim)}
        sizes |= {name: (share.unit, size) for name, size in (("v", v_dim), ("z", v_dim), ("alpha", 1), ("beta", 1))}
        at = {name: b.add(b.mul(*sizes[name]), own.first) for name, own in columns.items()}
        head = _Head(b, isa, (k_dim, v_dim, width, vectors), share, given, at, b.stack(4, tokens.in_turn))
        with b.loop(share.low, share.end) as t:
            head.know(t.index)
        copy = b.stack(k_dim, vectors * width) if copied else None
        with b.loop(0, v_dim, vectors * width) as block:
            head.block(block.index, copy)
        if norm_eps is not None:
            with b.loop(share.low, share.end) as t:
                head.gated_norm(t.index, norm_eps)
        zero_padding(b, share, given["out"], head.first, b.add(head.first, v_dim), width)

    def reference(layer: int, state: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        q, k = (_unit(columns[n].of(given[n], k_heads, k_dim)).repeat(heads // k_heads, 1) for n in "qk")
        v, (a, beta) = columns["v"].of(given["v"], heads, v_dim), (columns[n].of(given[n], heads) for n in ("alpha", "beta"))
        decay = np.exp(given["rate"] * np.logaddexp(0, a + given["bias"]))[..., None, None]
        state, out = state.copy(), np.zeros((T, heads, v_dim))
        for at, real in tokens.real(layer, given):
            S = state[at].astype(np.float64)
            for t in real:
                S = S * decay[t]
                new = (v[t] - np.einsum("hk,hkv->hv", k[t], S)) / (1 + np.exp(-beta[t]))[:, None]
                S = S + np.einsum("hk,hv->hkv", k[t], new)
                out[t] = np.einsum("hk,hkv->hv", q[t], S) * k_dim**-0.5
            state[at] = S
            if norm_eps is not None:
                gate = ACTIVATIONS["silu"][1](columns["z"].of(given["z"], heads, v_dim)[real])
                out[real] = rms_normed(out[real], given["norm"], norm_eps) * gate
        return {"out": out.reshape(T, -1).astype(np.float32), "state": state}

    name = f"gated_delta_{tokens.suffix}_{'x'.join(map(str, shape))}_" + "_".join(n + c.name for n, c in columns.items())
    name += "" if norm_eps is None else f"_norm{number(norm_eps)}"
    return Kernel(
        f"{name}_{isa.name}",
        operands,
        {"out": TensorType((T, heads * v_dim), F32), "state": state_type},
        tokens.sequences * heads,
        write,
        in_place={"state": "state"},
        reference=reference,
        flops=T * heads * k_dim * v_dim * 7,
        nbytes=4 * (2 * tokens.sequences * prod(state_type.shape[1:]) + T * (2 * k_heads * k_dim + 2 * heads * v_dim)),
    )


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + LENGTH_EPS)


def _block(tokens: Tokens, isa: Isa, k_dim: int, vectors: int, width: int) -> tuple[int, bool]:
    """Choose how many columns of the state S [k_dim, v_dim] the kernel updates at a time."""
    limit = isa.registers // 4
    if tokens.in_turn > 1:
        fitting = (STACK_BYTES - 16 * tokens.in_turn) // (4 * k_dim * width)
        if fitting > 0:
            return largest_width(1 << min(fitting, limit).bit_length() - 1, vectors), True
    return largest_width(limit, vectors), False


@dataclass
class _Head:
    """A writer of a workgroup's code, which computes one head of one sequence.

    sizes: (k_dim, v_dim, elements of a vector, width of a block in vectors). at: the head's first
    column in each operand. known: f32 [4, tokens]: decay, beta, 1 / |k| and 1 / (|q| sqrt(k_dim)).
    """

    b: Body
    isa: Isa
    sizes: tuple[int, int, int, int]
    share: Share
    given: Mapping[str, Ssa]
    at: Mapping[str, Index]
    known: Ssa

    @property
    def first(self) -> Index:
        return self.b.mul(self.share.unit, self.sizes[1])

    def _read(self, name: str, t: Index, d: Index, width: int) -> Ssa:
        return self.b.vload(self.given[name], width, t, self.b.add(self.at[name], d))

    def _times(self, name: str, t: Index, d: Index) -> Ssa:
        """Load one element of an operand, such as k, and return it in every lane of a vector."""
        b = self.b
        return b.broadcast(b.load(self.given[name], t, b.add(self.at[name], d)), self.sizes[2])

    def know(self, t: Index) -> None:
        b, k_dim, head = self.b, self.sizes[0], self.share.unit

        def inverse_length(name: str, factor: float) -> Ssa:
            read = lambda d, width: self._read(name, t, d, width)
            of_one, squares = b.f32(factor), square_sum(b, k_dim, read)
            return b.divf(of_one, b.math("sqrt", b.addf(squares, b.f32(LENGTH_EPS))))

        alpha, beta = (b.load(self.given[name], t, self.at[name]) for name in ("alpha", "beta"))
        step = softplus(b, single_lane(b, b.addf(alpha, b.load(self.given["bias"], head))))
        decay = exp(b, b.mulf(step, single_lane(b, b.load(self.given["rate"], head))))
        slot = b.sub(t, self.share.low)
        b.store(b.extract(decay, 0), self.known, DECAY, slot)
        b.store(b.extract(sigmoid(b, single_lane(b, beta)), 0), self.known, BETA, slot)
        b.store(inverse_length("k", 1.0), self.known, OF_K, slot)
        b.store(inverse_length("q", k_dim**-0.5), self.known, OF_Q, slot)

    def block(self, column: Index, copy: Ssa | None) -> None:
        """Emit code that updates a block of columns of the state for all tokens.

        copy: stack buffer for a copy of the block, which is updated and written back; None to
            update the state itself.
        """
        b, (k_dim, _, width, vectors) = self.b, self.sizes
        state, offsets = self.given["state"], range(0, vectors * width, width)
        own: list[Index] = [self.share.at, self.share.unit]

        def slot(row: Index, d: int) -> tuple[Ssa, list[Index]]:
            return (state, [*own, row, b.add(column, d)]) if copy is None else (copy, [row, d])

        if copy is not None:
            with b.loop(0, k_dim) as row:
                for d in offsets:
                    b.vstore(b.vload(state, width, *own, row.index, b.add(column, d)), copy, row.index, d)
        with b.loop(self.share.low, self.share.end) as token:
            self._token(token.index, column, slot)
        if copy is not None:
            with b.loop(0, k_dim) as row:
                for d in offsets:
                    b.vstore(b.vload(copy, width, row.index, d), state, *own, row.index, b.add(column, d))

    def _token(self, t: Index, column: Index, slot: Callable[[Index, int], tuple[Ssa, list[Index]]]) -> None:
        b, (k_dim, _, width, vectors) = self.b, self.sizes
        offsets, rows = range(0, vectors * width, width), largest_width(max(8 // vectors, 1), k_dim)
        decay, beta, of_k, of_q = (b.load(self.known, i, b.sub(t, self.share.low)) for i in range(4))
        zero = b.splat(0.0, width)
        with b.loop(0, k_dim, rows, carry=[zero] * (rows * vectors)) as loop:
            recalled, sums = iter(loop.values), []
            for row in (b.add(loop.index, r) for r in range(rows)):
                k = self._times("k", t, row)
                for d in offsets:
                    buffer, where = slot(row, d)
                    sums.append(b.fma(k, b.vload(buffer, width, *where), next(recalled)))
            loop.give(*sums)
        lost, written, left = (b.broadcast(x, width) for x in (b.mulf(decay, of_k), b.mulf(beta, of_k), decay))
        new = []
        for i, d in enumerate(offsets):
            was = b.mulf(tree(b.addf, loop.results[i::vectors]), lost)
            new.append(b.mulf(b.subf(self._read("v", t, b.add(column, d), width), was), written))
        with b.loop(0, k_dim, rows, carry=[zero] * vectors) as loop:
            sums = loop.values
            for row in (b.add(loop.index, r) for r in range(rows)):
                k, q, before, sums = self._times("k", t, row), self._times("q", t, row), sums, []
                for value, total, d in zip(new, before, offsets, strict=True):
                    buffer, where = slot(row, d)
                    after = b.fma(k, value, b.mulf(b.vload(buffer, width, *where), left))
                    b.vstore(after, buffer, *where)
                    sums.append(b.fma(q, after, total))
            loop.give(*sums)
        scale = b.broadcast(of_q, width)
        for total, d in zip(loop.results, offsets, strict=True):
            b.vstore(b.mulf(total, scale), self.given["out"], t, b.add(self.first, b.add(column, d)))

    def gated_norm(self, t: Index, eps: float) -> None:
        b, (_, v_dim, width, _) = self.b, self.sizes
        out, first = self.given["out"], self.first
        read = lambda d, width: b.vload(out, width, t, b.add(first, d))
        scale = b.broadcast(inverse_rms(b, read, v_dim, eps), width)
        with b.loop(0, v_dim, width) as d:
            value = b.mulf(b.mulf(read(d.index, width), scale), b.vload(self.given["norm"], width, d.index))
            gate = ACTIVATIONS["silu"][0](b, self._read("z", t, d.index, width))
            b.vstore(b.mulf(value, gate), out, t, b.add(first, d.index))
