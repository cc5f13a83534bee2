"""The tensors of one quantised weight (`Stored`), and column permutations of weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import codec_of
from castiron.emitter.scaled_codecs import SCALE_TYPES, join, scaled_codec
from castiron.emitter.shorten import shorten_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Tensor

_BLOCK = (128, 128)
# The end of the names of tensors with the order of a weight's columns.
ORDER = "column_order"


@dataclass(frozen=True)
class Stored:
    """The stored tensors of one quantised weight: its codes, scales and so on.

    path: the checkpoint, for error messages.
    name: name of the weight, such as model.layers.0.mlp.up_proj.weight.
    config: the quantization_config.
    parts: {end of a tensor's name, such as "qweight": tensor}.
    """

    path: Path
    name: str
    config: Mapping
    parts: Mapping[str, Tensor]

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {shorten_text(self.name)}: {message}")

    def __getitem__(self, part: str) -> Tensor:
        if (tensor := self.parts.get(part)) is None:
            raise self.error(f"{part} is missing; download the model again")
        return tensor

    def scales(self, part: str) -> Tensor:
        """Return the stored tensor of the weight's scales as a matrix; a vector [n] becomes [n, 1].

        ModelOpt's scales of blocks, [n, 1, m, 1], become [n, m].

        part: end of the tensor's name, such as "weight_scale".
        """
        tensor = self[part]
        if len(tensor.shape) == 4 and tensor.shape[1] == tensor.shape[3] == 1:
            tensor = replace(tensor, shape=tensor.shape[::2])
        if tensor.codec not in SCALE_TYPES or len(tensor.shape) > 2:
            known = ", ".join(SCALE_TYPES)
            raise self.error(
                f"unsupported {part} {list(tensor.shape)} of type {tensor.codec}; supported are 1 or 2 dimensions of {known}"
            )
        return replace(tensor, shape=tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1))

    def tensor(
        self,
        kind: str,
        shape: tuple[int, int],
        scales: Tensor,
        codes: Callable[[], np.ndarray],
        zeros: Callable[[], np.ndarray] | None = None,
        transposed: bool = False,
        order: np.ndarray | None = None,
    ) -> tuple[Tensor, ...]:
        """Combine codes, scales and zero points to one quantised weight, [out, in].

        kind: type of the codes, such as "int4" or "nf4".
        shape: (out, in).
        scales: one for each group or block, [out, groups], or [groups, out] if `transposed`.
        codes: function that returns the codes, u8 [out, in].
        zeros: function that returns the zero points, i8 in the shape of `scales`.
        order: permutation of the columns that makes groups contiguous. Column i of the weight is
            column order[i] of the codes.

        Returns the weight and, if `order` is given, a second tensor with `order`, f32 [in].
        """
        found = scales.shape[::-1] if transposed else scales.shape
        rows, columns = self._group(found, shape)
        codec_name = scaled_codec(kind, gcd(columns, shape[1]), scales.codec)
        if codec_name is None:
            raise self.error(
                f"unsupported size of quantisation groups: {columns} columns in rows of {shape[1]}; give a "
                "checkpoint in which both are multiples of 32"
            )
        codec = codec_of(codec_name)
        of_blocks = np.arange(shape[0])[:, None] // rows, np.arange(shape[1] // codec.block) * codec.block // columns

        def sides(values: np.ndarray) -> np.ndarray:
            return (values.T if transposed else values)[of_blocks].reshape(-1)

        def read() -> np.ndarray:
            d = sides(scales.data.view(SCALE_TYPES[scales.codec]).reshape(scales.shape))
            m = None if zeros is None else sides(zeros())
            found = codes() if order is None else codes()[:, order]
            return join(codec, found.reshape(-1, codec.block), d, m).reshape(shape[0], -1)

        weight = Tensor(self.name, shape, codec_name, scales.source, read)
        if order is None:
            return (weight,)
        name = self.name.removesuffix("weight") + ORDER
        return weight, Tensor(name, (shape[1],), "f32", scales.source, lambda: order.astype("<f4").view(np.uint8))

    def order(self, part: str, inner: int, groups: int) -> np.ndarray | None:
        """Return a permutation of the columns that makes the quantisation groups contiguous.

        The result is None if they are contiguous already.

        part: end of the name of the tensor that has each column's group index, such as "g_idx". If
            the weight has no such tensor, its groups are contiguous.
        inner: number of columns. groups: number of groups.
        """
        if (tensor := self.parts.get(part)) is None:
            return None
        indices = tensor.data.view("<i4").reshape(-1) if tensor.codec == "I32" else np.zeros(0, np.int32)
        order = np.argsort(indices, kind="stable")
        if len(indices) != inner or inner % groups or (indices[order] != np.arange(inner) // (inner // groups)).any():
            raise self.error(f"{part} does not divide the {inner} columns into {groups} equal groups; download the model again")
        return None if (order == np.arange(inner)).all() else order

    def _group(self, scales: tuple[int, ...], shape: tuple[int, int]) -> tuple[int, int]:
        out, inner = shape
        if prod(scales) == 1:
            return shape
        block = block_of(self.config)
        if scales == (-(-out // block[0]), -(-inner // block[1])):
            return block
        if scales[0] == out and inner % scales[1] == 0:
            return 1, inner // scales[1]
        raise self.error(f"scales {list(scales)} do not fit the shape {list(shape)}; download the model again")


def block_of(config: Mapping) -> tuple[int, int]:
    """Return (rows, columns) of a block of an FP8 weight; the elements of a block share a scale."""
    sizes = config.get("weight_block_size") or weights_of(config).get("block_structure") or _BLOCK
    is_valid = isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    return tuple(sizes) if is_valid else _BLOCK


def weights_of(config: Mapping) -> Mapping:
    """Return how compressed-tensors quantised the weights: their bits, group size and so on.

    config: the quantization_config. The result is the entry `weights` of its first config group; {}
    for other quantisation methods.
    """
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def column_orders(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Find the column permutations of weights, and drop duplicates of the same permutation.

    The permutation of a weight `*.weight` is the tensor `*.column_order`.

    Returns the tensors without the duplicates, and {name of a weight: name of the tensor with its
    permutation}.
    """
    found, orders, names = dict(tensors), dict[str, str](), dict[bytes, str]()
    for name, tensor in tensors.items():
        if name.endswith(f".{ORDER}"):
            orders[name.removesuffix(ORDER) + "weight"] = known = names.setdefault(tensor.data.tobytes(), name)
            if known != name:
                del found[name]
    return found, orders
