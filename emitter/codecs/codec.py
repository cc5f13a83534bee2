"""Formats of stored weights, such as q4_k.

`Codec` describes a format. `Parts` has the codes and scales of quantised blocks as NumPy arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from castiron.emitter.codecs.fixed_point import GROUP, MAX_INTEGER


@dataclass(frozen=True)
class Parts:
    """The codes and scales of n quantised blocks, unpacked to one array for each kind of number.

    A block is divided into groups of elements, as in ggml. The value of an element is

        d * scale * code + sign * m * minimum

    where d and m belong to the block of the element, and scale and minimum to its group. The sign
    is `Codec.minimum`: +1, -1, or 0 if the format has no minima. Some formats store encoded
    numbers, which `codecs.numbers` decodes for this formula.

    codes: i8 [n, block], one for each element. Encoded: if `Codec.table` has values that are not
        integers, indices into this table; if `Codec.e4m3`, the bits of 8-bit floats.
    d: [n], f16 or f32. Encoded: u16 with the bits of a bf16; if `Codec.exponents`, u8 numbers e
        that stand for 2^(e - 128).
    m: [n], f16; None if the format has no minima. Encoded: if `Codec.zeros`, the i8 zero point of
        each block, where m = d * zero point.
    scales, minima: [n, groups], u8 or i8; None stands for 1. Encoded: if `Codec.small_floats`, each
        scale is a u8 with the bits of an f16, shifted right by 7.
    """

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    scales: np.ndarray | None = None
    minima: np.ndarray | None = None


@dataclass(frozen=True)
class Codec:
    """A format in which rows of weights are stored, such as q4_k.

    A row consists of blocks of `block` elements, and each block takes `block_bytes` bytes. In a
    quantised format, each element is stored as a code, and every `group` elements share a scale.
    `Parts` has the formula that computes elements from codes and scales.

    splitter: unpacks blocks to `Parts`; None if the format is not quantised.
    bits: number of bits of a code in the packed weights that kernels read. There, codes of 8 bits
        are signed, and shorter codes are unsigned (see `table` and `offset`).
    table: if not empty, the values that a code may have; packed weights store the index of the
        value.
    offset: without a table, the number that is added to a code in packed weights, so that it is
        unsigned.
    minimum: +1 if each group has a minimum that is added to its elements, -1 if the minimum is
        subtracted, 0 if groups have no minimum.
    exponents: whether the scale of a block is stored as an exponent of 2, as in OCP's MX formats.
    small_floats: whether the scale of a group is an E4M3 float, as in NVIDIA's NVFP4.
    zeros: whether each block stores a zero point; the minimum that is subtracted is then the scale
        times the zero point.
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

    @cached_property
    def integers(self) -> tuple[int, int]:
        """Return the smallest and the largest integer that int8 kernels multiply as a code.

        These are the values of `table` times `int8_scale`, or else codes as they are stored.
        """
        if self.table:
            found = [round(self.int8_scale * value) for value in self.table]
            return min(found), max(found)
        return (-128, 127) if self.bits == 8 else (0, (1 << self.bits) - 1)

    def _fits_i32(self, elements: int, digits: int) -> bool:
        peak = max(abs(code - self.offset) for code in self.integers)
        return peak * elements * MAX_INTEGER[digits] < 1 << 31

    def has_wide_dots(self, digits: int) -> bool:
        """Return whether a group's dot product with integers of `digits` bytes may exceed an i32."""
        return not self._fits_i32(self.group, digits)

    def unit(self, digits: int) -> int:
        """Return how many elements of x, quantised to `digits` bytes for this codec, share a scale.

        It is 32, or more with three digits if the groups of a block share scale and minimum: as many
        as an exact sum in an i32 allows.
        """
        has_one_scale = digits == 3 and self.group == GROUP and not self.minimum and not self.has_group_scales
        sizes = [n for n in (128, 64) if has_one_scale and self.block % n == 0 and self._fits_i32(n, digits)]
        return max([GROUP, *sizes])

    @cached_property
    def has_group_scales(self) -> bool:
        """Return whether the groups of a block have scales of their own."""
        return self.split(np.zeros((1, self.block_bytes), np.uint8)).scales is not None

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
        """Return the factor by which `table` values are multiplied before they are rounded to int8.

        If the values are integers, the factor is 1. Otherwise it is the factor from 64 to 127 with
        the smallest sum of squared rounding errors.
        """
        if self.has_integers:
            return 1
        return min(range(64, 128), key=lambda n: sum((round(n * value) / n - value) ** 2 for value in self.table))

    @property
    def in_int8(self) -> "Codec":
        """Return a copy with each value of `table` rounded to a multiple of 1 / `int8_scale`.

        The rounded values, multiplied by `int8_scale`, are integers that fit in int8.
        """
        return replace(self, table=tuple(round(self.int8_scale * value) / self.int8_scale for value in self.table))

    @property
    def summed(self) -> bool:
        """Return whether a matmul with these weights needs the sum of its input x over each group.

        It does if codes have an offset, or groups a minimum: a constant that is added to all
        weights of a group adds constant * sum(x) to the result.
        """
        return bool(self.offset or self.minimum)

    def split(self, blocks: np.ndarray) -> Parts:
        """Return the codes, scales and minima in the bytes of n blocks.

        blocks: u8 [n, block_bytes]. The codec must be quantised.
        """
        assert self.splitter is not None, f"{self.name} has no blocks"
        return self.splitter(_in_columns(blocks))


def _in_columns(blocks: np.ndarray) -> np.ndarray:
    """Return a copy of an array of bytes [n, b] in column-major (Fortran) order.

    The functions that unpack blocks process the same byte of all n blocks at a time. This is fast
    if these n bytes are contiguous.
    """
    if blocks.shape[1] % 2:
        return np.asfortranarray(blocks)
    # NumPy copies two bytes with strides as fast as one byte.
    pairs = np.ascontiguousarray(np.ascontiguousarray(blocks).view("<u2").T)
    columns = np.empty((len(pairs), 2, len(blocks)), np.uint8)
    columns[:, 0] = pairs
    columns[:, 1] = pairs >> np.uint16(8)
    return columns.reshape(-1, len(blocks)).T
