"""The bytes of every token of a vocabulary: counted out when a bundle is compiled, and kept in it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.manifest import VOCABULARY

# Beside a token's length: it is special, so that no text holds it.
SPECIAL = 1 << 31


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` are the bytes of token i, empty where the model has more tokens than its tokenizer; `special` are the ids
    of those that are no text."""

    tokens: list[bytes]
    special: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer, size: int) -> Vocabulary:
        """Of a tokenizer, for a model of `size` tokens."""
        added = tokenizer.get_added_tokens_decoder()
        data = TokenBytes(tokenizer)
        return cls([data(i) for i in range(size)], tuple(sorted(i for i in added if added[i].special and i < size)))

    @classmethod
    def read(cls, data: bytes) -> Vocabulary:
        """What `bytes` wrote; ValueError for anything else."""
        (size,) = np.frombuffer(data, "<u4", 1)
        heads = np.frombuffer(data, "<u4", size, 4)
        lengths = heads & ~np.uint32(SPECIAL)
        bounds = np.concatenate([[4 + 4 * int(size)], lengths]).cumsum(dtype=np.int64).tolist()
        if bounds[-1] != len(data):
            raise ValueError("the lengths of its tokens are not those of the file")
        return cls([data[start:end] for start, end in pairwise(bounds)], tuple(np.flatnonzero(heads & SPECIAL).tolist()))

    def __bytes__(self) -> bytes:
        """The number of tokens, the length of each with SPECIAL, u32 little-endian; then their bytes."""
        heads = np.array([len(self.tokens), *map(len, self.tokens)], "<u4")
        heads[1 + np.array(self.special, np.int64)] |= SPECIAL
        return heads.tobytes() + b"".join(self.tokens)


def read_vocabulary(bundle: Bundle) -> Vocabulary:
    """Of a bundle with a tokenizer, from which it is counted out where the bundle does not have it by itself."""
    if VOCABULARY in bundle.manifest.files:
        with suppress(ValueError):
            found = Vocabulary.read(bundle.part(VOCABULARY).read_bytes())
            if len(found.tokens) == bundle.manifest.vocab:
                return found
        raise PipelineError(f"{bundle.path / VOCABULARY} is not as castiron writes it; compile the bundle again")
    from tokenizers import Tokenizer

    assert bundle.tokenizer is not None
    return Vocabulary.of(Tokenizer.from_buffer(bundle.tokenizer.read_bytes()), bundle.manifest.vocab)
