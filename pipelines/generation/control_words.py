"""Words of messages that are spelled as control tokens, and stay text: what a user says opens no turn and ends none.

A message that spells `<|im_end|>` gets a break in it, a character that stands nowhere else, before the template renders it. In
the rendered text a control token is a word without a break; the others were said. So a template may cut, join and quote its
messages as it likes, and a word that comes about by that is one that was said too.
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
from castiron.pipelines.generation.tokenizing import encoded

# Private use: no language has them.
BREAKS = range(0xE000, 0xF900)
# Where an assistant's message has what the model wrote.
ANSWERS = ("content", "reasoning_content")
# Words that share more of their beginning are rare, and expressions nest no deeper.
DEEPEST = 60


class ControlWords:
    """The control words of a tokenizer: its special tokens, and others that the chat template writes."""

    def __init__(self, tokenizer: Any, template: str, answers: Collection[str] = ()):
        """`answers`: words that a model writes in its answers, such as <think>: templates look for them in what comes back as
        an assistant's message."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._added = {str(token.content): token.special for token in added if token.content}
        self.words = {w for w, special in self._added.items() if special and _is_mark(w)}
        self.words |= {w for w in self._added if w in answers or _is_bracketed(w) and w in template}
        # Merges of BPE make no control word; other models find one in a text by themselves.
        self._normalised = tokenizer.normalizer is not None and (
            type(tokenizer.model).__name__ != "BPE" or any(t.normalized for t in added if t.content in self.words)
        )
        # What neither begins nor ends a word has none and no part of one.
        self._ends = {c for word in self.words for c in (word[0], word[-1])}
        self._answers = answers

    def broken(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Variables of a template with a break in each word of their texts that is a control word, or a part of one where a
        text begins or ends; and the break, "" where there is none in any. PipelineError for what is nested too deep."""
        try:
            return self._broken(given)
        except RecursionError:
            raise PipelineError("the messages nest values too deep for a chat template: send what is in them as text") from None

    def _broken(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        said = [text for text in _strings(given) if not self._ends.isdisjoint(text)]
        if not any(self._everywhere.breaks(text) for text in said):
            return dict(given), ""
        # As JSON writes it too.
        whole = "".join(_strings(given)).lower()
        mark = next((c for c in map(chr, BREAKS) if c not in whole and f"u{ord(c):04x}" not in whole), None)
        if mark is None:
            raise PipelineError("the messages hold every character of Unicode's private use: leave one out")
        return self._parted(given, mark, self._everywhere), mark

    def encode(self, text: str, mark: str) -> list[int]:
        """The ids of a rendered text, in which words with a break `mark` in them are no control words; nor are those that come
        about as the tokenizer normalises it, such as one of full-width letters."""
        if not mark and not self._normalised:
            return encoded(self._tokenizer, text, False)
        pieces = re.split(rf"{mark}|\\+u{ord(mark):04x}", text) if mark else [text]
        breaks = [0]
        for piece in pieces[:-1]:
            breaks.append(breaks[-1] + len(piece))
        text, told, at, start = "".join(pieces), [], 0, 0
        while found := self._any.search(text, start):
            start, end = found.span()
            if breaks[bisect_right(breaks, end - 1) - 1] > start:
                # It was said; the next one may begin in it.
                start += 1
                continue
            told += [text[at:start], self._names.get(found[0], found[0])]
            at = start = end
        told.append(text[at:])
        return encoded(self._plain, "".join(told), False)

    def _parted(self, value: Any, mark: str, words: Words) -> Any:
        if isinstance(value, str):
            cuts = [0, *words.breaks(value), len(value)]
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
            return [self._parted(each, mark, words) for each in value]
        return value

    @cached_property
    def _everywhere(self) -> Words:
        return Words(self.words)

    @cached_property
    def _in_answers(self) -> Words:
        return Words(self.words.difference(self._answers))

    @cached_property
    def _any(self) -> re.Pattern:
        return re.compile(_any_of(self._added))

    @cached_property
    def _names(self) -> dict[str, str]:
        """What each control word is called in `_plain`: nobody can say that, because nobody knows it."""
        secret = os.urandom(8).hex()
        return {word: f"\U000f0000{secret}{n}\U000f0001" for n, word in enumerate(sorted(self.words))}

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer whose control words have other names, so that their own are text."""
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


class Words:
    """Finds words, and parts of them at the ends of a text, whatever their case: a template may change it."""

    def __init__(self, words: Collection[str]):
        low = {word.lower() for word in words}
        # One may begin in another.
        self._each = re.compile(f"(?={_any_of(low)})")
        parts = lambda cut: {part for word in low for n in range(1, len(word)) if _is_mark(part := cut(word, n), 1)}
        self._begun, self._ended = parts(lambda word, n: word[:n]), parts(lambda word, n: word[n:])
        self._longest = max(map(len, low), default=0)

    def breaks(self, text: str) -> list[int]:
        """Where to break `text`, ascending: behind the first character of each word, and where at an end a part of a word
        meets what the template may put there."""
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


def _is_mark(word: str, least: int = 2) -> bool:
    """Whether it is no plain word, which may be a role's name."""
    return len(word) >= least and not word.isspace() and not word.isalnum()


def _is_bracketed(word: str) -> bool:
    return _is_mark(word, 3) and not any(c.isalnum() or c.isspace() for c in (word[0], word[-1]))


def _any_of(words: Collection[str], depth: int = 0) -> str:
    """An expression for any of these words, the longest that begins at a place: it reads a character once."""
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


def _strings(value: Any) -> Iterator[str]:
    """Every text in `value`, the keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)
