"""Products of activations with packed weights: what is to be computed, apart from how a kernel tiles it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castiron.emitter.codecs import Codec, codec_of
from castiron.emitter.kernels.products.epilogue import Epilogue
from castiron.emitter.kernels.weights.packing import packed_shape, unpack
from castiron.emitter.kernels.weights.x_bytes import of_bytes, rounded_types
from castiron.emitter.kernels.weights.x_pieces import EXACT, joined, nearest, pieces_type
from castiron.emitter.kernels.writing.body import number
from castiron.emitter.kernels.writing.rms import rms_normed
from castiron.emitter.types import F32, I8, I32, TensorType

# What happens to x before it is multiplied: "exact" leaves it f32; "bytes" is `weights.x_bytes`; of `weights.x_pieces`
# "pairs" and "matrix" take the one bf16 nearest to it, for a vector or a matrix unit, which has weights rounded to bf16 as
# well, and "pieces" the three bf16 that make an f32, for a matrix unit. "canonical" leaves it f32 too, and is for kernels of
# several tokens whose order of sums would not be that of one token otherwise.
NUMERICS = ("exact", "bytes", "pairs", "matrix", "pieces", "canonical")
FAST = ("bytes", "pairs", "matrix")
PIECES = {"pairs": 1, "matrix": 1, "pieces": EXACT}


@dataclass(frozen=True)
class Product:
    """x [tokens, in] times a packed weight [out, in], with what is fused before and after. Equal products may have one
    kernel.

    codec: of the weight. rms_eps: x is RMS-normalised first, for one token. glu: the activation of act(gate) * up after,
    of which the packed weight has both (`Epilogue.weight_rows`). bias, residual: are added last. length: rows from a
    length on that is known at run time are padding and become zero.

    With `experts` the weight is that of so many, one after another, and `tokens` counts pairs of a token and one of its
    experts, of which `per_row` have one row of x.

    ValueError for an unknown codec, activation or numerics, rows that are not whole codec blocks, pairs that the rows of
    x do not share evenly, and what no kernel fuses.
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
    numerics: str = "exact"

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics {self.numerics!r} are unknown: use {', '.join(NUMERICS)}")
        if self.tokens % self.per_row:
            raise ValueError(f"a product has {self.tokens} pairs, of which each row of x cannot have {self.per_row}")
        packed_shape(self.codec, self.epilogue.weight_rows(self.out_features), self.in_features)
        single = self.tokens == 1 and not self.experts
        quantised = self.format.quantised
        taken = {"bytes": quantised, "pairs": self.codec == "bf16", "canonical": quantised or self.experts > 0}
        of_experts = self.numerics in ("bytes", "canonical")
        if self.numerics != "exact" and (single or not taken.get(self.numerics, True) or (self.experts and not of_experts)):
            what = f"{self.tokens} tokens, {self.experts} experts and {self.codec}"
            raise ValueError(f"no kernel takes {self.numerics} of x for {what}")
        for option, there, fits in (
            ("rms_eps", self.rms_eps is not None, single),
            ("length", self.length, not single),
            ("bias", self.bias, not self.experts),
            ("residual", self.residual, not self.experts),
        ):
            if there and not fits:
                raise ValueError(f"no kernel fuses {option} with {self.tokens} tokens and {self.experts} experts")

    @property
    def name(self) -> str:
        """Different for different products: `q4_1_1x960x576_rms1em05`."""
        sizes = f"{self.codec}_{self.tokens}x{self.out_features}x{self.in_features}"
        if self.experts:
            sizes += f"_of{self.experts}by{self.per_row}"
        return sizes + self.suffix

    @property
    def suffix(self) -> str:
        """The part of a name that is made by what is fused."""
        norm = "" if self.rms_eps is None else f"_rms{number(self.rms_eps)}"
        return f"_{self.numerics}" * (self.numerics != "exact") + norm + self.epilogue.name + "_length" * self.length

    @property
    def format(self) -> Codec:
        """The codec itself."""
        return codec_of(self.codec)

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.bias, self.residual, self.glu)

    @property
    def weight_rows(self) -> int:
        """Rows of the packed weight, of one expert."""
        return self.epilogue.weight_rows(self.out_features)

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """[row blocks, records, record bytes] of the packed weight, of one expert."""
        return packed_shape(self.codec, self.weight_rows, self.in_features)

    def operands(self) -> dict[str, TensorType]:
        """What its kernel takes, in order: x, (x_scales, x_sums), (norm), weight, (chosen), (bias), (residual), (length).

        With bytes x, x_scales and x_sums are what `weights.x_bytes` makes of x for the codec, with pieces x is what
        `weights.x_pieces` makes of it, and x_sums are the sums of its groups where the codec has minima; canonical ones are
        those of `kernels.group_sums`.
        norm [in] is the RMS norm's weight, chosen i32 [tokens] the expert of each pair, length an i32 that counts rows
        of x.
        """
        row_blocks, *record = self.weight_shape
        y, scalar = self.results()["y"], TensorType((), I32)
        every = {
            **{name: (True, type_) for name, type_ in self._x_operands().items()},
            "norm": (self.rms_eps is not None, TensorType((self.in_features,), F32)),
            "weight": (True, TensorType((max(1, self.experts) * row_blocks, *record), I8)),
            "chosen": (self.experts > 0, TensorType((self.tokens,), I32)),
            "bias": (self.bias, TensorType((self.out_features,), F32)),
            "residual": (self.residual, y),
            "length": (self.length, scalar),
        }
        return {name: type_ for name, (there, type_) in every.items() if there}

    def _x_operands(self) -> dict[str, TensorType]:
        shape = self.tokens // self.per_row, self.in_features
        if self.numerics == "bytes":
            made = rounded_types(*shape, self.format)
            return {"x": made["y"], "x_scales": made["scales"], "x_sums": made["sums"]}
        x = pieces_type(*shape, PIECES[self.numerics]) if self.numerics in PIECES else TensorType(shape, F32)
        given = {"x": x}
        if self.summed_groups:
            given["x_sums"] = TensorType((shape[0], shape[1] // self.format.group), F32)
        return given

    @property
    def summed_groups(self) -> int:
        """The size of groups of which sums of x come beside it; 0 for none."""
        if self.numerics == "canonical" and not self.experts:
            return self.format.group if self.format.summed else 0
        return self.format.group if self.numerics == "pieces" and self.format.minimum else 0

    def results(self) -> dict[str, TensorType]:
        return {"y": TensorType((self.tokens, self.out_features), F32)}

    def define(self, x: np.ndarray, weight: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        """NumPy definition over `operands`, sums in f64."""
        x = self.x_of(x, given.get("x_scales"))
        if self.rms_eps is not None:
            x = rms_normed(x, given["norm"], self.rms_eps)
        real = self.per_row * int(given["length"]) if self.length else self.tokens
        products = np.zeros((self.tokens, self.weight_rows))
        if not self.experts:
            products = x @ self._unpacked(weight).T
        else:
            weights = weight.reshape(self.experts, *self.weight_shape)
            for pair in range(real):
                products[pair] = x[pair // self.per_row] @ self._unpacked(weights[given["chosen"][pair]]).T
        y = self.epilogue.define(products, self.out_features, given.get("bias"), given.get("residual"))
        y[real:] = 0
        return {"y": y}

    def x_of(self, x: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        """What the operand x stands for, f64 [rows, in]."""
        if self.numerics == "bytes" and scales is not None:
            return of_bytes(x, scales)
        if self.numerics in PIECES:
            return joined(x, self.tokens // self.per_row, self.in_features)
        return x.astype(np.float64)

    def _unpacked(self, weight: np.ndarray) -> np.ndarray:
        values = unpack(self.codec, weight, self.weight_rows, self.in_features)
        return (nearest(values) if self.numerics == "matrix" else values).astype(np.float64)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.weight_rows * self.in_features

    @property
    def nbytes(self) -> int:
        """Of all operands and the result; of experts' weights, those of as many as there are pairs."""
        types = self.operands() | self.results()
        weight = types.pop("weight").nbytes
        if self.experts:
            weight = weight * min(self.tokens, self.experts) // self.experts
        return weight + sum(t.nbytes for t in types.values())
