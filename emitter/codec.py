"""Formats of weights: `Codec` describes a format; `Parts` has the unpacked arrays."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Parts:
    """The arrays that are unpacked from n quantised blocks.

    A block has one or more groups of elements, as in ggml. The value of an element is

        d * scale * code + sign * m * minimum

    where d and m belong to the element's block, and scale and minimum to its group. The sign is
    `Codec.minimum`: +1, -1, or 0 without minima.

    codes: i8 [n, block].
    d: the scale of each block, [n]: f16, f32, or u16 with the bits of a bf16. For a codec with
        `exponents`, d is u8, and the scale is 2^(d - 128).
    m: the factor of each block's minima, [n] f16; None if there are no minima. For a codec with
        `zeros`, m is the block's zero point, [n] i8, and the formula has d * m in place of m.
    scales, minima: the factors of each group, [n, groups] u8 or i8; None means 1. For a codec with
        `small_floats`, scales are u8: the bits of an f16, shifted right by 7.
    """

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    scales: np.ndarray | None = None
    minima: np.ndarray | None = None


@dataclass(frozen=True)
class Codec:
    """A format in which rows of weights are stored, such as q4_k.

    A row consists of blocks of `block` elements. In a quantised block, each element has a code, and
    every `group` elements share a scale. `Parts` has the formula of an element's value.

    splitter: unpacks blocks to `Parts`; None if the format is not quantised.
    bits: size of a stored code. A code of 8 bits is stored as it is, signed.
    offset, table: how a code of fewer bits is stored as an unsigned number. If there is a table,
        the number is the index of the code in `table`. If not, the number is the code plus
        `offset`.
    minimum: whether a group's minimum is added to its elements (+1) or subtracted (-1); 0 if groups
    have no minimum.
    exponents: whether a block's scale is stored as an exponent, as in OCP's MX formats.
    small_floats: whether a group's scale is an E4M3 float, as in NVIDIA's NVFP4.
    zeros: whether a block has a zero point, from which its minima follow.
    e4m3: whether codes are 8-bit floats of OCP's type E4M3.
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
        """Return the number of bits of a decoded code: 8 with a `table`, otherwise `bits`."""
        return 8 if self.table else self.bits

    @property
    def quantised(self) -> bool:
        return self.splitter is not None

    @property
    def has_integers(self) -> bool:
        return not self.e4m3 and all(value == int(value) for value in self.table)

    @property
    def has_bf16_codes(self) -> bool:
        """Return whether bf16 represents every code exactly."""
        return self.e4m3 or self.has_integers

    @cached_property
    def int8_scale(self) -> int:
        """Return the factor by which `table` is multiplied before it is rounded to int8.

        It is the factor from 64 to 127 with the smallest square error, or 1 if there is no table.
        """
        if self.has_integers:
            return 1
        return min(range(64, 128), key=lambda n: sum((round(n * value) / n - value) ** 2 for value in self.table))

    @property
    def in_int8(self) -> "Codec":
        """Return a copy whose table of floats is rounded to multiples of 1 / `int8_scale`."""
        return replace(self, table=tuple(round(self.int8_scale * value) / self.int8_scale for value in self.table))

    @property
    def summed(self) -> bool:
        """Return whether a matmul needs sum(x) of each group: for an offset or for minima."""
        return bool(self.offset or self.minimum)

    def split(self, blocks: np.ndarray) -> Parts:
        """Return the codes, scales and minima in the bytes of n blocks.

        blocks: u8 [n, block_bytes]. The codec must be quantised.
        """
        assert self.splitter is not None, f"{self.name} has no blocks"
        return self.splitter(_in_columns(blocks))


def _in_columns(blocks: np.ndarray) -> np.ndarray:
    """Return bytes [n, b] in column order: NumPy is fast along columns, because they are long."""
    if blocks.shape[1] % 2:
        return np.asfortranarray(blocks)
    # NumPy copies two bytes with strides as fast as one byte.
    pairs = np.ascontiguousarray(np.ascontiguousarray(blocks).view("<u2").T)
    columns = np.empty((len(pairs), 2, len(blocks)), np.uint8)
    columns[:, 0] = pairs
    columns[:, 1] = pairs >> np.uint16(8)
    return columns.reshape(-1, len(blocks)).T
