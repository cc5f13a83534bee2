"""Element types and tensor types of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np


class EmitError(Exception):
    """An error for an invalid graph or config; the message is one line."""


# The largest f32 and the smallest normal f32.
LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-126


def is_number(value: object) -> bool:
    """Return whether `value` is a number (not a bool) in the range of f32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def is_positive(value: object) -> bool:
    """Return whether `value` is a positive number in the range of normal f32."""
    return is_number(value) and value >= SMALLEST  # type: ignore[operator]


@dataclass(frozen=True)
class DType:
    """An element type with StableHLO's name; arrays of bf16 are uint16, with its bits."""

    name: str
    bits: int
    kind: str
    numpy: np.dtype

    def __repr__(self) -> str:
        return self.name


F32 = DType("f32", 32, "float", np.dtype("float32"))
F16 = DType("f16", 16, "float", np.dtype("float16"))
BF16 = DType("bf16", 16, "float", np.dtype("uint16"))
I1 = DType("i1", 1, "bool", np.dtype("bool"))
I8 = DType("i8", 8, "int", np.dtype("int8"))
I32 = DType("i32", 32, "int", np.dtype("int32"))

DTYPES: dict[str, DType] = {d.name: d for d in (F32, F16, BF16, I1, I8, I32)}


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor with a static shape; `TensorType((), I32)` is an i32 scalar."""

    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if any(not isinstance(n, int) or n < 0 for n in self.shape):
            raise EmitError(f"invalid tensor shape: {self.shape}; use non-negative integers")

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * max(self.dtype.bits, 8) // 8

    def __str__(self) -> str:
        return "tensor<" + "".join(f"{n}x" for n in self.shape) + self.dtype.name + ">"

    __repr__ = __str__


def to_f32(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert an array of `dtype` (f32, f16 or bf16) to f32, which is exact."""
    if dtype is BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def from_f32(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Round an f32 array to the float type `dtype`, ties to even."""
    if dtype is not BF16:
        return array.astype(dtype.numpy)
    bits = np.array(array, np.float32, order="C").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = np.isnan(array)
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
