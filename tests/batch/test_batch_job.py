"""`castiron batch` gives each row the result that it gets in a run of its own."""

from __future__ import annotations

import io
import json
import os
import random
import re
import select
import subprocess
import sys
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import httpx2
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from castiron.pipelines import terminal
from castiron.pipelines.batch import job as jobs
from castiron.pipelines.batch import records as records_module
from castiron.pipelines.batch.job import Summary, answering
from castiron.pipelines.batch.plain_records import Prompts
from castiron.pipelines.batch.records import Conversion, Record
from castiron.pipelines.cli import batch as command
from castiron.pipelines.cli import main as cli
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.sampling import Sampling
from tests.engine.test_scheduler import CONTEXT, EOS, PROMPTS, TEXT, VOCAB, FakeBatch, by_itself
from tests.support import served
from tests.support.batch_jobs import read, without_varying, write

ROOT = Path(__file__).parents[2]


MANIFEST = SimpleNamespace(context=CONTEXT, vocab=VOCAB, tokens=SimpleNamespace(eos=(EOS,)))


def conversion(**wanted) -> Conversion:
    return Conversion(Prompts(MANIFEST, TEXT, max_tokens=10, **wanted), lambda: None, b"identity", 0)  # type: ignore


def rows_of(prompts):
    for index, prompt in enumerate(prompts):
        yield Record(index, {"prompt": prompt}, {"prompt": prompt}, json.dumps(prompt).encode())


def answers(scheduler, prompts, window=8, **wanted):
    made = conversion(**wanted)
    return answering(scheduler, made, window)(replace(row, key=made.key(row)) for row in rows_of(prompts))


@given(st.integers(1, 4), st.lists(PROMPTS, max_size=12), st.integers(1, 12))
def test_each_row_gets_its_result_of_a_single_run(size, prompts, window):
    found = {row.index: outcome for row, outcome in answers(Engine(FakeBatch(size)), prompts, window)}
    assert found.keys() == set(range(len(prompts)))
    for index, prompt in enumerate(prompts):
        expected = by_itself(prompt, 10)
        assert found[index].added["generated"] == TEXT.decode(expected)
        assert (found[index].prompt, found[index].generated) == (len(prompt), len(expected))


def test_shared_prefixes_are_prefilled_in_one_window():
    batch, taken = FakeBatch(3), count()
    rng = random.Random(0)
    prefixes = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(3)]

    def prompts():
        # Neighbouring rows have different prefixes, so that each slot would lose its prefix.
        while True:
            yield prefixes[next(taken) % 3] + [rng.randrange(3, VOCAB) for _ in range(4)]

    rows = list(islice(answers(Engine(batch), prompts(), window=48), 48))
    assert next(taken) <= 48 + 3 + 48
    prefilled = sum(work[2] for work in batch.work if work[0] == "prefill")
    assert prefilled <= 3 * 40 + 4 * 48 + 4 * 48, "a shared prefix was prefilled more than once"
    assert sum(outcome.cached for _, outcome in rows) >= 45 * 40


def test_sampling_is_reproducible_and_differs_by_row():
    def drawn(size, window, seed=0):
        made = conversion(sampling=Sampling(temperature=1.0))
        made.seed = seed
        keyed = (replace(row, key=made.key(row)) for row in rows_of([[5, 6]] * 6))
        found = answering(Engine(FakeBatch(size)), made, window)(keyed)
        return [outcome.added["generated"] for _, outcome in sorted((row.index, outcome) for row, outcome in found)]

    first = drawn(1, 1)
    assert drawn(4, 6) == first != drawn(1, 1, seed=1) and len(set(first)) == 6


def test_greedy_rows_equal_castiron_run(job, path, tmp_path, capsys):
    texts = ["Hello there", "What?", "Hello where"]
    rows = [{"prompt": text, "kept": [1, {"a": None}]} for text in texts]
    rows += [{"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]} for text in texts]
    counts = job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "-n", "9")
    found = read(tmp_path / "out.jsonl")
    for text, one, other in zip(texts, found, found[3:]):
        cli.main(["run", str(path), "-p", text, "-n", "9", "--threads", "1", "--json"])
        single = json.loads(capsys.readouterr().out)
        assert one["generated"] == other["generated"] == single["text"] and one["kept"] == [1, {"a": None}]
        assert one["finish_reason"] == single["finish_reason"] and one["prompt_tokens"] == single["prompt_tokens"]
    reported = {name: counts[name] for name in ("records", "before", "failed", "generated_tokens")}
    assert reported == {
        "records": 6,
        "before": 0,
        "failed": 0,
        "generated_tokens": sum(row["generated_tokens"] for row in found),
    }
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
    ("/v1/completions", {"prompt": "Hi", "temperature": 0, "no_such_field": 1}),
    ("/v1/completions", {"prompt": "Hi", "use_beam_search": True}),
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


def test_openai_rows_equal_the_servers_answers(job, path, tmp_path):
    rows = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(BODIES)]
    job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    found = {row["custom_id"]: row for row in read(tmp_path / "out.jsonl")}
    with served.served(path, tmp_path / "log", "--quiet") as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        for row in rows:
            result, response = found[row["custom_id"]]["response"], client.post(row["url"], json=row["body"])
            assert result["status_code"] == response.status_code
            assert without_varying(result["body"]) == without_varying(response.json())
    assert [row["response"]["status_code"] for row in found.values()].count(200) == 10
    assert all(row["error"] is None for row in found.values())
    # The results are the same with another prefix cache.
    first = read(tmp_path / "out.jsonl")
    Path(f"{tmp_path}/out.jsonl.journal").unlink()
    job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    again = read(tmp_path / "out.jsonl")
    assert without_varying(again) == without_varying(first) and again[0]["id"] == first[0]["id"]


def test_a_row_with_the_seed_minus_one_gets_a_seed_of_the_job(job, tmp_path):
    body = {"prompt": "Hi", "max_tokens": 12, "temperature": 1, "seed": -1, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", [{"custom_id": "a", "url": "/v1/completions", "body": body}])
    texts = []
    for name in ("one.jsonl", "two.jsonl"):
        job(source, tmp_path / name)
        texts += [choice["text"] for row in read(tmp_path / name) for choice in row["response"]["body"]["choices"]]
    assert len(texts) == 2 and texts[0] == texts[1]


def test_memory_limits_count_a_row_at_a_time(job, tmp_path, monkeypatch):
    # The limit allows the 31,200 bytes of log-probabilities of one row, but not twice as many.
    monkeypatch.setattr("castiron.pipelines.api.byte_limit.total_bytes", lambda: 16 * 40_000)
    body = {"messages": served.MESSAGES, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    rows = [{"custom_id": str(i), "url": BODIES[0][0], "body": body | {"max_tokens": 6}} for i in range(6)]
    rows.append(rows[0] | {"body": body | {"max_tokens": 12}})
    job(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    found = [row["response"] for row in read(tmp_path / "out.jsonl")]
    assert [response["status_code"] for response in found] == [200] * 6 + [400]
    assert "for a client" in found[6]["body"]["error"]["message"]


def test_options_of_prompts_have_no_effect_on_openais_format(job, tmp_path):
    body = {"messages": served.MESSAGES, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    job(
        write(tmp_path / "in.jsonl", [{"custom_id": "a", "url": BODIES[0][0], "body": body}]), tmp_path / "out.jsonl", "-n", "3"
    )
    assert "no effect on requests in OpenAI's format: --max-tokens;" in job.errors
    assert read(tmp_path / "out.jsonl")[0]["response"]["body"]["usage"]["completion_tokens"] == 6


# Invalid plain rows, each with a part of its error.
BAD_ROWS = [
    ("{", "line 3 is not JSON"), ('"text"', "not a JSON object"), ("\xff", "not UTF-8"), ('{"prompt": NaN}', "constant NaN"),
    ("[" * 100_000, "not JSON"), ({"id": 2}, "no messages and no prompt"), ({"prompt": 7}, "neither text nor"),
    ({"prompt": []}, "neither text nor"), ({"prompt": [999]}, "vocabulary"), ({"messages": ["x"]}, "objects with role"),
    ({"prompt": "a", "messages": [{"role": "user"}]}, "messages and prompt"), ({"prompt": "x" * 500}, "126"),
    ({"prompt": "\ud800"}, "UTF-8"), ({"messages": [{"role": "user", "content": 5}]}, "messages.0: content is missing or"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0: content is missing or"),
]  # fmt: skip
# Invalid rows in OpenAI's format.
BAD_REQUESTS = [
    ({"custom_id": "a", "url": ["/v1/files"], "body": {}}, "url is \"['/v1/files']\"; use one of /v1/"),
    ({"custom_id": 7, "url": "/v1/completions", "body": {}}, "custom_id is missing or"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}}, "do not stream"),
    ({"custom_id": "a", "url": "/v1/completions", "body": "{"}, "body is not JSON"),
    ({"custom_id": "a", "body": {}, "more": 1}, "'more'"),
    ({"custom_id": "a", "url": "/v1/completions"}, "body is missing or not"),
    ("no JSON after a row in OpenAI's format", "line"),
]


def test_a_bad_row_fails_by_itself(job, tmp_path):
    # A plain row may have columns with names of OpenAI's format.
    good = {"prompt": "Hi", "id": 1, "url": "https://example.org", "body": "<html>"}
    rows = [good, *(row for row, _ in BAD_ROWS + BAD_REQUESTS), good]
    lines = [(row if isinstance(row, str) else json.dumps(row)).encode("latin-1") for row in rows]
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(lines))
    counts = job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-n", "4")
    assert "castiron: 4 records with the custom_id of an earlier record" in job.errors
    first, *middle, last = read(tmp_path / "out.jsonl")
    assert (counts["records"], counts["failed"]) == (24, 22)
    assert first == last and first["generated"] and first["error"] is None
    plain, requests = middle[: len(BAD_ROWS)], middle[len(BAD_ROWS) :]
    assert [row for row, (_, message) in zip(plain, BAD_ROWS, strict=True) if message not in row["error"]] == []
    assert all(row["generated"] is None for row in plain)
    for row, (_, message) in zip(requests, BAD_REQUESTS, strict=True):
        assert message in (row["error"] or row["response"]["body"]["error"])["message"]


def test_the_format_of_a_row_follows_its_columns():
    lines = [
        '{"custom_id": "a", "url": "u", "body": {}}',
        "no",
        "{",
        '{"prompt": "", "url": "u", "body": ""}',
        "no",
        '{"body": 1}',
    ]
    rows = list(records_module.JsonLines(io.BytesIO("\n".join(lines).encode())))
    assert [row.is_openai for row in rows] == [True, True, True, False, False, False]


def test_pipes_get_results_immediately(path, tmp_path):
    words = [sys.executable, "-m", "castiron", "batch", str(path), "-", "-o", "-", "-n", "3", "--threads", "1"]
    first, *rest = [json.dumps({"prompt": "x" * (20 - i), "id": i}) + "\n" for i in range(12)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, cwd=ROOT, **pipes, text=True) as process:
        process.stdin.write(first)
        process.stdin.flush()
        # The first row is answered before the others are written.
        assert select.select([process.stdout], [], [], 120)[0] and json.loads(process.stdout.readline())["id"] == 0
        output, errors = process.communicate("".join(rest), timeout=120)
    assert sorted(json.loads(line)["id"] for line in output.splitlines()) == list(range(1, 12))
    assert "are not stored" in errors and os.listdir(tmp_path) == []


def test_lines_of_a_pipe_equal_those_of_a_file(monkeypatch):
    monkeypatch.setattr(records_module, "MAX_LINE", 40)
    data = b'\xef\xbb\xbf{"a": 1}\n\n{"b": 2}\n{"long": "' + b"x" * 200 + b'"}\n[]\n{"c": "\xc3\xa9"}'
    expected = list(records_module.JsonLines(io.BytesIO(data)))
    errors = [None, None, "line 4 has more than", "line 5 is not a JSON", None]
    assert [row.error and row.error[:20] for row in expected] == errors
    for size in (1, 7, 64, 1000):
        reader, writer = os.pipe()
        with open(reader, "rb") as file:
            coming, found = iter(records_module.JsonLines(file)), []
            for start in range(0, len(data), size):
                os.write(writer, data[start : start + size])
                # All lines that are complete, without waiting for the rest.
                found += iter(lambda: next(coming), None)
            assert len(found) == 4
            os.close(writer)
            assert [*found, *coming] == expected


def test_a_window_of_slow_rows_starts_after_its_wait(monkeypatch):
    monkeypatch.setattr(jobs, "time", clock := SimpleNamespace(monotonic=lambda: clock.now, now=0.0))
    one = lambda *prompt: SimpleNamespace(
        requests=[SimpleNamespace(prompt=np.array(prompt), limit=1)], record=SimpleNamespace(index=0)
    )
    first, second, third = one(5), one(4, 4), one(3)
    works = jobs.in_windows(iter([first, None, second, None, None, third]))
    assert next(works) is None
    clock.now = jobs.WAIT / 2
    assert next(works) is None
    clock.now = jobs.WAIT
    assert [next(works), next(works), next(works)] == [second, first, third] and next(works, "end") == "end"


def test_progress_is_a_bar_at_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(command, "REPORT_SECONDS", -1.0)
    monkeypatch.setattr(terminal, "INTERVAL", 0.001)
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    summary = Summary(records=1200, prompt_tokens=400, generated_tokens=600, seconds=10.0)
    command.progress_reporter(terminal.Progress())(summary, 0.25)
    assert capsys.readouterr().err == "castiron: 1,200 records, 100 tok/s, about 30 s left\n"
    # An earlier run finished half of the rows; the estimate uses the rows of this run only.
    command.progress_reporter(terminal.Progress())(replace(summary, before=600), 0.25)
    assert capsys.readouterr().err.endswith("about 60 s left\n")
    with terminal.Progress() as shown:
        shown.shown, shown_text = True, ""
        command.progress_reporter(shown)(summary, 0.25)
        while "tok/s" not in shown_text:
            shown_text += capsys.readouterr().err
    assert re.search(r"records  \[######\.+\]  25%  1,200 records, 100 tok/s  \d+ s", shown_text)
