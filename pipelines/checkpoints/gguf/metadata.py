"""Read the metadata of GGUF files with type checks."""

import math
import numbers

import numpy as np

from castiron.emitter.shorten import shorten
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, inconsistent
from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile

# Keys that `unread` does not list, because they repeat the tensors' shapes, do not change the logits
# of a text, or are read by `hf_config.encoding_of`.
_SILENT_KEYS = {"vocab_size", "tensor_data_layout", "pooling_type", "classifier.output_labels", "expert_shared_count"}
_SILENT_KEYS |= {"rope.scaling.finetuned", "rope.dimension_sections"}
_SILENT_KEYS |= {f"dense_{n}_feat_{end}" for n in (2, 3) for end in ("in", "out")}


class Metadata:
    """The metadata of a GGUF file under a prefix, by default the architecture's, such as `llama.`.

    Methods take keys without the prefix. `default` is for a key that the file lacks.
    """

    def __init__(self, file: GgufFile, prefix: str | None = None):
        self.file = file
        self.prefix = prefix or architecture_name(file) + "."
        self._read: set[str] = set()  # `unread` lists the other keys

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {message}")

    def inconsistent(self, problem: str) -> CheckpointError:
        return inconsistent(self.file.path, problem)

    def invalid(self, key: str, wanted: str) -> CheckpointError:
        """Return the error for a value that is not `wanted`."""
        value = self.get(key)
        stated = shorten(value.tolist() if isinstance(value, np.ndarray) else value, 40)
        return self.error(f"{self.prefix}{key} is {stated}, not {wanted}")

    def get(self, key: str, default=None):
        """Return the value of a key without a check of its type."""
        self._read.add(key)
        return self.file.metadata.get(self.prefix + key, default)

    def _typed(self, key: str, type_: type, wanted: str, default):
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # a number per layer, all equal
        if value is not None and (not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool)):
            raise self.invalid(key, wanted)
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        """Return an integer of at least 0; an array of equal numbers counts as one."""
        value = self._typed(key, numbers.Integral, "an integer", default)
        if value is not None and value < 0:
            raise self.invalid(key, "an integer of at least 0")
        return value

    def real(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number; an array of equal numbers counts as one."""
        value = self._typed(key, numbers.Real, "a number", default)
        if value is not None and not math.isfinite(value):
            raise self.invalid(key, "a finite number")
        return None if value is None else float(value)

    def string(self, key: str, default: str | None = None) -> str | None:
        return self._typed(key, str, "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "true or false", default)

    def required(self, key: str) -> int:
        """Return a positive integer; CheckpointError if the file lacks the key."""
        value = self.integer(key)
        if not value:
            raise self.error(f"metadata key {self.prefix}{key} is {'missing' if value is None else 0}")
        return value

    def by_layer(self, key: str) -> list[int]:
        """Return a number for each layer; a single number applies to all."""
        blocks, stated = self.required("block_count"), self.get(key)
        counts = [stated] * blocks if isinstance(stated, int) else np.asarray(stated).tolist()
        if not isinstance(counts, list) or len(counts) != blocks or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise self.invalid(key, f"an integer of at least 0 for each of {blocks} blocks")
        return counts

    def has(self, layer: int, leaf: str) -> bool:
        """Return whether the file has a tensor such as `blk.0.attn_q.bias`."""
        return f"blk.{layer}.{leaf}" in self.file.tensors

    def unread(self) -> list[str]:
        """Return the keys that no method has read; they might change the logits."""
        keys = (key for key in self.file.metadata if key.startswith(self.prefix))
        return sorted(key for key in keys if key.removeprefix(self.prefix) not in self._read | _SILENT_KEYS)


def architecture_name(file: GgufFile) -> str:
    """Return the file's `general.architecture`; CheckpointError if it has none."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path} has no general.architecture; give a model's GGUF file")
    return name
