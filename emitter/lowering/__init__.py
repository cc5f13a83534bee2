"""Layer operations to what compiles: `portable` (StableHLO alone) or `kernels` (our own, through flow.dispatch)."""

from __future__ import annotations

from collections.abc import Callable

from castiron.emitter.ir import Module
from castiron.emitter.kernels.products.choosing import kernel_of
from castiron.emitter.kernels.products.frame import Tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.emitter.layer_rules import LAYERS
from castiron.emitter.lowering import kernels, portable
from castiron.emitter.step import ModelModule
from castiron.emitter.types import EmitError
from castiron.emitter.verifier import LOWERED, check

LOWERINGS = ("kernels", "portable")


def lower(
    module: ModelModule,
    lowering: str = "kernels",
    isa: str = "avx2",
    threads: int = 2,
    tiles: Callable[[Product], Tiles | None] = lambda product: None,
) -> Module:
    """The verified module without layer operations.

    `isa` (a key of ISAS), `threads` (how many are expected to run it) and `tiles` (of a product, where it has better ones
    than the default) change no result but by rounding. EmitError for a lowering or instruction set that is not known.
    """
    if lowering not in LOWERINGS:
        raise EmitError(f"lowering {lowering!r} is not one of {', '.join(LOWERINGS)}")
    if isa not in ISAS:
        raise EmitError(f"instruction set {isa!r} is not one of {', '.join(ISAS)}")
    check(module, LAYERS)
    if lowering == "portable":
        lowered = portable.lower(module)
    else:
        lowered = kernels.lower(module, ISAS[isa], lambda product: kernel_of(product, ISAS[isa], threads, tiles(product)))
    check(lowered, LOWERED)
    return lowered
