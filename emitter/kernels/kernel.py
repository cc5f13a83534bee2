"""What a kernel is to the graph: a typed symbol, its text, its NumPy definition and its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.body import executable
from castiron.emitter.types import TensorType

INDEX = "index"
Work = int | Callable[[int], int]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One `stream.executable` and everything the rest of castiron needs to know about it.

    name: symbol, unique for distinct text, derived from the kernel's parameters.
    operands: by name, in the order of the dispatch, tensor types, or "index" for a scalar given there (a layer number).
    results: tensor types by name.
    text: `stream.executable private @{name} {...}` exporting `@{name}_fn`.
    reference: NumPy definition, operands by name to results by name.
    flops, bytes: work and memory touched by one call; a callable takes the position.
    in_place: results that live in the storage of an operand, by names; the others have storage of their own.
    product: what it computes, if that is a product with a weight, for which other tiles could be chosen.
    """

    name: str
    operands: Mapping[str, TensorType | str]
    results: Mapping[str, TensorType]
    text: str
    reference: Callable[..., Mapping[str, np.ndarray]]
    flops: Work
    bytes: Work
    in_place: Mapping[str, str] = field(default_factory=dict)
    product: Product | None = None

    @property
    def tensors(self) -> dict[str, TensorType]:
        """The operands that are tensors, in order."""
        return {name: t for name, t in self.operands.items() if isinstance(t, TensorType)}

    @property
    def indices(self) -> list[str]:
        """The operands that are indices, in order."""
        return [name for name, t in self.operands.items() if t == INDEX]

    def work(self, position: int) -> tuple[int, int]:
        """FLOP and bytes of one call when the sequence stands at `position`."""
        flops, nbytes = (w(position) if callable(w) else w for w in (self.flops, self.bytes))
        return flops, nbytes


def write_kernel(
    name: str,
    operands: Mapping[str, TensorType | str],
    results: Mapping[str, TensorType],
    workgroups: int,
    write: Callable[..., None],
    *,
    reference: Callable[..., Mapping[str, np.ndarray]],
    flops: Work,
    nbytes: Work,
    in_place: Mapping[str, str] | None = None,
    product: Product | None = None,
) -> Kernel:
    """The kernel whose body `write(body, **arguments)` writes, see `writing.body.executable`."""
    in_place = in_place or {}
    text = executable(name, operands, results, in_place, workgroups, write)
    return Kernel(name, operands, results, text, reference, flops, nbytes, in_place, product)
