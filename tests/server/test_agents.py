"""First requests of coding agents: accepted, streamed, continued, and cached for the next start.

`agent_requests.json` has the first request that each agent sent, with fewer tools. In place of a
longer text it has `<N>`, its number of characters; the tests put generated text there, six times
shorter. TASK is the user's task.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.server import exchange
from castiron.pipelines.server.app import open_app
from castiron.pipelines.server.exchange import StreamResponse
from castiron.pipelines.text.tokenizer import Tokenizer
from tests.support import served

REQUESTS = json.loads((Path(__file__).parents[1] / "support/agent_requests.json").read_text())
CONTEXT = 16384
LIMITS = {"/v1/responses": "max_output_tokens"}
CALL = {"name": "read", "arguments": '{"path": "a"}'}
# A call and its result, in the form that each API's agents send back.
CONTINUED: dict[str, tuple[str, list[dict]]] = {
    "/v1/responses": ("input", [
        {"type": "function_call", "id": "fc_0", "status": "completed", "call_id": "1", **CALL},
        {"type": "function_call_output", "id": "fco_0", "call_id": "1", "output": "alpha"}]),
    "/v1/messages": ("messages", [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {"path": "a"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "alpha"}]}]),
    "/v1/chat/completions": ("messages", [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "1", "content": "alpha"}]),
}  # fmt: skip


def expanded(value: Any, task: str) -> Any:
    """Replace `<N>` by generated text and TASK by the task, in all strings of a JSON value."""
    if isinstance(value, dict):
        return {key: expanded(each, task) for key, each in value.items()}
    if isinstance(value, list):
        return [expanded(each, task) for each in value]
    if isinstance(value, str) and (found := re.fullmatch(r"<(\d+)>", value)):
        return ("alpha bravo charlie delta echo foxtrot " * int(found[1]))[: int(found[1]) // 6]
    return task if value == "TASK" else value


def ask(server: served.Served, agent: str, task: str, *, continued: bool = False) -> tuple[int, int]:
    """Stream the answer to an agent's first or second request; return prompt and cached tokens."""
    path, body = REQUESTS[agent]["path"], expanded(REQUESTS[agent]["body"], task)
    field, items = CONTINUED[path.partition("?")[0]]
    body |= {
        "model": "checkpoint",
        "temperature": 0,
        LIMITS.get(path, "max_tokens"): 5,
        field: [*body[field], *(items if continued else ())],
    }
    status, headers, text = served.ask(server.url, path, body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    events = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text, re.M)]
    last = events[-1].get("response") or (events[-2] if "message" in path else events[-1])
    usage = last["usage"]
    if "message" in path:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
    return usage.get("input_tokens", usage.get("prompt_tokens")), details["cached_tokens"]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    made = served.checkpoint(folder / "checkpoint", served.TOOLS_TEMPLATE, max_position_embeddings=CONTEXT)
    return compile_model(made, folder / "tiny", Options(context=CONTEXT, batch=(4,), verify_widths=())).bundle


# Rejects a system message after the first message, as Qwen3.5's template does.
STRICT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('late') }}{% endif %}{{ m.role[0] }}:{{ m.content }}" + served.CALLS
    + ";{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)  # fmt: skip


def answered(path: str, number: int) -> tuple[str, dict[str, Any], list[dict]]:
    """Return (field of the messages, other fields, messages of one more turn) for a request of an API."""
    words = f"number {number}"
    if number % 2 and path in CONTINUED:
        field, turn = CONTINUED[path]
    else:
        field = CONTINUED[path][0]
        turn = [{"role": "assistant", "content": f"answer {words}"}, {"role": "user", "content": f"question {words}"}]
    late = {"role": "system", "content": f"reminder {words}"}
    billing = f"x-anthropic-billing-header: cc_version=2.1.331.{number}ab; cc_entrypoint=cli; cch={number}f0c1;"
    first = {
        "/v1/messages": {"system": [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent. " * 9}]}
    }
    return field, first.get(path, {}), [*turn, late] if path == "/v1/messages" or number % 2 else [turn[0], late, *turn[1:]]


@pytest.fixture(scope="module", params=["any place", "first place"])
def app(request, path):
    with TestClient(open_app(path, threads=1)) as client:
        api = client.app.api
        if request.param == "first place":
            old = api.tokenizer
            api.tokenizer = Tokenizer(old.backend, STRICT, old.bos, old.eos, tool_format=old.tool_format)
        yield client


@pytest.mark.parametrize("api", CONTINUED)
def test_a_turn_never_lowers_the_number_of_cached_tokens(app, api):
    """A line for accounting and later system messages leave the prompt before them as it is."""
    tools = expanded(REQUESTS[next(name for name in REQUESTS if REQUESTS[name]["path"].startswith(api))]["body"]["tools"], "")
    messages: list[dict] = [{"role": "user", "content": f"Read the files, {api}."}]
    before = cached = 0
    for number in range(6):
        field, first, turn = answered(api, number)
        body = {"model": "checkpoint", LIMITS.get(api, "max_tokens"): 1, "tools": tools, field: messages, **first}
        answer = app.post(api, json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        found = usage.get("cache_read_input_tokens")
        if found is None:
            found = (usage.get("input_tokens_details") or usage["prompt_tokens_details"])["cached_tokens"]
        prompt = usage.get("prompt_tokens") or usage["input_tokens"] + (found if "messages" in api else 0)
        # The prompt before ends in the start of an answer.
        assert found >= max(cached, before - len(";a:"))
        before, cached, messages = prompt, found, messages + turn
    assert cached > 0.8 * prompt


def stored(cache: Path) -> list[Path]:
    return list(cache.glob("prefixes/*/*.state"))


@pytest.mark.parametrize("agent", REQUESTS)
def test_the_next_start_reads_an_agents_prompt_from_disk(agent, path, tmp_path):
    cache = tmp_path / "cache"
    with served.served(path, tmp_path / "log", CASTIRON_CACHE=str(cache)) as server:
        prompt, cached = ask(server, agent, "Read the file a.")
        assert prompt > 2048 and cached < 8
        # A prompt that comes before the state is stored would be stored too, and read from a chunk's start.
        deadline = time.monotonic() + 60
        while not stored(cache) and time.monotonic() < deadline:
            time.sleep(0.01)
        following, cached = ask(server, agent, "Read the file a.", continued=True)
        assert following > prompt and cached >= prompt - 16
    assert len(stored(cache)) == 1
    with served.served(path, tmp_path / "log", CASTIRON_CACHE=str(cache)) as server:
        prompt, cached = ask(server, agent, "Write the file b.")
        assert prompt > cached > 0.5 * prompt


def test_only_local_servers_store_prompts_and_an_option_switches_it_off(path, tmp_path):
    agent, cache = next(iter(REQUESTS)), tmp_path / "cache"
    for options in (("--prefix-cache", "none"), ("--host", "0.0.0.0")):
        with served.served(path, tmp_path / "log", *options, CASTIRON_CACHE=str(cache)) as server:
            ask(server, agent, "Read the file a.")
        assert not stored(cache), options


def test_a_server_without_a_writable_cache_answers(path, tmp_path):
    cache = tmp_path / "cache"
    cache.write_text("in the way")
    with served.served(path, tmp_path / "log", CASTIRON_CACHE=str(cache)) as server:
        ask(server, next(iter(REQUESTS)), "Read the file a.")
        assert "long prompts are computed again at the next start" in server.errors


def test_a_stream_sends_comments_while_it_has_no_events(monkeypatch):
    """The first event comes only after a comment was sent."""
    monkeypatch.setattr(exchange, "KEEP_ALIVE", 0.001)
    commented, sent = asyncio.Event(), []

    class Job:
        class reply:
            last, is_ndjson = None, False

        async def chunks(self):
            await commented.wait()
            yield {"a": 1}

        def close(self) -> None:
            sent.append("closed")

    async def send(message) -> None:
        sent.append(message)
        if message.get("body", b"").startswith(b":"):
            commented.set()

    async def receive():
        await asyncio.Event().wait()

    async def stream() -> None:
        state = exchange.Exchange("client", b"", 60, None, False)
        await StreamResponse(Job())({"path": "/", "state": {"exchange": state}}, receive, send)

    asyncio.run(stream())
    assert sent[0]["status"] == 200 and sent[1]["body"].startswith(b": ")
    bodies = b"".join(message["body"] for message in sent[1:-1])
    assert bodies.endswith(b'data: {"a":1}\n\n') and sent[-1] == "closed"
