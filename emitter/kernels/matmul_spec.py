"""The specification of a matmul of activations with packed weights, without tile sizes."""

from dataclasses import dataclass

import numpy as np

from castiron.emitter.codecs import codec_of, row_bytes
from castiron.emitter.codecs.codec import Codec
from castiron.emitter.graph.types import F32, I8, I32, TensorType
from castiron.emitter.kernels.epilogue import ACTIVATIONS
from castiron.emitter.kernels.mlir.body import number
from castiron.emitter.kernels.mlir.vector_math import rms_normed
from castiron.emitter.kernels.quantise_x import dequantised, quantised, quantised_types
from castiron.emitter.kernels.split_x import EXACT, joined, nearest, split_type
from castiron.emitter.kernels.weights.packing import LANES, packed_shape, unpack

# How a kernel multiplies x:
# f32: in f32, as all formats of floats in exact numerics.
# int24, int16, int8: quantised to integers of three, two or one bytes (`quantise_x`), whose dot products with codes are
# exact. A codec's table of floats is rounded to int8 too (`Codec.in_int8`).
# bf16_pairs, bf16_matrix: rounded to bf16 by `split_x`, for a vector unit and for a matrix unit; weights are rounded too.
# bf16_split: split by `split_x` into three bf16 whose sum is x, for a matrix unit.
NUMERICS = ("f32", "int24", "int16", "int8", "bf16_pairs", "bf16_matrix", "bf16_split")
FAST = ("int16", "int8", "bf16_pairs", "bf16_matrix")
DIGITS = {"int8": 1, "int16": 2, "int24": 3}
PIECES = {"bf16_pairs": 1, "bf16_matrix": 1, "bf16_split": EXACT}
MIN_PAIRS = 2  # min average (token, expert) pairs of an expert for which an MoE matmul groups pairs by expert


@dataclass(frozen=True)
class Matmul:
    """The specification of y = x W^T, for x [tokens, in] and a packed weight W [out, in].

    codec: name of the storage format of W, such as "q4_k".
    tokens, out_features, in_features: the sizes of y and W.
    rms_eps: epsilon of an RMS norm that the kernel applies to x; None for no norm. CPU kernels
        compute the norm for one token only.
    bias, residual: whether the kernel adds a bias or a residual to y.
    glu: activation of a GLU, y = act(gate) * up, or None. With a GLU, W has both matrices: blocks
        of 16 rows alternate, the first is of gate, the second of up (`weights.packing.pack`).
    length: whether an operand `length` gives the number of rows of x that are not padding. The
        results of padding are zero.
    experts: number of experts of an MoE layer, or 0. With experts, the operand `weight` has the
        weights of all experts, `tokens` is the number of (token, expert) pairs, and x has
        tokens / `per_row` rows.
    per_row: number of experts that each row of x uses; its pairs are consecutive.
    numerics: one of `NUMERICS`, how x is multiplied.

    Raises ValueError for an unknown codec, and if the codec's block size does not divide
    `in_features`.
    """

    codec: str
    tokens: int
    out_features: int
    in_features: int
    rms_eps: float | None = None
    bias: bool = False
    residual: bool = False
    glu: str | None = None
    length: bool = False
    experts: int = 0
    per_row: int = 1
    numerics: str = "f32"

    def __post_init__(self) -> None:
        row_bytes(self.codec, self.in_features)

    @property
    def name(self) -> str:
        """Return a name made of all fields, such as `q4_1_1x960x576_rms1em05`."""
        sizes = f"{self.codec}_{self.tokens}x{self.out_features}x{self.in_features}"
        if self.experts:
            sizes += f"_of{self.experts}by{self.per_row}"
        numerics = f"_{self.numerics}" * (self.numerics != "f32")
        norm = "" if self.rms_eps is None else f"_rms{number(self.rms_eps)}"
        glu = f"_{self.glu}" if self.glu else ""
        flags = "_bias" * self.bias + "_residual" * self.residual + "_length" * self.length
        return sizes + numerics + norm + glu + flags

    @property
    def format(self) -> Codec:
        return codec_of(self.codec)

    @property
    def digits(self) -> int:
        """Return the number of int8 digits of an element of quantised x; 0 if x is not quantised."""
        return DIGITS.get(self.numerics, 0)

    @property
    def is_grouped(self) -> bool:
        """Return whether an MoE kernel multiplies the pairs of an expert together."""
        return self.experts > 0 and self.tokens >= MIN_PAIRS * self.experts

    @property
    def quantises_x(self) -> bool:
        """Return whether the kernel itself quantises x, which is then an operand in f32."""
        return self.digits > 0 and (not self.is_grouped if self.experts else self.tokens == 1)

    @property
    def blocks_per_result(self) -> int:
        """Return how many 16-row blocks of W give 16 columns of y: 2 with a GLU, else 1."""
        return 2 if self.glu else 1

    @property
    def weight_rows(self) -> int:
        """Return the rows of the packed weight, of one expert; with a GLU, of gate and up together."""
        return -(-self.out_features // LANES) * 2 * LANES if self.glu else self.out_features

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Return the shape of the packed weight, of one expert: (row blocks, records, bytes)."""
        return packed_shape(self.codec, self.weight_rows, self.in_features)

    def operands(self) -> dict[str, TensorType]:
        """Return the types of those operands that the kernel needs, by name, in order.

        x, x_scales, x_sums, x_integer_sums: x in f32, or the results of `quantise_x` or `split_x`.
        chosen: the expert of each (token, expert) pair. length: rows of x that are not padding.
        """
        row_blocks, *record = self.weight_shape
        every = {
            **{name: (True, type_) for name, type_ in self._x_operands().items()},
            "norm": (self.rms_eps is not None, TensorType((self.in_features,), F32)),
            "weight": (True, TensorType((max(1, self.experts) * row_blocks, *record), I8)),
            "chosen": (self.experts > 0, TensorType((self.tokens,), I32)),
            "bias": (self.bias, TensorType((self.out_features,), F32)),
            "residual": (self.residual, self.results()["y"]),
            "length": (self.length, TensorType((), I32)),
        }
        return {name: type_ for name, (there, type_) in every.items() if there}

    def _x_operands(self) -> dict[str, TensorType]:
        shape = self.tokens // self.per_row, self.in_features
        if self.digits and not self.quantises_x:
            return quantised_types(*shape, self.format, self.digits)
        x = split_type(*shape, PIECES[self.numerics]) if self.numerics in PIECES else TensorType(shape, F32)
        given = {"x": x}
        if self.summed_groups:
            given["x_sums"] = TensorType((shape[0], shape[1] // self.format.group), F32)
        return given

    @property
    def summed_groups(self) -> int:
        """Return the number of elements of x in each sum of the operand `x_sums`.

        It is 0 if the kernel has no such operand, and if `quantise_x` computes those sums.
        """
        return self.format.group if self.numerics == "bf16_split" and self.format.minimum else 0

    def results(self) -> dict[str, TensorType]:
        return {"y": TensorType((self.tokens, self.out_features), F32)}

    def define(self, x: np.ndarray, weight: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        """Compute the kernel's result in NumPy, as a reference: {"y": f32 [tokens, out]}.

        given: the other operands by name; see `operands`.
        """
        x = self.x_of(x, given.get("x_scales"))
        if self.rms_eps is not None:
            x = rms_normed(x, given["norm"], self.rms_eps)
        if self.quantises_x:
            made = quantised(x, self.format, self.digits)
            x = dequantised(made["x"], made["x_scales"], self.digits)
        real = self.per_row * int(given["length"]) if self.length else self.tokens
        dots = np.zeros((self.tokens, self.weight_rows))
        if not self.experts:
            dots = x @ self._unpacked(weight).T
        else:
            weights = weight.reshape(self.experts, *self.weight_shape)
            for pair in range(real):
                dots[pair] = x[pair // self.per_row] @ self._unpacked(weights[given["chosen"][pair]]).T
        if self.glu is not None:
            pairs = dots.reshape(self.tokens, -1, 2, LANES)
            activated = ACTIVATIONS[self.glu][1](pairs[:, :, 0]) * pairs[:, :, 1]
            dots = activated.reshape(self.tokens, -1)[:, : self.out_features]
        y = (dots + given.get("bias", 0) + given.get("residual", 0)).astype(np.float32)
        y[real:] = 0
        return {"y": y}

    def x_of(self, x: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        """Return the activations as f64 [rows, in], given the kernel's operands x and x_scales.

        x may be f32, quantised to integers or split into bf16, see `numerics`.
        """
        if scales is not None:
            return dequantised(x, scales, self.digits)
        if self.numerics in PIECES:
            return joined(x, self.tokens // self.per_row, self.in_features)
        return x.astype(np.float64)

    def _unpacked(self, weight: np.ndarray) -> np.ndarray:
        values = unpack(self.codec, weight, self.weight_rows, self.in_features, self.digits > 0)
        return (nearest(values) if PIECES.get(self.numerics) == 1 else values).astype(np.float64)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.weight_rows * self.in_features

    @property
    def nbytes(self) -> int:
        """Return the bytes of operands and results of a call; with experts, of those that it may use."""
        types = self.operands() | self.results()
        weight = types.pop("weight").nbytes
        if self.experts:
            weight = weight * min(self.tokens, self.experts) // self.experts
        return weight + sum(t.nbytes for t in types.values())
