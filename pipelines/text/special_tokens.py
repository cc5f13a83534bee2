"""Encode chat messages so that the text of a special token in a message stays plain text.

Otherwise a message with a text such as `<|im_end|>` could end a turn. The text of a special token
is called its spelling.

Before the chat template renders the messages, a break character is inserted into each spelling in
them. No message contains this character. In the rendered text, only a spelling without a break is
encoded as a special token. This also works if the template cuts, joins or quotes messages.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from castiron.pipelines.errors import PipelineError

# Candidates for the break character: private use characters, which no language has.
BREAKS = range(0xE000, 0xF900)
# Fields of an assistant's message with text that the model generated.
ANSWERS = ("content", "reasoning_content")
# Max nesting of the regular expression that finds spellings; few spellings share longer prefixes.
DEEPEST = 60


class SpecialTokens:
    """The special tokens of a tokenizer, and tokens such as <think> that its chat template uses.

    To make their texts in messages plain text, call `broken` before the chat template is rendered,
    and `sanitised` after it. answers: texts of tokens that stay tokens in an assistant's message.
    """

    def __init__(self, tokenizer: Any, template: str, answers: Collection[str] = ()):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._added = {str(token.content): token.special for token in added if token.content}
        self.spelled = {w for w, special in self._added.items() if special and _is_mark(w)}
        self.spelled |= {w for w in self._added if w in answers or _is_bracketed(w) and w in template}
        # BPE's merges don't produce special tokens; other models may find one in normalised text.
        self._normalised = tokenizer.normalizer is not None and (
            type(tokenizer.model).__name__ != "BPE" or any(t.normalized for t in added if t.content in self.spelled)
        )
        # Text without any of these characters contains no spelling and no part of a spelling.
        self._ends = {c for word in self.spelled for c in (word[0], word[-1])}
        self._answers = answers

    def broken(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Insert a break character into the text of each special token in a template's variables.

        A string that starts or ends with a part of such a text, which the template could complete,
        gets one there too. The character, "" if not needed, is in no message. Raise PipelineError
        for values that nest too deep or contain all possible break characters.
        """
        try:
            strings = list(strings_of(given))
            if not any(self._everywhere.breaks(text) for text in strings if not self._ends.isdisjoint(text)):
                return dict(given), ""
            # The break must not be in a message, not even as an escape in JSON.
            joined = "".join(strings).lower()
            mark = next((c for c in map(chr, BREAKS) if c not in joined and f"u{ord(c):04x}" not in joined), None)
            if mark is None:
                raise PipelineError(
                    "the messages contain every character of Unicode's private use area, U+E000 to U+F8FF; remove "
                    "one of these characters from all messages"
                )
            return self._parted(given, mark, self._everywhere), mark
        except RecursionError:
            raise PipelineError(
                "values in the messages nest too deep for a chat template; send these values as JSON text"
            ) from None

    def sanitised(self, text: str, mark: str) -> tuple[Any, str]:
        """Return (tokenizer, text) with which special tokens from messages become plain text.

        mark: the break from `broken`. A text that only normalisation turns into a special token,
        such as one in full-width letters, stays plain text too.
        """
        if not mark and not self._normalised:
            return self._tokenizer, text
        pieces = re.split(rf"{mark}|\\+u{ord(mark):04x}", text) if mark else [text]
        breaks = [0]
        for piece in pieces[:-1]:
            breaks.append(breaks[-1] + len(piece))
        text, parts, at, start = "".join(pieces), [], 0, 0
        while found := self._any.search(text, start):
            start, end = found.span()
            if breaks[bisect_right(breaks, end - 1) - 1] > start:
                # This spelling came from a message; the next one may start inside it.
                start += 1
                continue
            parts += [text[at:start], self._names.get(found[0], found[0])]
            at = start = end
        parts.append(text[at:])
        return self._plain, "".join(parts)

    def _parted(self, value: Any, mark: str, spellings: Spellings) -> Any:
        if isinstance(value, str):
            cuts = [0, *spellings.breaks(value), len(value)]
            return mark.join(value[start:end] for start, end in pairwise(cuts))
        if isinstance(value, Mapping):
            answer = value.get("role") == "assistant"
            return {
                self._parted(name, mark, self._everywhere): self._parted(
                    each, mark, self._in_answers if answer and name in ANSWERS else self._everywhere
                )
                for name, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._parted(each, mark, spellings) for each in value]
        return value

    @cached_property
    def _everywhere(self) -> Spellings:
        return Spellings(self.spelled)

    @cached_property
    def _in_answers(self) -> Spellings:
        return Spellings(self.spelled.difference(self._answers))

    @cached_property
    def _any(self) -> re.Pattern:
        return re.compile(_any_of(self._added))

    @cached_property
    def _names(self) -> dict[str, str]:
        """Random texts for the special tokens; they are secret, so no message contains one."""
        secret = os.urandom(8).hex()
        return {word: f"\U000f0000{secret}{n}\U000f0001" for n, word in enumerate(sorted(self.spelled))}

    @cached_property
    def _plain(self) -> Any:
        """A copy of the tokenizer in which the random texts of `_names` are the special tokens."""
        from tokenizers import Tokenizer

        described, names = json.loads(self._tokenizer.to_str()), self._names
        model = described["model"]
        new = lambda word: names.get(word, word)
        for token in described["added_tokens"]:
            token["content"] = new(token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {new(word): index for word, index in model["vocab"].items()}
        else:
            model["vocab"] = [[new(word), score] for word, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = new(model["unk_token"])
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])]
        return Tokenizer.from_str(json.dumps(described))


class Spellings:
    """A case-insensitive search for texts of special tokens, such as "<|im_end|>", in a text."""

    def __init__(self, words: Collection[str]):
        low = {word.lower() for word in words}
        # A lookahead, because spellings may overlap.
        self._each = re.compile(f"(?={_any_of(low)})")
        parts = lambda cut: {part for word in low for n in range(1, len(word)) if _is_mark(part := cut(word, n), 1)}
        self._begun, self._ended = parts(lambda word, n: word[:n]), parts(lambda word, n: word[n:])
        self._longest = max(map(len, low), default=0)

    def breaks(self, text: str) -> list[int]:
        """Return the sorted indices of breaks: in special tokens, and beside parts at the ends."""
        low = text.lower()
        if len(low) != len(text):
            low = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
        found = {match.start() + 1 for match in self._each.finditer(low)}
        head, tail = low.lstrip(), low.rstrip()
        if any(tail[-n:] in self._begun for n in range(1, min(self._longest, len(tail)) + 1)):
            found.add(len(tail))
        if any(head[:n] in self._ended for n in range(1, min(self._longest, len(head)) + 1)):
            found.add(len(low) - len(head))
        return sorted(found)


def _is_mark(word: str, min_length: int = 2) -> bool:
    return len(word) >= min_length and not word.isspace() and not word.isalnum()


def _is_bracketed(word: str) -> bool:
    return _is_mark(word, 3) and not any(c.isalnum() or c.isspace() for c in (word[0], word[-1]))


def _any_of(words: Collection[str], depth: int = 0) -> str:
    """Return a regular expression of the longest of `words`, with common prefixes written once."""
    if len(words) == 1 or depth == DEEPEST:
        return f"(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})"
    following: dict[str, list[str]] = {}
    for word in words:
        if word:
            following.setdefault(word[0], []).append(word[1:])
    if not following:
        return r"(?!)" if not words else ""
    parts = [f"{re.escape(c)}{_any_of(rest, depth + 1)}" for c, rest in sorted(following.items())]
    return f"(?:{'|'.join(parts)}){'?' if '' in words else ''}"


def strings_of(value: Any, skipped: Collection[str] = ()) -> Iterator[str]:
    """Yield all strings and keys in a JSON value, except the `skipped` keys and their values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in skipped:
                yield from strings_of(key)
                yield from strings_of(each, skipped)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from strings_of(each, skipped)
