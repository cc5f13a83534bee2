"""A conversation over one session: the cache is kept between turns, and only what is new is fed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.positions import at_most, room, stand
from castiron.pipelines.generation.prefix_cache import PrefixCache
from castiron.pipelines.generation.prefix_store import PrefixStore
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.text import Text
from castiron.pipelines.generation.thoughts import Thought
from castiron.pipelines.progress import say
from castiron.vmfb.aside import write_atomically
from castiron.vmfb.disk import reason
from castiron.vmfb.state_file import StateError, identity, read_head, read_rows, write_state

if TYPE_CHECKING:
    from castiron.pipelines.generation.draft import Draft

# Share of the context that is kept free for an answer without --max-tokens when turns have to go.
ANSWER_SHARE = 4
# Share of the context that goes at once: what stays is read again, which is then not due after every turn.
DROPPED_SHARE = 4
ROLES = ("system", "user", "assistant")
# Behind the name of a conversation's file: the state that has read it.
STATE = ".state"


class Chat:
    """Messages and the session that has read them, which nothing else may move.

    `messages`: {"role", "content"} each, the system message first if there is one. Every turn renders all messages by
    the template and goes on from where the ids first differ from those in the cache, so that a template that rewrites
    its history is followed too.
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
        usual_tokens: int | None = None,
        speculate: bool = False,
        draft: Draft | None = None,
        repetition_stop: bool = True,
        store: PrefixStore | None = None,
    ):
        """An answer has at most `max_tokens`, for which turns are dropped and without room for which a message is
        refused; without them at most `usual_tokens`, or what room there is; without both it may fill the context.
        `store`: where states of long beginnings are kept."""
        self.session, self.text, self.sampler = session, text, Sampler(sampling)
        self.system, self.stops, self.speculate, self.draft = system, tuple(stops), speculate, draft
        self.max_tokens, self.usual_tokens, self.repetition_stop = max_tokens, usual_tokens, repetition_stop
        stand(session, 0)
        self.cache = PrefixCache([session], store)
        self.generation: Generation | None = None
        self.dropped = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation, but for the system message. Cached ids stay, for what begins as they do."""
        self.messages = self._head()

    def instruct(self, system: str | None) -> None:
        """Another system message, or none, before the same conversation."""
        kept = [message for message in self.messages if message["role"] != "system"]
        self.system = system
        self.messages = [*self._head(), *kept]

    def answer(self, words: str, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Says `words` and yields the answer's text as it comes, what is thought before it as `Thought`; closing it early
        keeps what was said so far.

        `dropped` then tells how many messages had to go for room, `generation` the speed. PipelineError if the words
        alone do not fit in the context; the conversation is then as it was before.
        """
        return self._ask([*self.messages, {"role": "user", "content": words}], progress)

    def retry(self, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """`answer` to the last question once more, in the place of the answer that it got."""
        return self._ask(self.messages[: self._last_question() + 1], progress)

    def undo(self) -> str:
        """Takes the last question back with its answer, and returns it; PipelineError if there is none."""
        last = self._last_question()
        words = self.messages[last]["content"]
        self.messages = self.messages[:last]
        return words

    def _last_question(self) -> int:
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise PipelineError("nothing has been asked yet")
        return asked[-1]

    def _head(self) -> list[dict]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _ask(self, messages: list[dict], progress: Callable[[int, int], None] | None) -> Iterator[str]:
        messages, prompt, self.dropped = self._fit(messages)
        _, known = self.cache.take(ids := np.array(prompt), [0])

        def read(done: int, total: int) -> None:
            if self.cache.store:
                self.cache.store.offer(self.session, ids)
            if progress:
                progress(done, total)

        self.generation = generation = Generation(
            self.session, prompt[known:], sampler=self.sampler, max_tokens=self._limit(prompt), text=self.text,
            stop_tokens=self.text.eos, stop_strings=self.stops, progress=read, speculate=self.speculate,
            draft=self.draft, history=prompt[:known], repetition_stop=self.repetition_stop, thoughts=True,
        )  # fmt: skip
        return self._speak(generation, messages, known)

    def _speak(self, generation: Generation, messages: list[dict], known: int) -> Iterator[str]:
        said: list[str] = []
        try:
            for text in generation.stream():
                # What it thought is not said again to it, as its makers train it.
                if not isinstance(text, Thought):
                    said.append(text)
                yield text
        finally:
            generation.settle()
            # An interrupt may have come anywhere: only what both the session and the generation know of counts.
            fed = (generation.prompt + generation.tokens)[: self.session.position - known]
            stand(self.session, known + len(fed), fed)
            self.cache.fed(0, fed)
            if generation.prefill_seconds:
                self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]

    def _limit(self, prompt: list[int]) -> int | None:
        return self.max_tokens or at_most(self.usual_tokens, room(self.session.context, 0, len(prompt)))

    def _fit(self, messages: list[dict]) -> tuple[list[dict], list[int], int]:
        """The messages with their ids and how many were dropped: none where there is room, else as many of the oldest
        turns as a share of the context holds, and more where the answer asks for it."""
        context = self.session.context
        least = self.max_tokens or max(1, min(self.usual_tokens or context, context // ANSWER_SHARE))
        head = 1 if messages[0]["role"] == "system" else 0
        prompt = self.text.encode_chat(messages)
        goal, dropped = len(prompt), 0
        if room(context, 0, len(prompt)) < least:
            goal -= context // DROPPED_SHARE
        while len(prompt) > goal or room(context, 0, len(prompt)) < least:
            turns = [i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user"]
            if not turns:
                break
            dropped += turns[0] - head
            messages = [*messages[:head], *messages[turns[0] :]]
            prompt = self.text.encode_chat(messages)
        if room(context, 0, len(prompt)) < (self.max_tokens or 1):
            asked = f" and {least} for the answer" if self.max_tokens else ""
            raise PipelineError(
                f"this message needs {len(prompt)} tokens{asked} by itself and the context is {context}: shorten it, "
                "or compile with a larger --context"
            )
        return messages, prompt, dropped

    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON, {"messages": [{"role", "content"}, ...]}, and beside it the state that has read them,
        which `load` goes on from; PipelineError if that cannot be done."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        place, position = Path(path).resolve(), self.session.position
        state = place.with_name(place.name + STATE)
        try:
            # A conversation that was saved under this name before stays until this one is whole.
            write_atomically(place, text.encode())
            if position:
                tokens = self.cache.tokens[0, :position]
                write_state(state, identity(self.session.manifest), tokens, self.session.rows(position))
            else:
                state.unlink(missing_ok=True)
        except OSError as error:
            raise PipelineError(f"{path} cannot be written: {reason(error)}") from None

    def load(self, path: str | Path) -> None:
        """Takes the messages of a file that `save` wrote, and the state beside it; PipelineError for another file, the
        conversation stays then. A state that cannot be used is said, and the conversation is read again with the next
        question."""
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
        self._load_state(Path(f"{path}{STATE}"))

    def _load_state(self, place: Path) -> None:
        try:
            state = read_head(place)
            if state.bundle != identity(self.session.manifest):
                raise StateError(f"{place} is a state of another bundle")
            count = len(state.tokens)
            self.session.take(read_rows(state, self.session.rows(count)), count)
            self.cache.tokens[0, :count] = state.tokens
        except FileNotFoundError:
            return
        except (StateError, OSError) as error:
            say(f"{error if isinstance(error, StateError) else f'{place}: {error.strerror}'}; the conversation is read again")
