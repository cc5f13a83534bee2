"""Batch jobs over Parquet tables keep the columns and types, and survive damaged input."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from castiron.pipelines.batch import parquet
from castiron.pipelines.cli import main as cli
from tests.support.batch_jobs import read, write


@pytest.mark.parametrize("data", [b"PAR1" + bytes(100) + b"PAR1", b"", b"{}"])
def test_invalid_parquet_is_a_one_line_error(data, path, tmp_path, capsys):
    (tmp_path / "in.parquet").write_bytes(data)
    assert cli.main(["batch", str(path), str(tmp_path / "in.parquet"), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "in.parquet is not a valid Parquet file" in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_tables_keep_their_columns_and_types(job, tmp_path):
    when = np.datetime64("2026-11-22T08:00:00.123456789", "ns")
    table = pa.table({
        "prompt": ["Hello there", None, "What?"], "when": pa.array([when] * 3), "vector": pa.array([[0.1, 2.5]] * 3, pa.list_(pa.float32())),
        "blob": [b"\xff", None, b""], "error": [1, 2, 3], "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    assert job(tmp_path / "in.parquet", tmp_path / "out.parquet", "-n", "4")["failed"] == 1
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["kind"].to_pylist() == ["a", "b", "a"]
    for name in ("prompt", "when", "vector", "blob"):
        assert found[name].equals(table[name]) and found.schema.field(name).type == table.schema.field(name).type
    assert found["error"].to_pylist() == [
        None,
        "the record has no messages and no prompt; give it exactly one of the columns messages, prompt",
        None,
    ]
    # A dictionary inside a struct, and rows in OpenAI's format.
    body = pa.StructArray.from_arrays(
        [pa.array(["Hi", "Hi"]).dictionary_encode(), pa.array([2, 1]), pa.array([True, True])],
        ["prompt", "max_tokens", "ignore_eos"],
    )
    pq.write_table(pa.table({"prompt": ["a", "b"], "deep": body}), tmp_path / "deep.parquet")
    job(tmp_path / "deep.parquet", tmp_path / "deep.out.parquet", "-n", "1")
    assert pq.read_table(tmp_path / "deep.out.parquet")["deep"].to_pylist() == body.to_pylist()
    requests = pa.table({"custom_id": ["a", "b"], "url": ["/v1/completions"] * 2, "body": body})
    pq.write_table(requests, tmp_path / "requests.parquet")
    job(tmp_path / "requests.parquet", tmp_path / "requests.out.parquet", "-n", "1")
    responses = [json.loads(row["response"]) for row in pq.read_table(tmp_path / "requests.out.parquet").to_pylist()]
    assert [response["body"]["usage"]["completion_tokens"] for response in responses] == [2, 1]
    # Renaming a column changes the rows.
    names = ["question", *table.column_names[1:]]
    pq.write_table(table.rename_columns(names), tmp_path / "in.parquet")
    assert job(tmp_path / "in.parquet", tmp_path / "out.parquet", "-n", "4")["failed"] == 3
    pq.write_table(table, tmp_path / "in.parquet")
    # The rows of the table as lines, and lines as a table.
    job(tmp_path / "in.parquet", tmp_path / "out.jsonl", "-n", "4")
    lines = read(tmp_path / "out.jsonl")
    assert [line["generated"] for line in lines] == found["generated"].to_pylist() and lines[0]["when"].startswith("2026-11-22")
    mixed = [{"prompt": "a", "x": 1, "y": {}}, {"prompt": "b", "x": "one"}, *({"prompt": "c", "z": [i]} for i in range(1100))]
    job(write(tmp_path / "mixed.jsonl", mixed), tmp_path / "mixed.parquet", "-n", "1")
    found = pq.read_table(tmp_path / "mixed.parquet").to_pylist()
    expected = [("1", "{}", None), ('"one"', None, None), (None, None, [0])]
    assert [(row["x"], row["y"], row["z"]) for row in found[:3]] == expected


def test_rows_before_damage_run_a_single_time(path, job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parquet, "GROUP", 10)
    rows = [{"prompt": f"Row {i}", "noise": random.Random(i).randbytes(40).hex()} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=20, compression="none")
    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    good = source.read_bytes()
    second = pq.ParquetFile(source).metadata.row_group(1).column(0).data_page_offset
    source.write_bytes(good[:second] + b"\xff" * 20 + good[second + 20 :])
    assert cli.main(["batch", str(path), str(source), "-o", str(out), "-n", "2", "--threads", "1"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "is damaged" in message and "damaged after record" in message and not out.exists()
    source.write_bytes(good)
    before = job(source, out, "-n", "2")["before"]
    assert 5 < before < 40 and len(read(out)) == 40


def test_an_error_names_the_extra_with_pyarrow(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "castiron.pipelines.batch.parquet", raising=False)
    assert cli.main(["batch", str(path), str(tmp_path / "in.parquet"), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "pyarrow is not installed: " in capsys.readouterr().err
