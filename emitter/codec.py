"""The classes `Codec`, a storage format of rows of weights, and `Parts`, its blocks unpacked."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Parts:
    """The unpacked parts of n quantised blocks.

    A block consists of groups, as in ggml. The value of an element is
    d * scale * code + `Codec.minimum` * m * minimum, where `Codec.minimum` is +1, -1 or 0.

    Attributes:
        codes: [n, block] i8.
        d: the scale of each block, [n]. It is f16 or f32, or u16 with the bits of a bf16. If the
            codec has `exponents`, it is u8, the exponent e of the scale 2^(e - 128).
        m: the factor of each block's minima, [n] f16, or None if the codec has no minima. If the
            codec has `zeros`, it is the block's zero point, [n] i8, and d * m is the factor.
        scales, minima: the factors of a group, [n, groups] u8 or i8; None means 1. If the codec has
            `small_floats`, scales are the exponents and mantissas of f16, shifted right by 7 bits.
    """

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    scales: np.ndarray | None = None
    minima: np.ndarray | None = None


@dataclass(frozen=True)
class Codec:
    """A storage format of rows: blocks of `block` elements; `group` elements share a scale.

    splitter: implements `split`, or None if the format is not quantised. bits: size of a stored
    code. A stored code is the unsigned number `code + offset`, or an index into `table` if there is
    one, or the signed code itself if it has 8 bits. e4m3: whether the 8 bits are a float of OCP's
    type E4M3. minimum: +1 or -1, the sign with which a group's minimum is added, or 0 if there are
    no minima. zeros: whether m is a zero point, so that the minimum is d * m. exponents: whether a
    block's scale is stored as the exponent d of 2^(d - 128), as in OCP's MX formats. small_floats:
    whether a group's scale is an E4M3 float, as in NVIDIA's NVFP4.
    """

    name: str
    block: int
    block_bytes: int
    splitter: Callable[[np.ndarray], Parts] | None = None
    bits: int = 0
    offset: int = 0
    group: int = 0
    minimum: int = 0
    table: tuple[float, ...] = ()
    exponents: bool = False
    small_floats: bool = False
    zeros: bool = False
    e4m3: bool = False

    @property
    def code_bits(self) -> int:
        """Return the bits of a signed code: 8 if codes are values of `table`, otherwise `bits`."""
        return 8 if self.table else self.bits

    @property
    def quantised(self) -> bool:
        return self.splitter is not None

    @property
    def has_integers(self) -> bool:
        """Return whether codes are integers, and not floats."""
        return not self.e4m3 and all(value == int(value) for value in self.table)

    @property
    def has_bf16_codes(self) -> bool:
        """Return whether every code is a bf16 number."""
        return self.e4m3 or self.has_integers

    @property
    def summed(self) -> bool:
        """Return whether matmuls need the sum of x over each group, to apply offset or minima."""
        return bool(self.offset or self.minimum)

    def split(self, blocks: np.ndarray) -> Parts:
        """Return the codes, scales and minima in the bytes of n blocks.

        blocks: u8 [n, block_bytes]. The codec must be quantised.
        """
        assert self.splitter is not None, f"{self.name} has no blocks"
        return self.splitter(blocks)
