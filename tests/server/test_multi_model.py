"""A server of several models, which are opened when named and closed when unused."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import threading
import weakref
from pathlib import Path

import httpx2
import openai
import pytest

from castiron.pipelines.api.model_api import ModelApi, names_of
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import App, open_api
from castiron.pipelines.server.metrics import Metrics
from castiron.pipelines.server.served_models import ModelPool
from castiron.vmfb.bundle.bundle import open_bundle
from tests.support.served import MESSAGES, RENDERED, SLOTS, ReferenceSession, bundle, served

pytestmark = pytest.mark.anyio
NAMES = ["tiny", "other"]
COUNTED = ("castiron_slots", "vllm:generation_tokens_total")


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[Path]:
    """Two bundles of the same name, which are served under their directories' names."""
    base = tmp_path_factory.getbasetemp()
    first, second = bundle(base), base / "several" / "other"
    shutil.copytree(first, second)
    return [first, second]


@pytest.fixture(scope="module")
def reference(paths):
    return ReferenceSession(paths[0])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Doors:
    """A function that opens models, those in `shut` only after their event is set."""

    def __init__(self, *shut: str):
        self.metrics = Metrics()
        self.opened: list[str] = []
        self.programs: list[weakref.ref] = []
        self.shut = {name: threading.Event() for name in shut}

    def __call__(self, bundle, names) -> ModelApi:
        if (name := names[0]) in self.shut:
            assert self.shut[name].wait(60)
        self.opened.append(name)
        api = open_api(bundle, self.metrics, threads=1, names=names)
        self.programs.append(weakref.ref(api.engine.engine.scheduler.batch.program))
        return api


class PoolClient(httpx2.AsyncClient):
    """A client of several models in this process."""

    def __init__(self, paths, doors, **options):
        metrics = doors.metrics if isinstance(doors, Doors) else Metrics()
        bundles = [open_bundle(path) for path in paths]
        self.pool = ModelPool(bundles, doors, forget=metrics.forget, **{"keep": 60.0, **options})
        self.app = App(self.pool, metrics)
        super().__init__(transport=httpx2.ASGITransport(self.app), base_url="http://pool")

    async def __aexit__(self, *error) -> None:
        await super().__aexit__(*error)
        await asyncio.to_thread(self.pool.stop)

    async def chat(self, model: str | None, count: int = 12) -> httpx2.Response:
        body = {"model": model, "messages": MESSAGES, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return await self.post("/v1/chat/completions", json=body)

    async def generate(self, model: str | None, count: int = 12) -> str:
        answer = await self.chat(model, count)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    async def loaded(self) -> list[bool]:
        return [model["loaded"] for model in (await self.get("/v1/models")).json()["data"]]

    async def until(self, *loaded: bool) -> None:
        async with asyncio.timeout(60):
            while await self.loaded() != list(loaded):
                await asyncio.sleep(0.01)


async def test_a_model_is_opened_when_it_is_named_and_found_by_its_name(paths, reference):
    doors = Doors()
    async with PoolClient(paths, doors) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == NAMES and not doors.opened
        assert (await client.get("/v1/models/other")).json()["context_length"] == reference.bundle.manifest.context
        for wrong in ((await client.chat("gpt-9")), await client.get("/v1/models/gpt-9")):
            error = wrong.json()["error"]
            assert wrong.status_code == 404 and error["code"] == "model_not_found" and error["param"] == "model"
            assert "'gpt-9' does not exist; this server has 'tiny', 'other'" in error["message"]
        broken = await client.post("/v1/chat/completions", content=b"{")
        assert broken.status_code == 400 and "not valid JSON" in broken.json()["error"]["message"]
        unknown = await client.post("/v1/completion", json={})
        assert unknown.status_code == 404 and "no such path" in unknown.json()["error"]["message"]
        assert not doors.opened
        assert await client.generate("other") == reference.generate(RENDERED, 12) and doors.opened == ["other"]
        assert await client.generate(None) == reference.generate(RENDERED, 12) and doors.opened == ["other", "tiny"]
        await asyncio.gather(*(client.generate(name) for name in NAMES * 3))
        assert len(doors.opened) == 2 and await client.loaded() == [True, True]
        metrics = (await client.get("/metrics")).text
        slots, tokens = (re.findall(rf"^{name}{{model_name=\"(\w+)\"}} (\d+)\.0$", metrics, re.M) for name in COUNTED)
        assert slots == [("other", str(SLOTS)), ("tiny", str(SLOTS))] and sum(int(count) for _, count in tokens) == 96


async def test_a_model_is_found_by_the_name_of_its_bundle_and_of_its_directory(paths, reference, tmp_path):
    directory = tmp_path / "called-otherwise"
    shutil.copytree(paths[0], directory)

    async with PoolClient([directory], Doors()) as client:
        for name in (reference.bundle.manifest.name, "called-otherwise"):
            assert await client.generate(name) == reference.generate(RENDERED, 12)


def test_a_model_has_the_name_that_was_typed(paths, monkeypatch):
    bundle, own = open_bundle(paths[1]), open_bundle(paths[1]).manifest.name
    monkeypatch.chdir(paths[1].parent)
    Path("linked.gguf").symlink_to(paths[1])
    for typed, name in (
        ("org/Model:Q4_K_M.gguf", "org/Model:Q4_K_M"),
        (str(paths[1]), "other"),
        ("other/", "other"),
        ("linked.gguf", "linked"),
        (None, own),
    ):
        assert names_of(bundle, typed)[0] == name and {own, "other"} <= {*names_of(bundle, typed)}
    ModelPool([bundle] * 2, Doors(), keep=1, arguments=["SmolLM2-135M-Instruct", "other"]).find("SmolLM2-135M-Instruct")


async def test_only_requests_for_a_loading_model_wait(paths, reference):
    doors = Doors("other")
    async with PoolClient(paths, doors) as client:
        waiting = [asyncio.create_task(client.generate("other")) for _ in range(2)]
        assert await client.generate("tiny") == reference.generate(RENDERED, 12)
        assert not any(task.done() for task in waiting) and doors.opened == ["tiny"]
        assert (await client.get("/health")).status_code == 200
        doors.shut["other"].set()
        assert await asyncio.gather(*waiting) == [reference.generate(RENDERED, 12)] * 2
        assert doors.opened == NAMES


async def test_a_model_that_nobody_uses_is_closed_and_opened_again(paths, reference):
    doors = Doors()
    async with PoolClient(paths, doors, keep=0.05) as client:
        await client.generate("tiny")
        await client.until(False, False)
        async with asyncio.timeout(60):
            while doors.programs[0]():
                await asyncio.sleep(0.01)
        assert await client.generate("tiny") == reference.generate(RENDERED, 12) and doors.opened == ["tiny", "tiny"]
        assert 'vllm:generation_tokens_total{model_name="tiny"} 24.0\n' in (await client.get("/metrics")).text


async def test_an_unused_model_is_closed_to_free_memory_for_the_next(paths, monkeypatch):
    monkeypatch.setattr("castiron.pipelines.server.served_models.total_bytes", lambda: 1)
    doors = Doors("other")
    async with PoolClient(paths, doors) as client:
        await client.generate("tiny")
        doors.shut["other"].set()
        await client.generate("other")
        assert await client.loaded() == [False, True]
        async with client.pool.use("tiny"):
            await client.generate("other")
            assert await client.loaded() == [True, True], "a model in use stays open even above the memory limit"


async def test_a_model_that_cannot_be_opened_is_an_error_of_its_requests_only(paths, reference, tmp_path, capsys):
    doors = Doors()

    def failing(bundle, names) -> ModelApi:
        if names[0] == "other":
            raise PipelineError("it has no weights")
        return doors(bundle, names)

    async with PoolClient(paths, failing) as client:
        answer = await client.chat("other")
        assert answer.status_code == 500 and "'other': it has no weights" in answer.json()["error"]["message"]
        assert await client.generate("tiny") == reference.generate(RENDERED, 12) and await client.loaded() == [True, False]
    same = tmp_path / "tiny"
    shutil.copytree(paths[0], same)
    with pytest.raises(PipelineError, match="two models have the same name: .*; rename one"):
        ModelPool([open_bundle(paths[0]), open_bundle(same)], Doors(), keep=1.0)


def test_castiron_serve_takes_multiple_bundles(paths, reference, tmp_path):
    with served(
        paths[0], tmp_path / "log", str(paths[1]), "--keep-alive", "60", "--prefix-cache", str(tmp_path / "states")
    ) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            assert [model.id for model in client.models.list().data] == NAMES
            options = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "extra_body": {"ignore_eos": True}}
            for name in NAMES:
                stream = client.chat.completions.create(model=name, stream=True, **options)
                generated = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                assert generated == reference.generate(RENDERED, 9) and f"{name} opened in" in server.errors
            with pytest.raises(openai.NotFoundError, match="'other2' does not exist"):
                client.chat.completions.create(model="other2", **options)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert "Traceback" not in server.errors


async def test_the_other_apis_name_their_model_too_and_have_errors_of_their_own_shape(paths, reference):
    async with PoolClient(paths, Doors(), keep=0) as client:
        greedy = {"temperature": 0, "ignore_eos": True}
        post = lambda path, **body: client.post(path, json=greedy | body)
        generated = reference.generate(RENDERED, 9)
        message = await post("/v1/messages", model="other", messages=MESSAGES, max_tokens=9)
        assert message.json()["content"][0]["text"] == generated and message.json()["model"] == "other"
        response = await post("/v1/responses", model="other", input=MESSAGES, max_output_tokens=9)
        assert response.json()["output"][0]["content"][0]["text"] == generated and response.json()["model"] == "other"
        count = await client.post("/v1/messages/count_tokens", json={"messages": MESSAGES})
        assert count.json() == {"input_tokens": len(RENDERED)}
        # A stored response outlives its model.
        await client.until(False, False)
        url = f"/v1/responses/{response.json()['id']}"
        assert (await client.get(url)).json() == response.json()
        more = await post(
            "/v1/responses", model="tiny", input="x", max_output_tokens=1, previous_response_id=response.json()["id"]
        )
        assert more.json()["usage"]["input_tokens"] == len(RENDERED) + len(generated) + len(";u:x;a:")
        assert (await client.delete(url)).json()["deleted"] and (await client.get(url)).status_code == 404
        for path, kind, more in (
            ("/v1/messages", "not_found_error", {"messages": MESSAGES, "max_tokens": 1}),
            ("/v1/responses", "invalid_request_error", {"input": "x"}),
        ):
            wrong = await post(path, model="third", **more)
            assert wrong.status_code == 404 and wrong.json()["error"]["type"] == kind
            assert ("param" in wrong.json()["error"]) == (path == "/v1/responses")
        broken = await client.post("/v1/messages", content=b"{")
        assert broken.status_code == 400 and broken.json()["type"] == "error"
        data = json.dumps({"messages": MESSAGES}).encode()
        client.app.bodies.per_client = len(data)
        again = await client.post("/v1/messages/count_tokens", content=data)
        assert again.json() == {"input_tokens": len(RENDERED)}, "the memory of a body is counted once"
