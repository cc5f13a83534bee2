"""Layer operations to what compiles: `portable` (StableHLO alone) or `kernels` (our own, through flow.dispatch)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from emitter.ir import Module
from emitter.kernels.isa import ISAS
from emitter.kernels.product import Product, Tiles
from emitter.layers import ModelModule
from emitter.lowering import kernels, portable
from emitter.types import EmitError
from emitter.verifier import verify

LOWERINGS = ("kernels", "portable")


def lower(
    module: ModelModule,
    lowering: str = "kernels",
    isa: str = "avx2",
    threads: int = 2,
    tiles: Mapping[Product, Tiles] = MappingProxyType({}),
) -> Module:
    """The verified module without layer operations.

    `isa` (a key of ISAS), `threads` (how many are expected to run it) and `tiles` (for products that have better ones
    than the default) shape the kernels' tiles only. EmitError for a lowering or instruction set that is not known.
    """
    if lowering not in LOWERINGS:
        raise EmitError(f"lowering {lowering!r} is not one of {', '.join(LOWERINGS)}")
    if isa not in ISAS:
        raise EmitError(f"instruction set {isa!r} is not one of {', '.join(ISAS)}")
    lowered = portable.lower(module) if lowering == "portable" else kernels.lower(module, ISAS[isa], threads, tiles)
    verify(lowered)
    return lowered
