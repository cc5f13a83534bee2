"""Recurrent layers on a GPU: causal convolution, selective scan and gated delta rule.

A thread updates its part of a state in place, token by token. The parts do not depend on each
other:

    causal convolution   a thread: one feature; the last inputs of the filter are in registers
    selective scan       a workgroup: one head; a thread: rows of S [head_dim, n], in memory
    gated delta rule     a workgroup: one head; a thread: columns of S [k_dim, v_dim], in memory

The formulas are in `emitter.layers.recurrences`. Padding and idle sequences of a batch (negative
positions) give zeros and do not change the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from castiron.emitter.kernels.gpu.activations import ACTIVATIONS, sigmoid, softplus
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Index, Ssa
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.recurrent import causal_conv as cpu_conv
from castiron.emitter.kernels.recurrent import gated_delta as cpu_delta
from castiron.emitter.kernels.recurrent import selective_scan as cpu_scan
from castiron.emitter.kernels.recurrent.tokens import Columns, Share, Tokens

THREADS = 64
_ISA = ISAS["avx2"]  # for the operands and references of the CPU kernels, which do not depend on it


def _like(kernel: Kernel, workgroups: int, threads: int, write) -> Kernel:
    """Return a GPU kernel with the operands, results, reference and cost of a CPU kernel."""
    name = "gpu_" + kernel.name.removesuffix(f"_{_ISA.name}")
    return GpuKernel(
        name, kernel.operands, kernel.results, workgroups, write, kernel.reference, kernel.flops, kernel.nbytes,
        kernel.in_place, threads=threads,
    )  # fmt: skip


def _zero(b: GpuBody, share: Share, y: Ssa, column: Index) -> None:
    with b.loop(share.end, share.high) as t:
        b.store(b.f32(0.0), y, t.index, column)


@cache
def causal_conv(
    tokens: Tokens, features: int, positions: int, x: Columns, bias: bool = False, activation: str | None = None
) -> Kernel:
    """Return the GPU kernel with operands, results and arguments of the CPU's `causal_conv`."""
    n, units = positions, -(-features // THREADS)

    def write(b: GpuBody, state: Ssa, layer: Ssa, y: Ssa, weight: Ssa, **given: Ssa) -> None:
        share = tokens.share(b, units, layer, given)
        feature = b.add(b.mul(share.unit, THREADS), b.thread())
        with b.when(b.less(feature, features)):
            filters = [b.load(weight, i, feature) for i in range(n)]
            window = [b.load(state, share.at, i, feature) for i in range(n - 1)]
            with b.loop(share.low, share.end, carry=window) as t:
                seen = [*t.values, b.load(given["x"], t.index, b.add(feature, x.first))]
                total = b.load(given["bias"], feature) if bias else b.f32(0.0)
                for value, factor in zip(seen, filters, strict=True):
                    total = b.fma(value, factor, total)
                b.store(ACTIVATIONS[activation](b, total) if activation else total, y, t.index, feature)
                t.give(*seen[1:])
            for i, value in enumerate(t.results):
                b.store(value, state, share.at, i, feature)
            _zero(b, share, y, feature)

    kernel = cpu_conv.causal_conv(tokens, features, positions, x, isa=_ISA, bias=bias, activation=activation)
    return _like(kernel, tokens.sequences * units, THREADS, write)


def selective_scan(tokens: Tokens, shape: Sequence[int], columns: Mapping[str, Columns]) -> Kernel:
    """Return the GPU kernel with operands, results and arguments of the CPU's `selective_scan`."""
    groups, heads, head_dim, n = shape
    threads = -(-min(head_dim, 128) // 32) * 32

    def write(b: GpuBody, state: Ssa, layer: Ssa, y: Ssa, **given: Ssa) -> None:
        share, thread = tokens.share(b, heads, layer, given), b.thread()
        head, group = share.unit, b.div(share.unit, heads // groups)
        at = lambda name, first, size: b.add(b.mul(first, size), columns[name].first)
        rate, bias, skip = (b.load(given[name], head) for name in ("rate", "bias", "skip"))
        with b.strided(thread, head_dim) as i:
            column = b.add(b.mul(head, head_dim), i.index)
            with b.loop(share.low, share.end) as t:
                step = softplus(b, b.addf(b.load(given["dt"], t.index, at("dt", head, 1)), bias))
                decay = b.math("exp", b.mulf(step, rate))
                x = b.load(given["x"], t.index, b.add(at("x", head, head_dim), i.index))
                written = b.mulf(x, step)
                with b.loop(0, n, carry=[b.mulf(x, skip)]) as j:
                    own_b, own_c = (b.load(given[name], t.index, b.add(at(name, group, n), j.index)) for name in "BC")
                    old = b.load(state, share.at, head, i.index, j.index)
                    new = b.fma(written, own_b, b.mulf(old, decay))
                    b.store(new, state, share.at, head, i.index, j.index)
                    j.give(b.fma(new, own_c, j.values[0]))
                b.store(j.results[0], y, t.index, column)
            _zero(b, share, y, column)

    kernel = cpu_scan.selective_scan(tokens, shape, columns, isa=_ISA)
    return _like(kernel, tokens.sequences * heads, threads, write)


def gated_delta(tokens: Tokens, shape: Sequence[int], columns: Mapping[str, Columns], norm_eps: float | None = None) -> Kernel:
    """Return the GPU kernel with operands, results and arguments of the CPU's `gated_delta`."""
    k_heads, heads, k_dim, v_dim = shape
    threads = 1 << min(v_dim - 1, 127).bit_length()

    def write(b: GpuBody, state: Ssa, layer: Ssa, out: Ssa, **given: Ssa) -> None:
        share, thread = tokens.share(b, heads, layer, given), b.thread()
        head, group = share.unit, b.div(share.unit, heads // k_heads)

        def read(name: str, t: Index, first: Index, d: Index, size: int) -> Ssa:
            return b.load(given[name], t, b.add(b.add(b.mul(first, size), d), columns[name].first))

        with b.loop(share.low, share.end) as t:
            step = softplus(b, b.addf(read("alpha", t.index, head, 0, 1), b.load(given["bias"], head)))
            decay = b.math("exp", b.mulf(step, b.load(given["rate"], head)))
            beta = sigmoid(b, read("beta", t.index, head, 0, 1))
            with b.loop(0, k_dim, carry=[b.f32(cpu_delta.LENGTH_EPS)] * 2) as d:
                both = [read(name, t.index, group, d.index, k_dim) for name in "kq"]
                d.give(*(b.fma(x, x, total) for x, total in zip(both, d.values)))
            of_k, of_q = (b.divf(b.f32(f), b.math("sqrt", x)) for f, x in zip((1.0, k_dim**-0.5), d.results))
            with b.strided(thread, v_dim, [b.f32(0.0)]) as j:
                with b.loop(0, k_dim, carry=[b.f32(0.0)]) as row:
                    k = read("k", t.index, group, row.index, k_dim)
                    row.give(b.fma(k, b.load(state, share.at, head, row.index, j.index), row.values[0]))
                recalled = b.mulf(b.mulf(decay, row.results[0]), of_k)
                new = b.mulf(b.mulf(beta, b.subf(read("v", t.index, head, j.index, v_dim), recalled)), of_k)
                with b.loop(0, k_dim, carry=[b.f32(0.0)]) as row:
                    k, q = (read(name, t.index, group, row.index, k_dim) for name in "kq")
                    updated = b.fma(k, new, b.mulf(decay, b.load(state, share.at, head, row.index, j.index)))
                    b.store(updated, state, share.at, head, row.index, j.index)
                    row.give(b.fma(q, updated, row.values[0]))
                result = b.mulf(row.results[0], of_q)
                b.store(result, out, t.index, b.add(b.mul(head, v_dim), j.index))
                j.give(b.fma(result, result, j.values[0]))
            if norm_eps is not None:
                _gated_norm(b, thread, out, t.index, head, v_dim, norm_eps, j.results[0], given["norm"], read)
        with b.strided(thread, v_dim) as j:
            _zero(b, share, out, b.add(b.mul(head, v_dim), j.index))

    kernel = cpu_delta.gated_delta(tokens, shape, columns, isa=_ISA, norm_eps=norm_eps)
    return _like(kernel, tokens.sequences * heads, threads, write)


def _gated_norm(b, thread, out, t, head, v_dim, eps, square, weight, read) -> None:
    sums, at = b.sums(thread, [square], b.threads)
    mean = b.divf(b.load(sums, at), b.f32(v_dim))
    inverse = b.divf(b.f32(1.0), b.math("sqrt", b.addf(mean, b.f32(eps))))
    with b.strided(thread, v_dim) as j:
        column = b.add(b.mul(head, v_dim), j.index)
        normed = b.mulf(b.mulf(b.load(out, t, column), inverse), b.load(weight, j.index))
        b.store(b.mulf(normed, ACTIVATIONS["silu"](b, read("z", t, head, j.index, v_dim))), out, t, column)
    # The sums of the next token use the same shared memory.
    b.barrier()
