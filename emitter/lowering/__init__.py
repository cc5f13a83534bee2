"""Layer operations to what compiles: `portable` (StableHLO alone) or `kernels` (our own, through flow.dispatch)."""

from __future__ import annotations

from emitter.ir import Module
from emitter.kernels.isa import ISAS
from emitter.layers import ModelModule
from emitter.lowering import kernels, portable
from emitter.types import EmitError
from emitter.verifier import verify

LOWERINGS = ("kernels", "portable")


def lower(module: ModelModule, lowering: str = "kernels", isa: str = "avx2") -> Module:
    """The verified module without layer operations. `isa` (a key of ISAS) shapes the kernels' tiles only."""
    if lowering not in LOWERINGS:
        raise EmitError(f"lowering {lowering!r} is not one of {', '.join(LOWERINGS)}")
    if isa not in ISAS:
        raise EmitError(f"instruction set {isa!r} is not one of {', '.join(ISAS)}")
    lowered = portable.lower(module) if lowering == "portable" else kernels.lower(module, ISAS[isa])
    verify(lowered)
    return lowered
