"""The paths on which clients of llama.cpp and vLLM look up a server's properties."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

import castiron
from castiron.pipelines.server.app import open_app
from tests.support import served


@pytest.fixture(scope="module")
def app(path):
    with TestClient(open_app(path, threads=1, api_keys=["key"]), headers={"x-api-key": "key"}) as client:
        yield client


def test_properties_have_the_context_and_the_template(app):
    found = app.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == served.CONTEXT and found["total_slots"] == served.SLOTS
    assert found["default_generation_settings"]["params"]["temperature"] == 1
    assert found["chat_template"] == served.TEMPLATE and found["model_alias"] == app.get("/v1/models").json()["data"][0]["id"]
    assert app.get("/props", params={"model": "none"}).status_code == 404


def test_slots_are_busy_while_requests_run(app, monkeypatch):
    idle = [{"id": i, "n_ctx": served.CONTEXT, "is_processing": False} for i in range(served.SLOTS)]
    assert app.get("/slots").json() == app.get("/slots?fail_on_no_slot=1").json() == idle
    for running in (1, served.SLOTS + 3):
        monkeypatch.setattr(type(app.app.api.engine), "unfinished", property(lambda _: running))
        assert sum(slot["is_processing"] for slot in app.get("/slots").json()) == min(running, served.SLOTS)
    answer = app.get("/slots?fail_on_no_slot=1")
    assert answer.status_code == 503 and "all slots run a request" in answer.json()["error"]["message"]


def test_the_version_and_a_ping(app):
    assert app.get("/version").json() == {"version": castiron.__version__}
    assert app.get("/version", headers={"x-api-key": ""}).status_code == 401
    assert app.get("/ping", headers={"x-api-key": ""}).json() == {"status": "ok"}
