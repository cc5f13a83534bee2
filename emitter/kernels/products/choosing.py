"""Which kernel a product gets: a table, first row that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products import (
    experts,
    few_bytes,
    gemm,
    gemm_bytes,
    gemm_canonical,
    gemm_few,
    gemm_matrix,
    gemm_pairs,
    gemv,
    grouped,
)
from castiron.emitter.kernels.products.frame import Tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import Isa


@dataclass(frozen=True)
class _Way:
    takes: Callable[[Product], bool]
    kernel: Callable[..., Kernel]
    default_tiles: Callable[[Product, Isa, int], Tiles]
    tiles: type[Tiles]


_WAYS = (
    _Way(
        lambda product: product.experts > 0 and product.numerics == "bytes",
        grouped.grouped_bytes,
        grouped.default_bytes_tiles,
        grouped.GroupedBytesTiles,
    ),
    _Way(
        lambda product: 0 < grouped.LEAST * product.experts <= product.tokens and product.numerics == "exact",
        grouped.grouped,
        grouped.default_tiles,
        grouped.GroupedTiles,
    ),
    _Way(lambda product: product.experts > 0, experts.experts, experts.default_tiles, gemv.GemvTiles),
    _Way(lambda product: product.tokens == 1, gemv.gemv, gemv.default_tiles, gemv.GemvTiles),
    _Way(
        lambda product: product.numerics == "bytes" and product.tokens <= gemm_few.MOST_TOKENS,
        few_bytes.few_bytes,
        few_bytes.default_tiles,
        few_bytes.FewBytesTiles,
    ),
    _Way(
        lambda product: product.numerics == "bytes",
        gemm_bytes.gemm_bytes,
        gemm_bytes.default_tiles,
        gemm_bytes.GemmBytesTiles,
    ),
    _Way(
        lambda product: product.numerics in ("pieces", "matrix"),
        gemm_matrix.gemm_matrix,
        gemm_matrix.default_tiles,
        gemm_matrix.GemmMatrixTiles,
    ),
    _Way(
        lambda product: product.numerics == "pairs",
        gemm_pairs.gemm_pairs,
        gemm_pairs.default_tiles,
        gemm_pairs.GemmPairsTiles,
    ),
    _Way(
        lambda product: product.numerics == "canonical",
        gemm_canonical.gemm_canonical,
        gemm_canonical.default_tiles,
        gemm_canonical.GemmCanonicalTiles,
    ),
    _Way(lambda product: product.tokens <= gemm_few.MOST_TOKENS, gemm_few.gemm_few, gemm_few.default_tiles, gemm_few.FewTiles),
    _Way(lambda product: True, gemm.gemm, gemm.default_tiles, gemm.GemmTiles),
)


def _way(product: Product) -> _Way:
    return next(way for way in _WAYS if way.takes(product))


def numerics_of(product: Product, isa: Isa, fast: bool) -> str:
    """What is best done to x of a product whose numerics are open (`product.NUMERICS`): rounded only if `fast`.

    One token is bound by memory and gains nothing, nor do pairs of which hardly two have one expert. On a vector unit in its
    canonical form, kernels of one or a few tokens are canonical as they are, as are those that have weights of no codes.
    """
    if isa.canonical:
        several = product.experts or (product.format.quantised and product.tokens > gemm_few.MOST_TOKENS)
        return "canonical" if several else "exact"
    if product.experts:
        together = product.tokens >= grouped.LEAST_BYTES * product.experts
        return "bytes" if fast and together and product.format.quantised else "exact"
    if product.tokens == 1:
        return "exact"
    if isa.matrix and product.tokens >= gemm_matrix.LEAST_TOKENS:
        return "matrix" if fast else "pieces"
    if fast and product.format.quantised and not _as_fast_in_f32(product, isa):
        return "bytes"
    return "pairs" if fast and isa.pairs and product.codec == "bf16" else "exact"


def _as_fast_in_f32(product: Product, isa: Isa) -> bool:
    """Codes of 8 bits, or of a table, by AVX2, which widens them to s16: bytes measured 0.8 to 0.95 times as fast."""
    return product.format.code_bits == 8 and isa.dot == "madd" and isa.lanes == 8


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> Tiles:
    """Those that measured well for most; `threads` is how many the kernel is expected to run on."""
    return _way(product).default_tiles(product, isa, threads)


def read_tiles(product: Product, values: Mapping[str, int]) -> Tiles:
    """Tiles out of their fields; ValueError for other fields, or values that are not whole numbers."""
    kind = _way(product).tiles
    if set(values) != {field.name for field in fields(kind)} or any(type(v) is not int for v in values.values()):
        raise ValueError(f"{dict(values)} are not the fields of {kind.__name__}")
    return kind(**values)


@cache
def kernel_of(product: Product, isa: Isa, threads: int = 2, tiles: Tiles | None = None) -> Kernel:
    """The kernel with these tiles, or the default ones, made once for all layers; ValueError for tiles that do not fit."""
    return _way(product).kernel(product, isa, tiles or default_tiles(product, isa, threads))
