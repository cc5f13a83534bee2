"""How much work a model is: bytes read for a token, and arithmetic for a prompt. Bench sets times against these.

A bundle's manifest says what each of its kernels does (`castiron.pipelines.casting.module_facts.work_of`); a GGUF file's
tensors say what another engine reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from castiron.emitter.caches import SCALE_BYTES
from castiron.vmfb.archive import Part
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.chunks import chunks
from castiron.vmfb.manifest import STATE_ITEM_BYTES, WEIGHTS, Manifest


@dataclass(frozen=True)
class Workload:
    """A bundle's work, by what its manifest says of every kernel.

    A bundle without kernels says nothing: then `weight_bytes` are those of all parameters, `cache_bytes` 0 and the rest None.
    """

    manifest: Manifest
    parameter_bytes: int

    @classmethod
    def of(cls, bundle: Bundle) -> Workload:
        return cls(bundle.manifest, sum(parameter_sizes(bundle.part(WEIGHTS)).values()))

    @property
    def known(self) -> bool:
        """Whether the manifest says what the kernels do."""
        kernels = self._kernels("decode_step").values()
        return bool(kernels) and all("weights" in kernel for kernel in kernels)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that decoding one token reads: of an embedding table a row, of experts the token's."""
        kernels = self._kernels("decode_step").values()
        return sum(kernel["calls"] * kernel["weights"] for kernel in kernels) if self.known else self.parameter_bytes

    @property
    def elements(self) -> int | None:
        """Elements of the matrices that decoding one token reads, each of which is multiplied and added once."""
        kernels = self._kernels("decode_step").values()
        return sum(k["calls"] * k["flops"][0] // 2 for k in kernels if "tokens" in k) if self.known else None

    @property
    def cache_item_bytes(self) -> float:
        """Bytes of an element of the bundle's caches, with its share of a scale."""
        if self.manifest.cache != "q8_0":
            return STATE_ITEM_BYTES[self.manifest.cache]
        size = next(state.shape[-1] for state in self.manifest.states if state.kind != "recurrent")
        return size / (size - SCALE_BYTES)

    def cache_bytes(self, depth: int, tokens: int, item_bytes: float) -> float:
        """Bytes of caches that a token reads, on average over `tokens` from position `depth` on, by an engine whose elements
        take `item_bytes`."""
        if not self.known:
            return 0.0
        # A kernel whose bytes grow with the position reads one position at 0, and each time as many more.
        growing = [kernel for kernel in self._kernels("decode_step").values() if kernel["bytes"][1]]
        read = sum(
            kernel["calls"] * (amount(kernel, "bytes", position) - kernel["bytes"][0] + kernel["bytes"][1])
            for kernel in growing
            for position in range(depth, depth + tokens)
        )
        return read * item_bytes / self.cache_item_bytes / tokens

    def prefill_flops(self, tokens: int) -> float | None:
        """Multiplications and additions for `tokens` from an empty context, with logits of the last token only.

        A call that is not full counts by its share of tokens.
        """
        if not self.known:
            return None
        names = {function.width: function.name for function in self.manifest.functions if function.role == "prefill"}
        names[1] = "decode_step"
        done, total = 0, 0.0
        for width, count in chunks(tokens, 0, self.manifest.context, self.manifest.prefill_widths, 0.0):
            for kernel in self._kernels(names[width]).values():
                # One row in a call of several tokens: the output head, for logits that only the last call's end needs.
                of_last = width > 1 and kernel.get("tokens") == 1
                share = (done + count == tokens) if of_last else count / width
                total += kernel["calls"] * amount(kernel, "flops", done) * share
            done += count
        return total

    def _kernels(self, function: str) -> Mapping[str, dict]:
        return self.manifest.compile.get("work", {}).get(function, {})


def amount(kernel: Mapping, unit: str, position: int) -> int:
    """FLOP or bytes of one call of a kernel at `position`, out of the manifest's [at position 0, per position, largest]."""
    start, step, end = kernel[unit]
    return min(start + step * position, max(start, end))


def parameter_sizes(file: Part) -> dict[str, int]:
    """Bytes by name of the parameters in an irpa file, or in the part of an archive that is one."""
    import iree.runtime as rt

    index, mapped = rt.ParameterIndex(), file.map()
    index.load_from_file_handle(rt.FileHandle.wrap_memory(mapped), "irpa")
    return {name: entry.length for name, entry in index.items()}


def gguf_bytes(path: Path) -> int:
    """Bytes of weights that llama.cpp reads for one token of a GGUF file: of the stacked weights of experts those that a
    token passes, of an embedding table beside an output head a row. CheckpointError for a file that is not sound."""
    from castiron.pipelines.checkpoints.gguf_file import read_gguf

    file = read_gguf(path)
    prefix = f"{file.metadata.get('general.architecture')}."
    experts = file.metadata.get(prefix + "expert_count", 0)
    chosen = file.metadata.get(prefix + "expert_used_count", experts)
    read = 0
    for tensor in file.tensors.values():
        rows = prod(tensor.shape[:-1])
        if len(tensor.shape) == 3 and tensor.shape[0] == experts:
            read += tensor.nbytes * chosen // experts
        else:
            table = tensor.name == "token_embd.weight" and "output.weight" in file.tensors
            read += tensor.nbytes // rows if table else tensor.nbytes
    return read
