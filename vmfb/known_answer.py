"""Results of a model for fixed inputs, which a GPU must reproduce before it runs the bundle."""

from __future__ import annotations

from dataclasses import dataclass, field

# Largest difference, as a share of the largest expected value: f32 sums in another order differ by less.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Decode:
    """The expected logits of a few decode steps, of which the first is at position 0.

    tokens: the input token of each step.
    ids: the tokens whose logits are compared.
    logits: the expected logits, `[steps, len(ids)]`.
    """

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class KnownAnswer:
    """The results that a GPU must reproduce before it runs a bundle.

    matmuls: the expected result of a fixed matmul for each weight codec (storage format of
        weights). The bundle's device.vmfb has this matmul as the function `matmul_CODEC`.
    decode: expected logits of the model; None if they are not checked.
    tolerance: the largest allowed difference, as a fraction of the largest expected value.
    """

    matmuls: dict[str, tuple[float, ...]] = field(default_factory=dict)
    decode: Decode | None = None
    tolerance: float = TOLERANCE
