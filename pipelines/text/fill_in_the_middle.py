"""Fill-in-the-middle (FIM): prompts for which a model generates the text between two given texts.

Each model family has FIM tokens of its own. The family is recognised by the names of the FIM tokens
in the vocabulary, as in llama.cpp's llama-vocab.cpp. A GGUF file may also state ids of FIM tokens;
these replace the ids that were found by name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.special_tokens import SpecialTokens
from castiron.pipelines.text.text_output import StopStrings
from castiron.pipelines.text.tokenizer import Tokenizer, check_utf8, encode_text

NO_FIM = "this model has no fill-in-the-middle (FIM) tokens; use a code model that has, such as Qwen2.5-Coder"
# Tokens of a prefix, a suffix and, except Mistral's, the middle.
FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Tiny-Coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Mistral
)
REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<fim-repo>", "<|reponame|>", "<reponame>", "<REPO>")
FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>", "<filename>")
PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "▁<EOT>", "<EOT>", "<|EOT|>", "<｜end▁of▁sentence｜>")
# A character that no token joins with the text after it.
ANCHOR = "\u263a"
# The start of a long prefix is cut off in steps of 1 / CUTS of its space, so that the prompts of the following requests
# begin with the same tokens, whose states are cached.
CUTS = 8


@dataclass(frozen=True)
class Fim:
    """A builder of fill-in-the-middle (FIM) prompts, which have a prefix and a suffix.

    prefix, suffix, middle, repository, file: ids of the tokens before these parts; `middle` ends
    the prompt. ends: ids that end the generated text, besides the tokenizer's end tokens.
    """

    tokenizer: Tokenizer
    special: SpecialTokens
    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]
    suffix_first: bool = False

    def prompt(
        self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = (), max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt; files: (name, text) of other files.

        max_tokens: None for no limit. Files are left out first, then the start of the prefix and
        the end of the suffix; if both are long, the prefix gets three quarters of the space.
        """
        head = [self.tokenizer.bos] if self.tokenizer.encode("")[:1] == [self.tokenizer.bos] else []
        before, after = self._encode(prefix), self._encode(suffix, joined=True)
        others = [self._file(name) + self._encode(text) for name, text in files]
        begin, end = self._around_files() if files else ([], [])
        if max_tokens is not None:
            space = max(max_tokens - len(head) - 3, 4)
            after = after[: max(space // 4, space - len(before))]
            before = _last(before, space - len(after))
            space -= len(before) + len(after) + len(begin) + len(end)
            while others and sum(map(len, others)) > space:
                del others[0]
            if not others:
                begin, end = [], []
        middle = [] if self.middle is None else [self.middle]
        parts = [[self.prefix, *before], [self.suffix, *after]]
        first, second = reversed(parts) if self.suffix_first else parts
        return [*head, *begin, *(token for other in others for token in other), *end, *first, *second, *middle]

    def _around_files(self) -> tuple[list[int], list[int]]:
        begin = [] if self.repository is None else [self.repository, *self._encode("myproject\n")]
        return begin, [] if self.file is None else self._file("filename")

    def _file(self, name: str) -> list[int]:
        if self.file is None:
            return self._encode("\n\n--- snippet ---\n\n")
        return [self.file, *self._encode(f"{name}\n")]

    def _encode(self, text: str, joined: bool = False) -> list[int]:
        """Return the token ids of a text, in which special tokens are plain text.

        joined: the text follows other text, so SentencePiece's space before it is left out.
        """
        if not text:
            return []
        if joined and self._plain(ANCHOR)[1].startswith("\u2581"):
            (anchor, _), (ids, _) = self._plain(ANCHOR), self._plain(ANCHOR + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self._plain(text)[0]

    def _plain(self, text: str) -> tuple[list[int], str]:
        """Encode a text, with special tokens as plain text; return (ids, first token's text)."""
        given, mark = self.special.broken({"text": check_utf8(text, "the text")})
        found = encode_text(*self.special.sanitised(given["text"], mark), add_special_tokens=False)
        return found.ids, found.tokens[0] if found.tokens else ""


def _last(tokens: list[int], space: int) -> list[int]:
    """Return the last tokens, at most `space`; a multiple of space // CUTS is cut off.

    While a text grows, most prompts then start at the same token, whose KV cache can be reused.
    """
    step = max(space // CUTS, 1)
    return tokens[-(-max(len(tokens) - space, 0) // step) * step :]


def fim_of(tokenizer: Tokenizer) -> Fim:
    """Return the builder of a tokenizer's prompts; raise PipelineError if it has no such tokens."""
    name, number = tokenizer.backend.id_to_token, tokenizer.backend.token_to_id
    known = lambda names: [token for each in names if (token := number(each)) is not None]
    family = next((names for names in FAMILIES if all(number(each) is not None for each in names if each)), ("", "", ""))
    named = {"pre": known(family[:1]), "suf": known(family[1:2]), "mid": known(family[2:])}
    named |= {"rep": known(REPOSITORY), "sep": known(FILE), "pad": known(PADDING)}
    ids = {role: tokens[0] for role, tokens in named.items() if tokens}
    ids |= {role: token for role, token in tokenizer.fim.items() if name(token)}
    if not {"pre", "suf"} <= ids.keys():
        raise PipelineError(NO_FIM)
    ends = tuple(dict.fromkeys([*ids.values(), *known(ENDS)]))
    return Fim(
        tokenizer, SpecialTokens(tokenizer.backend, "", {name(token) for token in ends}), ids["pre"], ids["suf"],
        ids.get("mid"), ids.get("rep"), ids.get("sep"), ends, suffix_first="mid" not in ids,
    )  # fmt: skip


class LineStops(StopStrings):
    """A filter that ends a text at a stop string, or at a line break by two more rules.

    indent: it ends before a line after the first with fewer spaces and tabs. seconds: after this
    time it ends at the next line break; None for no limit.
    """

    def __init__(self, strings: Collection[str], indent: int = 0, seconds: float | None = None):
        super().__init__(strings)
        self.indent, self.seconds = indent, seconds
        self._start: float | None = None
        self._has_ended = False
        # Line breaks and spaces at the end of the text, whose line may have to be left out.
        self._space = ""

    @property
    def stopped(self) -> bool:
        return self._has_ended or self.met is not None

    def add(self, more: str, final: bool = False) -> str:
        if self._has_ended:
            return ""
        self._start = self._start or time.monotonic()
        text = self._space + super().add(more, final)
        self._space = ""
        if self.seconds is not None and time.monotonic() - self._start > self.seconds and "\n" in text:
            self._has_ended = True
            return text[: text.index("\n")]
        if not self.indent:
            return text
        for line in re.finditer(r"(?:\n([ \t\r]*))+(?=[^ \t\r\n])", text):
            if len(line[1]) < self.indent:
                self._has_ended = True
                return text[: line.start()]
        if not (final or self.met) and (found := re.search(r"\n\s*$", text)):
            text, self._space = text[: found.start()], text[found.start() :]
        return text
