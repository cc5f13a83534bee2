"""Choose the kernel of a matmul from a table: the first row whose condition the matmul meets."""

from collections.abc import Callable, Mapping
from dataclasses import astuple, fields
from functools import cache
from typing import Any

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.matmul.experts import ExpertGemvs, Grouped, GroupedInteger
from castiron.emitter.kernels.matmul.gemm import Gemm
from castiron.emitter.kernels.matmul.gemm_bf16 import GemmBf16
from castiron.emitter.kernels.matmul.gemm_integer import GemmInteger, SmallBatchInteger
from castiron.emitter.kernels.matmul.gemm_matrix import GemmMatrix
from castiron.emitter.kernels.matmul.gemv import Gemv
from castiron.emitter.kernels.matmul.schedule import (
    FEW_TOKENS,
    MATRIX_MIN_INT8_TOKENS,
    MATRIX_MIN_SMALL_TOKENS,
    MATRIX_MIN_TOKENS,
    GemmBf16Tiles,
    GemmIntegerTiles,
    GemmMatrixTiles,
    GemmTiles,
    GemvTiles,
    GroupedIntegerTiles,
    GroupedTiles,
    SmallBatchIntegerTiles,
    SmallBatchTiles,
    Tiles,
    has_small_panel,
)
from castiron.emitter.kernels.matmul.small_batch import SmallBatch
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.split_x import DEPTH

MAX_MADD_TOKENS = 3  # more tokens are faster in f32 if the CPU lacks instructions such as VNNI

# Columns: predicate of a matmul, prefix of the kernel's name, class of its tiles, class that emits its body.
_CHOICES: tuple[tuple[Callable[[Matmul], bool], str, type[Tiles], type[Any]], ...] = (
    (lambda m: m.is_grouped and m.digits > 0, "grouped", GroupedIntegerTiles, GroupedInteger),
    (lambda m: m.is_grouped and m.numerics == "f32", "grouped", GroupedTiles, Grouped),
    (lambda m: m.experts > 0, "gemv", GemvTiles, ExpertGemvs),
    (lambda m: m.tokens == 1, "gemv", GemvTiles, Gemv),
    (lambda m: m.digits > 0 and m.tokens <= FEW_TOKENS, "few", SmallBatchIntegerTiles, SmallBatchInteger),
    (lambda m: m.digits > 0, "gemm", GemmIntegerTiles, GemmInteger),
    (lambda m: m.numerics in ("bf16_split", "bf16_matrix"), "gemm", GemmMatrixTiles, GemmMatrix),
    (lambda m: m.numerics == "bf16_pairs", "gemm", GemmBf16Tiles, GemmBf16),
    (lambda m: m.tokens <= FEW_TOKENS, "few", SmallBatchTiles, SmallBatch),
    (lambda m: True, "gemm", GemmTiles, Gemm),
)


def _choice(matmul: Matmul) -> tuple[str, type[Tiles], type[Any]]:
    return next(choice[1:] for choice in _CHOICES if choice[0](matmul))


def numerics_of(matmul: Matmul, isa: Isa, numerics: str = "exact") -> str:
    """Return one of `matmul_spec.NUMERICS`, how x is multiplied; numerics: of `--numerics`."""
    codec = matmul.format
    # Without VNNI, int8 dot products take several instructions, and more of them for codes of 8 bits.
    has_wide_codes, is_madd = codec.integers[1] - codec.integers[0] > 127, isa.dot == "madd"
    is_slow = has_wide_codes and is_madd and isa.lanes == 8
    has_int8 = codec.quantised and not codec.e4m3 and not is_slow
    is_single = not matmul.is_grouped if matmul.experts else matmul.tokens == 1
    is_integer = codec.quantised and codec.has_integers
    if numerics == "canonical":
        return "int24" if is_integer else "f32"
    is_fast_in_int24 = not is_madd or (not has_wide_codes and (is_single or matmul.tokens <= MAX_MADD_TOKENS))
    exact = "int24" if is_integer and is_fast_in_int24 else "f32"
    if is_single:
        return "int8" if numerics == "draft" and has_int8 and not matmul.experts else exact
    is_fast = numerics in ("fast", "draft")
    if matmul.experts:
        return "int8" if is_fast and has_int8 else exact
    min_tokens = MATRIX_MIN_INT8_TOKENS if is_fast and has_int8 else MATRIX_MIN_TOKENS
    if not is_fast and has_small_panel(codec) and codec.group >= DEPTH:
        min_tokens = MATRIX_MIN_SMALL_TOKENS
    if isa.matrix and matmul.tokens >= min_tokens and (is_fast or codec.has_bf16_codes):
        return "bf16_matrix" if is_fast else "bf16_split"
    if is_fast and has_int8:
        return "int8"
    # For few tokens, decoding weights into a panel of bf16 takes longer than it saves; bf16 weights are not decoded.
    # CPUs with AMX multiply pairs of bf16 at half the speed of f32.
    is_fast_in_bf16 = (matmul.codec == "bf16" and not isa.matrix) or matmul.tokens > FEW_TOKENS
    return "bf16_pairs" if is_fast and isa.pairs and is_fast_in_bf16 else exact


def default_tiles(matmul: Matmul, isa: Isa, threads: int = 2) -> Tiles:
    _, kind, _ = _choice(matmul)
    return kind.default(matmul, isa, threads)


def read_tiles(matmul: Matmul, values: Mapping[str, int]) -> Tiles:
    """Return the tile sizes of a matmul's kernel, given by name, such as {"rows": 4, ...}.

    Raises ValueError for unknown or missing names, and for values that are not integers.
    """
    _, kind, _ = _choice(matmul)
    names = [field.name for field in fields(kind)]
    if set(values) != set(names) or any(type(v) is not int for v in values.values()):
        raise ValueError(f"invalid tiles of matmul {matmul.name}: {dict(values)}; give integers for {', '.join(names)}")
    return kind(**values)


@cache
def kernel_of(matmul: Matmul, isa: Isa, threads: int = 2, tiles: Tiles | None = None) -> Kernel:
    """Return the kernel of a matmul for a CPU's instruction set.

    threads: number of threads that run the kernel; the default tile sizes depend on it.
    tiles: tile sizes, or None for the defaults.

    Raises ValueError if the tile sizes do not fit the matmul.
    """
    prefix, _, writer = _choice(matmul)
    tiles = tiles or default_tiles(matmul, isa, threads)
    if any(type(value) is not int or value < 1 for value in astuple(tiles)) or not tiles.fit(matmul):
        raise ValueError(
            f"invalid tiles of matmul {matmul.name}: {tiles.name}; "
            f"use positive integers that {type(tiles).__name__}.fit accepts, or omit tiles for the default"
        )
    return Kernel(
        f"{prefix}_{matmul.name}_{isa.name}_{tiles.name}",
        matmul.operands(),
        matmul.results(),
        tiles.workgroups * (matmul.tokens if writer is ExpertGemvs else 1),
        lambda b, **buffers: writer(b, matmul, isa, tiles, buffers).write(),
        reference=matmul.define,
        flops=matmul.flops,
        nbytes=matmul.nbytes,
        matmul=matmul,
    )
