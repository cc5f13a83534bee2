"""What the kernels of products share around their bodies: buffers by name, tiles that fit, definition and work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel, write_kernel
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.body import Body, Ssa
from castiron.emitter.kernels.writing.isa import Isa


@dataclass(frozen=True)
class Tiles(ABC):
    """What a search may vary of a kernel, all of it whole numbers above 0; results change by rounding only.

    letters: one for each field, before its value in the name of the kernel.
    """

    letters: ClassVar[str]

    @property
    def name(self) -> str:
        return "".join(f"{letter}{value}" for letter, value in zip(self.letters, astuple(self), strict=True))

    @abstractmethod
    def fit(self, product: Product) -> bool:
        """Whether the kernel can have these tiles."""


# A product's operands (`Product.operands`) and its result y in its kernel.
Buffers = Mapping[str, Ssa]


def product_kernel(
    product: Product, isa: Isa, tiles: Tiles, prefix: str, workgroups: int, write: Callable[[Body, Buffers], None]
) -> Kernel:
    """The kernel whose body `write` writes; `prefix` tells its name from others'. ValueError for tiles that do not fit."""
    if any(type(value) is not int or value < 1 for value in astuple(tiles)) or not tiles.fit(product):
        raise ValueError(f"tiles {tiles.name} do not fit {product.name}: see {type(tiles).__name__}")
    return write_kernel(
        f"{prefix}_{isa.name}_{tiles.name}",
        product.operands(),
        product.results(),
        workgroups,
        lambda b, **buffers: write(b, buffers),
        reference=product.define,
        flops=product.flops,
        nbytes=product.nbytes,
        product=product,
        fenced=isa.canonical,
    )
