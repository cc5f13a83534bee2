"""A conversation over one session: the cache is kept between turns, and only what is new is fed."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.stops import StopStrings
from castiron.pipelines.generation.streaming import pieces
from castiron.pipelines.generation.text import Text
from castiron.vmfb.cache import write_atomically

# Of the context, what is kept free for an answer without --max-tokens when turns have to go.
ANSWER_SHARE = 4
ROLES = ("system", "user", "assistant")


class Chat:
    """Messages and the session that has read them.

    `messages`: {"role", "content"} each, the system message first if there is one. `fed`: the ids in the session's
    cache. Every turn renders all messages by the template and rewinds to where the ids first differ from `fed`, so that a
    template that rewrites its history is followed too.
    """

    def __init__(
        self,
        session,
        text: Text,
        *,
        sampling: Sampling = Sampling(),
        system: str | None = None,
        stops: Sequence[str] = (),
        max_tokens: int | None = None,
        speculate: bool = False,
    ):
        self.session, self.text, self.sampler = session, text, Sampler(sampling)
        self.system, self.stops, self.max_tokens, self.speculate = system, tuple(stops), max_tokens, speculate
        self.fed: list[int] = []
        self.generation: Generation | None = None
        self.dropped = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation, but for the system message. Cached ids stay, for what begins as they do."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, words: str, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Says `words` and yields the answer's text as it comes; closing it early keeps what was said so far.

        `dropped` then tells how many messages had to go for room, `generation` the speed. PipelineError if the words
        alone do not fit in the context; the conversation is then as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": words}]
        messages, prompt, self.dropped = self._fit(messages)
        keep = self._keep(prompt)
        self.generation = generation = Generation(
            self.session, prompt[keep:], sampler=self.sampler, max_tokens=self.max_tokens,
            stop_tokens=self.text.eos, progress=progress, speculate=self.speculate, history=prompt[:keep],
        )  # fmt: skip
        return self._speak(generation, messages, prompt)

    def _speak(self, generation: Generation, messages: list[dict], prompt: list[int]) -> Iterator[str]:
        said: list[str] = []
        stops = StopStrings(self.stops)
        try:
            for piece in pieces(generation, self.text, stops):
                said.append(piece)
                yield piece
        finally:
            generation.settle()
            if stops.stopped:
                generation.finish_reason = "stop"
            # An interrupt may have come between the model's call and the token's way here.
            self.fed = (prompt + generation.tokens)[: self.session.position]
            if generation.prefill_seconds:
                self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]

    def _fit(self, messages: list[dict]) -> tuple[list[dict], list[int], int]:
        """The messages with their ids, without as many of the oldest turns as the context asks for, and how many."""
        context = self.session.context
        least = min(self.max_tokens or context // ANSWER_SHARE, context)
        head = 1 if messages[0]["role"] == "system" else 0
        dropped = 0
        while True:
            prompt = self.text.encode_chat(messages)
            # The last token that is generated is never fed.
            if len(prompt) + least - 1 <= context:
                return messages, prompt, dropped
            turns = [i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user"]
            if turns:
                dropped += turns[0] - head
                messages = [*messages[:head], *messages[turns[0] :]]
            elif self.max_tokens is None and len(prompt) <= context:
                return messages, prompt, dropped
            else:
                asked = f" and {least} for the answer" if self.max_tokens else ""
                raise PipelineError(
                    f"this message needs {len(prompt)} tokens{asked} by itself and the context is {context}: shorten it, "
                    "or compile with a larger --context"
                )

    def _keep(self, prompt: list[int]) -> int:
        """Rewinds to where `prompt` and the cache part, leaving at least one token to feed; how many stay."""
        self.fed = self.fed[: self.session.position]
        same = next((i for i, (a, b) in enumerate(zip(prompt, self.fed)) if a != b), min(len(prompt), len(self.fed)))
        keep = min(same, len(prompt) - 1)
        self.session.rewind(keep)
        self.fed = self.fed[:keep]
        return keep

    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON, {"messages": [{"role", "content"}, ...]}; PipelineError if that cannot be done."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            # A conversation that was saved there before stays until this one is whole.
            write_atomically(Path(path).resolve(), text.encode())
        except OSError as error:
            raise PipelineError(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: str | Path) -> None:
        """Takes the messages of a file that `save` wrote; PipelineError for another file, the conversation stays then."""
        try:
            messages = json.loads(Path(path).read_text("utf-8"))["messages"]
            proper = isinstance(messages, list) and all(message["role"] in ROLES for message in messages)
            messages = [{"role": message["role"], "content": message["content"]} for message in messages]
            # JSON may hold halves of surrogate pairs, which no tokenizer takes.
            "".join(message["content"] for message in messages).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            proper = False
        if not proper:
            raise PipelineError(f"{path} is not a conversation that /save wrote")
        self.messages = messages
        self.system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
