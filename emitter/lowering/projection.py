"""Weight matrices as kernel calls: which kernel, which packed parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from castiron.emitter import ops
from castiron.emitter.ir import Param, Value, parameter
from castiron.emitter.kernels.group_sums import group_sums
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.choosing import numerics_of
from castiron.emitter.kernels.products.product import PIECES, Product
from castiron.emitter.kernels.round_x import round_x
from castiron.emitter.kernels.split_x import split_x
from castiron.emitter.kernels.weights.packing import LANES, interleave_rows, pack, packed_shape
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.step import Weight, source
from castiron.emitter.types import F32, I8, TensorType

# A projection of one token takes its RMS norm in up to this width: every workgroup computes the norm again.
NORM_LIMIT = 8192


@dataclass(frozen=True)
class Projector:
    """Makes products' calls: `kernel_of` gives the kernel of a product. fast: x is rounded where a kernel takes it so."""

    kernel_of: Callable[[Product], Kernel]
    isa: Isa
    fast: bool = False
    rounded: dict[tuple[Value, str], Mapping[str, Value]] = field(default_factory=dict)

    def __call__(
        self,
        x: Value,
        weights: Sequence[Weight],
        biases: Sequence[Weight] = (),
        *,
        norm: tuple[Value, float] | None = None,
        residual: Value | None = None,
        glu: str | None = None,
        length: Value | None = None,
        chosen: Value | None = None,
        experts: int = 0,
    ) -> Value:
        """x [T, in] through weights [out_i, in] of one codec: [T, sum of out_i], or [T, out] for the two of a GLU.

        norm: weight [in] and epsilon of an RMS norm of x, for T = 1. residual: added to the result. length: rows of x
        from it on are padding. With `experts` each weight [experts * out, in] is that of so many in order, and row i of
        the result [len(chosen), out] is x's row i // (len(chosen) / T) through the weight of expert chosen[i] i32.
        """
        given = {
            "norm": norm[0] if norm else None,
            "weight": parameter(packed_param(weights, glu is not None, experts or 1)),
            "chosen": chosen,
            "bias": _bias(biases) if biases else None,
            "residual": residual,
            "length": length,
        }
        rows = [w.shape[0] // (experts or 1) for w in weights]
        tokens = x.shape[0] if chosen is None else chosen.shape[0]
        product = Product(
            weights[0].codec,
            tokens,
            rows[0] if glu else sum(rows),
            x.shape[1],
            rms_eps=norm[1] if norm else None,
            bias=bool(biases),
            residual=residual is not None,
            glu=glu,
            length=length is not None,
            experts=experts,
            per_row=tokens // x.shape[0],
        )
        product = replace(product, numerics=numerics_of(product, self.isa, self.fast))
        operands = {name: value for name, value in given.items() if value is not None}
        return ops.kernel_call(self.kernel_of(product), **self._x(x, product), **operands)["y"]

    def _x(self, x: Value, product: Product) -> dict[str, Value]:
        """x as the product's kernel takes it, rounded or taken apart once for all that share that."""
        if product.numerics == "exact":
            return {"x": x}
        if product.numerics == "canonical":
            if not product.summed_groups:
                return {"x": x}
            return {"x": x, "x_sums": self._made(x, group_sums(*x.shape, product.format, isa=self.isa))["sums"]}
        if product.numerics == "bytes":
            made = self._made(x, round_x(*x.shape, product.format, isa=self.isa))
            return {"x": made["y"], "x_scales": made["scales"], "x_sums": made["sums"]}
        made = self._made(x, split_x(*x.shape, PIECES[product.numerics], product.summed_groups, isa=self.isa))
        return {"x": made["y"], **({"x_sums": made["sums"]} if product.summed_groups else {})}

    def _made(self, x: Value, kernel: Kernel) -> Mapping[str, Value]:
        key = x, kernel.name
        if key not in self.rounded:
            self.rounded[key] = ops.kernel_call(kernel, x=x)
        return self.rounded[key]


def packed_param(weights: Sequence[Weight], interleaved: bool = False, experts: int = 1) -> Param:
    """Weights [out_i, in] of one codec in the kernels' layout, rows stacked in order.

    interleaved: row blocks are taken in turn from the two weights of a GLU. experts: each weight is that of so many,
    whose packed weights stand one after another.
    """
    codec, inner = weights[0].codec, weights[0].shape[1]
    own = [w.shape[0] // experts for w in weights]
    rows = sum(-(-n // LANES) * LANES if interleaved else n for n in own)
    blocks, *record = packed_shape(codec, rows, inner)

    def packed(*raws: np.ndarray) -> np.ndarray:
        stack = interleave_rows if interleaved else lambda *parts: np.concatenate(parts)
        each = zip(*(np.split(raw, experts) for raw in raws))
        return np.concatenate([pack(codec, stack(*parts)) for parts in each])

    type_ = TensorType((experts * blocks, *record), I8)
    return Param(_joined([w.name for w in weights]), type_, source(weights, packed))


def _joined(names: list[str]) -> str:
    """One name for several: `layers.0.self_attn.q_proj+k_proj+v_proj.weight`."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    differ = [column for column in range(len(parts[0])) if len({p[column] for p in parts}) > 1]
    joined = list(parts[0])
    for column in differ:
        joined[column] = "+".join(p[column] for p in parts)
    return ".".join(joined)


def _bias(biases: Sequence[Weight]) -> Value:
    """Biases of stacked projections, in order: f32 [sum of out]."""
    type_ = TensorType((sum(w.shape[0] for w in biases),), F32)
    joined = source(biases, lambda *raws: np.concatenate([r.view(np.float32) for r in raws]))
    return parameter(Param(_joined([w.name for w in biases]), type_, joined))
