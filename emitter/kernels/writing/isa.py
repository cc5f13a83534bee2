"""Vector units that kernels are shaped for: their width and their registers decide tile sizes, and the order of sums.

Only in its canonical form does a unit not decide the order: kernels then have 16 lanes whatever a register has, one chain of
sums for an output, and multiplications that no compiler joins with an addition, so that every CPU gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CANONICAL_LANES = 16


@dataclass(frozen=True)
class Isa:
    """lanes: f32 elements of a vector register; registers: how many vector registers there are; dot: what multiplies
    bytes, see `writing.dot`; pairs: what multiplies pairs of bf16, see `writing.pairs`; matrix: what multiplies blocks of
    them, see `writing.matrix`. The last two are empty where there is nothing. canonical: as the module says.
    """

    name: str
    lanes: int
    registers: int
    dot: str
    pairs: str = ""
    matrix: str = ""
    canonical: bool = False

    @property
    def roomy(self) -> bool:
        """Whether there are registers for 24 sums of 16 lanes."""
        return self.lanes * self.registers >= 512

    @property
    def plain(self) -> Isa:
        """The same without instructions that are asked for by name: kernels of the same shape, for any CPU."""
        dot = "plain blocks" if self.dot == "smmla" else "plain"
        return replace(self, dot=dot, pairs=self.pairs and "plain", matrix=self.matrix and "plain")

    @property
    def in_canonical_form(self) -> Isa:
        """The same with vectors of 16 lanes, of several registers where they are narrower."""
        registers = self.registers * self.lanes // CANONICAL_LANES
        return Isa(f"{self.name}_canonical", CANONICAL_LANES, registers, "plain", canonical=True)


AVX2 = Isa("avx2", 8, 16, "madd")
AVXVNNI = Isa("avxvnni", 8, 16, "vnni")
AVX512 = Isa("avx512", 16, 32, "madd")
AVX512VNNI = Isa("avx512vnni", 16, 32, "vnni")
AVX512BF16 = Isa("avx512bf16", 16, 32, "vnni", "dpbf16")
AMX = Isa("amx", 16, 32, "vnni", "dpbf16", "amx")
NEON = Isa("neon", 4, 32, "sdot")
NEONI8MM = Isa("neoni8mm", 4, 32, "smmla", "bfdot")

ISAS: dict[str, Isa] = {isa.name: isa for isa in (AVX2, AVXVNNI, AVX512, AVX512VNNI, AVX512BF16, AMX, NEON, NEONI8MM)}
