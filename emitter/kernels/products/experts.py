"""y = W_e x for the experts e that a router chose: one dispatch for all of them, which reads no other expert's weights.

A pair is a token and one of its experts; each is a GEMV (`products.gemv`) of its own with the expert's part of the
stacked weight.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from castiron.emitter.codecs import codec_of
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.epilogue import Arguments, Epilogue
from castiron.emitter.kernels.products.gemv import Gemv, GemvTiles
from castiron.emitter.kernels.products.gemv import default_tiles as gemv_tiles
from castiron.emitter.kernels.weights.packing import packed_shape, unpack
from castiron.emitter.kernels.writing.body import Body, Ssa, executable
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.types import F32, I8, I32, TensorType


def gemv_experts(
    codec_name: str,
    experts: int,
    pairs: int,
    out_features: int,
    in_features: int,
    *,
    isa: Isa,
    per_row: int = 1,
    glu: str | None = None,
    length: bool = False,
    threads: int = 2,
    tiles: GemvTiles | None = None,
) -> Kernel:
    """x [pairs / per_row, in], weight [experts * blocks, records, size], chosen i32 [pairs], (length i32) -> y [pairs, out].

    Row i of y is the product of x's row i // per_row with the weight of expert chosen[i], f32; the weight is the packed
    ones (`packed_shape`) of all experts in order. `glu` as of `gemv`. With `length` only the pairs of x's rows < length
    are computed, the others are zero. `tiles.workgroups` are for each pair. ValueError as of `gemv`, and for pairs that
    the rows of x do not share evenly.
    """
    if pairs % per_row:
        raise ValueError(f"gemv_experts has {pairs} pairs, of which each row of x cannot have {per_row}")
    codec, epilogue = codec_of(codec_name), Epilogue(glu=glu)
    rows = epilogue.weight_rows(out_features)
    blocks, *record = shape = packed_shape(codec_name, rows, in_features)
    tiles = tiles or default_tiles(codec_name, pairs, out_features, in_features, isa, epilogue.blocks, threads)
    weight_type = TensorType((experts * blocks, *record), I8)
    operands = (
        TensorType((pairs // per_row, in_features), F32),
        weight_type,
        TensorType((pairs,), I32),
        *[TensorType((), I32)] * length,
    )
    y_type = TensorType((pairs, out_features), F32)

    def write(b: Body, x: Ssa, weight: Ssa, chosen: Ssa, *rest: Ssa) -> None:
        pair, share = b.div(b.workgroup(), tiles.workgroups), b.rem(b.workgroup(), tiles.workgroups)
        row, out = b.div(pair, per_row), rest[-1]
        given = Arguments((x, weight, out), False, epilogue, length=False)

        def product() -> None:
            base = b.mul(b.to_index(b.load(chosen, pair)), blocks)
            sizes = (out_features, in_features, shape)
            Gemv(b, codec, isa, tiles, epilogue, given, *sizes, None, (row, pair), base).write(share)

        if not length:
            product()
            return
        real = b.less(row, b.to_index(b.load(rest[0])))
        with b.when(real):
            product()
        with b.when(b.both(b.negate(real), b.equal(share, 0))), b.loop(0, out_features) as k:
            b.store(b.f32(0.0), out, pair, k.index)

    def reference(x: np.ndarray, weight: np.ndarray, chosen: np.ndarray, *real: np.ndarray) -> tuple[np.ndarray, ...]:
        y = np.zeros(y_type.shape, np.float32)
        for pair in range(per_row * int(real[0]) if length else pairs):
            own = unpack(codec_name, weight.reshape(experts, *shape)[chosen[pair]], rows, in_features)
            products = x[pair // per_row].astype(np.float64) @ own.astype(np.float64).T
            y[pair] = epilogue.define(products[None], out_features, None, None)[0]
        return (y,)

    name = f"gemv_{codec_name}_{out_features}x{in_features}{epilogue.name}_{pairs}of{experts}by{per_row}"
    name += "_length" * length + f"_{isa.name}_{tiles.name}"
    return Kernel(
        name=name,
        operands=operands,
        results=(y_type,),
        tied=(None,),
        text=executable(name, operands, (y_type,), (None,), pairs * tiles.workgroups, write),
        reference=reference,
        flops=2 * pairs * rows * in_features,
        bytes=sum(t.nbytes for t in (operands[0], y_type)) + weight_type.nbytes * min(pairs, experts) // experts,
    )


def default_tiles(
    codec_name: str, pairs: int, out_features: int, in_features: int, isa: Isa, blocks: int = 1, threads: int = 2
) -> GemvTiles:
    """Those of one GEMV, in as many workgroups as give every thread two to do."""
    tiles = gemv_tiles(codec_name, out_features, in_features, isa, blocks, threads)
    return replace(tiles, workgroups=min(tiles.workgroups, -(-2 * threads // pairs)))
