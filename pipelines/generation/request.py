"""How prompts are to go on: what a caller asks for, made into sequences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from numbers import Integral
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.grammar import Grammar
from castiron.pipelines.generation.positions import at_most, room
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.sequence import Sequence
from castiron.pipelines.generation.text import Text
from castiron.vmfb.manifest import Manifest

# Text as it is, token ids, or messages ({"role", "content"} each) for the chat template.
Prompt = str | Collection[int] | Items[Mapping[str, Any]]


class Request:
    """Limits, sampling and stops of prompts to a model with this manifest and context."""

    def __init__(
        self,
        manifest: Manifest,
        context: int,
        text: Text | None,
        *,
        max_tokens: int | None = None,
        sampling: Sampling = Sampling(),
        stop_tokens: Collection[int] | None = None,
        stop_strings: str | Iterable[str] = (),
        template_args: Mapping[str, Any] = {},
        grammar: Grammar | None = None,
    ):
        """`template_args`: variables for the chat template. `grammar`: what every text has to be; an answer to messages comes
        after the model's thoughts, which are then no part of it. PipelineError for what no prompt can be run with."""
        self.manifest, self.context, self.text = manifest, context, text
        self.max_tokens, self.sampling, self.template_args = max_tokens, sampling, template_args
        self.stop_tokens = manifest.tokens.eos if stop_tokens is None else tuple(stop_tokens)
        self.stop_strings = stop_strings if isinstance(stop_strings, str) else tuple(stop_strings)
        self.grammar = grammar
        self.sequence([0])

    def sequence(self, prompt: Prompt) -> Sequence:
        """The sequence of one prompt, of at most `max_tokens` and as many as there is room for; PipelineError for a prompt
        that cannot be run."""
        ids = self.encode(prompt)
        limit = at_most(self.max_tokens, room(self.context, 0, len(ids)))
        return Sequence(
            ids, self.context, max_tokens=limit, text=self.text, sampler=Sampler(self.sampling),
            stop_tokens=self.stop_tokens, stop_strings=self.stop_strings, grammar=self.grammar,
            thoughts=self.grammar is not None and are_messages(prompt),
        )  # fmt: skip

    def scoring(self, prompt: Prompt, top: int) -> Sequence:
        """What finds the `scores` of a prompt, with the `top` likeliest tokens of each place, and generates nothing."""
        return Sequence(self.encode(prompt), self.context, max_tokens=0, prompt_logprobs=top)

    def encode(self, prompt: Any) -> Collection[int]:
        """The token ids of one prompt; PipelineError for what is no prompt."""
        if self.text and isinstance(prompt, str):
            return self.text.encode(prompt)
        if self.text and are_messages(prompt):
            if self.text.chat_template is None:
                raise PipelineError("this model has no chat template; give it text in place of messages")
            return self.text.encode_chat(prompt, **self.template_args)
        if not isinstance(prompt, Collection) or not all(isinstance(token, Integral) for token in prompt):
            raise PipelineError(f"this prompt is neither {'text nor messages nor ' if self.text else ''}a list of token ids")
        vocab = self.manifest.vocab
        if outside := [token for token in prompt if not 0 <= token < vocab]:
            raise PipelineError(f"token {outside[0]} is outside the vocabulary of {vocab} tokens")
        return prompt


def are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Items) and bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def is_prompt(value: Any) -> bool:
    """Whether `value` is one prompt, rather than several."""
    ids = isinstance(value, Collection) and bool(len(value)) and all(isinstance(token, Integral) for token in value)
    return isinstance(value, str) or ids or are_messages(value)
