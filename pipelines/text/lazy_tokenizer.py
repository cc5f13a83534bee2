"""A tokenizer that gives the library only the tokens and merges that a text may need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from tokenizers import Encoding, Tokenizer, models

from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.token_table import TokenTable, damaged_table

# Later texts are encoded with the complete vocabulary: loading it takes as long as about 15 short texts without it.
MAX_TEXTS = 10
# Attributes that do not depend on the model's tokens and merges.
SHARED = {"decoder", "get_added_tokens_decoder", "model", "no_padding", "no_truncation", "normalizer"}


class LazyTokenizer:
    """A `tokenizers.Tokenizer` that loads its complete vocabulary only when something needs it.

    The library takes up to a second to read all merges. So it encodes a text twice: without merges,
    which gives the symbols that BPE would merge, and with the tokens that are substrings of the
    joined symbols, and their merges. Every token of the text is such a substring.
    """

    def __init__(self, part: Part, load: Callable[[], Tokenizer]):
        self._part, self._table, self._load = part, TokenTable(part), load
        self._lock, self._texts = threading.Lock(), 0
        try:
            # It has the ids of added tokens, which stay the same if its model is replaced.
            self._base = Tokenizer.from_buffer(self._table.rest)
        except Exception:  # tokenizers raises Exception itself
            raise damaged_table(part) from None
        if not isinstance(self._base.model, models.BPE):
            raise damaged_table(part)
        self._added = frozenset(self._base.get_added_tokens_decoder())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base if name in SHARED else self._complete, name)

    def encode(self, text: str, second: str | None = None, add_special_tokens: bool = True) -> Encoding:
        """Return the encoding of `text`, or of the pair of `text` and `second`."""
        self._texts += 1
        # Something else may have loaded the complete tokenizer, and changed a setting of it.
        if second is not None or self._texts > MAX_TEXTS or "_complete" in self.__dict__:
            return self._complete.encode(text, second, add_special_tokens=add_special_tokens)
        with self._lock:
            self._base.model = self._symbols
            symbols = "".join(self._base.encode(text, add_special_tokens=False).tokens)
            self._base.model = self._model(*self._table.select(symbols))
            return self._base.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; unknown ids are left out, as in the library."""
        if skip_special_tokens:
            return self._complete.decode(list(ids))
        tokens = [token for each in ids if (token := self.id_to_token(each)) is not None]
        decoder = self._base.decoder
        return decoder.decode(tokens) if decoder else " ".join(tokens)

    def id_to_token(self, index: int) -> str | None:
        if index in self._added:
            return self._base.id_to_token(index)
        return self._table[index] if 0 <= index < len(self._table) else None

    @cached_property
    def _complete(self) -> Tokenizer:
        complete = self._load()
        complete.no_truncation()
        complete.no_padding()
        return complete

    @cached_property
    def _symbols(self) -> models.BPE:
        """The model without merges."""
        return self._model(self._table.symbols.tolist(), ())

    def _model(self, tokens: Iterable[int], merges: Iterable[tuple[int, int]]) -> models.BPE:
        table, given = self._table, self._base.model
        try:
            return models.BPE(
                {table[token]: token for token in tokens}, [(table[left], table[right]) for left, right in merges],
                unk_token=given.unk_token, fuse_unk=given.fuse_unk, byte_fallback=given.byte_fallback,
                ignore_merges=given.ignore_merges,
            )  # fmt: skip
        except Exception:  # a merge whose tokens are not in the vocabulary
            raise damaged_table(self._part) from None
