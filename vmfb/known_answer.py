"""The known answer of a GPU bundle: results that a device must reproduce."""

from __future__ import annotations

from dataclasses import dataclass, field

# Largest difference, as a share of the largest expected value: f32 sums in another order differ by less.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Decode:
    """The logits of decode steps.

    tokens: the appended tokens. ids: the tokens whose logits are stored. logits: for each step, the
    logits of `ids`.
    """

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class KnownAnswer:
    """The results that a device must compute.

    matmuls: results of the functions `matmul_CODEC` of device.vmfb, by codec. tolerance: the
    largest allowed difference, as a fraction of the largest expected value.
    """

    matmuls: dict[str, tuple[float, ...]] = field(default_factory=dict)
    decode: Decode | None = None
    tolerance: float = TOLERANCE
