"""`Codec`, a format of stored weights such as q4_k, and `Parts`, the codes and scales of blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from castiron.emitter.codecs.fixed_point import GROUP, MAX_INTEGER


@dataclass(frozen=True)
class Parts:
    """The codes and scales of n quantised blocks. The value of an element is

        d * scale * code + sign * m * minimum

    where d and m belong to its block, scale and minimum to its group, and the sign is
    `Codec.minimum`. Some formats store encoded numbers, which `codecs.numbers` decodes.

    codes: i8 [n, block]. Encoded: indices into a `Codec.table` of fractions, or 8-bit floats
        (`e4m3`).
    d: [n] f16 or f32. Encoded: the bits of a bf16, or u8 e for 2^(e - 128) (`exponents`).
    m: [n] f16; None without minima. Encoded: i8 zero points, where m = d * zero point (`zeros`).
    scales, minima: [n, groups] u8 or i8; None stands for 1. Encoded: the bits of an f16, shifted
        right by 7 (`small_floats`).
    """

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    scales: np.ndarray | None = None
    minima: np.ndarray | None = None


@dataclass(frozen=True)
class Codec:
    """A format in which rows of weights are stored, such as q4_k.

    splitter: unpacks blocks to `Parts`; None if the format is not quantised.
    bits: size of a code in packed weights; codes of 8 bits are signed, shorter ones unsigned.
    table: the values of codes, which packed weights index; without one, `offset` makes codes
        unsigned.
    group: number of elements that share a scale.
    minimum: +1 if a group's minimum is added to its elements, -1 if it is subtracted, 0 for none.
    exponents: scales of blocks are exponents of 2 (OCP's MX). small_floats: scales of groups are
        E4M3.
    zeros: the minimum of a block is its scale times a stored zero point. e4m3: codes are E4M3
        floats.
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
        """Return the smallest and the largest integer that int8 kernels multiply as a code."""
        if self.table:
            codes = [round(self.int8_scale * value) for value in self.table]
            return min(codes), max(codes)
        return (-128, 127) if self.bits == 8 else (0, (1 << self.bits) - 1)

    def _fits_i32(self, elements: int, digits: int) -> bool:
        peak = max(abs(code - self.offset) for code in self.integers)
        return peak * elements * MAX_INTEGER[digits] < 1 << 31

    def has_wide_dots(self, digits: int) -> bool:
        """Return whether a group's dot product with integers of `digits` bytes may exceed an i32."""
        return not self._fits_i32(self.group, digits)

    def unit(self, digits: int) -> int:
        """Return how many elements of x, quantised to `digits` bytes for this codec, share a scale.

        It is 32, or with three digits as many as an exact i32 sum allows if groups share their
        scale.
        """
        has_one_scale = digits == 3 and self.group == GROUP and not self.minimum and not self.has_group_scales
        sizes = [n for n in (128, 64) if has_one_scale and self.block % n == 0 and self._fits_i32(n, digits)]
        return max([GROUP, *sizes])

    @cached_property
    def has_group_scales(self) -> bool:
        return self.split(np.zeros((1, self.block_bytes), np.uint8)).scales is not None

    @property
    def quantised(self) -> bool:
        return self.splitter is not None

    @property
    def has_integers(self) -> bool:
        return not self.e4m3 and all(value == int(value) for value in self.table)

    @property
    def has_bf16_codes(self) -> bool:
        return self.e4m3 or self.has_integers

    @cached_property
    def int8_scale(self) -> int:
        """Return the factor, 64 to 127, with which int8 represents `table` best; 1 for integers."""
        if self.has_integers:
            return 1
        return min(range(64, 128), key=lambda n: sum((round(n * value) / n - value) ** 2 for value in self.table))

    @property
    def in_int8(self) -> "Codec":
        """Return a copy with each value of `table` rounded to a multiple of 1 / `int8_scale`."""
        return replace(self, table=tuple(round(self.int8_scale * value) / self.int8_scale for value in self.table))

    def split(self, blocks: np.ndarray) -> Parts:
        """Return the `Parts` of n blocks, u8 [n, block_bytes]; the codec must be quantised."""
        assert self.splitter is not None, f"{self.name} has no blocks"
        return self.splitter(_in_columns(blocks))


def _in_columns(blocks: np.ndarray) -> np.ndarray:
    """Return u8 [n, b] in column-major order, in which the same byte of n blocks is contiguous."""
    if blocks.shape[1] % 2:
        return np.asfortranarray(blocks)
    # NumPy copies two bytes with strides as fast as one byte.
    pairs = np.ascontiguousarray(np.ascontiguousarray(blocks).view("<u2").T)
    columns = np.empty((len(pairs), 2, len(blocks)), np.uint8)
    columns[:, 0] = pairs
    columns[:, 1] = pairs >> np.uint16(8)
    return columns.reshape(-1, len(blocks)).T
