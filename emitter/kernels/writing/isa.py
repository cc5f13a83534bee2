"""Vector units that kernels are shaped for: their width and their registers decide tile sizes, never the result."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Isa:
    """lanes: f32 elements of a vector register; registers: how many vector registers there are; dot: what multiplies
    bytes, see `writing.dot`; pairs: what multiplies pairs of bf16, see `writing.pairs`; matrix: what multiplies blocks of
    them, see `writing.matrix`. The last two are empty where there is nothing.
    """

    name: str
    lanes: int
    registers: int
    dot: str
    pairs: str = ""
    matrix: str = ""

    @property
    def plain(self) -> Isa:
        """The same without instructions that are asked for by name: kernels of the same shape, for any CPU."""
        dot = "plain blocks" if self.dot == "smmla" else "plain"
        return replace(self, dot=dot, pairs=self.pairs and "plain", matrix=self.matrix and "plain")


AVX2 = Isa("avx2", 8, 16, "madd")
AVXVNNI = Isa("avxvnni", 8, 16, "vnni")
AVX512 = Isa("avx512", 16, 32, "madd")
AVX512VNNI = Isa("avx512vnni", 16, 32, "vnni")
AVX512BF16 = Isa("avx512bf16", 16, 32, "vnni", "dpbf16")
AMX = Isa("amx", 16, 32, "vnni", "dpbf16", "amx")
NEON = Isa("neon", 4, 32, "sdot")
NEONI8MM = Isa("neoni8mm", 4, 32, "smmla")

ISAS: dict[str, Isa] = {isa.name: isa for isa in (AVX2, AVXVNNI, AVX512, AVX512VNNI, AVX512BF16, AMX, NEON, NEONI8MM)}
