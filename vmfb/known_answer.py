"""Results of a model for fixed inputs, which a GPU must reproduce before it runs the bundle."""

from __future__ import annotations

from dataclasses import dataclass, field

# Largest difference, as a share of the largest expected value: f32 sums in another order differ by less.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Decode:
    """The expected logits of decode steps from position 0 on.

    tokens: the token that each step appends. logits: for each step, the expected logits of only the
    tokens `ids`.
    """

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class KnownAnswer:
    """The results that a GPU must reproduce before it runs a bundle.

    matmuls: by weight codec (the format in which weights are stored), the expected result of the
    function `matmul_CODEC`, a fixed matmul in the bundle's device.vmfb. decode: expected logits of
    the model; None if they are not checked. tolerance: the largest allowed difference, as a
    fraction of the largest expected value.
    """

    matmuls: dict[str, tuple[float, ...]] = field(default_factory=dict)
    decode: Decode | None = None
    tolerance: float = TOLERANCE
