"""Numbers as MLIR and the names of symbols spell them."""

from __future__ import annotations

import struct


def f32_literal(x: float) -> str:
    """The f32 nearest to x as MLIR's hexadecimal literal, which holds every bit of it, infinities included."""
    return f"0x{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def number(x: float) -> str:
    """A float as part of a symbol: digits, letters and underscores that hold it to nine digits."""
    return f"{x:.9g}".replace("-", "m").replace(".", "p").replace("+", "")
