"""y = W x for one token: packed weights are decoded in registers, sums are f32.

Sixteen rows run side by side, one a lane, so nothing is ever summed across lanes. x stands on the stack, already
normalised and multiplied by the powers of two with which the codes come (`emitter.kernels.records`); the sums of its
groups, which minima and offsets need, stand beside it. Both are made once per workgroup.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emitter.codecs import Codec, codec_of
from emitter.kernels.fusions import Arguments, Epilogue, norm_name, norm_of
from emitter.kernels.isa import Isa
from emitter.kernels.kernel import Kernel
from emitter.kernels.records import CACHE_LINE, Records, code_factors
from emitter.kernels.rope_append import inverse_rms
from emitter.kernels.text import Body, Index, Value, executable, vector_type
from emitter.kernels.vector_math import lane_sums
from emitter.packing import LANES, packed_shape, unpack
from emitter.types import F32, I8, TensorType

STACK_BYTES = 28 << 10  # of the 32 KB that IREE allows a kernel; the rest is the compiler's, for spills
WORKGROUP_BYTES = 48 << 10  # of weights: enough to hide a workgroup's start, little enough to balance threads
MOST_WORKGROUPS = 64


@dataclass(frozen=True)
class GemvTiles:
    """What a search may vary; results change by rounding only.

    chains: sums a row is split into, to hide the latency of fma. ahead: bytes that weights are asked for in advance.
    unroll: records of a float codec in one iteration.
    """

    workgroups: int
    chains: int
    ahead: int
    unroll: int = 8

    @property
    def name(self) -> str:
        return f"w{self.workgroups}c{self.chains}a{self.ahead}u{self.unroll}"


def default_tiles(codec_name: str, out_features: int, in_features: int, isa: Isa, blocks: int = 1) -> GemvTiles:
    """Tiles that measured well; `blocks` is `Epilogue.blocks`."""
    shape = packed_shape(codec_name, blocks * out_features, in_features)
    nbytes = shape[0] * shape[1] * shape[2]
    workgroups = max(1, min(MOST_WORKGROUPS, nbytes // WORKGROUP_BYTES, -(-out_features // LANES)))
    return GemvTiles(workgroups, chains=8 if isa.lanes == LANES else 2, ahead=5 << 10)


def gemv(
    codec_name: str,
    out_features: int,
    in_features: int,
    *,
    isa: Isa,
    rms_eps: float | None = None,
    bias: bool = False,
    residual: bool = False,
    glu: str | None = None,
    tiles: GemvTiles | None = None,
) -> Kernel:
    """x [1, in], (norm [in]), weight (`packed_shape`, i8), (bias [out]), (residual [1, out]) -> y [1, out], f32.

    `rms_eps` asks for RMS norm of x with the weight `norm` before, `glu` for act(gate) * up after (then the packed
    weight has `Epilogue.weight_rows(out)` rows, interleaved), `bias` and `residual` are added last. ValueError for an
    unknown codec or activation, or rows that are not whole blocks.
    """
    codec = codec_of(codec_name)
    epilogue = Epilogue(bias, residual, glu)
    rows = epilogue.weight_rows(out_features)
    shape = packed_shape(codec_name, rows, in_features)
    tiles = tiles or default_tiles(codec_name, out_features, in_features, isa, epilogue.blocks)
    norm = rms_eps is not None
    x_type, y_type = TensorType((1, in_features), F32), TensorType((1, out_features), F32)
    weight_type = TensorType(shape, I8)
    operands = (
        x_type,
        *[TensorType((in_features,), F32)] * norm,
        weight_type,
        *[TensorType((out_features,), F32)] * bias,
        *[y_type] * residual,
    )

    def write(b: Body, *arguments: Value) -> None:
        given = Arguments(arguments, norm, epilogue, length=False)
        _Gemv(b, codec, isa, tiles, epilogue, given, out_features, in_features, shape, rms_eps).write()

    def reference(*arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        given = Arguments(arguments, norm, epilogue, length=False)
        weight = unpack(codec_name, given.weight, rows, in_features)
        products = norm_of(given.x, given.norm, rms_eps) @ weight.astype(np.float64).T
        return (epilogue.define(products, out_features, given.bias, given.residual),)

    name = f"gemv_{codec_name}_{out_features}x{in_features}{norm_name(rms_eps)}{epilogue.name}_{isa.name}_{tiles.name}"
    return Kernel(
        name=name,
        operands=operands,
        results=(y_type,),
        tied=(None,),
        text=executable(name, operands, (y_type,), (None,), tiles.workgroups, write),
        reference=reference,
        flops=2 * rows * in_features,
        bytes=sum(t.nbytes for t in (*operands, y_type)),
    )


class _Gemv:
    """Writes the body of one kernel."""

    def __init__(
        self,
        b: Body,
        codec: Codec,
        isa: Isa,
        tiles: GemvTiles,
        epilogue: Epilogue,
        given: Arguments,
        out_features: int,
        in_features: int,
        shape: tuple[int, int, int],
        rms_eps: float | None,
    ):
        self.b, self.codec, self.tiles, self.epilogue, self.given = b, codec, tiles, epilogue, given
        self.lanes = isa.lanes
        self.out_features, self.in_features, self.rms_eps = out_features, in_features, rms_eps
        self.blocks, self.count, self.size = shape
        self.records = Records(b, codec, isa, given.weight)
        self.layout = self.records.layout
        self.vectors = self.records.vectors
        self.ahead = -(-tiles.ahead // self.size)
        self.needs_sums = bool(codec.offset or codec.minimum)

    def write(self) -> None:
        b, tiles = self.b, self.tiles
        per_k = 4 + (4 / self.codec.group if self.needs_sums else 0)
        chunks = -(-int(self.in_features * per_k) // STACK_BYTES)
        chunk = -(-self.count // chunks)  # records
        elements = self.layout.elements
        self.x = b.stack(chunk * elements)
        self.sums = b.stack(chunk * elements // self.codec.group) if self.needs_sums else None
        self.inverse = None
        if self.rms_eps is not None:
            inverse = inverse_rms(b, self._read_x, self.in_features, self.rms_eps, self.lanes)
            self.inverse = inverse
        results = self.blocks // self.epilogue.blocks
        workgroup = b.workgroup()
        low = b.div(b.mul(workgroup, results), tiles.workgroups)
        high = b.div(b.mul(b.add(workgroup, 1), results), tiles.workgroups)
        most = -(-results // tiles.workgroups) * self.epilogue.blocks
        partial = b.stack(most, LANES) if chunks > 1 else None
        for first in range(0, self.count, chunk):
            last = min(first + chunk, self.count)
            self._fill(first * elements, last * elements)
            with b.loop(low, high) as row:
                products = []
                for i in range(self.epilogue.blocks):
                    block = b.add(b.mul(row.index, self.epilogue.blocks), i)
                    slot = b.add(b.mul(b.sub(row.index, low), self.epilogue.blocks), i)
                    totals = self._start(partial, slot, first == 0)
                    totals = self._block(block, first, last, totals)
                    if last < self.count:
                        for v, total in enumerate(totals):
                            b.vstore(total, partial, slot, v * self.lanes)
                    products.append(totals)
                if last == self.count:
                    self._finish(row.index, products)

    def _read_x(self, k: Index, width: int) -> Value:
        return self.b.vload(self.given.x, width, 0, k)

    def _start(self, partial: Value | None, slot: Index, first: bool) -> list[Value]:
        if first:
            return [self.b.splat(0.0, self.lanes)] * self.vectors
        return [self.b.vload(partial, self.lanes, slot, v * self.lanes) for v in range(self.vectors)]

    def _prepared(self, k: Index, width: int) -> Value:
        """x[k], x[k + 1], ... after the norm."""
        b = self.b
        x = self._read_x(k, width)
        if self.inverse is None:
            return x
        return b.mulf(b.mulf(x, b.broadcast(self.inverse, width)), b.vload(self.given.norm, width, k))

    def _fill(self, first: int, last: int) -> None:
        """The stack's copy of x from element `first` to `last`, and the sums of its groups."""
        b, lanes = self.b, self.lanes
        if not self.codec.quantised:
            end = min(last, self.in_features)
            whole = (end - first) // lanes * lanes
            with b.loop(0, whole, lanes) as k:
                b.vstore(self._prepared(b.add(k.index, first), lanes), self.x, k.index)
            for k in range(whole, end - first):
                b.vstore(self._prepared(first + k, 1), self.x, k)
            for k in range(end - first, last - first):
                b.vstore(b.splat(0.0, 1), self.x, k)
            return
        group, factors = self.codec.group, code_factors(self.codec)
        sign = self.codec.minimum or -self.codec.offset
        with b.loop(0, (last - first) // group) as g:
            start = b.mul(g.index, group)
            parts = []
            for k in range(0, group, lanes):
                x = self._prepared(b.add(b.add(start, first), k), lanes)
                parts.append(x)
                listed = ", ".join(f"{f:.9e}" for f in factors[k : k + lanes])
                if (factors[k : k + lanes] != 1).any():
                    x = b.mulf(x, b.constant(f"dense<[{listed}]>", vector_type(lanes)))
                b.vstore(x, self.x, b.add(start, k))
            if self.needs_sums:
                while len(parts) > 1:
                    parts = [b.addf(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
                total = b.extract(lane_sums(b, parts), 0)
                b.store(b.mulf(total, b.f32(sign)), self.sums, g.index)

    def _block(self, block: Index, first: int, last: int, totals: list[Value]) -> list[Value]:
        """totals + the products of one block's records from `first` to `last`."""
        if not self.codec.quantised:
            return self._float_block(block, first, last, totals)
        with self.b.loop(first, last, carry=totals) as record:
            place = self.b.sub(record.index, first)
            add = self._group_record if self.layout.groups == 1 else self._super_record
            record.give(*add(block, record.index, place, record.values))
        return record.results

    def _group_record(self, block: Index, record: Index, place: Index, totals: list[Value]) -> list[Value]:
        """A record of one group: total + d * sum(x code) + m * sum(x)."""
        b, records = self.b, self.records
        self.records.prefetch(block, b.add(record, self.ahead), 0, -(-self.size // CACHE_LINE))
        products = self._group(block, record, 0, place)
        done = []
        for v, total in enumerate(totals):
            total = b.fma(products[v], records.d(block, record, v), total)
            if self.codec.minimum:
                total = b.fma(records.m(block, record, v), self._sum(place), total)
            done.append(total)
        return done

    def _super_record(self, block: Index, record: Index, place: Index, totals: list[Value]) -> list[Value]:
        """A record of many groups: total + d * sum over groups(scale * sum(x code)) + m * sum(minimum * sum(x))."""
        b, records, groups = self.b, self.records, self.layout.groups
        minima = self.codec.minimum != 0
        zeros = [b.splat(0.0, self.lanes)] * self.vectors
        with b.loop(0, groups, carry=zeros * (1 + minima)) as g:
            offset = records.codes_at(g.index)
            records.prefetch(block, b.add(record, self.ahead), offset, -(-self.layout.group_bytes // CACHE_LINE))
            at = b.add(b.mul(place, groups), g.index)
            products = self._group(block, record, g.index, at)
            given = []
            for v in range(self.vectors):
                given.append(b.fma(products[v], records.group_scale(block, record, g.index, v), g.values[v]))
            for v in range(self.vectors if minima else 0):
                minimum = records.group_minimum(block, record, g.index, v)
                given.append(b.fma(minimum, self._sum(at), g.values[self.vectors + v]))
            g.give(*given)
        done = []
        for v, total in enumerate(totals):
            total = b.fma(g.results[v], records.d(block, record, v), total)
            if minima:
                total = b.fma(g.results[self.vectors + v], records.m(block, record, v), total)
            done.append(total)
        return done

    def _sum(self, group: Index) -> Value:
        return self.b.broadcast(self.b.load(self.sums, group), self.lanes)

    def _group(self, block: Index, record: Index, group: Index, place: Index) -> list[Value]:
        """sum over a group of x * code, one vector for 16 rows each; `place` is the group's number in the chunk."""
        b, chains = self.b, self.tiles.chains
        codes = self.records.group_codes(block, record, group)
        start = b.mul(place, self.codec.group)
        offset = self._sum(place) if self.codec.minimum == 0 and self.needs_sums else None
        sums: list[list[Value | None]] = [[offset] + [None] * (chains - 1) for _ in range(self.vectors)]
        for k in range(self.codec.group):
            x = b.broadcast(b.load(self.x, b.add(start, k)), self.lanes)
            for v in range(self.vectors):
                code, chain = codes.code(k, v), k % chains
                so_far = sums[v][chain]
                sums[v][chain] = b.mulf(code, x) if so_far is None else b.fma(code, x, so_far)
        return [self._total(chains_of_v) for chains_of_v in sums]

    def _total(self, parts: list[Value | None]) -> Value:
        parts = [part for part in parts if part is not None]
        while len(parts) > 1:
            parts = [self.b.addf(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        return parts[0]

    def _float_block(self, block: Index, first: int, last: int, totals: list[Value]) -> list[Value]:
        b, chains, unroll, elements = self.b, self.tiles.chains, self.tiles.unroll, self.layout.elements
        zeros = [b.splat(0.0, self.lanes)] * self.vectors

        def add(record: Index, sums: list[Value], chain: int) -> None:
            for v in range(self.vectors):
                for i, weight in enumerate(self.records.elements(block, record, v)):
                    k = b.add(b.mul(b.sub(record, first), elements), i)
                    x = b.broadcast(b.load(self.x, k), self.lanes)
                    slot = (chain * elements + i) % chains * self.vectors + v
                    sums[slot] = b.fma(weight, x, sums[slot])

        whole = (last - first) // unroll * unroll
        with b.loop(first, first + whole, unroll, carry=totals + zeros * (chains - 1)) as loop:
            self.records.prefetch(block, b.add(loop.index, self.ahead), 0, -(-self.size * unroll // CACHE_LINE))
            sums = list(loop.values)
            for i in range(unroll):
                add(b.add(loop.index, i), sums, i)
            loop.give(*sums)
        sums = list(loop.results)
        for i, record in enumerate(range(first + whole, last)):
            add(record, sums, i)
        return [self._total(sums[v :: self.vectors]) for v in range(self.vectors)]

    def _finish(self, row: Index, products: list[list[Value]]) -> None:
        """Store the 16 results of block `row`, of which the last may have fewer."""
        b, given = self.b, self.given
        results = self.epilogue.combine(b, products)
        column = b.mul(row, LANES)
        ragged = self.out_features % LANES

        def store_whole() -> None:
            for v, y in enumerate(results):
                at = b.add(column, v * self.lanes)
                b.vstore(self.epilogue.finish(b, y, given.bias, given.residual, 0, at), given.out, 0, at)

        def store_ragged() -> None:
            for lane in range(ragged):
                at = b.add(column, lane)
                y = b.extract(results[lane // self.lanes], lane % self.lanes)
                b.store(self.epilogue.finish(b, y, given.bias, given.residual, 0, at), given.out, 0, at)

        if not ragged:
            store_whole()
            return
        end = self.blocks // self.epilogue.blocks - 1
        with b.when(b.less(row, end)):
            store_whole()
        with b.when(b.equal(row, end)):
            store_ragged()
