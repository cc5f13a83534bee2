"""Answers in the shapes of OpenAI's API: whole completions, and the chunks of a stream."""

import time
import uuid
from collections.abc import Iterable, Sequence

from castiron.pipelines.generation.sequence import Finished, Said
from castiron.pipelines.generation.token_bytes import TokenBytes


def usage(ends: Sequence[tuple[int, Finished]]) -> dict:
    """Tokens of a request, from the ends of its sequences as (which prompt, end): a prompt counts once for all its
    choices."""
    prompts = {place: end for place, end in reversed(ends)}
    prompt = sum(end.prompt for end in prompts.values())
    generated = sum(end.generated for _, end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached for end in prompts.values())},
    }


class Reply:
    """Builds the answers to one request; the two kinds differ in the names of things."""

    kind = chunk_kind = prefix = ""

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool):
        self.token_bytes, self.logprobs = token_bytes, logprobs
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[dict], usage: dict) -> dict:
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict], usage: dict | None = None) -> dict:
        return {**self.head, "object": self.chunk_kind, "choices": choices, "usage": usage}

    def choice(self, index: int, text: str, said: Sequence[Said], reason: str) -> dict:
        """One whole answer."""
        raise NotImplementedError

    def opening(self, index: int) -> dict | None:
        """What a stream begins with, if it has something to say before the first text."""
        return None

    def delta(self, index: int, text: str, said: Sequence[Said], reason: str | None = None) -> dict:
        """A piece of an answer, or with `reason` its end."""
        raise NotImplementedError


class ChatReply(Reply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, text: str, said: Sequence[Said], reason: str) -> dict:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(said), "finish_reason": reason}

    def opening(self, index: int) -> dict:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, said: Sequence[Said], reason: str | None = None) -> dict:
        delta = {} if reason else {"content": text}
        logprobs = self._logprobs(said) if said else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, said: Sequence[Said]) -> dict | None:
        if not self.logprobs:
            return None
        entries = []
        for chosen in (s.chosen for s in said):
            top = [self._token(token, logprob) for token, logprob in chosen.top]
            entries.append({**self._token(chosen.token, chosen.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict:
        data = self.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


class CompletionReply(Reply):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool, echoes: Sequence[str]):
        """`echoes` is what comes before each answer: the prompt, or nothing."""
        super().__init__(model, token_bytes, logprobs)
        self.echoes = echoes

    def choice(self, index: int, text: str, said: Sequence[Said], reason: str) -> dict:
        return self._choice(index, self.echoes[index] + text, said, reason)

    def opening(self, index: int) -> dict | None:
        return self._choice(index, self.echoes[index], (), None) if self.echoes[index] else None

    def delta(self, index: int, text: str, said: Sequence[Said], reason: str | None = None) -> dict:
        return self._choice(index, text, said, reason)

    def _choice(self, index: int, text: str, said: Sequence[Said], reason: str | None) -> dict:
        logprobs = None
        if self.logprobs and (said or reason is not None):
            before = len(self.echoes[index])
            logprobs = {
                "tokens": [self.token_bytes.text(s.chosen.token) for s in said],
                "token_logprobs": [finite(s.chosen.logprob) for s in said],
                "top_logprobs": [self._top((s.chosen.token, s.chosen.logprob), s.chosen.top) for s in said],
                "text_offset": [before + s.offset for s in said],
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _top(self, chosen: tuple[int, float], top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """The likeliest tokens by their text, and the chosen one among them; of equal texts the likeliest counts."""
        found: dict[str, float] = {}
        for token, logprob in (*top, chosen):
            found.setdefault(self.token_bytes.text(token), finite(logprob))
        return found


def finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999 for what is as good as impossible."""
    return max(logprob, -9999.0)
