"""Layer operations to what compiles: `portable` (StableHLO alone) or `kernels` (our own, through flow.dispatch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from castiron.emitter.ir import Function, Module
from castiron.emitter.kernels.products.choosing import kernel_of
from castiron.emitter.kernels.products.frame import Tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import ISAS, Isa
from castiron.emitter.layer_rules import LAYERS
from castiron.emitter.lowering import kernels, portable
from castiron.emitter.lowering.canonical import canonical
from castiron.emitter.lowering.fusion import fuse
from castiron.emitter.lowering.projection import NORM_LIMIT, Projector
from castiron.emitter.lowering.rewrite import Rule, rewrite
from castiron.emitter.step import ModelModule
from castiron.emitter.types import EmitError
from castiron.emitter.verifier import LOWERED, check


def _portable(function: Function, isa: Isa, threads: int, project: Projector) -> tuple[Function, Mapping[str, Rule]]:
    return function, portable.RULES


def _kernels(function: Function, isa: Isa, threads: int, project: Projector) -> tuple[Function, Mapping[str, Rule]]:
    return fuse(function, NORM_LIMIT), kernels.Context(isa, threads, project).rules()


# Of each lowering, what it makes of a function first, and its rule for each kind of operation.
LOWERINGS: dict[str, Callable[[Function, Isa, int, Projector], tuple[Function, Mapping[str, Rule]]]] = {
    "kernels": _kernels,
    "portable": _portable,
}
NUMERICS = ("exact", "canonical", "fast")


def lower(
    module: ModelModule,
    lowering: str = "kernels",
    isa: str = "avx2",
    threads: int = 2,
    tiles: Callable[[Product], Tiles | None] = lambda product: None,
    numerics: str = "exact",
) -> Module:
    """The verified module without layer operations.

    `isa` (a key of ISAS), `threads` (how many are expected to run it) and `tiles` (of a product, where it has better ones
    than the default) change no result but by rounding. numerics: "exact" leaves x f32, "canonical" has one order of all sums
    too, so that these and the number of tokens in a call change no bit, "fast" rounds x to bytes for products of several tokens
    with codes. EmitError for a lowering, an instruction set or numerics that are not known.
    """
    for what, value, known in (
        ("lowering", lowering, LOWERINGS),
        ("instruction set", isa, ISAS),
        ("numerics", numerics, NUMERICS),
    ):
        if value not in known:
            raise EmitError(f"{what} {value!r} is not one of {', '.join(known)}")
    if numerics != "exact" and lowering != "kernels":
        raise EmitError(f"numerics {numerics} need the lowering kernels, not {lowering}")
    check(module, LAYERS)
    unit = ISAS[isa].in_canonical_form if numerics == "canonical" else ISAS[isa]
    project = Projector(lambda product: kernel_of(product, unit, threads, tiles(product)), unit, numerics == "fast")
    lowered = Module(module.name)
    for function in module.functions.values():
        rewrite(*LOWERINGS[lowering](function, unit, threads, project), lowered)
    if numerics == "canonical":
        lowered = canonical(lowered)
    check(lowered, LOWERED)
    return lowered
