"""Several models behind one address: opened when named, closed when unused, and none waits for another that loads."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import threading
import weakref
from pathlib import Path

import openai
import pytest

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.serve.app import Front, open_app
from castiron.pipelines.serve.clients import Access
from castiron.pipelines.serve.several import Several
from castiron.vmfb.bundle import open_bundle
from tests.pipelines.served import MESSAGES, RENDERED, SLOTS, Alone, bundle, served

NAMES = ["tiny", "other"]
COUNTED = ("castiron_slots", "vllm:generation_tokens_total")


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[Path]:
    """Two bundles of the same name, so that they are called by their directories."""
    base = tmp_path_factory.getbasetemp()
    first, second = bundle(base), base / "several" / "other"
    shutil.copytree(first, second)
    return [first, second]


@pytest.fixture(scope="module")
def alone(paths):
    return Alone(paths[0])


class Doors:
    """Opens models, those of `shut` once they are let in; `opened` are the names of all so far."""

    def __init__(self, *shut: str):
        self.opened: list[str] = []
        self.programs: list[weakref.ref] = []
        self.shut = {name: threading.Event() for name in shut}

    def __call__(self, bundle, name, metrics) -> Front:
        if name in self.shut:
            assert self.shut[name].wait(60)
        self.opened.append(name)
        front = open_app(bundle, threads=1, name=name, metrics=metrics)
        self.programs.append(weakref.ref(front.api.engine.scheduler.batch.program))
        return front


class Answer:
    """What an ASGI application has sent."""

    def __init__(self) -> None:
        self.status, self.data = 0, b""

    async def send(self, message) -> None:
        self.status = message.get("status", self.status)
        self.data += message.get("body", b"")

    @property
    def text(self) -> str:
        return self.data.decode()

    @property
    def json(self) -> dict:
        return json.loads(self.data)


class Asking:
    """A client of several models in this process."""

    def __init__(self, paths, doors: Doors, **options):
        self.several = several = Several([open_bundle(path) for path in paths], doors, **{"keep": 60.0, **options})
        self.front = Front(several, several, several.metrics, several.paths, Access((), ()), True)

    async def __aenter__(self) -> Asking:
        return self

    async def __aexit__(self, *_) -> None:
        await asyncio.to_thread(self.several.stop)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", path, b"")

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        answer, parts = Answer(), [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict:
            return parts.pop() if parts else await asyncio.Event().wait()

        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
        await self.front(scope, receive, answer.send)
        return answer

    async def chat(self, model: str | None, count: int = 12) -> Answer:
        body = {"messages": MESSAGES, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return await self.ask("POST", "/v1/chat/completions", json.dumps(body | ({"model": model} if model else {})).encode())

    async def says(self, model: str | None, count: int = 12) -> str:
        answer = await self.chat(model, count)
        assert answer.status == 200, answer.text
        return answer.json["choices"][0]["message"]["content"]

    async def loaded(self) -> list[bool]:
        return [model["loaded"] for model in (await self.get("/v1/models")).json["data"]]

    async def until(self, *loaded: bool) -> None:
        async with asyncio.timeout(60):
            while await self.loaded() != list(loaded):
                await asyncio.sleep(0.01)


def test_a_model_is_opened_when_it_is_named_and_found_by_its_name(paths, alone):
    async def main() -> None:
        doors = Doors()
        async with Asking(paths, doors) as asking:
            listed = (await asking.get("/v1/models")).json["data"]
            assert [model["id"] for model in listed] == NAMES and not doors.opened
            assert (await asking.get("/v1/models/other")).json["context_length"] == alone.bundle.manifest.context
            for wrong in ((await asking.chat("gpt-9")), await asking.get("/v1/models/gpt-9")):
                error = wrong.json["error"]
                assert wrong.status == 404 and error["code"] == "model_not_found" and error["param"] == "model"
                assert "'gpt-9' does not exist; this server has 'tiny', 'other'" in error["message"]
            broken = await asking.ask("POST", "/v1/chat/completions", b"{")
            assert broken.status == 400 and "not valid JSON" in broken.json["error"]["message"]
            unknown = await asking.ask("POST", "/v1/completion", b"{}")
            assert unknown.status == 404 and "no such path" in unknown.json["error"]["message"]
            assert not doors.opened
            assert await asking.says("other") == alone.says(RENDERED, 12) and doors.opened == ["other"]
            assert await asking.says(None) == alone.says(RENDERED, 12) and doors.opened == ["other", "tiny"]
            await asyncio.gather(*(asking.says(name) for name in NAMES * 3))
            assert len(doors.opened) == 2 and await asking.loaded() == [True, True]
            metrics = (await asking.get("/metrics")).text
            slots, tokens = (re.findall(rf"^{name}{{model_name=\"(\w+)\"}} (\d+)$", metrics, re.M) for name in COUNTED)
            assert slots == [("other", str(SLOTS)), ("tiny", str(SLOTS))] and sum(int(count) for _, count in tokens) == 96

    asyncio.run(main())


def test_who_asks_for_a_model_that_loads_waits_and_nobody_else(paths, alone):
    async def main() -> None:
        doors = Doors("other")
        async with Asking(paths, doors) as asking:
            waiting = [asyncio.create_task(asking.says("other")) for _ in range(2)]
            assert await asking.says("tiny") == alone.says(RENDERED, 12)
            assert not any(task.done() for task in waiting) and doors.opened == ["tiny"]
            assert (await asking.get("/health")).status == 200
            doors.shut["other"].set()
            assert await asyncio.gather(*waiting) == [alone.says(RENDERED, 12)] * 2
            assert doors.opened == NAMES

    asyncio.run(main())


def test_a_model_that_nobody_uses_is_closed_and_opened_again(paths, alone):
    async def main() -> None:
        doors = Doors()
        async with Asking(paths, doors, keep=0.05) as asking:
            await asking.says("tiny")
            await asking.until(False, False)
            async with asyncio.timeout(60):
                while doors.programs[0]():
                    await asyncio.sleep(0.01)
            assert await asking.says("tiny") == alone.says(RENDERED, 12) and doors.opened == ["tiny", "tiny"]
            assert 'vllm:generation_tokens_total{model_name="tiny"} 24\n' in (await asking.get("/metrics")).text

    asyncio.run(main())


def test_a_model_makes_room_for_another_unless_it_is_in_use(paths):
    async def main() -> None:
        doors = Doors("other")
        async with Asking(paths, doors, memory=1) as asking:
            await asking.says("tiny")
            doors.shut["other"].set()
            await asking.says("other")
            assert await asking.loaded() == [False, True]
            tiny = asking.several.models[0]
            await asking.several._enter(tiny)
            await asking.says("other")
            assert await asking.loaded() == [True, True], "a model in use stays, whatever there is of memory"
            asking.several._leave(tiny)

    asyncio.run(main())


def test_one_that_cannot_be_opened_says_why_and_harms_no_other(paths, alone, tmp_path, capsys):
    async def main() -> None:
        doors = Doors()

        def failing(bundle, name, metrics) -> Front:
            if name == "other":
                raise PipelineError("it has no weights")
            return doors(bundle, name, metrics)

        async with Asking(paths, failing) as asking:
            answer = await asking.chat("other")
            assert answer.status == 500 and "cannot be opened: it has no weights" in answer.json["error"]["message"]
            assert await asking.says("tiny") == alone.says(RENDERED, 12) and await asking.loaded() == [True, False]

    asyncio.run(main())
    same = tmp_path / "tiny"
    shutil.copytree(paths[0], same)
    with pytest.raises(PipelineError, match="two models are called tiny"):
        Several([open_bundle(paths[0]), open_bundle(same)], Doors(), keep=1.0)


def test_castiron_serve_takes_several(paths, alone, tmp_path):
    with served(
        paths[0], tmp_path / "log", str(paths[1]), "--keep", "60", "--prefix-cache", str(tmp_path / "states")
    ) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            assert [model.id for model in client.models.list().data] == NAMES
            options = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "extra_body": {"ignore_eos": True}}
            for name in NAMES:
                stream = client.chat.completions.create(model=name, stream=True, **options)
                said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                assert said == alone.says(RENDERED, 9) and f"{name} opened in" in server.errors
            with pytest.raises(openai.NotFoundError, match="'other2' does not exist"):
                client.chat.completions.create(model="other2", **options)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert "Traceback" not in server.errors


def test_the_other_apis_name_their_model_too_and_have_errors_of_their_own_shape(paths, alone):
    async def main() -> None:
        async with Asking(paths, Doors(), keep=0) as asking:
            greedy = {"temperature": 0, "ignore_eos": True}
            post = lambda path, **body: asking.ask("POST", path, json.dumps(greedy | body).encode())
            said = alone.says(RENDERED, 9)
            message = await post("/v1/messages", model="other", messages=MESSAGES, max_tokens=9)
            assert message.json["content"][0]["text"] == said and message.json["model"] == "other"
            response = await post("/v1/responses", model="other", input=MESSAGES, max_output_tokens=9)
            assert response.json["output"][0]["content"][0]["text"] == said and response.json["model"] == "other"
            count = await asking.ask("POST", "/v1/messages/count_tokens", json.dumps({"messages": MESSAGES}).encode())
            assert count.json == {"input_tokens": len(RENDERED)}
            # What is kept outlives the model that said it.
            await asking.until(False, False)
            kept = f"/v1/responses/{response.json['id']}"
            assert (await asking.get(kept)).json == response.json
            more = await post(
                "/v1/responses", model="tiny", input="x", max_output_tokens=1, previous_response_id=response.json["id"]
            )
            assert more.json["usage"]["input_tokens"] == len(RENDERED) + len(said) + len(";u:x;a:")
            assert (await asking.ask("DELETE", kept, b"")).json["deleted"] and (await asking.get(kept)).status == 404
            for path, kind in (("/v1/messages", "not_found_error"), ("/v1/responses", "invalid_request_error")):
                wrong = await post(path, model="third", messages=MESSAGES)
                assert (
                    wrong.status == 404
                    and wrong.json["error"]["type"] == kind
                    and ("param" in wrong.json["error"]) == (path == "/v1/responses")
                )
            broken = await asking.ask("POST", "/v1/messages", b"{")
            assert broken.status == 400 and broken.json["type"] == "error"
            data = json.dumps({"messages": MESSAGES}).encode()
            asking.front.bodies.each = len(data)
            again = await asking.ask("POST", "/v1/messages/count_tokens", data)
            assert again.json == {"input_tokens": len(RENDERED)}, "a body has room once, however often it is read"

    asyncio.run(main())
