"""Generate text from one prompt or from many with an engine, for tests to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.sampling import Sampler
from castiron.pipelines.text import generate
from castiron.pipelines.text.generate import encode_prompt
from castiron.pipelines.text.text_output import Stream, text_request
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.run.session import Batch, Session


def Generation(
    session, prompt, *, text: Tokenizer | None = None, speculate: bool = False, draft=None, store=None, **options: Any
) -> TokenStream:  # fmt: skip
    """Return a stream of the tokens after `prompt`."""
    model = session if isinstance(session, Session | Bundle | Path) else Batch(session)
    engine = Engine(model, ngrams=speculate, draft=draft, store=store)
    stream = TokenStream(engine, text_request(prompt, engine.context, text, **options), reasoning=True)
    stream.session = session
    return stream


class TokenStream(Stream):
    """An iterator over token ids; `stream` iterates over their text."""

    done = 0

    def __next__(self) -> int:
        while len(self.tokens) == self.done:
            if self.finish_reason:
                raise StopIteration
            self.read()
        self.done += 1
        return self.tokens[self.done - 1]

    def stream(self) -> Iterator[str]:
        try:
            while True:
                yield super().__next__()
        except StopIteration:
            return


def generate_many(
    engine: Engine, prompts, *, text: Tokenizer | None = None, template_args: Mapping = MappingProxyType({}), **options: Any
):
    """Return an iterator over the results of prompts, in the order of completion."""
    vocab = engine.manifest.vocab

    def make_request(prompt):
        return text_request(encode_prompt(prompt, text, vocab, template_args), engine.context, text, **options)

    make_request([0])
    return generate.generate_many(engine, prompts, make_request)


def choose(sampler: Sampler, logits, history=(), counts: Mapping = MappingProxyType({})) -> int:
    """Return the next token of `logits` [vocab] and use its random number."""
    token, _ = sampler.pick(logits, history, counts)
    sampler.used()
    return token
