"""What every checkpoint format is read into."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import dequantise
from castiron.emitter.pooling import Pooling
from castiron.emitter.shown import shown
from castiron.pipelines.errors import CheckpointError as CheckpointError


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor under its HF name, still in the file's own number format.

    shape is logical, (out, in) for a linear layer; codec is a key of `castiron.emitter.codecs.CODECS`; source is the name
    of the tensor in the file.
    """

    name: str
    shape: tuple[int, ...]
    codec: str
    source: str
    read: Callable[[], np.ndarray]

    @property
    def data(self) -> np.ndarray:
        """The stored bytes, u8 [*shape[:-1], row_bytes].

        A view of the mapped file, except for rows that GGUF keeps in another order and norms that it keeps with
        one added: these are computed anew at each access, so that nobody but the caller holds them.
        """
        return self.read()

    def dequantise(self) -> np.ndarray:
        """The values, f32 [*shape]."""
        return dequantise(self.codec, self.data)


@dataclass(frozen=True)
class Encoding:
    """How texts become vectors. prompts: what is put before a text, by name; default_prompt: the one that is where none is
    named. max_tokens: of a text, None for as many as the model takes. lower_case: texts are. tensors: of the layers after
    pooling, by name. relevance, types: of a model that gives two texts one number, as the manifest's Encoder has them."""

    pooling: Pooling
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    relevance: str | None = None
    types: bool = False


@dataclass
class Checkpoint:
    """A model as its makers gave it out.

    format is "gguf" or "hf"; config has config.json's form with HF's key names, `model_type` among them; tensors
    are under HF's names; tokenizer is the content of tokenizer.json, or None. That its post-processor adds the
    BOS token is the only trace of a tokenizer's `add_bos_token`. left_out counts the tensors of parts that are no text's, by
    what their names begin with. encoding: how its texts become vectors, of a model that is there for that.
    """

    path: Path
    format: str
    config: dict
    tensors: Mapping[str, Tensor]
    tokenizer: dict | None = None
    chat_template: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_config: dict = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    encoding: Encoding | None = None


def without(keys: Mapping, ignored: Sequence[str], where: Path) -> dict:
    """`keys` less the ignored; CheckpointError, naming the file `where`, for one that is not among them."""
    if absent := [key for key in ignored if key not in keys]:
        raise CheckpointError(f"{where} has no key {shown(absent[0])} that could be ignored")
    return {key: value for key, value in keys.items() if key not in ignored}
