"""Lower layer operations: to StableHLO only (`portable`) or to castiron's kernels (`kernels`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from castiron.emitter.abi import NUMERICS
from castiron.emitter.ir import Graph, Module
from castiron.emitter.kernels.matmul.selection import kernel_of
from castiron.emitter.kernels.matmul.tiles import Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS, Isa
from castiron.emitter.layer_operations import LAYERS
from castiron.emitter.lowering import kernels, portable
from castiron.emitter.lowering.canonical import canonical
from castiron.emitter.lowering.fusion import fuse
from castiron.emitter.lowering.projection import NORM_LIMIT, Projector
from castiron.emitter.lowering.rewrite import Rule, rewrite
from castiron.emitter.operations import LOWERED
from castiron.emitter.step import ModelModule
from castiron.emitter.types import EmitError
from castiron.emitter.verifier import check


def _portable(function: Graph, isa: Isa, threads: int, project: Projector) -> tuple[Graph, Mapping[str, Rule]]:
    return function, portable.RULES


def _kernels(function: Graph, isa: Isa, threads: int, project: Projector) -> tuple[Graph, Mapping[str, Rule]]:
    return fuse(function, NORM_LIMIT), kernels.Context(isa, threads, project).rules()


# For each lowering, a function that prepares a graph and returns it with a rule for each kind of operation.
LOWERINGS: dict[str, Callable[[Graph, Isa, int, Projector], tuple[Graph, Mapping[str, Rule]]]] = {
    "kernels": _kernels,
    "portable": _portable,
}


def lower(
    module: ModelModule,
    lowering: str = "kernels",
    isa: str = "avx2",
    threads: int = 2,
    tiles: Callable[[Matmul], Tiles | None] = lambda matmul: None,
    numerics: str = "exact",
) -> Module:
    """Lower the layer operations of a module, and verify the result.

    isa: a key of ISAS. threads: expected number of CPU threads. tiles: returns tiles for a matmul,
    or None for the default. isa, threads and tiles change results by rounding only. numerics:
    "exact" leaves x f32; "canonical" also fixes the order of additions, so that results have the
    same bits for every isa, threads, tiles and number of tokens in a call; "fast" quantises x for
    several tokens and quantised weights. Raises EmitError for unknown values.
    """
    for what, value, known in (
        ("lowering", lowering, LOWERINGS),
        ("instruction set", isa, ISAS),
        ("numerics", numerics, NUMERICS),
    ):
        if value not in known:
            raise EmitError(f"unknown {what}: {value!r}; use one of {', '.join(known)}")
    if numerics != "exact" and lowering != "kernels":
        raise EmitError(f"numerics {numerics} need the lowering kernels, not {lowering}; use --lowering kernels")
    check(module, LAYERS)
    unit = ISAS[isa].in_canonical_form if numerics == "canonical" else ISAS[isa]
    project = Projector(lambda matmul: kernel_of(matmul, unit, threads, tiles(matmul)), unit, numerics == "fast")
    lowered = Module(module.name)
    for function in module.functions.values():
        rewrite(*LOWERINGS[lowering](function, unit, threads, project), lowered)
    if numerics == "canonical":
        lowered = canonical(lowered)
    check(lowered, LOWERED)
    return lowered
