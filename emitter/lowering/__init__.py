"""Lower a model: replace its layer operations, such as `linear`, by StableHLO or kernel calls.

The lowering "kernels" uses kernels for CPUs, "gpu" uses kernels for GPUs, and "portable" uses
StableHLO only.
"""

from __future__ import annotations

from collections.abc import Callable

from castiron.emitter.abi import LOWERINGS, NUMERICS
from castiron.emitter.graph.ir import Module
from castiron.emitter.graph.stablehlo import LOWERED
from castiron.emitter.graph.types import EmitError
from castiron.emitter.graph.verifier import check
from castiron.emitter.kernels.gpu.matvec import MAX_TOKENS
from castiron.emitter.kernels.matmul.schedule import Tiles
from castiron.emitter.kernels.matmul.selection import kernel_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.layers.operations import LAYERS
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.lowering import gpu, kernels, portable
from castiron.emitter.lowering.canonical import canonical
from castiron.emitter.lowering.fusion import fuse
from castiron.emitter.lowering.gpu_fusion import fuse_kernels
from castiron.emitter.lowering.projection import NORM_LIMIT, Projector
from castiron.emitter.lowering.rewrite import rewrite


def lower(
    module: ModelModule,
    lowering: str = "kernels",
    isa: str = "avx2",
    threads: int = 2,
    tiles: Callable[[Matmul], Tiles | None] = lambda matmul: None,
    numerics: str = "exact",
) -> Module:
    """Return a verified module with layer operations replaced by kernel calls or StableHLO.

    lowering: "kernels" for CPUs, "gpu" for GPUs, or "portable" for StableHLO only.
    isa: name of the CPU's vector instruction set, such as "avx2".
    threads: number of threads for which tile sizes are chosen.
    tiles(matmul): returns the tile sizes of a matmul kernel, or None for the default.
    numerics: "exact" keeps activations in f32; results for different isa, threads and tiles differ
        only by rounding errors. "canonical" also fixes the order of additions, so that results have
        the same bits for every isa, threads, tiles and number of tokens in a call. "fast" rounds
        activations, and perhaps weights, to int8 or bf16 in calls with several tokens, where that
        is faster. "draft" does so in calls with one token too.

    Raise EmitError if lowering, isa or numerics is unknown, or if this lowering does not support
    these numerics.
    """
    for what, value, known in (
        ("lowering", lowering, LOWERINGS),
        ("instruction set", isa, ISAS),
        ("numerics", numerics, NUMERICS),
    ):
        if value not in known:
            raise EmitError(f"unknown {what}: {value!r}; use one of {', '.join(known)}")
    if numerics != "exact" and lowering != "kernels":
        raise EmitError(f"lowering {lowering!r} does not support numerics {numerics!r}; use --lowering kernels")
    check(module, LAYERS)
    cpu = ISAS[isa]
    project = Projector(lambda matmul: kernel_of(matmul, cpu, threads, tiles(matmul)), cpu, numerics)
    lowered = Module(module.name)
    for function in module.functions.values():
        if lowering == "portable":
            rewrite(function, portable.RULES, lowered)
        elif lowering == "gpu":
            rewrite(fuse(function, gpu.NORM_LIMIT, MAX_TOKENS, gpu=True), gpu.RULES, lowered)
            lowered.functions[function.name] = fuse_kernels(lowered.functions[function.name])
        else:
            rewrite(fuse(function, NORM_LIMIT), kernels.Context(cpu, threads, project).rules(), lowered)
    if lowering == "kernels":
        lowered = canonical(lowered, numerics)
    check(lowered, LOWERED)
    return lowered
