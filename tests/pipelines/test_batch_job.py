"""`castiron batch`: every row has the result that it has alone, whatever stands beside it and however often the job is killed."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castiron.pipelines import cli, progress
from castiron.pipelines.batch import parquet, window
from castiron.pipelines.batch import rows as rows_module
from castiron.pipelines.batch.job import Summary, answering, run_job
from castiron.pipelines.batch.journal import TITLE, Journal
from castiron.pipelines.batch.plain import Prompts, Wanted
from castiron.pipelines.batch.requests import Requests, identity
from castiron.pipelines.batch.rows import Row
from castiron.pipelines.commands import batch as command
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.vmfb.bundle import open_bundle
from tests.pipelines import served
from tests.pipelines.test_scheduler import CONTEXT, EOS, PROMPTS, TEXT, VOCAB, FakeBatch, alone

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return served.bundle(tmp_path_factory.getbasetemp())


def write(place: Path, rows) -> Path:
    place.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return place


def read(place: Path) -> list[dict]:
    return [json.loads(line) for line in place.read_bytes().splitlines()]


class Jobs:
    """The commands of a test in this process."""

    def __init__(self, path: Path, capsys):
        self.path, self.capsys = path, capsys

    def __call__(self, rows: Path, output: Path, *options: str) -> dict:
        cli.main(["batch", str(self.path), str(rows), "-o", str(output), "--threads", "1", "--json", *options])
        said = self.capsys.readouterr()
        self.errors = said.err
        return json.loads(said.out)


@pytest.fixture
def job(path, capsys):
    return Jobs(path, capsys)


# Over a model in NumPy.

MANIFEST = SimpleNamespace(context=CONTEXT, vocab=VOCAB, tokens=SimpleNamespace(eos=(EOS,)))


def requests(**wanted) -> Requests:
    return Requests(Prompts(MANIFEST, TEXT, Wanted(most=10, **wanted)), lambda: None, b"identity", 0)  # type: ignore


def rows_of(prompts):
    for index, prompt in enumerate(prompts):
        yield Row(index, {"prompt": prompt}, {"prompt": prompt}, json.dumps(prompt).encode())


def answers(scheduler, prompts, window=8, **wanted):
    made = requests(**wanted)
    return answering(scheduler, made, window)((row, made.key(row)) for row in rows_of(prompts))


@given(st.integers(1, 4), st.lists(PROMPTS, max_size=12), st.integers(1, 12))
def test_each_row_has_one_result_and_it_is_the_one_it_gets_alone(size, prompts, window):
    found = {row.index: outcome for row, _, outcome in answers(Scheduler(FakeBatch(size)), prompts, window)}
    assert found.keys() == set(range(len(prompts)))
    for index, prompt in enumerate(prompts):
        expected = alone(prompt, 10)
        assert found[index].added["generated"] == TEXT.decode(expected)
        assert (found[index].prompt, found[index].generated) == (len(prompt), len(expected))


def test_what_rows_share_is_read_once_and_no_more_is_held_than_a_window():
    batch, taken = FakeBatch(3), count()
    rng = random.Random(0)
    beginnings = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(3)]

    def prompts():
        # One after another, so that two slots never hold what the next row begins with.
        while True:
            yield beginnings[next(taken) % 3] + [rng.randrange(3, VOCAB) for _ in range(4)]

    rows = list(islice(answers(Scheduler(batch), prompts(), window=48), 48))
    assert next(taken) <= 48 + 3 + 48
    read = sum(work[2] for work in batch.work if work[0] == "prefill")
    assert read <= 3 * 40 + 4 * 48 + 4 * 48, "a shared beginning was read more than once"
    assert sum(outcome.cached for _, _, outcome in rows) >= 45 * 40


def test_rows_that_may_take_long_come_first_and_those_that_need_nothing_before_them():
    prompts = [[3, 4], [5] * 60, [], [6] * 20, [7] * 40]
    ended = [row.index for row, _, _ in answers(Scheduler(FakeBatch(1)), prompts, ignore_eos=True)]
    assert ended == [2, 1, 4, 3, 0]


def test_equal_rows_draw_different_answers_and_the_same_ones_again():
    def drawn(size, window, seed=0):
        made = requests(sampling=Sampling(temperature=1.0))
        made.seed = seed
        keyed = ((row, made.key(row)) for row in rows_of([[5, 6]] * 6))
        found = answering(Scheduler(FakeBatch(size)), made, window)(keyed)
        return [outcome.added["generated"] for _, outcome in sorted((row.index, outcome) for row, _, outcome in found)]

    first = drawn(1, 1)
    assert drawn(4, 6) == first != drawn(1, 1, seed=1) and len(set(first)) == 6


# Over a bundle.


def test_greedy_rows_are_what_run_says(job, path, tmp_path, capsys):
    texts = ["Hello there", "What?", "Hello where"]
    rows = [{"prompt": text, "kept": [1, {"a": None}]} for text in texts]
    rows += [{"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]} for text in texts]
    counts = job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "-n", "9", "--ordered")
    found = read(tmp_path / "out.jsonl")
    for text, one, other in zip(texts, found, found[3:]):
        cli.main(["run", str(path), "-p", text, "-n", "9", "--threads", "1", "--json"])
        alone = json.loads(capsys.readouterr().out)
        assert one["generated"] == other["generated"] == alone["text"] and one["kept"] == [1, {"a": None}]
        assert one["finish_reason"] == alone["finish_reason"] and one["prompt_tokens"] == alone["prompt_tokens"]
    told = {name: counts[name] for name in ("rows", "before", "failed", "generated_tokens")}
    assert told == {"rows": 6, "before": 0, "failed": 0, "generated_tokens": sum(row["generated_tokens"] for row in found)}
    assert counts["cached_tokens"] > 0


BODIES = [
    ("/v1/chat/completions", {"messages": served.MESSAGES, "max_tokens": 6, "temperature": 0, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": served.MESSAGES, "max_tokens": 6, "seed": 5, "n": 2, "top_p": 0.9}),
    ("/v1/completions", {"prompt": ["Hi", [5, 6, 7]], "max_tokens": 5, "temperature": 0, "echo": True}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 9, "temperature": 0, "stop": ["e", "a"], "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {"messages": served.MESSAGES, "response_format": {"type": "json_object"}, "seed": 1, "max_tokens": 9},
    ),
    ("/v1/completions", {"prompt": "Hi", "no_such_field": 1}),
    ("/v1/completions", {"prompt": "x" * 500}),
    ("/v1/chat/completions", {"messages": served.MESSAGES, "model": "gpt-4o"}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/responses", {"input": "Hello there", "instructions": "Be brief", "max_output_tokens": 6, "seed": 3, "store": False}),
    (
        "/v1/responses",
        {"input": "Hi", "temperature": 0, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 9, "store": False},
    ),
    ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_none"}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/messages", {"messages": served.MESSAGES, "system": "Be brief", "max_tokens": 6, "temperature": 0}),
    ("/v1/messages", {"messages": served.MESSAGES, "max_tokens": 9, "stop_sequences": ["e", "a"], "seed": 4}),
    ("/v1/messages", {"messages": served.MESSAGES}),
    ("/v1/rerank", {"query": "Hi", "documents": ["x"]}),
]
# What an answer says of the moment.
MOMENT = (
    "id", "created", "created_at", "completed_at", "prompt_tokens_details", "input_tokens_details", "cache_creation_input_tokens",
)  # fmt: skip


def lasting(value):
    """An answer without what is another each time."""
    if isinstance(value, list):
        return [lasting(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: lasting(each) for name, each in value.items() if name not in MOMENT}
    if cached := found.pop("cache_read_input_tokens", 0):
        found["input_tokens"] += cached
    return found


def test_openais_rows_are_answered_as_the_server_does(job, path, tmp_path):
    rows = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(BODIES)]
    job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    found = {row["custom_id"]: row for row in read(tmp_path / "out.jsonl")}
    with served.served(path, tmp_path / "log", "--quiet") as server, httpx.Client(base_url=server.url, timeout=120) as client:
        for row in rows:
            told, asked = found[row["custom_id"]], client.post(row["url"], json=row["body"])
            assert told["error"] is None and told["response"]["status_code"] == asked.status_code
            assert lasting(told["response"]["body"]) == lasting(asked.json())
    assert [row["response"]["status_code"] for row in found.values()].count(200) == 9
    # The same bytes, whatever was in the cache.
    first = (tmp_path / "out.jsonl").read_bytes()
    Path(f"{tmp_path}/out.jsonl.journal").unlink()
    job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == first


def test_what_rows_of_a_window_may_keep_is_not_counted_together(job, tmp_path, monkeypatch):
    # Each has room for 31,200 bytes of log-probabilities and none for twice as many.
    monkeypatch.setattr("castiron.pipelines.serve.kept.total_bytes", lambda: 16 * 40_000)
    body = {"messages": served.MESSAGES, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    rows = [{"custom_id": str(i), "url": BODIES[0][0], "body": body | {"max_tokens": 6}} for i in range(6)]
    rows.append(rows[0] | {"body": body | {"max_tokens": 12}})
    job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "--ordered")
    found = [row["response"] for row in read(tmp_path / "out.jsonl")]
    assert [response["status_code"] for response in found] == [200] * 6 + [400]
    assert "for one client" in found[6]["body"]["error"]["message"]


def test_what_a_body_does_not_say_is_as_the_job_has_it_in_every_form(job, tmp_path):
    bodies = {
        "/v1/chat/completions": {"messages": served.MESSAGES}, "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi", "text": {"verbosity": "medium"}}, "/v1/messages": {"messages": served.MESSAGES},
    }  # fmt: skip
    (tmp_path / "schema.json").write_text('{"const": "ab"}')
    rows = [{"custom_id": url, "url": url, "body": body} for url, body in bodies.items()]
    rows.append({"custom_id": "own", "url": "/v1/messages", "body": bodies["/v1/messages"] | {"max_tokens": 2}})
    job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "-n", "9", "--json-schema", str(tmp_path / "schema.json"))
    told = {row["custom_id"]: row["response"]["body"] for row in read(tmp_path / "out.jsonl")}
    said = {
        "/v1/chat/completions": told["/v1/chat/completions"]["choices"][0]["message"]["content"],
        "/v1/completions": told["/v1/completions"]["choices"][0]["text"],
        "/v1/responses": told["/v1/responses"]["output"][0]["content"][0]["text"],
        "/v1/messages": told["/v1/messages"]["content"][0]["text"],
    }
    assert said == dict.fromkeys(bodies, '"ab"') and told["own"]["content"][0]["text"] == '"a'
    job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-n", "3", "--temperature", "0")
    told = {row["custom_id"]: row["response"]["body"] for row in read(tmp_path / "out.jsonl")}
    assert told["/v1/responses"]["usage"]["output_tokens"] == told["/v1/messages"]["usage"]["output_tokens"] == 3
    assert told["/v1/responses"]["status"] == "incomplete" and told["/v1/messages"]["stop_reason"] == "max_tokens"


def test_a_row_that_is_none_says_why_and_the_others_go_on(job, tmp_path):
    good = {"prompt": "Hi", "id": 1}
    bad = [
        "{", '"text"', "\xff", '{"prompt": NaN}', "[" * 100_000, {"id": 2}, {"prompt": 7}, {"prompt": []}, {"prompt": [999]},
        {"prompt": "a", "messages": [{"role": "user"}]}, {"messages": ["x"]}, {"prompt": "x" * 500}, {"prompt": "\ud800"},
        {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"prompt": "x" * 100_001},
    ]  # fmt: skip
    alien = [
        {"custom_id": "a", "url": ["/v1/files"], "body": {}}, {"custom_id": 7, "url": "/v1/completions", "body": {}},
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}},
        {"custom_id": "a", "url": "/v1/completions", "body": "{"}, {"custom_id": "a", "body": {}, "more": 1},
        {"custom_id": "a", "url": "/v1/completions"}, "not one of OpenAI's either",
    ]  # fmt: skip
    # A table of the web has columns of such names too.
    good |= {"url": "https://example.org", "body": "<html>"}
    place = tmp_path / "in.jsonl"
    place.write_bytes(
        b"\xef\xbb\xbf"
        + b"\n\n".join((r if isinstance(r, str) else json.dumps(r)).encode("latin-1") for r in [good, *bad, *alien, good])
    )
    counts = job(place, tmp_path / "out.jsonl", "-n", "4", "--ordered")
    assert "castiron: 4 rows with a custom_id that another row has before" in job.errors
    first, *middle, last = read(tmp_path / "out.jsonl")
    assert (counts["rows"], counts["failed"]) == (25, 23)
    assert first == last and first["generated"] and first["error"] is None
    assert all(row["error"] for row in middle[: len(bad)]) and all(row["generated"] is None for row in middle[: len(bad)])
    says = ["line 3 is not JSON", "not a JSON object", "not UTF-8", "NaN is no JSON", "not JSON", "no messages and no prompt",
            "must be text", "must be text", "vocabulary", "messages and prompt", "objects with role", "126", "UTF-8",
            "messages.0 needs", "messages.0 needs", "characters"]  # fmt: skip
    assert [word for word, row in zip(says, middle) if word not in row["error"]] == []
    whys = [
        row["error"]["message"] if row["error"] else row["response"]["body"]["error"]["message"] for row in middle[len(bad) :]
    ]
    assert [
        w
        for w, why in zip(
            ["url must be", "custom_id must be", "no streams", "body is not JSON", "'more'", "body must be", "line"], whys
        )
        if w not in why
    ] == []


def test_a_row_is_of_the_form_of_its_columns_and_one_without_of_the_row_before_it():
    lines = [
        '{"custom_id": "a", "url": "u", "body": {}}',
        "no",
        "{",
        '{"prompt": "", "url": "u", "body": ""}',
        "no",
        '{"body": 1}',
    ]
    rows = list(rows_module.JsonLines(io.BytesIO("\n".join(lines).encode())))
    assert [row.is_request for row in rows] == [True, True, True, False, False, False]


def test_what_was_changed_is_done_again_and_nothing_else(job, tmp_path):
    rows, out = [{"prompt": f"Row {i}", "id": i} for i in range(6)], tmp_path / "out.jsonl"
    place = write(tmp_path / "in.jsonl", rows)
    assert job(place, out, "-n", "5", "--ordered")["before"] == 0
    whole = out.read_bytes()
    assert job(place, out, "-n", "5", "--ordered")["before"] == 6 and out.read_bytes() == whole
    # One row edited, one in front, one gone.
    rows = [{"prompt": "first"}, *rows[:3], {"prompt": "Row 3", "id": "edited"}, *rows[5:]]
    counts = job(write(place, rows), out, "-n", "5", "--ordered")
    assert (counts["rows"], counts["before"]) == (6, 4)
    assert [row.get("id") for row in read(out)] == [None, 0, 1, 2, "edited", 5]
    assert len((tmp_path / "out.jsonl.journal").read_bytes().splitlines()) == 1 + 6
    for options in (["-n", "4"], ["-n", "5", "--temperature", "1"], ["-n", "5", "--temperature", "1", "--seed", "3"]):
        assert job(place, out, *options)["before"] == 0
    assert job(place, out, "-n", "5", "--temperature", "1", "--seed", "3")["before"] == 6


def test_where_there_is_no_room_for_a_journal_is_said_and_it_is_begun_again(tmp_path):
    out, (_, hard) = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    # A full disk takes nothing, or a part.
    for room in (0, len(TITLE) // 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(OSError) as told:
                Journal(out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert told.value.filename == f"{out}.journal"
        del told
    Journal(out).close()
    assert Path(f"{out}.journal").read_bytes() == TITLE


def test_the_key_of_a_row_is_the_bundles_too(path):
    manifest = open_bundle(path).manifest
    others = [
        replace(manifest, files={**manifest.files, name: replace(manifest.files[name], sha256="0" * 64)})
        for name in ("weights.irpa", "model.vmfb", "tokenizer.json", "chat_template.jinja", "compile.log")
    ]
    same = [identity(manifest, {"seed": 0}) == identity(other, {"seed": 0}) for other in others]
    assert same == [False] * 4 + [True] and identity(manifest, {"seed": 0}) != identity(manifest, {"seed": 1})


def test_an_output_has_one_writer_and_is_no_input(path, tmp_path, capsys):
    place, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    held = Journal(out)

    def refused(*words: str) -> str:
        assert cli.main(["batch", str(path), *words, "--threads", "1"]) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "memory:" not in line]
        return line

    assert "another castiron batch is writing" in refused(str(place), "-o", str(out))
    held.close()
    Path(f"{out}.journal").write_text("my own notes\n")
    assert "no journal of castiron batch" in refused(str(place), "-o", str(out))
    assert Path(f"{out}.journal").read_text() == "my own notes\n" and not out.exists()
    assert "is the input" in refused(str(place), "-o", str(place))
    (tmp_path / "folder.jsonl").mkdir()
    assert "is a folder" in refused(str(place), "-o", str(tmp_path / "folder.jsonl"))
    assert "ends in none of" in refused(str(place), "-o", "out.csv")
    assert "give -o a file" in refused(str(place), "-o", "-", "--json")
    assert "--embed" in refused(str(place), "-o", str(out), "--dimensions", "3")


def test_an_output_may_lie_in_a_folder_to_be_made_and_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("castiron.pipelines.batch.journal.fcntl.flock", flock)
    made, out = requests(), tmp_path / "a/b/out.jsonl"
    job = lambda: run_job(rows_of_list([[3, 4]]), made.key, answering(Scheduler(FakeBatch(1)), made), out)
    assert (job().before, job().before) == (0, 1) and len(read(out)) == 1


def test_a_line_that_is_not_whole_counts_for_nothing(tmp_path):
    out, rows = tmp_path / "out.jsonl", [[3, 4, i + 5] for i in range(5)]
    made = requests()
    job = lambda prompts: run_job(rows_of_list(prompts), made.key, answering(Scheduler(FakeBatch(2)), made), out, ordered=True)
    job(rows)
    whole, journal = out.read_bytes(), Path(f"{out}.journal")
    lines = journal.read_bytes().splitlines(keepends=True)
    for cut, before in (
        (len(TITLE) // 2, 0),
        (len(TITLE), 0),
        (len(journal.read_bytes()) - 1, 4),
        (len(b"".join(lines[:3])) + 50, 2),
    ):
        journal.write_bytes(b"".join(lines)[:cut])
        assert job(rows).before == before and out.read_bytes() == whole
    # Zeros where a machine lost its power.
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:60] + b"\0" * 20 + lines[2][80:] + lines[3] + b"\0" * 99)
    assert job(rows).before == 2 and out.read_bytes() == whole


class rows_of_list:
    """Rows of prompts, as a file has them."""

    share = fault = None

    def __init__(self, prompts):
        self.prompts = prompts

    def __iter__(self):
        return rows_of(self.prompts)


KILLED = """
import sys, time
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.vmfb.batch import Batch
step, begin = Batch.step, Scheduler._begin
def slow(self, tokens):
    time.sleep(float(sys.argv[2]))
    return step(self, tokens)
def counted(self, sequence):
    with open(sys.argv[1], "a") as file:
        file.write("x")
    return begin(self, sequence)
Batch.step, Scheduler._begin = slow, counted
from castiron.pipelines.cli import main
sys.exit(main(sys.argv[3:]))
"""


def test_a_job_killed_at_any_moment_goes_on_where_it_was(job, path, tmp_path):
    rng, kills = random.Random(7), 10
    rows = [{"prompt": f"Tell me of {rng.randrange(10**6)}", "id": i} for i in range(90)]
    body = {"prompt": "Once", "max_tokens": 7, "ignore_eos": True}
    rows += [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i in range(30)]
    place, out, begun = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", tmp_path / "begun"
    options = ["-n", "12", "--temperature", "0.8"]
    job(place, tmp_path / "whole.jsonl", *options)
    words = ["batch", str(path), str(place), "-o", str(out), "--threads", "1", *options]
    line = lambda pause: [sys.executable, "-c", KILLED, str(begun), pause, *words]
    begun.touch()
    for kill in range(kills):
        process = subprocess.Popen(line("0.008"), cwd=ROOT, stderr=subprocess.DEVNULL)
        # Twice while it starts; else when some more rows have begun, and a moment later.
        more = begun.stat().st_size + rng.randint(1, 9)
        while kill % 5 and begun.stat().st_size < more:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02 if kill % 5 else 0.6))
        process.kill()
        assert process.wait() == -9 and not out.exists()
    assert subprocess.run(line("0"), cwd=ROOT, capture_output=True).returncode == 0
    assert sorted(out.read_bytes().splitlines()) == sorted((tmp_path / "whole.jsonl").read_bytes().splitlines())
    # Of each killed run the rows that were in slots are begun again, and no others.
    assert kills // 2 < begun.stat().st_size - len(rows) <= kills * served.SLOTS


def test_tables_keep_their_columns_and_types(job, tmp_path):
    when = np.datetime64("2026-11-22T08:00:00.123456789", "ns")
    table = pa.table({
        "prompt": ["Hello there", None, "What?"], "when": pa.array([when] * 3), "vector": pa.array([[0.1, 2.5]] * 3, pa.list_(pa.float32())),
        "blob": [b"\xff", None, b""], "error": [1, 2, 3], "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    assert job(tmp_path / "in.parquet", tmp_path / "out.parquet", "-n", "4", "--ordered")["failed"] == 1
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["kind"].to_pylist() == ["a", "b", "a"]
    for name in ("prompt", "when", "vector", "blob"):
        assert found[name].equals(table[name]) and found.schema.field(name).type == table.schema.field(name).type
    assert found["error"].to_pylist() == [None, "the row has no messages and no prompt; give it one of messages, prompt", None]
    # Words of a dictionary further down, and OpenAI's rows.
    body = pa.StructArray.from_arrays(
        [pa.array(["Hi", "Hi"]).dictionary_encode(), pa.array([2, None])], ["prompt", "max_tokens"]
    )
    pq.write_table(pa.table({"prompt": ["a", "b"], "deep": body}), tmp_path / "deep.parquet")
    job(tmp_path / "deep.parquet", tmp_path / "deep.out.parquet", "-n", "1", "--ordered")
    assert pq.read_table(tmp_path / "deep.out.parquet")["deep"].to_pylist() == body.to_pylist()
    asked = pa.table({"custom_id": ["a", "b"], "url": ["/v1/completions"] * 2, "body": body})
    pq.write_table(asked, tmp_path / "asked.parquet")
    job(tmp_path / "asked.parquet", tmp_path / "asked.out.parquet", "-n", "1", "--ordered")
    responses = [json.loads(row["response"]) for row in pq.read_table(tmp_path / "asked.out.parquet").to_pylist()]
    assert [response["body"]["usage"]["completion_tokens"] for response in responses] == [2, 1]
    # Another name of a column is another row.
    names = ["question", *table.column_names[1:]]
    pq.write_table(table.rename_columns(names), tmp_path / "in.parquet")
    assert job(tmp_path / "in.parquet", tmp_path / "out.parquet", "-n", "4", "--ordered")["failed"] == 3
    pq.write_table(table, tmp_path / "in.parquet")
    # The same rows as lines, and lines as a table again.
    job(tmp_path / "in.parquet", tmp_path / "out.jsonl.gz", "-n", "4", "--ordered")
    lines = [json.loads(line) for line in gzip.open(tmp_path / "out.jsonl.gz")]
    assert [line["generated"] for line in lines] == found["generated"].to_pylist() and lines[0]["when"].startswith("2026-11-22")
    mixed = [{"prompt": "a", "x": 1, "y": {}}, {"prompt": "b", "x": "one"}, *({"prompt": "c", "z": [i]} for i in range(1100))]
    job(write(tmp_path / "mixed.jsonl", mixed), tmp_path / "mixed.parquet", "-n", "1", "--ordered")
    found = pq.read_table(tmp_path / "mixed.parquet").to_pylist()
    assert [(row["x"], row["y"], row["z"]) for row in found[:3]] == [
        ("1", "{}", None),
        ('"one"', None, None),
        (None, None, [0]),
    ]


def test_rows_before_the_place_where_an_input_breaks_off_are_done_once(path, job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parquet, "GROUP", 10)
    rows = [{"prompt": f"Row {i}", "noise": random.Random(i).randbytes(40).hex()} for i in range(40)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=20, compression="none")
    table = (tmp_path / "in.parquet").read_bytes()
    second = pq.ParquetFile(tmp_path / "in.parquet").metadata.row_group(1).column(0).data_page_offset
    spoilt = {
        "in.jsonl.gz": (whole, [whole[: len(whole) // 2], whole[: len(whole) // 2] + b"\xff" * 99]),
        "in.parquet": (table, [table[:second] + b"\xff" * 20 + table[second + 20 :]]),
    }
    for name, (good, bad) in spoilt.items():
        place, out, before = tmp_path / name, tmp_path / f"{name}.jsonl", 0
        for data in bad:
            place.write_bytes(data)
            assert cli.main(["batch", str(path), str(place), "-o", str(out), "-n", "2", "--threads", "1"]) == 1
            says = capsys.readouterr().err.splitlines()[-1]
            assert "is not whole" in says and "its rows so far are done" in says and not out.exists()
        place.write_bytes(good)
        before = job(place, out, "-n", "2")["before"]
        assert 5 < before < 40 and len(read(out)) == 40


def test_pipes_have_each_result_as_it_comes_and_ordered_ones_in_order(path, tmp_path):
    words = [sys.executable, "-m", "castiron", "batch", str(path), "-", "-o", "-", "-n", "3", "--threads", "1", "--ordered"]
    first, *rest = [json.dumps({"prompt": "x" * (20 - i), "id": i}) + "\n" for i in range(12)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, cwd=ROOT, **pipes, text=True) as process:
        process.stdin.write(first)
        process.stdin.flush()
        # It is answered before any other comes.
        assert select.select([process.stdout], [], [], 120)[0] and json.loads(process.stdout.readline())["id"] == 0
        said, errors = process.communicate("".join(rest), timeout=120)
    assert [json.loads(line)["id"] for line in said.splitlines()] == list(range(1, 12))
    assert "kept nowhere" in errors and os.listdir(tmp_path) == []


def test_lines_of_a_pipe_are_those_of_a_file_however_they_come(monkeypatch):
    monkeypatch.setattr(rows_module, "LONGEST", 40)
    whole = b'\xef\xbb\xbf{"a": 1}\n\n{"b": 2}\n{"long": "' + b"x" * 200 + b'"}\n[]\n{"c": "\xc3\xa9"}'
    expected = list(rows_module.JsonLines(io.BytesIO(whole)))
    assert [row.error and row.error[:20] for row in expected] == [
        None,
        None,
        "line 4 has more than",
        "line 5 is not a JSON",
        None,
    ]
    for size in (1, 7, 64, 1000):
        reader, writer = os.pipe()
        with open(reader, "rb") as file:
            coming, found = iter(rows_module.JsonLines(file)), []
            for start in range(0, len(whole), size):
                os.write(writer, whole[start : start + size])
                # All that is whole by now, without waiting for the rest.
                found += iter(lambda: next(coming), None)
            assert len(found) == 4
            os.close(writer)
            assert [*found, *coming] == expected


def test_a_window_of_rows_that_come_slowly_is_begun_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(window, "time", clock := SimpleNamespace(monotonic=lambda: clock.now, now=0.0))
    one = lambda *prompt: SimpleNamespace(prompt=np.array(prompt), limit=1)
    first, second, third = (
        SimpleNamespace(sequences=[each], row=SimpleNamespace(index=0)) for each in (one(5), one(4, 4), one(3))
    )
    works = window.in_windows(iter([first, None, second, None, None, third]))
    assert next(works) is None
    clock.now = window.WAIT / 2
    assert next(works) is None
    clock.now = window.WAIT
    assert [next(works), next(works), next(works)] == [second, first, third] and next(works, "end") == "end"


def test_a_table_without_pyarrow_says_what_brings_it(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "castiron.pipelines.batch.parquet", raising=False)
    assert cli.main(["batch", str(path), str(tmp_path / "in.parquet"), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "this needs pyarrow, which is not installed: " in capsys.readouterr().err


def test_how_far_a_job_is_stands_in_a_bar_at_a_terminal_and_elsewhere_in_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(command, "TOLD", -1.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    summary = Summary(rows=1200, prompt_tokens=400, generated_tokens=600, seconds=10.0)
    command.teller(progress.Progress())(summary, 0.25)
    assert capsys.readouterr().err == "castiron: 1,200 rows, 100 tok/s, about 30 s left\n"
    # Of half the rows that an earlier run did nobody knows how long they took.
    command.teller(progress.Progress())(replace(summary, before=600), 0.25)
    assert capsys.readouterr().err.endswith("about 60 s left\n")
    with progress.Progress() as shown:
        shown.shown, said = True, ""
        command.teller(shown)(summary, 0.25)
        while "tok/s" not in said:
            said += capsys.readouterr().err
    assert re.search(r"rows  \[######\.+\]  25%  1,200 rows, 100 tok/s  \d+ s", said)
