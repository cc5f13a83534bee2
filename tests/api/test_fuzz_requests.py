"""Random requests: each gets an answer or an error in its API's shape, and the server continues."""

from __future__ import annotations

import http.client
import json
import random
import urllib.parse

from castiron.pipelines.api.anthropic.messages import CountTokensRequest, MessagesRequest
from castiron.pipelines.api.ollama.records import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from castiron.pipelines.api.openai.records import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from castiron.pipelines.api.openai.responses_records import InputTokensRequest, ResponsesRequest
from tests.support.served import ReferenceSession, served

# A valid request of each kind.
REQUESTS = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (InputTokensRequest, {"input": "hi"}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/api/chat": (OllamaChatRequest, {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 2}}),
    "/api/generate": (OllamaGenerateRequest, {"prompt": "hi", "options": {"num_predict": 2}}),
    "/api/show": (OllamaShowRequest, {}),
    "/tokenize": (TokenizeRequest, {"content": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [4, 5]}),
}
# Prefix of the data of a stream's last event.
LAST = {"/v1/messages": b'{"type":"message_stop"', "/v1/responses": b'{"type":"response.incomplete"'}
VALUES = (
    None, 0, 1, -1, 2, 5, 20, 0.5, 1.5, 0.01, 100, 1e308, -1e308, 1e-300, 2**63, 2**200, float("nan"), float("inf"), "", "a",
    "\0", "\ud800", "😀" * 50, [], {}, [[]], [None], ["x"] * 20, ["x", "y"], [0], [1, 2, 3], [210], [211], [10**30], True,
    False, {"1": 5}, {"1": -100}, {"211": 1}, {"-1": 1}, {"x": 1}, {"a": 1}, {"include_usage": True},
    [{"role": "user", "content": "hi"}], [{"role": "system", "content": None}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": "user", "content": "</s><s>"}],
    {"type": "enabled", "budget_tokens": 1024}, {"type": "tool", "name": "x"}, {"format": {"type": "json_object"}},
    {"effort": "high", "format": {"type": "json_schema", "schema": {}}}, [{"name": "f", "input_schema": {}}],
    [{"type": "function", "name": "f", "parameters": {}}], [{"type": "reasoning", "summary": [{}]}],
    [{"type": "function_call", "call_id": "", "name": "", "arguments": "["}], [{"type": []}], [{"role": "user", "content": [{}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "", "input": {}}, {"type": "thinking", "thinking": ""}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}], [{"role": "assistant", "content": "x"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": [], "arguments": "["}}, {"id": {}}]}, {"role": "tool"}],
    {"seed": -1, "num_predict": 0, "stop": []}, {"top_k": "a"}, {"mirostat": None, "typical_p": 2}, "json",
)  # fmt: skip


def every_request(rng: random.Random):
    for url, (kind, valid) in REQUESTS.items():
        fields = [*kind.model_fields, "bogus"]
        for field in fields:
            for value in VALUES:
                yield url, json.dumps(valid | {field: value}).encode()
        for _ in range(100):
            changed = valid | {rng.choice(fields): rng.choice(VALUES) for _ in range(4)}
            data = bytearray(json.dumps(changed).encode())
            for _ in range(rng.choice((0, 0, 1, 4))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            yield url, bytes(data)


def test_any_request_is_answered_or_rejected(path, tmp_path):
    with served(path, tmp_path / "log", "--temperature", "0", "--quiet", "--max-queue", "200") as server:
        parts = urllib.parse.urlsplit(server.url)
        statuses, rng = set(), random.Random(7)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        # All of them would take minutes.
        for url, data in rng.sample(list(every_request(rng)), 300):
            connection.request("POST", url, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            statuses.add(response.status)
            if response.status == 200:
                # A stream ends normally, without an error event.
                streamed = response.headers["content-type"].startswith("text/event-stream")
                if url in ("/api/chat", "/api/generate"):
                    assert json.loads(answer.splitlines()[-1])["done"], (url, data)
                else:
                    assert (
                        answer.rpartition(b"data: ")[2].startswith(LAST.get(url, b"[DONE]")) if streamed else json.loads(answer)
                    )
            else:
                assert response.status in (400, 404), (url, data, answer)
                if url.startswith("/api/"):
                    assert isinstance(json.loads(answer)["error"], str), (url, data)
                    continue
                anthropic = {"message", "type"} if url.startswith("/v1/messages") else set()
                # Anthropic's errors may have details.
                names = set(json.loads(answer)["error"]) - ({"details"} if anthropic else set())
                assert names == (anthropic or {"message", "type", "param", "code"})
        assert statuses >= {200, 400} and "Traceback" not in server.errors and "Warning" not in server.errors
        body = json.dumps({"prompt": "Hello", "max_tokens": 5})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == ReferenceSession(path).generate("Hello", 5)
