"""Ollama's own client for Python works with castiron's address."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import ollama
import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

import castiron
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.server.app import open_app
from tests.support import encoders, served, talking

talking_path = talking.talking_path
HI = [{"role": "user", "content": "hi"}]
OPTIONS = {"temperature": 0, "num_predict": 200}


class Colour(BaseModel, extra="forbid"):
    """A record without free text, because a random model would not end it."""

    dark: bool


class ToApp(httpx.BaseTransport):
    """A transport that passes requests to the application in this process."""

    def __init__(self, app: TestClient):
        self.app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.app.request(request.method, str(request.url), content=request.read(), headers=dict(request.headers))
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)


@pytest.fixture(scope="module")
def app(talking_path):
    with TestClient(open_app(talking_path, threads=1, api_keys=["key"])) as client:
        yield client


@pytest.fixture(scope="module")
def client(app):
    return ollama.Client("http://testserver", transport=ToApp(app), headers={"Authorization": "Bearer key"})


def test_it_chats_and_streams(client):
    answer = client.chat("checkpoint", HI, options=OPTIONS)
    assert answer.message.content and answer.done and answer.eval_count and answer.total_duration > answer.eval_duration > 0
    parts = list(client.chat("checkpoint:latest", HI, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content and len(parts) > 2
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_it_reads_reasoning_and_calls_functions(app, client, monkeypatch):
    def n(a: list[int]) -> str:
        """Add numbers.

        Args:
            a: the numbers
        """
        return str(sum(a))

    talking.answer_with(monkeypatch, app, talking.ANSWER)
    message = client.chat("checkpoint", HI, tools=[n], think=True).message
    assert (message.thinking, message.content) == ("Hm.", "Well.")
    first, second = message.tool_calls
    assert first.function.name == "n" and n(**first.function.arguments) == "1" and second.function.arguments == {}
    talking.answer_with(monkeypatch, app, "One.")
    results = [{"role": "tool", "tool_name": "n", "content": each} for each in ("1", "0")]
    assert client.chat("checkpoint", [*HI, message, *results], tools=[n]).message.content == "One."


def test_it_generates_in_a_format_and_continues(client):
    answer = client.generate("checkpoint", "hi", format=Colour.model_json_schema(), options=OPTIONS)
    Colour.model_validate_json(answer.response)
    again = client.generate("checkpoint", "more", context=answer.context, options=OPTIONS | {"num_predict": 4})
    assert again.prompt_eval_count > len(answer.context) and again.done_reason == "length"
    parts = [part.response for part in client.generate("checkpoint", "hi", stream=True, raw=True, options=OPTIONS)]
    assert "".join(parts) == client.generate("checkpoint", "hi", raw=True, options=OPTIONS).response


def test_it_describes_models(client):
    (model,) = client.list().models
    assert model.model == "checkpoint:latest" and model.size > 0 and model.modified_at and model.details.family == "llama"
    shown = client.show(model.model)
    assert shown.modelinfo["llama.context_length"] == talking.CONTEXT and "tools" in shown.capabilities
    (running,) = client.ps().models
    assert running.name == model.model and running.context_length == talking.CONTEXT and running.expires_at > model.modified_at


@pytest.mark.parametrize(("call", "status", "message"), [
    (lambda client: client.chat("none", HI), 404, "'none' does not exist"),
    (lambda client: list(client.chat("none", HI, stream=True)), 404, "'none' does not exist"),
    (lambda client: client.chat("checkpoint", [{**HI[0], "images": [b"x"]}]), 400, "images is not supported"),
    (lambda client: client.pull("checkpoint"), 400, "cannot add, change or delete"),
    (lambda client: list(client.push("checkpoint", stream=True)), 400, "cannot add, change or delete"),
    (lambda client: client.create("new", from_="checkpoint"), 400, "castiron serve"),
    (lambda client: client.copy("checkpoint", "new"), 400, "cannot add, change or delete"),
    (lambda client: client.delete("checkpoint"), 400, "cannot add, change or delete"),
])  # fmt: skip
def test_errors_have_their_message(client, call, status, message):
    with pytest.raises(ollama.ResponseError, match=message) as error:
        call(client)
    assert error.value.status_code == status


def test_it_embeds(tmp_path):
    made = encoders.write("qwen3", tmp_path / "qwen", pooling="lasttoken", num_hidden_layers=1)
    bundle = compile_model(made, tmp_path / "bundle", Options(embed=(20,))).bundle
    with castiron.load(bundle, threads=1) as model:
        vectors = model.embed(["Hello", "Ice"])
    with TestClient(open_app(bundle, threads=1)) as app:
        client = ollama.Client("http://testserver", transport=ToApp(app))
        found = client.embed("qwen", ["Hello", "Ice"])
    np.testing.assert_allclose(found.embeddings, vectors, atol=1e-7)


def test_a_server_streams_as_it_generates(talking_path, tmp_path):
    """The asynchronous client reads from a server in another process."""

    async def read(url: str) -> list[str]:
        asking = ollama.AsyncClient(url).chat("checkpoint", HI, stream=True, options=OPTIONS)
        return [part.message.content async for part in await asking]

    with served.served(talking_path, tmp_path / "log") as running:
        parts = asyncio.run(read(running.url))
        assert "".join(parts) == ollama.Client(running.url).chat("checkpoint", HI, options=OPTIONS).message.content


def test_values_at_the_ends_of_ranges_have_their_meaning(client):
    ask = lambda **options: client.chat("checkpoint", HI, options=OPTIONS | {"num_predict": 20} | options).message.content
    greedy = ask()
    assert ask(temperature=1, top_p=0) == ask(temperature=-1) == ask(stop=[""]) == ask(top_p=1.5, top_k=-1) == greedy
    assert ask(repeat_penalty=50.0, repeat_last_n=0) == greedy != ask(repeat_penalty=50.0, repeat_last_n=-1)
    long = [{"role": role, "content": "word " * 6} for _ in range(9) for role in ("user", "assistant")]
    assert client.chat("checkpoint", [*long, *HI], options={"num_predict": 4}).prompt_eval_count <= talking.CONTEXT
