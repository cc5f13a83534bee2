"""Answers that are blocks one after another, as the APIs that came after completions have them: thoughts, text, calls."""

import uuid
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from castiron.pipelines.generation.sequence import Delta, Finished, Token
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.pipelines.serve.replies import Reply


@dataclass
class Block:
    """`kind` is "thought", "text" or "call", whose `name` is the function's and whose `text` are its arguments."""

    kind: str
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    logprobs: list[dict] = field(default_factory=list)

    @property
    def call_id(self) -> str:
        """Of a call, what its result refers to, 9 letters and digits as every template takes them."""
        return self.id[:9]


class Blocks(Reply):
    """Builds the one choice of such an answer: events open, fill and close each block, and what they add up to is the whole
    `answer`."""

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool = False):
        super().__init__(model, token_bytes, logprobs)
        self.blocks: list[Block] = []
        self.end: Finished | None = None
        # Tokens whose text is not told yet.
        self._tokens: list[Token] = []
        self._open = False

    @property
    @abstractmethod
    def answer(self) -> dict:
        """The whole answer, behind its end."""

    @abstractmethod
    def opened(self, block: Block) -> Iterable[dict]:
        """The last block begins, without text."""

    @abstractmethod
    def filled(self, block: Block, more: str, logprobs: list[dict]) -> Iterable[dict]:
        """`more` text of the last block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterable[dict]:
        """The last block is whole, or as `end` says cut off."""

    def go_on(self, index: int, more: Delta, end: Finished | None) -> Iterable[dict]:
        self._tokens += more.tokens
        if more.thought:
            yield from self._say("thought", more.thought)
        if more.text:
            yield from self._say("text", more.text)
        for part in more.calls:
            if part.name is not None:
                yield from self._next(Block("call", part.name))
            if part.arguments:
                yield from self._say("call", part.arguments)
        if end:
            self.end = end
            yield from self._close()

    def _say(self, kind: str, more: str) -> Iterable[dict]:
        if not (self._open and self.blocks[-1].kind == kind):
            yield from self._next(Block(kind))
        block, tokens = self.blocks[-1], self._tokens
        self._tokens = []
        block.text += more
        found = self.logprobs_of(tokens) if self.logprobs and kind == "text" else []
        block.logprobs += found
        yield from self.filled(block, more, found)

    def _next(self, block: Block) -> Iterable[dict]:
        yield from self._close()
        self.blocks.append(block)
        self._open = True
        yield from self.opened(block)

    def _close(self) -> Iterable[dict]:
        if self._open:
            self._open = False
            yield from self.closed(self.blocks[-1])
