"""Weight matrices as kernel calls: which kernel, which packed parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from castiron.emitter import ops
from castiron.emitter.ir import Param, Value, parameter
from castiron.emitter.kernels.embed import embed as embed_kernel
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.packing import LANES, interleave_rows, pack, packed_shape
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.step import Weight, source
from castiron.emitter.types import F32, I8, TensorType

# A projection of one token takes its RMS norm in up to this width: every workgroup computes the norm again.
NORM_LIMIT = 8192


def embed(tokens: Value, weight: Weight, isa: Isa) -> Value:
    """Rows `tokens` [T] of the packed weight [vocab, hidden]: [T, hidden]."""
    kernel = embed_kernel(weight.codec, *weight.shape, tokens.shape[0], isa=isa)
    return ops.kernel_call(kernel, (tokens, parameter(packed_param([weight]))))[0]


def project(
    x: Value,
    weights: Sequence[Weight],
    biases: Sequence[Weight],
    *,
    kernel_of: Callable[[Product], Kernel],
    norm: tuple[Value, float] | None = None,
    residual: Value | None = None,
    glu: str | None = None,
    length: Value | None = None,
) -> Value:
    """x [T, in] through weights [out_i, in] of one codec: [T, sum of out_i], or [T, out] for the two of a GLU.

    kernel_of: chooses the tiles. norm: weight [in] and epsilon of an RMS norm of x, for T = 1. residual: added to the
    result. length: rows from it on are padding.
    """
    tokens, inner = x.shape
    out = weights[0].shape[0] if glu else sum(w.shape[0] for w in weights)
    packed = parameter(packed_param(weights, interleaved=glu is not None))
    product = Product(
        weights[0].codec,
        tokens,
        out,
        inner,
        rms_eps=norm[1] if norm else None,
        bias=bool(biases),
        residual=residual is not None,
        glu=glu,
        length=length is not None,
    )
    operands = [
        x,
        *((norm[0],) if norm else ()),
        packed,
        *((_bias(biases),) if biases else ()),
        *((residual,) if residual is not None else ()),
        *((length,) if length is not None else ()),
    ]
    return ops.kernel_call(kernel_of(product), operands)[0]


def project_experts(
    x: Value,
    chosen: Value,
    weights: Sequence[Weight],
    experts: int,
    *,
    kernel_of: Callable[[Product], Kernel],
    glu: str | None = None,
    length: Value | None = None,
) -> Value:
    """Row i // per_row of x [T, in] through the weight of expert chosen[i] i32 [T * per_row]: [T * per_row, out].

    weights [experts * out, in], all experts' rows in order, one of them or the two of a GLU. length: rows of x from it on
    are padding.
    """
    (pairs,), out, inner = chosen.shape, weights[0].shape[0] // experts, x.shape[1]
    per_row, padded = pairs // x.shape[0], length is not None
    product = Product(weights[0].codec, pairs, out, inner, glu=glu, length=padded, experts=experts, per_row=per_row)
    packed = parameter(packed_param(weights, glu is not None, experts))
    return ops.kernel_call(kernel_of(product), (x, packed, chosen, *((length,) if padded else ())))[0]


def packed_param(weights: Sequence[Weight], interleaved: bool = False, experts: int = 1) -> Param:
    """Weights [out_i, in] of one codec in the kernels' layout, rows stacked in order.

    interleaved: blocks of 16 rows are taken in turn from the two weights of a GLU. experts: each weight is that of so
    many, whose packed weights stand one after another.
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
