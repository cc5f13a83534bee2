"""What a kernel is to the graph: a typed symbol, its text, its NumPy definition and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from castiron.emitter.types import TensorType

if TYPE_CHECKING:
    from castiron.emitter.kernels.products.product import Product

INDEX = "index"
Work = int | Callable[[int], int]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One `stream.executable` and everything the rest of castiron needs to know about it.

    name: symbol, unique for distinct text, derived from the kernel's parameters.
    operands: tensor types, or "index" for a scalar given at dispatch (a layer number).
    results: tensor types; `tied[i]` is the operand in whose storage result i lives, or None.
    text: `stream.executable private @{name} {...}` exporting `@{name}_fn`.
    reference: NumPy definition, operands in order to a tuple of results.
    flops, bytes: work and memory touched by one call; a callable takes the position.
    product: what it computes, if that is a product with a weight, for which other tiles could be chosen.
    """

    name: str
    operands: tuple[TensorType | str, ...]
    results: tuple[TensorType, ...]
    tied: tuple[int | None, ...]
    text: str
    reference: Callable[..., tuple[np.ndarray, ...]]
    flops: Work
    bytes: Work
    product: Product | None = None

    def work(self, position: int) -> tuple[int, int]:
        """FLOP and bytes of one call when the sequence stands at `position`."""
        return tuple(w(position) if callable(w) else w for w in (self.flops, self.bytes))
