"""The scripts of docs/cluster.md on a cluster of Ray's test tool, where actors and replicas die."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import castiron
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import dump
from tests.support import served as serving

# Tests import Ray themselves, because its import takes seconds, even to collect tests.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
ROWS_SCRIPT, SERVE_SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STORE_BYTES = 80 << 20
SLOTS = 4
# With these limits, Ray does not take a slow node, worker or replica for a dead one.
ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0", "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "30", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT),
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """A tiny model with a long context."""
    folder = tmp_path_factory.mktemp("cluster")
    checkpoint = serving.checkpoint(folder / "checkpoint", num_hidden_layers=1, max_position_embeddings=1024)
    return compile_model(checkpoint, folder / "tiny", Options(context=1024, batch=(SLOTS,), verify_widths=())).bundle


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> Path:
    """The folder where actors write notes."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def cluster(notes):
    """A head node with 2 CPUs for an actor and 1 for reading; this process is connected to it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        from tests import cluster_parts

        patch.setenv(cluster_parts.NOTES, str(notes))

        head = {"num_cpus": 3, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        # Tests need neither workers' logs nor scaling, whose processes take seconds to start.
        head |= {"include_log_monitor": False, "no_monitor": True}
        found = Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", found.address)
        ray.init(log_to_driver=False, logging_level="error")
        try:
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """A table with prompts and messages, one row with neither, one long prompt, and other columns."""
    count = 320
    prompts = [None if i % 4 == 3 else "x" * 2000 if i == 6 else f"row {i % 23}: " + "abc" * (i % 7) for i in range(count)]
    messages = [[{"role": "user", "content": f"Hello {i}"}] if i % 4 == 3 and i != 7 else None for i in range(count)]
    table = pa.table({
        "id": pa.array(range(count), pa.uint16()), "prompt": prompts, "messages": messages,
        "when": pa.array([i * 1000 if i % 3 else None for i in range(count)], pa.timestamp("ms")),
    })  # fmt: skip
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(table, path)
    return path


@pytest.fixture(scope="module")
def expected(bundle, rows) -> pa.Table:
    """The rows with the answers of one process without Ray."""
    table = pq.read_table(rows)
    given = [row["messages"] or row["prompt"] for row in table.to_pylist()]
    model = castiron.load(bundle, threads=1)
    found = model.generate([prompt or [] for prompt in given], max_tokens=24, stop_strings=["\n\n"])
    columns = {"generated": [r.text for r in found], "finish_reason": [None if r.error else r.finish_reason for r in found],
               "generated_tokens": [None if r.error else len(r.tokens) for r in found]}  # fmt: skip
    for name, column in columns.items():
        table = table.append_column(name, pa.array(column))
    return table


def test_rows_equal_one_process_although_an_actor_dies(bundle, rows, expected, cluster, notes, tmp_path, monkeypatch):
    from tests import cluster_parts

    monkeypatch.setattr(castiron.ray, "Generate", cluster_parts.DyingGenerate)
    monkeypatch.setattr(sys, "argv", ["rows.py", str(bundle), str(rows), str(tmp_path / "answers")])
    monkeypatch.setattr("ray.init", lambda: None)
    job = threading.Thread(target=lambda: exec(compile(ROWS_SCRIPT, "docs/cluster.md", "exec"), {}))
    job.start()
    died = notes / "died"
    until = time.monotonic() + 300
    while not died.exists():
        assert job.is_alive() and time.monotonic() < until
        time.sleep(0.05)
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    job.join(400)
    assert not job.is_alive()
    found = pq.read_table(tmp_path / "answers").sort_by("id")
    assert found.select(expected.schema.names).to_pylist() == expected.to_pylist()
    assert found.schema.names == [*expected.schema.names, "error"] and found.schema.field("id").type == pa.uint16()
    errors = {row["id"]: row["error"] for row in found.to_pylist() if row["error"]}
    assert errors.keys() == {6, 7} and "tokens" in errors[6] and "invalid prompt" in errors[7]
    # Both nodes ran rows, and each actor had as many threads as CPUs.
    notes = [json.loads(line) for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {note["node"] for note in notes} >= {node.node_id, cluster.head_node.node_id}
    assert {note["threads"] for note in notes} == {2}
    cluster.remove_node(node)


def test_a_cluster_job_equals_one_process(bundle, rows, cluster, notes, tmp_path, monkeypatch):
    """An actor dies, and a job without Ray continues the journal."""
    from castiron.pipelines.cluster import actors
    from tests import cluster_parts

    monkeypatch.setattr(actors, "BatchActor", cluster_parts.DyingEngine)
    monkeypatch.setattr(actors, "MAX_WINDOW", 40)
    table = pq.read_table(rows).drop_columns(["when"]).to_pylist()
    lines = [json.dumps({name: value for name, value in row.items() if value is not None}) for row in table]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    options = ["-n", "8", "--temperature", "0.8", "--seed", "7", "--json"]
    run = lambda out, *more: cli.main(
        ["batch", str(bundle), str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / out), *options, *more]
    )
    assert run("here.jsonl", "--threads", "1") == 0
    assert run("there.jsonl", "--threads", "2", "--ray", cluster.address) == 0
    assert (notes / "engine-died").exists()
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    (tmp_path / "there.jsonl").unlink()
    assert run("there.jsonl", "--threads", "1") == 0
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


@pytest.mark.parametrize("stored", [True, False])
def test_an_actor_hashes_files_as_the_job_demands(stored, bundle, tmp_path, monkeypatch):
    from castiron.pipelines.cluster import actors

    hashed, opened, sha256 = [], open_bundle(bundle), Part.sha256
    monkeypatch.setattr(Part, "sha256", lambda part: hashed.append(part.path.name) or sha256(part))
    monkeypatch.setattr(actors, "bundle_at", lambda _: opened)
    path = tmp_path if stored else bundle
    for trust, times in (("once", 0), ("never", 1)):
        prepared = []
        args = argparse.Namespace(trust=trust)
        engine = actors.BatchActor(args, path, dump(opened.manifest), lambda _, found: prepared.append(found) or (None, None))
        assert engine.answers([], object() if stored else None) == []
        assert sorted(hashed) == sorted(opened.manifest.files) * times and prepared[0].path == path


@pytest.fixture(scope="module")
def served(bundle, cluster):
    """The page's deployment with two slow replicas: a client, and a handle to the replicas."""
    from ray import serve

    from castiron.pipelines.cluster import deployment as deployments
    from tests import cluster_parts

    url, key = f"http://127.0.0.1:{serving.free_port()}", "secret"
    words = {"replicas=(1, 8)": "replicas=2", "cpus=4": f"cpus=0.5, slots={SLOTS}"}
    script = SERVE_SCRIPT
    for old, new in words.items():
        assert old in script
        script = script.replace(old, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployments, "Replica", cluster_parts.SlowReplica)
        serve.start(http_options={"host": "127.0.0.1", "port": int(url.rpartition(":")[2])})
        exec(compile(script, "docs/cluster.md", "exec"), {"castiron": castiron, "bundle": str(bundle)})
        assert f'api_keys=["{key}"]' in script
        handle = serve.get_deployment_handle("model", "castiron")
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            yield client, handle


def ask(client: openai.OpenAI, messages: list[dict], tokens: int, **options):
    return client.chat.completions.create(model="checkpoint", messages=messages, max_tokens=tokens, temperature=0, **options)


def states(handle) -> list[tuple[int, int]]:
    """Return the process id and number of sequences of every live replica."""
    found = handle.broadcast("state").results(timeout_s=120, return_exceptions=True)
    return [state for state in found if not isinstance(state, BaseException)]


def samples(client: openai.OpenAI, name: str) -> dict[str, int]:
    """Return the value of a metric of every replica."""
    page = client.get(str(client.base_url).removesuffix("/v1/") + "/metrics", cast_to=str)
    return {
        replica: int(value)
        for replica, value in re.findall(rf'^{name}{{[^}}]*replica="(\w+)"[^}}]*}} (\d+)(?:\.0)?$', page, re.MULTILINE)
    }


def test_requests_are_routed_by_prefix(served):
    client, _ = served
    prompts = [[{"role": "system", "content": word * 200}, {"role": "user", "content": f"Hello {i}"}]
             for i in range(3) for word in ("ab", "cd", "ef")]  # fmt: skip
    answers = [ask(client, messages, 2) for messages in prompts]
    # The first prompt of each kind is new; the others find more than half of their tokens cached.
    found = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert all(tokens < 100 for tokens in found[:3]) and all(tokens > 400 for tokens in found[3:]), found
    assert sum(samples(client, "vllm:prefix_cache_hits_total").values()) > 6 * 400
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()


def test_unanswered_requests_survive_a_killed_replica(served):
    client, handle = served
    messages = [[{"role": "user", "content": f"Hello {i}"}] for i in range(2 * SLOTS)]
    expected = [ask(client, message, 40).choices[0].message.content for message in messages[:2]]
    with ThreadPoolExecutor(len(messages)) as pool:
        answers = [pool.submit(ask, client, message, 40) for message in messages]
        known: list[tuple[int, int]] = []
        while len([running for _, running in known if running]) < 2:
            assert not all(answer.done() for answer in answers)
            known = states(handle)
        os.kill(known[0][0], signal.SIGKILL)
        messages = [answer.result(200).choices[0].message.content for answer in answers]
    assert messages[:2] == expected and all(messages)


def test_a_stream_ends_with_an_error_if_its_replica_dies(served):
    from tests import cluster_parts

    client, handle = served
    chunks = [piece for piece in ask(client, serving.MESSAGES, 20, stream=True)]
    assert len(chunks) > 10 and chunks[-1].choices[0].finish_reason == "length"
    # When a client disconnects, its sequence ends long before its last token.
    long = {"stream": True, "extra_body": {"ignore_eos": True}}
    stream = ask(client, serving.MESSAGES, 900, **long)
    next(stream)
    assert any(running for _, running in states(handle))
    stream.close()
    until = time.monotonic() + 700 * cluster_parts.STEP
    while any(running for _, running in states(handle)):
        assert time.monotonic() < until
        time.sleep(0.1)
    stream = ask(client, serving.MESSAGES, 900, **long)
    next(stream)
    (mine,) = [process for process, running in states(handle) if running]
    os.kill(mine, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="ended in the middle"):
        list(stream)


def test_replicas_scale_with_requests_per_slot():
    from castiron.pipelines.cluster.deployment import deployment

    front = deployment("x", replicas=(1, 3), slots=SLOTS, queue=7)._bound_deployment
    replicas = front.init_args[0]._bound_deployment._deployment_config
    scaling = replicas.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, SLOTS)
    assert (replicas.max_ongoing_requests, replicas.max_queued_requests) == (2 * SLOTS, 7)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_errors_of_lost_replicas_have_the_apis_form(path, monkeypatch):
    from ray.exceptions import RayActorError

    from castiron.pipelines.cluster import deployment as front

    monkeypatch.setattr(front, "ATTEMPTS", 1)
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}

    def responses(*messages: dict) -> list[dict]:
        """Return what a client receives from a front whose replica dies after `messages`."""
        sent, waiting = list[dict](), [{"type": "http.request", "body": b"{}"}]

        async def receive():
            return waiting.pop() if waiting else await asyncio.Future()

        async def send(message):
            sent.append(message)

        async def stream(_):
            for message in messages:
                yield [message]
            raise RayActorError

        replicas = MagicMock()
        replicas.options().answer.remote().__aiter__ = stream
        asyncio.run(front.Front(replicas, 100).forward(scope, receive, send))
        return sent

    name, _, data = responses(start)[-1]["body"].decode().strip().rpartition("data: ")
    failed, body = responses()
    assert failed["status"] == 502
    for error in (json.loads(data), json.loads(body["body"])):
        if path == "/v1/messages":
            assert (error["type"], error["error"]["type"]) == ("error", "api_error") and name == "event: error\n"
        else:
            assert error["error"]["type"] == "server_error" and name == ""
