"""The OpenAPI document lists every route, and schemathesis' requests are answered by it."""

from __future__ import annotations

import re

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.testclient import TestClient

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.server import app, exchange
from castiron.pipelines.server.metrics import Metrics
from castiron.pipelines.server.routes import OPENAPI as PATH
from castiron.pipelines.server.served_models import ModelPool
from castiron.vmfb.bundle.bundle import open_bundle
from tests.support.served import served

KEY = {"Authorization": "Bearer key"}
CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance, checks.response_headers_conformance,
    checks.response_schema_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def front(path):
    return app.open_app(path, threads=1, api_keys=["key"])


def described(front) -> dict[tuple[str, str], dict]:
    """Return the described operations by method and path."""
    paths = TestClient(front, headers=KEY).get(PATH).json()["paths"]
    return {(method.upper(), path): each for path, methods in paths.items() for method, each in methods.items()}


def test_every_route_is_described_and_nothing_else(front):
    found = described(front)
    for route in front.app.routes:
        for method in route.methods:
            assert (method, re.sub(r":\w+}", "}", route.path)) in found


def test_bodies_and_keys_are_described_as_they_are_read_and_asked_for(front, monkeypatch):
    kinds = []

    def read(kind, _: bytes, strict: bool):
        kinds.append(kind)
        raise ApiError(400, "read")

    monkeypatch.setattr(exchange, "parse_body", read)
    client = TestClient(front)
    for (method, path), operation in described(front).items():
        url = path.format(name="x", file="chat.js")
        open_to_all = "security" not in operation
        assert (client.request(method, url).status_code == 401) != open_to_all, path
        assert ("401" in operation["responses"]) != open_to_all, path
        if method == "POST":
            assert client.request(method, url, headers=KEY, json={}).status_code == 400
            (schema,) = (each["schema"]["$ref"] for each in operation["requestBody"]["content"].values())
            assert schema == f"#/components/schemas/{kinds.pop().__name__}", path


HI = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(("kind", "field", "good", "bad"), [
    ("ResponsesRequest", "input", [HI, {**CALL, "encrypted_content": None}, {"type": "item_reference", "id": "1"}], {**CALL, "name": 5}),
    ("ResponsesRequest", "input", [{**HI, "content": [{"type": "input_text", "text": "hi", "note": 1}]}], {**HI, "content": [{}]}),
    ("ResponsesRequest", "tools", [{"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "f"}]}], {"type": "function"}),
    ("MessagesRequest", "messages", [HI, {"role": "assistant", "content": [USE]}], {"role": "assistant", "content": [{**USE, "input": 5}]}),
    ("MessagesRequest", "tools", [{"name": "f", "input_schema": {}}], {"name": "f"}),
])  # fmt: skip
def test_items_and_blocks_are_described(front, kind, field, good, bad):
    schemas = TestClient(front, headers=KEY).get(PATH).json()["components"]["schemas"]
    schema_of_kind = {"$ref": f"#/components/schemas/{kind}", "components": {"schemas": schemas}}
    required = {"messages": [HI], "max_tokens": 1} if kind == "MessagesRequest" else {}
    jsonschema.validate({**required, field: good}, schema_of_kind)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**required, field: [*good, bad]}, schema_of_kind)


def test_a_server_of_multiple_models_has_the_same_description(path, front):
    pool = ModelPool([open_bundle(path)], app.open_api, keep=1)
    assert described(front) == described(app.App(pool, Metrics()))


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    log = tmp_path_factory.mktemp("openapi") / "log"
    with served(path, log, "--temperature", "0", "--max-queue", "200", "--quiet", CASTIRON_API_KEY="key") as running:
        yield running


def test_answers_are_as_described(server):
    """Sends valid and invalid requests, for this model, another model or without a key."""
    with requests.Session() as session:
        # No proxy for requests to this machine.
        session.trust_env = False
        schema = schemathesis.openapi.from_url(server.url + PATH, headers=KEY, timeout=60)
        schema.validate()
        statuses = {}
        for result in schema.get_all_operations():
            operation = result.ok()
            found = statuses[operation.label] = set()

            def check(case, headers=KEY, found=found) -> None:
                # The default timeout is 10 s.
                response = case.call(base_url=server.url, session=session, headers=headers, timeout=300)
                found.add(response.status_code)
                # Schemathesis does not accept 413 as the rejection of an invalid body.
                rejected = [] if response.status_code == 413 else [checks.negative_data_rejection]
                case.validate_response(response, checks=CHECKS + rejected)

            @settings(max_examples=8)
            @given(operation.as_strategy(), st.booleans())
            def valid(case, here) -> None:
                if here and isinstance(case.body, dict):
                    case.body.pop("model", None)
                check(case)

            @settings(max_examples=12)
            @given(operation.as_strategy(GenerationMode.NEGATIVE))
            def invalid(case) -> None:
                check(case)

            @settings(max_examples=1)
            @given(operation.as_strategy())
            def nameless(case) -> None:
                check(case, {})

            valid()
            nameless()
            if operation.body:
                invalid()
        assert all(found & {200, 400, 404} for found in statuses.values())
        assert sum(200 in found for found in statuses.values()) > 10 and sum(401 in found for found in statuses.values()) > 10
        assert "Traceback" not in server.errors and "Warning" not in server.errors
