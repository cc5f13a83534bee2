"""Descriptions of the CPU vector instruction sets for which kernels are emitted."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Kernels that add the lanes of a vector use vectors of so many f32 on every CPU, so that the order of additions is the same.
SUM_LANES = 16


@dataclass(frozen=True)
class Isa:
    """The vector instructions of a CPU; lanes: f32 in a vector, registers: vectors.

    dot: for int8 dot products (`mlir.dot`). pairs: for bf16 pairs (`mlir.bf16_pairs`), or "".
    matrix: for matmuls of bf16 blocks (`mlir.matrix`), or "".
    """

    name: str
    lanes: int
    registers: int
    dot: str
    pairs: str = ""
    matrix: str = ""

    @property
    def roomy(self) -> bool:
        """Return whether the registers hold 24 accumulators of 16 f32, and the operands."""
        return self.lanes * self.registers >= 512

    @property
    def plain(self) -> Isa:
        """Return a copy whose kernels use no CPU-specific instructions and run on every CPU."""
        dot = "plain blocks" if self.dot == "smmla" else "plain"
        return replace(self, dot=dot, pairs=self.pairs and "plain", matrix=self.matrix and "plain")

    @property
    def sum_registers(self) -> int:
        """Return the number of vectors of SUM_LANES f32 that fit in the vector registers."""
        return self.registers * self.lanes // SUM_LANES


AVX2 = Isa("avx2", 8, 16, "madd")
AVXVNNI = Isa("avxvnni", 8, 16, "vnni")
AVX512 = Isa("avx512", 16, 32, "madd")
AVX512VNNI = Isa("avx512vnni", 16, 32, "vnni")
AVX512BF16 = Isa("avx512bf16", 16, 32, "vnni", "dpbf16")
AMX = Isa("amx", 16, 32, "vnni", "dpbf16", "amx")
NEON = Isa("neon", 4, 32, "sdot")
NEONI8MM = Isa("neoni8mm", 4, 32, "smmla", "bfdot")

ISAS: dict[str, Isa] = {isa.name: isa for isa in (AVX2, AVXVNNI, AVX512, AVX512VNNI, AVX512BF16, AMX, NEON, NEONI8MM)}
