"""The bytes of every token of a vocabulary, which the compiler stores in the bundle."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.manifest import VOCABULARY

# Flag in the stored length of a token: the token is special, so it is not part of any text.
SPECIAL = 1 << 31


class TokenBytes:
    """A function from a token id to the token's bytes, which may be only a part of a character.

    In a tokenizer file, byte-level tokenizers (as GPT-2's) write a byte as a character of their own
    alphabet. SentencePiece writes a space as U+2581, and a byte that is not a character as <0xE4>.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.byte_level = b"ByteLevel" in (tokenizer.decoder.__getstate__() if tokenizer.decoder else b"")
        self.alphabet = byte_alphabet()

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an unused id, such as padding."""
        if token in self.added:
            return self.added[token].encode()
        name = self.tokenizer.id_to_token(token) or ""
        if self.byte_level and all(letter in self.alphabet for letter in name):
            return bytes(self.alphabet[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD where it ends inside a character."""
        return self(token).decode("utf-8", "replace")


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet (`bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token of a model, empty for unused ids, and the ids of special tokens."""

    tokens: list[bytes]
    special: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer, size: int) -> Vocabulary:
        """Return the vocabulary of a tokenizer, for a model with `size` tokens."""
        added, data = tokenizer.get_added_tokens_decoder(), TokenBytes(tokenizer)
        return cls([data(i) for i in range(size)], tuple(sorted(i for i in added if added[i].special and i < size)))

    @classmethod
    def read(cls, data: bytes) -> Vocabulary:
        """Return the vocabulary that `bytes(vocabulary)` serialised; ValueError for other data."""
        (size,) = np.frombuffer(data, "<u4", 1)
        heads = np.frombuffer(data, "<u4", size, 4)
        lengths = heads & ~np.uint32(SPECIAL)
        bounds = np.concatenate([[4 + 4 * int(size)], lengths]).cumsum(dtype=np.int64).tolist()
        if bounds[-1] != len(data):
            raise ValueError("the lengths of the tokens do not match the size of the file")
        return cls([data[start:end] for start, end in pairwise(bounds)], tuple(np.flatnonzero(heads & SPECIAL).tolist()))

    def __bytes__(self) -> bytes:
        """Return the vocabulary as the content of the file vocabulary.bin.

        The file has the number of tokens, then the length of each token with the flag SPECIAL, all
        u32 little-endian, then the bytes of all tokens.
        """
        heads = np.array([len(self.tokens), *map(len, self.tokens)], "<u4")
        heads[1 + np.array(self.special, np.int64)] |= SPECIAL
        return heads.tobytes() + b"".join(self.tokens)


def read_vocabulary(bundle: Bundle) -> Vocabulary:
    """Return the vocabulary of a bundle, from its file or else computed from its tokenizer."""
    if VOCABULARY in bundle.manifest.files:
        with suppress(ValueError):
            found = Vocabulary.read(bundle.part(VOCABULARY).read_bytes())
            if len(found.tokens) == bundle.manifest.vocab:
                return found
        raise PipelineError(f"{bundle.path / VOCABULARY} is invalid; compile the bundle again")
    from tokenizers import Tokenizer

    assert bundle.tokenizer is not None
    return Vocabulary.of(Tokenizer.from_buffer(bundle.tokenizer.read_bytes()), bundle.manifest.vocab)
