"""Products of activations with packed weights: what is to be computed, apart from how a kernel tiles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products import experts as gemv_experts
from castiron.emitter.kernels.products import gemm, gemm_few, gemv
from castiron.emitter.kernels.products.epilogue import Epilogue, norm_name
from castiron.emitter.kernels.writing.isa import Isa

Tiles = gemv.GemvTiles | gemm_few.FewTiles | gemm.GemmTiles


@dataclass(frozen=True)
class Product:
    """x [tokens, in] times a packed weight [out, in], with what is fused before and after: `gemv` for one token,
    `gemm_few` for several and `gemm` for many, whose options these are. Equal products may have one kernel.

    With `experts` the weight is that of so many, `tokens` counts pairs of a token and an expert, of which `per_row` have
    one row of x, and the kernel is `gemv_experts`."""

    codec: str
    tokens: int
    out_features: int
    in_features: int
    rms_eps: float | None = None
    bias: bool = False
    residual: bool = False
    glu: str | None = None
    length: bool = False
    experts: int = 0
    per_row: int = 1

    @property
    def name(self) -> str:
        """Different for different products: `q4_1_1x960x576_rms1em05`."""
        sizes = f"{self.codec}_{self.tokens}x{self.out_features}x{self.in_features}"
        if self.experts:
            sizes += f"_of{self.experts}by{self.per_row}"
        return sizes + norm_name(self.rms_eps) + self.epilogue.name + "_length" * self.length

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.bias, self.residual, self.glu)

    @property
    def weight_rows(self) -> int:
        """Rows of the packed weight."""
        return self.epilogue.weight_rows(self.out_features)

    @property
    def _single(self) -> bool:
        return bool(self.tokens == 1 or self.experts)

    @property
    def _few(self) -> bool:
        return self.tokens <= gemm_few.MOST_TOKENS

    def default_tiles(self, isa: Isa, threads: int) -> Tiles:
        """Those that measured well for most."""
        sizes = (self.out_features, self.in_features, isa, self.epilogue.blocks, threads)
        if self.experts:
            return gemv_experts.default_tiles(self.codec, self.tokens, *sizes)
        if self.tokens == 1:
            return gemv.default_tiles(self.codec, *sizes)
        if self._few:
            return gemm_few.default_tiles(self.codec, self.tokens, *sizes)
        return gemm.default_tiles(self.codec, self.tokens, *sizes)

    def tiles(self, values: Mapping[str, int]) -> Tiles:
        """Tiles out of their fields; ValueError for other fields, or values that are not whole numbers."""
        kind = gemv.GemvTiles if self._single else gemm_few.FewTiles if self._few else gemm.GemmTiles
        if set(values) != {field.name for field in fields(kind)} or any(type(v) is not int for v in values.values()):
            raise ValueError(f"{dict(values)} are not the fields of {kind.__name__}")
        return kind(**values)

    def kernel(self, isa: Isa, threads: int = 2, tiles: Tiles | None = None) -> Kernel:
        """The kernel with these tiles, or the default ones; ValueError for tiles that do not fit."""
        return _kernel(self, isa, threads, tiles)


@cache
def _kernel(product: Product, isa: Isa, threads: int, tiles: Tiles | None) -> Kernel:
    """Made once for all layers of a model."""
    sizes = (product.codec, product.out_features, product.in_features)
    options = {
        "bias": product.bias, "residual": product.residual, "glu": product.glu,
        "isa": isa, "threads": threads, "tiles": tiles,
    }  # fmt: skip
    if product.experts:
        del options["bias"], options["residual"]
        pairs = (product.codec, product.experts, product.tokens, *sizes[1:])
        kernel = gemv_experts.gemv_experts(*pairs, per_row=product.per_row, length=product.length, **options)
    elif product.tokens == 1:
        kernel = gemv.gemv(*sizes, rms_eps=product.rms_eps, **options)
    else:
        write = gemm_few.gemm_few if product._few else gemm.gemm
        kernel = write(sizes[0], product.tokens, *sizes[1:], length=product.length, **options)
    return replace(kernel, product=product)
