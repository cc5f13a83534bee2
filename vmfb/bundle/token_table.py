"""The tokens and merges of a BPE tokenizer.json as arrays, which are mapped instead of parsed.

The file tokenizer.table has, without gaps and in little-endian order:

    counts   i32 [5]: tokens n, merges m, symbols s, bytes of all tokens, bytes of `rest`
    offsets  i32 [n + 1]: the token with id i is text[offsets[i]:offsets[i + 1]]
    merges   i32 [m, 3]: ids of the left token, the right token and the result, best merge first
    symbols  i32 [s]: ids of the tokens that need no merge, see `TokenTable`
    text     the tokens as UTF-8
    rest     the tokenizer.json without merges, and with no tokens but the added ones
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.manifest import BundleError

# Tokens are selected by their runs of this many bytes, each of which is an index of 24 bits.
RUN = 3


class TokenTable:
    """The tokens of a tokenizer.table by id, and the merges; BundleError if its arrays contradict.

    symbols: ids i32 [s] of tokens that BPE may use without a merge: single characters, byte tokens
        such as <0xE4>, the unknown token, and tokens that merges cannot make.
    rest: the tokenizer.json of the added tokens and of all steps but the model.
    """

    def __init__(self, part: Part):
        data = memoryview(part.read(0, part.size))
        counts = np.frombuffer(data[:20], "<i4").tolist() if len(data) >= 20 else [-1] * 5
        tokens, merges, symbols, size, rest = counts
        numbers = 5 + tokens + 1 + 3 * merges + symbols
        is_valid = min(counts) >= 0 and len(data) == 4 * numbers + size + rest
        if is_valid:
            _, self._offsets, pairs, self.symbols = np.split(
                np.frombuffer(data[: 4 * numbers], "<i4"), np.cumsum([5, tokens + 1, 3 * merges])
            )
            self._merges, self._bytes = pairs.reshape(-1, 3), data[4 * numbers : 4 * numbers + size]
            self._text, self.rest = np.frombuffer(self._bytes, np.uint8), bytes(data[4 * numbers + size :])
            is_valid = self._is_valid()
        if not is_valid:
            raise damaged_table(part)

    def _is_valid(self) -> bool:
        starts, ends = self._offsets[:-1], self._offsets[1:]
        try:
            str(self._bytes, "utf-8")
        except UnicodeDecodeError:
            return False
        return bool(
            starts.size
            and starts[0] == 0
            and ends[-1] == len(self._text)
            and np.all(starts <= ends)
            # No token starts inside a character.
            and np.all(self._text[starts[starts < ends]] & 0xC0 != 0x80)
            and all(((ids >= 0) & (ids < len(self))).all() for ids in (self._merges, self.symbols))
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, token: int) -> str:
        return str(self._bytes[self._offsets[token] : self._offsets[token + 1]], "utf-8")

    def select(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens that may be in `text`, and the merges (left id, right id) that make them.

        They are those whose runs of 3 bytes are all in `text`: more than its substrings, but
        faster to find.
        """
        seen = np.zeros(1 << 8 * RUN, bool)
        seen[_runs(np.frombuffer(text.encode(), np.uint8))] = True
        # before[i]: number of runs that start before byte i of self._text and are not in `text`.
        before = np.zeros(len(self._text) + 1, np.int32)
        np.cumsum(~seen[_runs(self._text)], out=before[1 : max(len(before) - RUN + 1, 1)])
        starts, ends = self._offsets[:-1], self._offsets[1:]
        chosen = before[np.maximum(ends - RUN + 1, starts)] == before[starts]
        return np.flatnonzero(chosen).tolist(), self._merges[chosen[self._merges[:, 2]], :2].tolist()


def damaged_table(part: Part) -> BundleError:
    return BundleError(f"damaged file in bundle: {part}; compile the bundle again")


def _runs(text: np.ndarray) -> np.ndarray:
    first, second, third = (text[at : max(len(text) - RUN + 1 + at, 0)].astype(np.uint32) for at in range(RUN))
    return first << 16 | second << 8 | third


def table_of(tokenizer: Mapping[str, Any]) -> bytes | None:
    """Return the tokenizer.table of a valid tokenizer.json; None if it cannot represent this kind.

    That is: models other than BPE, BPE with affixes or dropout, and ids with gaps.
    """
    model, added = tokenizer["model"], dict[str, int]()
    vocab: dict[str, int] = model["vocab"] if model.get("type") == "BPE" else {}
    tokens = sorted(vocab, key=vocab.__getitem__)
    if not tokens or any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return None
    # The library ignores the ids of added tokens in the file: new ones get the next ids.
    new = len(tokens)
    for token in tokenizer.get("added_tokens") or ():
        content = token["content"]
        expected = added.get(content, vocab.get(content, new))
        if not content or token["id"] != expected:
            return None
        added[content] = expected
        new += expected == new
    if [vocab[token] for token in tokens] != list(range(len(tokens))):
        return None
    # With `ignore_merges`, a token may be used although its characters are no tokens.
    alphabet = {token for token in tokens if len(token) == 1}
    special = {model.get("unk_token"), *(f"<0x{byte:02X}>" for byte in range(256))}
    symbols = [n for n, token in enumerate(tokens) if len(token) == 1 or token in special or not alphabet.issuperset(token)]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    try:
        merges = [(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs]
    except (KeyError, ValueError):  # a comment, which old files have
        return None
    texts = [token.encode() for token in tokens]
    rest = json.dumps({**tokenizer, "model": {**model, "vocab": added, "merges": []}}, ensure_ascii=False).encode()
    counts = len(tokens), len(merges), len(symbols), sum(map(len, texts)), len(rest)
    offsets = np.cumsum([0, *map(len, texts)])
    numbers = np.concatenate([counts, offsets, np.array(merges, np.int64).reshape(-1), symbols])
    return numbers.astype("<i4").tobytes() + b"".join(texts) + rest
