"""Read weights that bitsandbytes quantised to NF4, FP4 or int8 (bitsandbytes/functional.py)."""

import json
from dataclasses import replace
from math import gcd, prod

import numpy as np

from castiron.emitter.scaled_codecs import FP4, NF4
from castiron.pipelines.checkpoints.checkpoint import Tensor
from castiron.pipelines.checkpoints.quantised_parts import Stored

_TABLES = {"nf4": NF4, "fp4": FP4}
# By type: the name of the part that describes a weight.
_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in _TABLES}
# Names of the other parts of a weight.
PARTS = (
    *("SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *_STATES.values(),
)
_LARGEST_INT8 = np.float32(127)


def read_4_bits(stored: Stored) -> tuple[Tensor, ...]:
    """Return an NF4 or FP4 weight as a tensor [out, in] of castiron's NF4 or FP4 codec.

    A block is `blocksize` consecutive elements of the weight in row-major order, and may continue
    in the next row. Each block has a scale (absmax). With `nested_blocksize`, the scales are
    quantised too: they are u8 indices of the table nested_quant_map, and each group of
    `nested_blocksize` scales has a factor (nested_absmax). Raises CheckpointError for tensors with
    wrong sizes or types.
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
        raise stored.error("has an invalid quant_state") from None
    quant_map, absmax = stored["weight.quant_map"], stored["weight.absmax"]
    blocks, codec = -(-out * inner // size), "U8" if "nested_blocksize" in fields else "f32"
    if quant_map.codec != "f32" or quant_map.data.tobytes() != np.array(_TABLES[kind], "<f4").tobytes():
        raise stored.error(f"has another quant_map than that of {kind}")
    if prod(packed.shape) * 2 != out * inner or inner % 2 or absmax.shape != (blocks,) or absmax.codec != codec:
        raise stored.error(f"is {[out, inner]} with {prod(packed.shape)} bytes and absmax {list(absmax.shape)}")
    if codec == "U8":
        of_nested = stored["weight.nested_absmax"], stored["weight.nested_quant_map"]
        sizes = [prod(part.shape) for part in of_nested]
        if {part.codec for part in of_nested} != {"f32"} or sizes != [-(-blocks // nested), 256]:
            raise stored.error("has a nested_absmax or nested_quant_map of another size")

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


def read_int8(stored: Stored) -> tuple[Tensor, ...]:
    """Return an int8 weight of bitsandbytes as a tensor [out, in] of a codec "int8_*".

    The tensor SCB has the largest magnitude of each row. The code of this magnitude is 127, so the
    scale of a row is SCB / 127.
    """
    weight, largest = stored["weight"], stored.scales("SCB")
    read = lambda: (largest.data.view("<f4") / _LARGEST_INT8).view(np.uint8)
    scales = replace(largest, shape=(prod(largest.shape), 1), read=read)
    if largest.codec != "f32" or weight.codec != "I8" or len(weight.shape) != 2 or scales.shape[0] != weight.shape[0]:
        raise stored.error(f"is {list(weight.shape)} with SCB {list(largest.shape)}")
    return stored.tensor("int8", weight.shape, scales, lambda: weight.data)
