"""Read the quantised weights of HF directories, as their `quantization_config` describes them.

Tensors such as `q_proj.qweight`, `q_proj.scales` and `q_proj.qzeros` become one `q_proj.weight`
[out, in] in a codec of `emitter.codecs.scaled` with the same codes, scales and zero points. Bits
and group size follow from shapes. A layer with a plain `weight` is not quantised.

Sources of the layouts: compressed-tensors (compressors/pack_quantized), GPTQModel
(nn_modules/qlinear/torch.py), AutoAWQ (utils/packing_utils.py), bitsandbytes (functional.py),
AutoRound (export/export_to_autoround/export.py), ModelOpt (torch/export/quant_utils.py), and HF's
integrations/finegrained_fp8.py.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import codec_of, with_scale
from castiron.emitter.codecs.scaled import FP4, NF4, SCALE_TYPES, join, scaled_codec
from castiron.emitter.shorten import shorten_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Tensor, inconsistent
from castiron.pipelines.checkpoints.column_order import ORDER
from castiron.pipelines.checkpoints.hf.quantisation_methods import ZERO_POINTS, layout_of, weights_of

# Scales of activations and of the KV cache, which castiron does not quantise.
_OF_ACTIVATIONS = re.compile(
    r".*\.((?:input|output|activation|[qkv])_(?:scale|zero_point|global_scale)|(?:input|output)_observer\..*)"
)
# AutoAWQ packs eight columns in the order 0, 2, 4, 6, 1, 3, 5, 7; these are their indices in a word.
_AWQ_INDICES = (0, 4, 1, 5, 2, 6, 3, 7)
# The largest code of E4M3 that is a positive number.
_LARGEST_E4M3 = 0x7E
# Tables of bitsandbytes by type.
_TABLES = {"nf4": NF4, "fp4": FP4}
# The names of the parts that describe a weight.
_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in _TABLES}
# Names of the parts of a weight of bitsandbytes.
_BITSANDBYTES = (
    *("SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *_STATES.values(),
)
_LARGEST_INT8 = np.float32(127)
# Rows and columns of a block of FP8, unless the config states others.
_BLOCK = (128, 128)


@dataclass(frozen=True)
class WeightParts:
    """The tensors of one quantised weight, by the ends of their names, such as "qweight"."""

    path: Path
    name: str
    config: Mapping
    parts: Mapping[str, Tensor]

    def inconsistent(self, problem: str) -> CheckpointError:
        return inconsistent(self.path, f"{shorten_text(self.name)}: {problem}")

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {shorten_text(self.name)}: {message}")

    def __getitem__(self, part: str) -> Tensor:
        if (tensor := self.parts.get(part)) is None:
            raise self.inconsistent(f"{part} is missing")
        return tensor

    def scales(self, part: str) -> Tensor:
        """Return scales as a matrix; [n] becomes [n, 1], and ModelOpt's [n, 1, m, 1] [n, m]."""
        tensor = self[part]
        if len(tensor.shape) == 4 and tensor.shape[1] == tensor.shape[3] == 1:
            tensor = replace(tensor, shape=tensor.shape[::2])
        if tensor.codec not in SCALE_TYPES or len(tensor.shape) > 2:
            known = ", ".join(SCALE_TYPES)
            raise self.error(f"unsupported {_described(part, tensor)}; supported are 1 or 2 dimensions of {known}")
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
        """Return the weight [out, in] and, with an `order`, its column order.

        kind: type of the codes, such as "int4" or "nf4".
        scales: one for each group or block, [out, groups], or [groups, out] if `transposed`.
        codes: returns u8 [out, in]. zeros: returns the zero points, i8 in the shape of `scales`.
        order: permutation of the columns of the codes that makes groups contiguous.
        """
        found = scales.shape[::-1] if transposed else scales.shape
        rows, columns = self._group(found, shape)
        codec_name = scaled_codec(kind, gcd(columns, shape[1]), scales.codec)
        if codec_name is None:
            groups = f"groups of {columns} columns in rows of {shape[1]}"
            raise self.error(f"unsupported quantisation {groups}; both must be multiples of 32")
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
        """Return the column order that makes the groups in `part` contiguous; None if they are."""
        if (tensor := self.parts.get(part)) is None:
            return None
        indices = tensor.data.view("<i4").reshape(-1) if tensor.codec == "I32" else np.zeros(0, np.int32)
        order = np.argsort(indices, kind="stable")
        if len(indices) != inner or inner % groups or (indices[order] != np.arange(inner) // (inner // groups)).any():
            raise self.inconsistent(f"{part} does not divide the {inner} columns into {groups} equal groups")
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
        raise self.inconsistent(f"scales {list(scales)} do not fit the shape {list(shape)}")


def block_of(config: Mapping) -> tuple[int, int]:
    """Return (rows, columns) of a block of FP8 that shares a scale."""
    sizes = config.get("weight_block_size") or weights_of(config).get("block_structure") or _BLOCK
    is_valid = isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    return tuple(sizes) if is_valid else _BLOCK


def _described(part: str, tensor: Tensor) -> str:
    return f"{part} {list(tensor.shape)} of type {tensor.codec}"


def _unpacked(tensor: Tensor, bits: int, by_rows: bool = False) -> np.ndarray:
    """Unpack an i32 tensor [n, m] of numbers of 4 or 8 bits, lowest bits first, to u8.

    The result is [n, m * 32 / bits]; by rows, as a word spans rows, [m, n * 32 / bits].
    """
    words = tensor.data.reshape(*tensor.shape, 4)
    packed = np.ascontiguousarray(words.swapaxes(0, 1) if by_rows else words)
    packed = packed.reshape(len(packed), -1)
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _codes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned values as stored codes: 8 bits become signed bytes."""
    return numbers ^ np.uint8(128) if bits == 8 else numbers


def _packed_by_columns(stored: WeightParts) -> tuple[Tensor, ...]:
    """Convert a GPTQ or AWQ weight, with the order of its columns.

    qweight: [in, out / 8] for AWQ, [in * bits / 32, out] for GPTQ; scales: [groups, out];
    qzeros: [groups, out * bits / 32].
    """
    is_awq = stored.config["quant_method"] == "awq"
    qweight, qzeros, scales = stored["qweight"], stored["qzeros"], stored.scales("scales")
    groups, out = scales.shape
    bits = 32 * qzeros.shape[-1] // out
    if bits not in ((4,) if is_awq else (4, 8)):
        raise stored.error(f"{bits} bits are unsupported; supported are {'4 for awq' if is_awq else '4 and 8 for gptq'}")
    inner = qweight.shape[0] if is_awq else qweight.shape[0] * 32 // bits
    words = (inner, out * bits // 32) if is_awq else (inner * bits // 32, out)
    if qweight.shape != words or qzeros.shape != (groups, out * bits // 32) or {qweight.codec, qzeros.codec} != {"I32"}:
        shapes = f"qweight {list(qweight.shape)} and qzeros {list(qzeros.shape)}"
        raise stored.inconsistent(f"{shapes} do not fit scales {list(scales.shape)}")
    if is_awq:
        ordered = lambda numbers: numbers.reshape(len(numbers), -1, 8)[:, :, _AWQ_INDICES].reshape(len(numbers), -1)
        zeros = lambda: ordered(_unpacked(qzeros, bits)).view(np.int8)
        return stored.tensor("uint4", (out, inner), scales, lambda: ordered(_unpacked(qweight, bits)).T, zeros, True)
    order = stored.order("g_idx", inner, groups)
    half, subtracted, symmetric = 1 << bits - 1, ZERO_POINTS.get(stored.config.get("checkpoint_format")), _is_symmetric(stored)

    def zeros() -> np.ndarray:
        found = _unpacked(qzeros, bits)
        # Zero points of symmetric weights are `half`; their stored value shows the version, which some files name wrongly.
        if (symmetric or subtracted is None) and any((found == value).all() for value in (half - 1, half)):
            return np.full_like(found, half)
        return found + np.uint8(1 if subtracted is None else subtracted) & np.uint8(2 * half - 1)

    codes = lambda: _codes(_unpacked(qweight, bits, by_rows=True), bits)
    if not symmetric:
        of_groups = lambda: _codes(zeros(), bits).view(np.int8)
        return stored.tensor(f"uint{bits}", (out, inner), scales, codes, of_groups, True, order)

    def checked() -> np.ndarray:
        if (zeros() != half).any():
            raise stored.inconsistent(f"qzeros has zero points other than {half}, although `sym` is true")
        return codes()

    return stored.tensor(f"int{bits}", (out, inner), scales, checked, transposed=True, order=order)


def _is_symmetric(stored: WeightParts) -> bool | None:
    """Return `sym` of a weight; `extra_config` and `dynamic` (GPTQModel) state it by layer."""
    for key in ("extra_config", "dynamic"):
        layers = stored.config.get(key)
        for pattern, of_layer in layers.items() if isinstance(layers, dict) else ():
            with contextlib.suppress(re.error):
                stated = isinstance(of_layer, dict) and of_layer.get("sym") is not None
                if stated and re.search(pattern.removeprefix("+:"), stored.name.removesuffix(".weight")):
                    return of_layer["sym"]
    return stored.config.get("sym")


def _packed_by_rows(stored: WeightParts) -> tuple[Tensor, ...]:
    """Convert a pack-quantized weight of compressed-tensors, with the order of its columns.

    An i32 of weight_packed has numbers of one row, of weight_zero_point numbers of one column.
    """
    if "weight_global_scale" in stored.parts:
        return _nvfp4(stored, "weight_packed", "weight_global_scale", is_divisor=True)
    packed, scales, of_shape = stored["weight_packed"], stored.scales("weight_scale"), stored["weight_shape"]
    integers = {"I64": "<i8", "I32": "<i4"}.get(of_shape.codec)
    shape = tuple(of_shape.data.view(integers).reshape(-1).tolist()) if integers else ()
    if len(shape) != 2 or len(packed.shape) != 2 or packed.codec != "I32" or min(shape) < 1:
        raise stored.inconsistent(f"weight_packed {list(packed.shape)} does not fit weight_shape {list(shape)}")
    out, inner = shape
    bits = 32 * packed.shape[1] // inner
    if bits not in (4, 8) or packed.shape != (out, -(-inner * bits // 32)):
        raise stored.error(f"weight_packed {list(packed.shape)} does not store a weight {list(shape)} in 4 or 8 bits")
    order = stored.order("weight_g_idx", inner, scales.shape[1])
    codes = lambda: _codes(_unpacked(packed, bits)[:, :inner], bits)
    zero_points = stored.parts.get("weight_zero_point")
    if zero_points is None:
        return stored.tensor(f"int{bits}", shape, scales, codes, order=order)
    if zero_points.codec == "I8" and zero_points.shape == scales.shape:
        # Early versions do not pack signed zero points.
        zeros = lambda: zero_points.data.view(np.int8) + np.int8(8 if bits == 4 else 0)
    elif zero_points.codec == "I32" and zero_points.shape == (-(-out * bits // 32), scales.shape[1]):
        zeros = lambda: _codes(_unpacked(zero_points, bits, by_rows=True)[:, :out].T, bits).view(np.int8)
    else:
        raise stored.inconsistent(f"weight_zero_point {list(zero_points.shape)} does not fit weight_scale {list(scales.shape)}")
    return stored.tensor(f"uint{bits}", shape, scales, codes, zeros, order=order)


def _nvfp4(stored: WeightParts, part: str, of_tensor: str, is_divisor: bool) -> tuple[Tensor, ...]:
    """Convert an NVFP4 weight; the part `of_tensor` divides or multiplies its scales."""
    packed, scales, second = stored[part], stored["weight_scale"], stored[of_tensor]
    out, inner = packed.shape[0], 2 * packed.shape[-1]
    types = packed.codec, scales.codec, second.codec
    if scales.shape != (out, inner // 16) or inner % 64 or types != ("U8", "F8_E4M3", "f32") or prod(second.shape) != 1:
        both = f"{_described(part, packed)} and {_described('weight_scale', scales)}"
        raise stored.inconsistent(f"{both} do not have the layout of nvfp4")

    @np.errstate(divide="ignore")  # `check_finite` finds a divisor of 0
    def read() -> np.ndarray:
        if (scales.data > _LARGEST_E4M3).any():
            raise stored.inconsistent("weight_scale has negative or NaN scales")
        # A block of 64 has 4 scales; of every 16 codes, the first 8 are in the low halves of 8 bytes.
        runs = np.stack([packed.data & 15, packed.data >> 4], axis=-1).reshape(out, inner // 16, 2, 8)
        codes = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(out, inner // 64, 32)
        blocks = np.concatenate([scales.data.reshape(out, -1, 4), codes], axis=-1).reshape(out, -1)
        scale = second.data.view("<f4").reshape(1, 1)
        return with_scale(blocks, 1 / scale if is_divisor else scale)

    return (Tensor(stored.name, (out, inner), "nvfp4_scaled", packed.source, read),)


def _bitsandbytes_4_bits(stored: WeightParts) -> tuple[Tensor, ...]:
    """Convert an NF4 or FP4 weight of bitsandbytes.

    absmax has a scale for each `blocksize` consecutive elements, across rows. With double
    quantisation it is an index into nested_quant_map, times nested_absmax of `nested_blocksize`.
    """
    kind = next((kind for kind, name in _STATES.items() if name in stored.parts), "nf4")
    packed, state = stored["weight"], stored[_STATES[kind]]
    try:
        fields = json.loads(state.data.tobytes())
        (out, inner), size = fields["shape"], fields["blocksize"]
        nested, offset = fields.get("nested_blocksize", 1), np.float32(fields.get("nested_offset", 0))
        if any(type(n) is not int or n < 1 for n in (out, inner, size, nested)) or fields["quant_type"] != kind:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise stored.inconsistent(f"{_STATES[kind]} has no valid shape, blocksize and quant_type") from None
    quant_map, absmax = stored["weight.quant_map"], stored["weight.absmax"]
    blocks, codec = -(-out * inner // size), "U8" if "nested_blocksize" in fields else "f32"
    if quant_map.codec != "f32" or quant_map.data.tobytes() != np.array(_TABLES[kind], "<f4").tobytes():
        raise stored.inconsistent(f"quant_map is not the table of {kind}")
    if prod(packed.shape) * 2 != out * inner or inner % 2 or absmax.shape != (blocks,) or absmax.codec != codec:
        weight = f"a weight of {prod(packed.shape)} bytes with {_described('absmax', absmax)}"
        raise stored.inconsistent(f"{weight} does not fit the shape in quant_state: {[out, inner]}")
    if codec == "U8":
        of_nested = stored["weight.nested_absmax"], stored["weight.nested_quant_map"]
        sizes = [prod(part.shape) for part in of_nested]
        if {part.codec for part in of_nested} != {"f32"} or sizes != [-(-blocks // nested), 256]:
            wanted = f"{-(-blocks // nested)} and 256 of type f32"
            raise stored.inconsistent(
                f"nested_absmax and nested_quant_map have {sizes[0]} and {sizes[1]} numbers, not {wanted}"
            )

    def scales() -> np.ndarray:
        if codec == "U8":
            factors, values = (part.data.view("<f4").reshape(-1) for part in of_nested)
            found = values[absmax.data] * factors[np.arange(blocks) // nested] + offset
        else:
            found = absmax.data.view("<f4")
        # A group of the flat weight may start in the middle of a row.
        return found[np.arange(out * inner // group) * group // size].astype("<f4").view(np.uint8).reshape(out, -1)

    def codes() -> np.ndarray:
        return np.stack([packed.data >> 4, packed.data & 15], axis=-1).reshape(out, inner)

    group = gcd(size, inner)
    of_groups = Tensor(absmax.name, (out, inner // group), "f32", absmax.source, scales)
    return stored.tensor(kind, (out, inner), of_groups, codes)


def _bitsandbytes_int8(stored: WeightParts) -> tuple[Tensor, ...]:
    """Convert an int8 weight of bitsandbytes; SCB has the largest magnitude of each row."""
    weight, largest = stored["weight"], stored.scales("SCB")
    read = lambda: (largest.data.view("<f4") / _LARGEST_INT8).view(np.uint8)
    scales = replace(largest, shape=(prod(largest.shape), 1), read=read)
    if largest.codec != "f32" or weight.codec != "I8" or len(weight.shape) != 2 or scales.shape[0] != weight.shape[0]:
        raise stored.inconsistent(f"{_described('SCB', largest)} does not fit a weight {list(weight.shape)}")
    return stored.tensor("int8", weight.shape, scales, lambda: weight.data)


def _scaled(stored: WeightParts) -> tuple[Tensor, ...]:
    weight = stored["weight"]
    if stored.config["quant_method"] == "bitsandbytes":
        return _bitsandbytes_int8(stored) if weight.codec == "I8" else _bitsandbytes_4_bits(stored)
    if "weight_scale_2" in stored.parts:
        return _nvfp4(stored, "weight", "weight_scale_2", is_divisor=False)
    scales = stored.scales("weight_scale_inv" if "weight_scale_inv" in stored.parts else "weight_scale")
    zero_points = stored.parts.get("weight_zero_point")
    if len(weight.shape) != 2 or weight.codec == "U8":
        raise stored.inconsistent(f"{_described('a weight', weight)} is not valid for {stored.config['quant_method']}")
    if zero_points is not None:
        if zero_points.codec != "I8" or weight.codec != "I8" or prod(zero_points.shape) != prod(scales.shape):
            weights = f"a weight of type {weight.codec} with scales {list(scales.shape)}"
            raise stored.inconsistent(f"{_described('weight_zero_point', zero_points)} does not fit {weights}")
        zeros = lambda: zero_points.data.view(np.int8).reshape(scales.shape)
        return stored.tensor("uint8", weight.shape, scales, lambda: weight.data, zeros)
    kind = "e4m3" if weight.codec == "F8_E4M3" else "int8"
    return stored.tensor(kind, weight.shape, scales, lambda: weight.data)


# By the part that only such a weight has: its other parts, and the function that reads it.
_LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[WeightParts], tuple[Tensor, ...]]]] = {
    "qweight": (("qzeros", "scales", "g_idx"), _packed_by_columns),
    "weight_packed": (
        ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
        _packed_by_rows,
    ),
    "weight": (("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_zero_point", *_BITSANDBYTES), _scaled),
}


def quantised_weights(path: Path, config: Mapping, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors with those of each quantised weight combined, and counts of dropped ones.

    config: the quantization_config. Dropped are scales of activations and of the KV cache, counted
    by the end of their names, such as "input_scale".
    """
    config = layout_of(path, config)
    dropped = Counter(match[1] for name in tensors if (match := _OF_ACTIVATIONS.fullmatch(name)))
    combined = {name: tensor for name, tensor in tensors.items() if not _OF_ACTIVATIONS.fullmatch(name)}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part not in _LAYOUTS or (part == "weight" and tensor.codec not in ("F8_E4M3", "I8", "U8")):
            continue
        others, read = _LAYOUTS[part]
        parts = {key: combined.pop(f"{module}.{key}") for key in (part, *others) if f"{module}.{key}" in combined}
        weight = f"{module}.weight"
        combined |= {tensor.name: tensor for tensor in read(WeightParts(path, weight, config, parts))}
    return combined, dict(dropped)
