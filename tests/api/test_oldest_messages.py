"""Ollama's `truncate` and OpenAI's `truncation: auto` leave out the oldest messages of a long conversation."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.generation import Message, plain_message
from castiron.pipelines.api.oldest_messages import MARKS, without_oldest
from castiron.pipelines.server.app import open_app
from tests.support import talking

talking_path = talking.talking_path
CONTEXT = 80
ROLES = st.sampled_from(["user", "user", "assistant", "assistant", "tool", "system"])
CONVERSATIONS = st.lists(st.tuples(ROLES, st.integers(0, 40)), min_size=1, max_size=30)


def rendered(messages: list[Message]) -> list[int]:
    """A template with a token for each character, and a mark for each message."""
    return [ord(letter) for message in messages for letter in f"<{message['role'][0]}>{message['content']}"]


def with_letters(conversation: list[tuple[str, int]]) -> list[Message]:
    return [plain_message(role, chr(ord("A") + i) * size) for i, (role, size) in enumerate(conversation)]


def newest(messages: list[Message], limit: int | None = 1, rejects=lambda messages: False, context: int = CONTEXT) -> list[int]:
    async def encode(some) -> list[int]:
        if some != messages and rejects(some):
            raise ApiError(400, "this template rejects it")
        return rendered(some)

    return asyncio.run(without_oldest(messages, encode, context, limit))


def ollama(messages: list[Message], num_ctx: int) -> int:
    """Return the index of the first message that Ollama keeps, as its chatPrompt finds it."""
    for start in range(len(messages)):
        system = [message for message in messages[:start] if message["role"] == "system"]
        if len(rendered([*system, *messages[start:]])) <= num_ctx or start == len(messages) - 1:
            return start
    raise AssertionError


@given(CONVERSATIONS, st.sampled_from([None, 1, 10, 1000]))
def test_what_is_left_fits_and_ollama_keeps_it_too(conversation, limit):
    messages = with_letters(conversation)
    found, needed = newest(messages, limit), min(limit or CONTEXT, CONTEXT // 4)
    first = ollama(messages, CONTEXT + 1 - needed)
    shortened = lambda start: [each for i, each in enumerate(messages) if i >= start or each["role"] == "system"]
    starts = [start for start in range(len(messages)) if rendered(shortened(start)) == found]
    assert starts and starts[-1] >= first
    if first == 0:
        assert found == rendered(messages) or len(messages) == 1
    elif len(rendered(shortened(len(messages) - 1))) <= CONTEXT + 1 - needed:
        assert len(found) <= CONTEXT + 1 - needed
        head = next(message for message in shortened(starts[-1]) if message["role"] != "system" or message is messages[-1])
        assert head["role"] != "tool" or head is messages[-1]
        users = [start for start in range(first, starts[-1]) if messages[start]["role"] == "user"]
        # Ollama keeps more: at most the rest of a block.
        dropped = sum(conversation[i][1] + MARKS for i in range(first, users[-1])) if users and head["role"] == "user" else 0
        assert dropped <= CONTEXT // 2


@settings(max_examples=5)
@given(st.lists(st.integers(1, 15), min_size=30, max_size=40))
def test_the_start_moves_rarely_while_a_conversation_grows(sizes):
    conversation, starts, context = [("system", 5)], [], 6 * CONTEXT
    for size in sizes:
        conversation.append(("user", size))
        messages = with_letters(conversation)
        found = newest(messages, context=context)
        starts.append(next(i for i in range(1, len(messages)) if found == rendered([messages[0], *messages[i:]])))
        conversation.append(("assistant", size))
    moves = sum(before != after for before, after in zip(starts, starts[1:]))
    assert moves <= 2 * sum(2 * size + 2 * MARKS for size in sizes) // context + 1 < len(sizes) / 2 and starts == sorted(starts)


def test_a_result_never_comes_before_its_call():
    messages = with_letters([("user", 30), ("assistant", 40), ("tool", 30), ("assistant", 10)])
    assert newest(messages) == rendered(messages[3:])
    messages = with_letters([("user", 30), ("assistant", 20), ("tool", 30)])
    assert newest(messages) == rendered(messages[1:])


def test_a_start_that_the_template_rejects_is_passed_over():
    messages = with_letters([("user", 30), ("assistant", 30), ("user", 10), ("assistant", 10), ("user", 10)])
    assert newest(messages) == rendered(messages[1:]) or newest(messages) == rendered(messages[2:])
    only_last = newest(messages, rejects=lambda some: len(some) > 1)
    assert only_last == rendered(messages[-1:])
    with pytest.raises(ApiError, match="rejects"):
        newest(messages, rejects=lambda some: True)


HISTORY = [{"role": "user" if index % 2 == 0 else "assistant", "content": "abcde" * 5} for index in range(20)]


@pytest.fixture(scope="module")
def client(talking_path):
    with TestClient(open_app(talking_path, threads=1)) as found:
        yield found


def test_ollama_truncates_unless_the_request_forbids_it(client):
    messages, options = [{"role": "system", "content": "be"}, *HISTORY, {"role": "user", "content": "hi"}], {"num_predict": 2}
    body = {"messages": messages, "stream": False, "options": options}
    answer = client.post("/api/chat", json=body)
    assert answer.status_code == 200 and 150 < answer.json()["prompt_eval_count"] <= talking.CONTEXT
    refused = client.post("/api/chat", json={**body, "truncate": False})
    assert refused.status_code == 400 and "maximum context length" in refused.json()["error"]
    last = {"role": "user", "content": "x" * 300}
    refused = client.post("/api/chat", json={**body, "messages": [*messages, last]})
    assert refused.status_code == 400 and "maximum context length" in refused.json()["error"]


def test_responses_truncate_on_request(client):
    body = {"input": HISTORY[:-1], "instructions": "be", "max_output_tokens": 2}
    answer = client.post("/v1/responses", json={**body, "truncation": "auto"}).json()
    assert answer["truncation"] == "auto" and 150 < answer["usage"]["input_tokens"] <= talking.CONTEXT
    counted = client.post(
        "/v1/responses/input_tokens", json={"truncation": "auto", "input": HISTORY[:-1], "instructions": "be"}
    )
    assert counted.json()["input_tokens"] <= talking.CONTEXT
    for more in ({}, {"truncation": "disabled"}, {"truncation": None}):
        refused = client.post("/v1/responses", json=body | more)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    # A later response continues the complete conversation, which is shortened again.
    more = {"input": "hi", "previous_response_id": answer["id"], "max_output_tokens": 2}
    assert client.post("/v1/responses", json={**more, "truncation": "auto"}).status_code == 200
    assert client.post("/v1/responses", json=more).status_code == 400
