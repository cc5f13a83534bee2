"""Emit calls of matmul kernels, with packed weights as parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from castiron.emitter.graph.ir import Param, Value, parameter
from castiron.emitter.graph.types import F32, I8, TensorType
from castiron.emitter.kernels.kernel import Kernel, kernel_call
from castiron.emitter.kernels.matmul.selection import numerics_of
from castiron.emitter.kernels.matmul_spec import PIECES, Matmul
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.quantise_x import quantise_x
from castiron.emitter.kernels.split_x import split_x
from castiron.emitter.kernels.weights.packing import LANES, pack, packed_shape
from castiron.emitter.layers.step import Weight, source

# The widest RMS norm fused into a matmul of one token, because every workgroup computes the norm.
NORM_LIMIT = 8192


@dataclass(frozen=True)
class Projection:
    """A matmul of x [T, in] with weights [n, in] of one codec, and what its kernel also computes.

    norm: weight [in] and epsilon of an RMS norm of x, on CPUs for T = 1 only.
    glu: the activation in act(gate) * up of two weights, with one result [T, n]; None for no GLU.
    length: number of rows of x that are not padding.
    experts: 0, or the number of experts, each weight then being [experts * n, in].
    chosen: i32 [T * k], the k experts of each row of x; row i of the result belongs to chosen[i].
    """

    x: Value
    weights: Sequence[Weight]
    biases: Sequence[Weight] = ()
    norm: tuple[Value, float] | None = None
    residual: Value | None = None
    glu: str | None = None
    length: Value | None = None
    chosen: Value | None = None
    experts: int = 0

    @property
    def matmul(self) -> Matmul:
        """Return the `Matmul` that selects the kernel; the caller replaces its numerics."""
        rows = [w.shape[0] // (self.experts or 1) for w in self.weights]
        tokens = self.x.shape[0] if self.chosen is None else self.chosen.shape[0]
        return Matmul(
            self.weights[0].codec,
            tokens,
            rows[0] if self.glu else sum(rows),
            self.x.shape[1],
            rms_eps=self.norm[1] if self.norm else None,
            bias=bool(self.biases),
            residual=self.residual is not None,
            glu=self.glu,
            length=self.length is not None,
            experts=self.experts,
            per_row=tokens // self.x.shape[0],
        )

    def operands(self, weight: Param) -> dict[str, Value]:
        """Return the operands of the matmul kernel by name, except x."""
        given = {
            "norm": self.norm[0] if self.norm else None,
            "weight": parameter(weight),
            "chosen": self.chosen,
            "bias": parameter(bias_param(self.biases)) if self.biases else None,
            "residual": self.residual,
            "length": self.length,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Projector:
    """A callable that appends the CPU kernel call of a `Projection` and returns its result.

    rounded: from (x, name of the kernel that rounds x) to the rounded copy, which matmuls share.
    """

    kernel_of: Callable[[Matmul], Kernel]
    isa: Isa
    numerics: str = "exact"
    rounded: dict[tuple[Value, str], Mapping[str, Value]] = field(default_factory=dict)

    def __call__(self, p: Projection) -> Value:
        matmul = replace(p.matmul, numerics=numerics_of(p.matmul, self.isa, self.numerics))
        operands = p.operands(packed_param(p.weights, p.glu is not None, p.experts or 1))
        return kernel_call(self.kernel_of(matmul), **self._x(p.x, matmul), **operands)["y"]

    def _x(self, x: Value, matmul: Matmul) -> Mapping[str, Value]:
        if matmul.numerics == "f32" or matmul.quantises_x:
            return {"x": x}
        if matmul.digits:
            return self._made(quantise_x(*x.shape, matmul.format, matmul.digits, isa=self.isa), x)
        made = self._made(split_x(*x.shape, PIECES[matmul.numerics], matmul.summed_groups, isa=self.isa), x)
        return {"x": made["y"], **({"x_sums": made["sums"]} if matmul.summed_groups else {})}

    def _made(self, kernel: Kernel, x: Value) -> Mapping[str, Value]:
        # All matmuls that need x in one format share the conversion.
        key = x, kernel.name
        if key not in self.rounded:
            (name,) = kernel.operands
            self.rounded[key] = kernel_call(kernel, **{name: x})
        return self.rounded[key]


def packed_param(weights: Sequence[Weight], interleaved: bool = False, experts: int = 1) -> Param:
    """Return one parameter with the rows of all `weights`, packed for CPU kernels.

    interleaved: whether 16 rows of the first weight of a GLU are followed by 16 rows of the second.
    experts: the parameter has the rows of expert 0 of every weight, then those of expert 1.
    """
    codec, inner = weights[0].codec, weights[0].shape[1]
    expert_rows = [w.shape[0] // experts for w in weights]
    rows = sum(-(-n // LANES) * LANES if interleaved else n for n in expert_rows)
    blocks, *record = packed_shape(codec, rows, inner)

    def packed(*raws: np.ndarray) -> np.ndarray:
        result = np.empty((experts, blocks, *record), np.uint8)
        for out, *parts in zip(result, *(np.split(raw, experts) for raw in raws)):
            pack(codec, *(parts if interleaved or len(parts) == 1 else [np.concatenate(parts)]), out=out)
        return result.reshape(-1, *record)

    type_ = TensorType((experts * blocks, *record), I8)
    return Param(joined_name([w.name for w in weights]), type_, source(weights, packed))


def joined_name(names: list[str]) -> str:
    """Join the names of weights: `layers.0.mlp.gate_proj+up_proj.weight` for gate and up."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    differ = [column for column in range(len(parts[0])) if len({p[column] for p in parts}) > 1]
    joined = list(parts[0])
    for column in differ:
        joined[column] = "+".join(p[column] for p in parts)
    return ".".join(joined)


def bias_param(biases: Sequence[Weight]) -> Param:
    type_ = TensorType((sum(w.shape[0] for w in biases),), F32)
    joined = source(biases, lambda *raws: np.concatenate([r.view(np.float32) for r in raws]))
    return Param(joined_name([w.name for w in biases]), type_, joined)
