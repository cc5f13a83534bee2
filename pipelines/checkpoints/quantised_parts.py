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
    """The tensors of one quantised weight.

    name: name of the weight, such as model.layers.0.mlp.up_proj.weight. config: the
    quantization_config. parts: the tensors by the end of their names, such as "qweight".
    """

    path: Path
    name: str
    config: Mapping
    parts: Mapping[str, Tensor]

    def error(self, problem: str, remedy: str = "download the model again") -> CheckpointError:
        return CheckpointError(f"{self.path}: {shorten_text(self.name)} {problem}; {remedy}")

    def __getitem__(self, part: str) -> Tensor:
        if (tensor := self.parts.get(part)) is None:
            raise self.error(f"has no {part}")
        return tensor

    def scales(self, part: str) -> Tensor:
        """Return the scales in the tensor `part` with two dimensions; a vector becomes [n, 1]."""
        tensor = self[part]
        if tensor.codec not in SCALE_TYPES or len(tensor.shape) > 2:
            known = f"supported are 1 or 2 dimensions of {', '.join(SCALE_TYPES)}"
            raise self.error(f"has {part} {list(tensor.shape)} of type {tensor.codec}", known)
        return replace(tensor, shape=tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1))

    def tensor(
        self,
        kind: str,
        shape: tuple[int, int],
        scales: Tensor,
        codes: Callable[[], np.ndarray],
        zeros: Callable[[], np.ndarray] | None = None,
        turned: bool = False,
        order: np.ndarray | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the weight [out, in] and, if `order` is given, a tensor f32 [in] with `order`.

        kind: the type of the codes, as in `scaled_codec`.
        scales: one for each group or block, [out, groups], or [groups, out] if `turned`.
        codes: returns the stored codes, u8 [out, in].
        zeros: returns zero points, i8 in the shape of the scales.
        order: column i of the weight is column order[i] of the codes.
        """
        found = scales.shape[::-1] if turned else scales.shape
        rows, columns = self._group(found, shape)
        codec_name = scaled_codec(kind, gcd(columns, shape[1]), scales.codec)
        if codec_name is None:
            raise self.error(f"has groups of {columns} in rows of {shape[1]}", "supported are multiples of 32")
        codec = codec_of(codec_name)
        of_blocks = np.arange(shape[0])[:, None] // rows, np.arange(shape[1] // codec.block) * codec.block // columns

        def sides(values: np.ndarray) -> np.ndarray:
            return (values.T if turned else values)[of_blocks].reshape(-1)

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
        """Return a column permutation that makes quantisation groups contiguous.

        The tensor `part` has the group index of each column. The result is None if there is no such
        tensor, or if the groups are contiguous already. inner: number of columns.
        """
        if (tensor := self.parts.get(part)) is None:
            return None
        indices = tensor.data.view("<i4").reshape(-1) if tensor.codec == "I32" else np.zeros(0, np.int32)
        order = np.argsort(indices, kind="stable")
        if len(indices) != inner or inner % groups or (indices[order] != np.arange(inner) // (inner // groups)).any():
            raise self.error(f"has {part} that does not divide {inner} columns into equal groups")
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
        raise self.error(f"has scales {list(scales)}, which do not fit the shape {list(shape)}")


def block_of(config: Mapping) -> tuple[int, int]:
    """Return the block size (rows, columns) of FP8 weights; a block has one scale."""
    sizes = config.get("weight_block_size") or weights_of(config).get("block_structure") or _BLOCK
    is_valid = isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    return tuple(sizes) if is_valid else _BLOCK


def weights_of(config: Mapping) -> Mapping:
    """Return `weights` in the first of a compressed-tensors config's `config_groups`, or {}."""
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def column_orders(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, and {name of a weight: name of the tensor with its column permutation}.

    The permutation of the weight `*.weight` is the tensor `*.column_order`. If several of these are
    equal, only the first is returned, and it is used for all their weights.
    """
    found, orders, names = dict(tensors), dict[str, str](), dict[bytes, str]()
    for name, tensor in tensors.items():
        if name.endswith(f".{ORDER}"):
            orders[name.removesuffix(ORDER) + "weight"] = known = names.setdefault(tensor.data.tobytes(), name)
            if known != name:
                del found[name]
    return found, orders
