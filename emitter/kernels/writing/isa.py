"""Vector units that kernels are shaped for: their width and their registers decide tile sizes, never the result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """lanes: f32 elements of a vector register; registers: how many vector registers there are."""

    name: str
    lanes: int
    registers: int


AVX2 = Isa("avx2", 8, 16)
AVX512 = Isa("avx512", 16, 32)
NEON = Isa("neon", 4, 32)

ISAS: dict[str, Isa] = {isa.name: isa for isa in (AVX2, AVX512, NEON)}
