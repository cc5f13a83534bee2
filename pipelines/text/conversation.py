"""A conversation with a model; the engine's states (KV cache) stay cached between turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import free_positions
from castiron.pipelines.engine.sampling import Sampler, Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import print_message
from castiron.pipelines.text.reasoning import Reasoning
from castiron.pipelines.text.text_output import Stream, text_request
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.atomic_write import write_file
from castiron.vmfb.file_errors import reason
from castiron.vmfb.run.state_file import StateError

# Old turns are dropped if less than 1 / SHARE of the context, and less than `max_tokens`, is free for the answer. Dropping
# frees at least 1 / SHARE of the context, because the model must read the remaining turns again.
SHARE = 4
ROLES = ("system", "user", "assistant")
# Suffix of the state file beside a conversation's file.
STATE = ".state"

Progress = Callable[[int, int], None]


class Chat:
    """A conversation: its messages, and the engine that answers them.

    max_tokens: None for no limit but the context. dropped: number of messages that the last turn
    dropped to free space. stream: of the last answer.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, sampling: Sampling = Sampling(), system: str | None = None,
        stops: Sequence[str] = (), max_tokens: int | None = None, repetition_stop: bool = True,
    ):  # fmt: skip
        self.engine, self.tokenizer, self.sampler = engine, tokenizer, Sampler(sampling)
        self.system, self.stops = system, tuple(stops)
        self.max_tokens, self.repetition_stop = max_tokens, repetition_stop
        self.stream: Stream | None = None
        self.dropped = 0
        self.reset()

    def reset(self) -> None:
        """Remove all messages except the system message; the states (KV cache) stay cached."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def set_system_prompt(self, system: str | None) -> None:
        """Replace the system message by `system`, or remove it if `system` is None."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.system = system
        self.reset()
        self.messages += others

    def answer(self, message: str, progress: Progress | None = None) -> Iterator[str]:
        """Send a message, and yield pieces of the answer, those of reasoning as `Reasoning`.

        progress: called with (prompt tokens read, all prompt tokens). If the iterator is closed
        early, the answer so far stays. Raise PipelineError if the message does not fit in the
        context.
        """
        return self._answer([*self.messages, {"role": "user", "content": message}], progress)

    def retry(self, progress: Progress | None = None) -> Iterator[str]:
        """Replace the answer to the last user message; yield pieces of the new answer."""
        return self._answer(self.messages[: self._last_question() + 1], progress)

    def undo(self) -> str:
        """Remove the user's last message and its answer; return the message."""
        last = self._last_question()
        message = self.messages[last]["content"]
        self.messages = self.messages[:last]
        return message

    def _last_question(self) -> int:
        questions = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            raise PipelineError("nothing has been asked yet; send a message first")
        return questions[-1]

    def _answer(self, messages: list[dict], progress: Progress | None) -> Iterator[str]:
        messages, prompt, self.dropped = self._fit(messages)
        request = text_request(
            prompt, self.engine.context, self.tokenizer, sampling=self.sampler, max_tokens=self.max_tokens,
            stop_tokens=self.tokenizer.eos, stop_strings=self.stops, repetition_stop=self.repetition_stop, reasoning=True,
            on_prefill=progress,
        )  # fmt: skip
        self.stream = stream = Stream(self.engine, request, reasoning=True)
        return self._pieces(stream, messages)

    def _pieces(self, stream: Stream, messages: list[dict]) -> Iterator[str]:
        answer: list[str] = []
        try:
            for text in stream:
                # Models are trained without the reasoning of earlier turns.
                if not isinstance(text, Reasoning):
                    answer.append(text)
                yield text
        finally:
            stream.close()
            if stream.prefill_seconds:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _fit(self, messages: list[dict]) -> tuple[list[dict], list[int], int]:
        """Return (messages without the oldest turns, if needed; their ids; number dropped)."""
        context = self.engine.context
        needed = max(1, min(self.max_tokens or context, context // SHARE))
        head = 1 if messages[0]["role"] == "system" else 0
        prompt = self.tokenizer.encode_chat(messages)
        goal, dropped = len(prompt), 0
        if free_positions(context, len(prompt)) < needed:
            goal -= context // SHARE
        while len(prompt) > goal or free_positions(context, len(prompt)) < needed:
            turns = [i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user"]
            if not turns:
                break
            dropped += turns[0] - head
            messages = [*messages[:head], *messages[turns[0] :]]
            prompt = self.tokenizer.encode_chat(messages)
        if free_positions(context, len(prompt)) < 1:
            raise PipelineError(
                f"the message needs {len(prompt)} tokens even without earlier messages, but the context is {context}; "
                "shorten the message, or give a larger --context"
            )
        return messages, prompt, dropped

    def save(self, path: str | Path) -> None:
        """Write the messages to a JSON file, and the states (KV cache) to a file beside it."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        file = Path(path).resolve()
        if not file.parent.is_dir():
            raise PipelineError(f"cannot write {path}: no such folder: {file.parent}; create it, or give another path")
        try:
            # An existing file is replaced only when the new one is complete.
            write_file(file, text.encode())
            self.engine.save_state(file.with_name(file.name + STATE))
        except OSError as error:
            raise PipelineError(f"cannot write {path}: {reason(error)}") from None

    def load(self, path: str | Path) -> None:
        """Load the messages that `save` wrote, and the states beside them if they fit."""
        try:
            messages = json.loads(Path(path).read_text("utf-8"))["messages"]
            is_valid = isinstance(messages, list) and all(message["role"] in ROLES for message in messages)
            messages = [{"role": message["role"], "content": message["content"]} for message in messages]
            # JSON may have lone surrogates, which no tokenizer accepts.
            "".join(message["content"] for message in messages).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            is_valid = False
        if not is_valid:
            raise PipelineError(f"{path} is not a conversation; give a file that /save wrote")
        self.messages = messages
        self.system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        state = Path(f"{path}{STATE}")
        try:
            self.engine.load_state(state)
        except FileNotFoundError:
            return
        except (StateError, OSError) as error:
            shown = error if isinstance(error, StateError) else f"{state}: {error.strerror}"
            print_message(f"{shown}; castiron computes the conversation again")
