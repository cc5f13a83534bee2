"""Storage formats for the weights of quantised HF checkpoints, such as int4, e4m3 and nf4.

A block of 32, 64 or 128 elements has codes, a scale, and perhaps a zero point; larger groups, such
as a complete row, repeat their scale in several blocks.
"""

from collections.abc import Callable

import numpy as np

from castiron.emitter.codecs.codec import Codec, Parts

_BLOCKS = (128, 64, 32)
# By type of a scale: the NumPy type in which it is stored.
SCALE_TYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
# The quantiles of a normal distribution that bitsandbytes' NF4 has as codes (QLoRA, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# The floats that bitsandbytes' FP4 has as codes (functional.py: get_4bit_type); the largest is 12.
FP4 = tuple(
    number / 12 for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, 0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
)
# By kind of code: fields of the codec. Codes of uint8 and their zero points are stored minus 128.
_KINDS: dict[str, dict] = {
    "int4": {"bits": 4, "offset": 8},
    "uint4": {"bits": 4, "zeros": True},
    "int8": {"bits": 8},
    "uint8": {"bits": 8, "zeros": True},
    "e4m3": {"bits": 8, "e4m3": True},
    "nf4": {"bits": 4, "table": NF4},
    "fp4": {"bits": 4, "table": FP4},
}
# Codecs that have the block layout of a GGUF codec.
_SAME = {"int4_32_f16": "q4_0", "int8_32_f16": "q8_0"}


def _e4m3_values() -> np.ndarray:
    """Return the values of E4M3 (OCP's OFP8), f16 [256]; codes 0x7F and 0xFF are NaN."""
    exponents, mantissas = np.divmod(np.arange(128), 8)
    positive = np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7))
    positive[-1] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float16)


E4M3 = _e4m3_values()


def unpack_fields(columns: np.ndarray, run: int, bits: int, left: int = 0) -> np.ndarray:
    """Unpack numbers of `bits` bits, shifted left by `left`: u8 [n, b] to u8 [n, b * 8 / bits].

    Each `run` bytes have the next `run` numbers in their lowest bits, the next `run` in the next
    bits, and so on: with 4 bits and a run of 2, the bytes 0x21, 0x43 become 1, 3, 2, 4.
    Column-major arrays are fastest; the result is one too.
    """
    runs = columns.T.reshape(-1, run, len(columns))
    fields = np.empty((len(runs), 8 // bits, run, len(columns)), np.uint8)
    for field in range(8 // bits):
        right = field * bits - left
        # NumPy multiplies bytes faster than it shifts them to the left.
        shifted = runs >> np.uint8(right) if right > 0 else runs * np.uint8(1 << -right) if right else runs
        np.bitwise_and(shifted, np.uint8((1 << bits) - 1 << left), out=fields[:, field])
    return fields.reshape(-1, len(columns)).T


def translated(numbers: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return `table[numbers]` for up to 256 bytes, six times as fast as NumPy's indexing."""
    looked_up = bytearray(np.ascontiguousarray(numbers.T)).translate(table.tobytes().ljust(256))
    return np.frombuffer(looked_up, table.dtype).reshape(numbers.T.shape).T


def signed(codes: np.ndarray, offset: int) -> np.ndarray:
    """Subtract `offset` from u8 `codes` in place; return the same memory as an i8 array."""
    codes = codes.view(np.int8)
    if offset:
        codes -= np.int8(offset)
    return codes


def splitter(bits: int, offset: int, scale: str, zeros: bool) -> Callable[[np.ndarray], Parts]:
    """Return a function that unpacks blocks: a scale, an i8 zero point if `zeros`, then the codes.

    bits: 4 or 8. offset: what is subtracted from each code. scale: a key of `SCALE_TYPES`.
    """
    size = np.dtype(SCALE_TYPES[scale]).itemsize

    def split(b: np.ndarray) -> Parts:
        d = np.ascontiguousarray(b[:, :size]).view(SCALE_TYPES[scale])[:, 0]
        m = np.ascontiguousarray(b[:, size]).view(np.int8) if zeros else None
        codes = b[:, size + zeros :]
        if bits == 4:
            codes = unpack_fields(codes, 16, 4)
        return Parts(signed(codes, offset), d, m)

    return split


def join(codec: Codec, codes: np.ndarray, d: np.ndarray, m: np.ndarray | None) -> np.ndarray:
    """Pack scales, zero points and codes into blocks, u8 [n, block_bytes].

    codes: u8 [n, block]; of 32 codes of 4 bits, the first 16 become the low halves of 16 bytes.
    d: [n]. m: i8 [n], None if the format has no zero points.
    """
    if codec.bits == 4:
        runs = codes.reshape(len(codes), -1, 2, 16)
        codes = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(len(codes), -1)
    sides = [np.ascontiguousarray(part).reshape(-1, 1).view(np.uint8) for part in (d, m) if part is not None]
    return np.concatenate([*sides, codes], axis=1)


def _codec(kind: str, block: int, scale: str) -> Codec:
    fields = _KINDS[kind]
    bits, zeros = fields["bits"], fields.get("zeros", False)
    size = np.dtype(SCALE_TYPES[scale]).itemsize + zeros + block * bits // 8
    split = splitter(bits, fields.get("offset", 0), scale, zeros)
    return Codec(f"{kind}_{block}_{scale}", block, size, split, group=32, minimum=-int(zeros), **fields)


# Codecs by name, which is the kind of code, the elements of a block, and the type of its scale.
SCALED = {
    codec.name: codec
    for codec in (_codec(kind, block, scale) for kind in _KINDS for block in _BLOCKS for scale in SCALE_TYPES)
    if codec.name not in _SAME
}


def scaled_codec(kind: str, group: int, scale: str) -> str | None:
    """Return the codec for groups that share a scale, such as "int4_128_f16", or None.

    group: number of consecutive elements that share a scale in the checkpoint.
    """
    block = next((block for block in _BLOCKS if group % block == 0), None)
    name = f"{kind}_{block}_{scale}"
    return _SAME.get(name, name) if block else None
