"""Tensors that a directory holds otherwise than families name them: the experts of a layer in one, matrices as [in, out].

HF's `conversion_mapping` and the parameters of its modules say how; what families read is (out, in), an expert a tensor.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.pipelines.checkpoints.checkpoint import Tensor

# The codec of a tensor of bytes that are no numbers by themselves; none that `laid_out` gives has it but one it does not know.
BYTES = "U8"
# More in one tensor are not taken apart.
MOST_EXPERTS = 4096

# Which of so many rows.
_ALL: Callable[[int], slice] = lambda rows: slice(rows)
_FIRST: Callable[[int], slice] = lambda rows: slice(rows // 2)
_SECOND: Callable[[int], slice] = lambda rows: slice(rows // 2, rows)
_EVEN: Callable[[int], slice] = lambda rows: slice(0, rows, 2)
_ODD: Callable[[int], slice] = lambda rows: slice(1, rows, 2)


@dataclass(frozen=True)
class Layout:
    """A stored tensor whose name `pattern` matches, and what it holds.

    parts: name, as a template of the match's groups, "{}" for an expert's number -> which of its rows. transposed: a matrix
    is stored as [in, out]. scales: a template of the tensor that has the exponents of these MXFP4 blocks.
    """

    pattern: str
    parts: Mapping[str, Callable[[int], slice]]
    transposed: bool = False
    scales: str | None = None

    @property
    def stacked(self) -> bool:
        """Whether the first dimension of the tensor is that of the experts."""
        return any("{}" in name for name in self.parts)

    @property
    def least_rank(self) -> int:
        """Dimensions that a tensor must have to be read in this way."""
        return 1 + self.stacked + self.transposed


_GRANITE = (
    Layout(
        r"(.*\.block_sparse_moe)\.input_linear\.weight",
        {r"\1.experts.{}.gate_proj.weight": _FIRST, r"\1.experts.{}.up_proj.weight": _SECOND},
    ),
    Layout(r"(.*\.block_sparse_moe)\.output_linear\.weight", {r"\1.experts.{}.down_proj.weight": _ALL}),
)
# As HF's modules have them, and files that were saved from them.
_STACKED = (
    Layout(r"(.*\.experts)\.gate_up_proj", {r"\1.{}.gate_proj.weight": _FIRST, r"\1.{}.up_proj.weight": _SECOND}),
    Layout(r"(.*\.experts)\.down_proj", {r"\1.{}.down_proj.weight": _ALL}),
)
# Layers that predict further tokens, which HF leaves out.
_FURTHER = Layout(r"mtp\..*", {})

# By model type.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    # Without what stands after the states; the first checkpoints call the parts of a LayerNorm otherwise.
    "bert": (
        Layout(r"(?:bert\.)?pooler\..*|cls\..*|classifier\..*", {}),
        Layout(r"(?:bert\.)?((?:embeddings|encoder)\..*LayerNorm)\.gamma", {r"\1.weight": _ALL}),
        Layout(r"(?:bert\.)?((?:embeddings|encoder)\..*LayerNorm)\.beta", {r"\1.bias": _ALL}),
        Layout(r"(?:bert\.)?((?:embeddings|encoder)\..*)", {r"\1": _ALL}),
    ),
    "modernbert": (
        Layout(r"(?:head|decoder|classifier)\..*", {}),
        Layout(r"(?:model\.)?((?:embeddings|layers|final_norm)\..*)", {r"\1": _ALL}),
    ),
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "gemma4_text": _STACKED,
    "qwen3_5_moe_text": _STACKED,
    "qwen3_next": (*_STACKED, _FURTHER),
    "lfm3": (Layout(r"(.*\.self_attn)\.gate_proj\.weight", {r"\1.g_proj.weight": _ALL}),),
    "nemotron_h": (
        _FURTHER,
        Layout(r"backbone\.(.*\.experts)\.(up|down)_proj", {r"model.\1.{}.\2_proj.weight": _ALL}),
        Layout(r"backbone\.(.*)", {r"model.\1": _ALL}),
    ),
    # The layers after the last predict further tokens, and HF leaves them out by their number in the one model there is.
    "glm4_moe_lite": (Layout(r"model\.layers\.47\..*", {}),),
    # The first checkpoints have no "transformer." before names, and their causal masks.
    "gpt2": (
        Layout(r".*\bh\.\d+\.attn\.(bias|masked_bias)", {}),
        Layout(r"(?:transformer\.)?(h\..*\.c_(?:attn|proj|fc)\.weight)", {r"transformer.\1": _ALL}, transposed=True),
        Layout(r"(?:transformer\.)?((?:h|wte|wpe|ln_f)\..*)", {r"transformer.\1": _ALL}),
    ),
    "gpt_oss": (
        Layout(
            r"(.*\.mlp\.experts)\.gate_up_proj",
            {r"\1.{}.gate_proj.weight": _EVEN, r"\1.{}.up_proj.weight": _ODD},
            transposed=True,
        ),
        Layout(r"(.*\.mlp\.experts)\.down_proj", {r"\1.{}.down_proj.weight": _ALL}, transposed=True),
        Layout(r"(.*\.mlp\.experts)\.gate_up_proj_bias", {r"\1.{}.gate_proj.bias": _EVEN, r"\1.{}.up_proj.bias": _ODD}),
        Layout(r"(.*\.mlp\.experts)\.down_proj_bias", {r"\1.{}.down_proj.bias": _ALL}),
        Layout(
            r"(.*\.mlp\.experts)\.gate_up_proj_blocks",
            {r"\1.{}.gate_proj.weight": _EVEN, r"\1.{}.up_proj.weight": _ODD},
            scales=r"\1.gate_up_proj_scales",
        ),
        Layout(r"(.*\.mlp\.experts)\.down_proj_blocks", {r"\1.{}.down_proj.weight": _ALL}, scales=r"\1.down_proj_scales"),
    ),
}


def laid_out(model_type: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model of this type under the names that its family has for them; no weight is read."""
    found: dict[str, Tensor] = {}
    gone: set[str] = set()
    for tensor in tensors.values():
        for layout in LAYOUTS.get(model_type, ()):
            if match := re.fullmatch(layout.pattern, tensor.name):
                scales = tensors.get(match.expand(layout.scales)) if layout.scales else None
                if layout.scales and (scales is None or scales.shape != tensor.shape[:-1] or len(tensor.shape) != 4):
                    continue
                if len(tensor.shape) < layout.least_rank or tensor.shape[0] > MOST_EXPERTS and layout.stacked:
                    continue
                found.update((part.name, part) for part in _parts(layout, match, tensor, scales))
                gone |= {of.name for of in (tensor, scales) if of is not None}
                break
    return {name: tensor for name, tensor in tensors.items() if tensor.name not in gone} | found


def _parts(layout: Layout, match: re.Match, tensor: Tensor, scales: Tensor | None) -> Iterator[Tensor]:
    for template, rows in layout.parts.items():
        name = match.expand(template)
        for index in range(tensor.shape[0]) if "{}" in name else (None,):
            if scales is None:
                yield _part(layout, name.format(index), tensor, index, rows)
            else:
                yield _blocks(name.format(index), tensor, scales, index, rows)


def _part(layout: Layout, name: str, tensor: Tensor, index: int | None, rows: Callable[[int], slice]) -> Tensor:
    """Some rows of a matrix, or elements of a vector; of number `index` in the tensor, or of itself."""
    shape = tensor.shape if index is None else tensor.shape[1:]
    shape = shape[::-1] if layout.transposed else shape
    taken = rows(shape[0])

    def read() -> np.ndarray:
        own = tensor.data if index is None else tensor.data[index]
        if layout.transposed:
            columns, count = shape[1], shape[0]
            own = own.reshape(columns, count, -1).swapaxes(0, 1)
        own = own.reshape(shape[0], -1)[taken]
        return own.reshape(len(own), *shape[1:-1], -1) if len(shape) > 1 else own.reshape(-1)

    return Tensor(name, (len(range(*taken.indices(shape[0]))), *shape[1:]), tensor.codec, tensor.source, read)


def _blocks(name: str, blocks: Tensor, scales: Tensor, index: int, rows: Callable[[int], slice]) -> Tensor:
    """Some rows of the MXFP4 matrix of number `index`, in GGUF's blocks: the exponent, then codes i and i + 16 in byte i.

    Here blocks [n, rows, groups, 16] hold codes 2 i and 2 i + 1 in byte i, and scales [n, rows, groups] the exponents.
    """
    _, count, groups, width = blocks.shape
    taken = rows(count)

    def read() -> np.ndarray:
        pairs, exponents = blocks.data[index][taken], scales.data[index][taken]
        codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(*exponents.shape, 2, width)
        packed = np.concatenate([exponents[..., None], codes[..., 0, :] | codes[..., 1, :] << 4], -1)
        return packed.reshape(len(packed), -1)

    return Tensor(name, (len(range(*taken.indices(count))), groups * width * 2), "mxfp4", blocks.source, read)
