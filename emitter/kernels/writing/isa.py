"""Vector units that kernels are shaped for: their width and their registers decide tile sizes, never the result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """lanes: f32 elements of a vector register; registers: how many vector registers there are; dot: what multiplies
    bytes, see `writing.dot`."""

    name: str
    lanes: int
    registers: int
    dot: str


AVX2 = Isa("avx2", 8, 16, "madd")
AVXVNNI = Isa("avxvnni", 8, 16, "vnni")
AVX512 = Isa("avx512", 16, 32, "madd")
AVX512VNNI = Isa("avx512vnni", 16, 32, "vnni")
NEON = Isa("neon", 4, 32, "sdot")

ISAS: dict[str, Isa] = {isa.name: isa for isa in (AVX2, AVXVNNI, AVX512, AVX512VNNI, NEON)}
