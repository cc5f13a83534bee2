"""The journal of a batch job: which rows run again, and who may write an output."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from castiron.pipelines.batch.job import answering, run_job
from castiron.pipelines.batch.journal import TITLE, Journal
from castiron.pipelines.batch.records import identity
from castiron.pipelines.cli import main as cli
from castiron.pipelines.engine.engine import Engine
from castiron.vmfb.bundle.bundle import open_bundle
from tests.batch.test_batch_job import conversion, rows_of
from tests.engine.test_scheduler import FakeBatch
from tests.support import served
from tests.support.batch_jobs import read, without_varying, write

ROOT = Path(__file__).parents[2]


class RowsOf:
    """An input with rows of prompts."""

    share = fault = None

    def __init__(self, prompts):
        self.prompts = prompts

    def __iter__(self):
        return rows_of(self.prompts)


def run_rows(out, prompts):
    """Run a job over a model in NumPy; return how many rows were finished before, and the output."""
    made = conversion()
    summary = run_job(RowsOf(prompts), made.key, answering(Engine(FakeBatch(2)), made), out)
    return summary.before, out.read_bytes()


def test_only_changed_rows_run_again(job, tmp_path):
    rows, out = [{"prompt": f"Row {i}", "id": i} for i in range(6)], tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", rows)
    assert job(source, out, "-n", "5")["before"] == 0
    complete = out.read_bytes()
    assert job(source, out, "-n", "5")["before"] == 6 and out.read_bytes() == complete
    # One row is edited, one is new and one is gone.
    rows = [{"prompt": "first"}, *rows[:3], {"prompt": "Row 3", "id": "edited"}, *rows[5:]]
    counts = job(write(source, rows), out, "-n", "5")
    assert (counts["records"], counts["before"]) == (6, 4)
    assert [row.get("id") for row in read(out)] == [None, 0, 1, 2, "edited", 5]
    for options in (["-n", "4"], ["-n", "5", "--temperature", "1"], ["-n", "5", "--temperature", "1", "--seed", "3"]):
        assert job(source, out, *options)["before"] == 0
    assert job(source, out, "-n", "5", "--temperature", "1", "--seed", "3")["before"] == 6


def test_a_full_disk_names_the_journal(tmp_path):
    out, (_, hard) = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    # A full disk stores nothing, or a part of a line.
    for limit in (0, len(TITLE) // 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError) as caught:
                Journal(out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert caught.value.filename == f"{out}.journal"
        del caught
    Journal(out).close()
    assert Path(f"{out}.journal").read_bytes() == TITLE


def test_the_key_of_a_row_depends_on_the_bundle(path):
    manifest = open_bundle(path).manifest
    others = [
        replace(manifest, files={**manifest.files, name: replace(manifest.files[name], sha256="0" * 64)})
        for name in ("weights.irpa", "model.vmfb", "tokenizer.json", "chat_template.jinja", "compile.log")
    ]
    same = [identity(manifest, {"seed": 0}) == identity(other, {"seed": 0}) for other in others]
    assert same == [False] * 4 + [True] and identity(manifest, {"seed": 0}) != identity(manifest, {"seed": 1})


def test_rejects_invalid_outputs(path, tmp_path, capsys):
    source, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    journal_of_other = Journal(out)

    def refused(*words: str) -> str:
        assert cli.main(["batch", str(path), *words, "--threads", "1"]) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "memory:" not in line]
        return line

    assert "another castiron batch is writing" in refused(str(source), "-o", str(out))
    journal_of_other.close()
    Path(f"{out}.journal").write_text("my own notes\n")
    assert "is not a journal that this version of castiron can read" in refused(str(source), "-o", str(out))
    assert Path(f"{out}.journal").read_text() == "my own notes\n" and not out.exists()
    assert "is the input" in refused(str(source), "-o", str(source))
    (tmp_path / "folder.jsonl").mkdir()
    assert "is a directory" in refused(str(source), "-o", str(tmp_path / "folder.jsonl"))
    assert "unknown file name extension" in refused(str(source), "-o", "out.csv")
    assert "give a file for the results with -o" in refused(str(source), "-o", "-", "--json")
    assert "--embed" in refused(str(source), "-o", str(out), "--dimensions", "3")


def test_an_output_may_be_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("castiron.pipelines.batch.journal.fcntl.flock", flock)
    out = tmp_path / "a/b/out.jsonl"
    assert [run_rows(out, [[3, 4]])[0] for _ in range(2)] == [0, 1] and len(read(out)) == 1


def test_an_incomplete_line_runs_its_row_again(tmp_path):
    out, rows = tmp_path / "out.jsonl", [[3, 4, i + 5] for i in range(5)]
    _, complete = run_rows(out, rows)
    journal = Path(f"{out}.journal")
    data, lines = journal.read_bytes(), journal.read_bytes().splitlines(keepends=True)
    middle = len(b"".join(lines[:3])) + 50
    for cut, before in ((len(TITLE) // 2, 0), (len(TITLE), 0), (len(data) - 1, 4), (middle, 2)):
        journal.write_bytes(data[:cut])
        assert run_rows(out, rows) == (before, complete)
    # A machine that loses its power may leave zeros.
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:60] + b"\0" * 20 + lines[2][80:] + lines[3] + b"\0" * 99)
    assert run_rows(out, rows) == (2, complete)


def test_a_damaged_line_runs_its_row_again(tmp_path):
    """Any byte may change: digits, quotes, braces, the key, the checksum."""
    out, rows = tmp_path / "out.jsonl", [[3, 4, i + 5] for i in range(3)]
    _, complete = run_rows(out, rows)
    journal = Path(f"{out}.journal")
    data = journal.read_bytes()
    second = data.index(b"\n", len(TITLE)) + 1
    end = data.index(b"\n", second)
    for offset in range(second, end, 7):
        for byte in b'x"}7\xff':
            if data[offset] != byte:
                journal.write_bytes(data[:offset] + bytes([byte]) + data[offset + 1 :])
                assert run_rows(out, rows) == (2, complete), offset
    # A line feed in the middle makes two lines, and neither is valid.
    journal.write_bytes(data[: second + 50] + b"\n" + data[second + 51 :])
    assert run_rows(out, rows) == (2, complete)


KILLED = """
import sys, time
from castiron.pipelines.engine.scheduler import Scheduler
from castiron.vmfb.run.session import Batch
step, begin = Batch.step, Scheduler._start
def slow(self, tokens):
    time.sleep(float(sys.argv[2]))
    return step(self, tokens)
def counted(self, sequence):
    with open(sys.argv[1], "a") as file:
        file.write("x")
    return begin(self, sequence)
Batch.step, Scheduler._start = slow, counted
from castiron.pipelines.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


def test_a_killed_job_continues(job, path, tmp_path):
    rng, kills = random.Random(7), 10
    rows = [{"prompt": f"Tell me of {rng.randrange(10**6)}", "id": i} for i in range(90)]
    body = {"prompt": "Once", "max_tokens": 7, "ignore_eos": True}
    rows += [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i in range(30)]
    source, out, begun = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", tmp_path / "begun"
    options = ["-n", "12", "--temperature", "0.8"]
    job(source, tmp_path / "complete.jsonl", *options)
    words = ["batch", str(path), str(source), "-o", str(out), "--threads", "1", *options]
    line = lambda pause: [sys.executable, "-c", KILLED, str(begun), pause, *words]
    begun.touch()
    for kill in range(kills):
        process = subprocess.Popen(line("0.008"), cwd=ROOT, stderr=subprocess.DEVNULL)
        # Two runs are killed while they start, the others some rows and a moment later.
        more = begun.stat().st_size + rng.randint(1, 9)
        while kill % 5 and begun.stat().st_size < more:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02 if kill % 5 else 0.6))
        process.kill()
        assert process.wait() == -9 and not out.exists()
    assert subprocess.run(line("0"), cwd=ROOT, capture_output=True).returncode == 0
    found, expected = (sorted(map(json.dumps, without_varying(read(each)))) for each in (out, tmp_path / "complete.jsonl"))
    assert found == expected
    # After each kill, only the rows that were in slots run again.
    assert kills // 2 < begun.stat().st_size - len(rows) <= kills * served.SLOTS
