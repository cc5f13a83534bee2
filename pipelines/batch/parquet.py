"""Parquet files as input and output of batch jobs; needs pyarrow, from the extra `parquet`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from castiron.pipelines.batch.journal import Entry
from castiron.pipelines.batch.records import Record, has_openai_columns
from castiron.pipelines.errors import PipelineError

# Records that are read or written together.
GROUP = 1024


class Table:
    """An iterable over the records of a Parquet file."""

    def __init__(self, path: Path):
        try:
            self.file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            # Errors of the operating system, as for a missing file, have an errno; Arrow's have none.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise PipelineError(f"{path} is not a valid Parquet file ({_one_line(error)}); write it again") from None
        self.path, self.done = path, 0
        self.fault: PipelineError | None = None
        names = self.file.schema_arrow.names
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise PipelineError(f"{path} has two columns named {duplicates[0]}; rename one")
        # Dictionary columns are decoded, because each serialised record would contain the complete dictionary.
        type_of = lambda type_: type_.value_type if pa.types.is_dictionary(type_) else type_
        self.schema = pa.schema([(field.name, type_of(field.type)) for field in self.file.schema_arrow])

    @property
    def share(self) -> float | None:
        total = self.file.metadata.num_rows
        return self.done / total if total else 1.0

    def __iter__(self) -> Iterator[Record]:
        is_openai = has_openai_columns(self.schema.names)
        for group in self._groups():
            for index in range(group.num_rows):
                # Copy each value, because Arrow serialises a slice with the data of the complete group.
                columns = [pa.concat_arrays([column.slice(index, 1)]) for column in group.columns]
                record = pa.Table.from_arrays(columns, schema=self.schema)
                with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, self.schema) as writer:
                    writer.write_table(record)
                data = sink.getvalue().to_pybytes()
                yield Record(self.done, plain(record), base64.b64encode(data).decode(), data, is_openai)
                self.done += 1

    def _groups(self) -> Iterator[pa.RecordBatch]:
        try:
            for group in self.file.iter_batches(GROUP):
                yield group.cast(self.schema)
        except (pa.ArrowException, OSError) as error:
            self.fault = PipelineError(
                f"{self.path} is damaged after record {self.done} ({_one_line(error)}); the records before it are "
                "done; write this input file again, and run the command again"
            )


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.300}"


def plain(record: pa.Table) -> dict[str, Any]:
    """Return the only row of a table as {column name: JSON value}."""
    columns = {
        name: column.cast(pa.string()) if pa.types.is_temporal(column.type) else column
        for name, column in zip(record.schema.names, record.columns)
    }
    return json.loads(json.dumps({name: without_nulls(column[0].as_py()) for name, column in columns.items()}, default=str))


def without_nulls(value: Any) -> Any:
    """Return a JSON value without object members that are null.

    Arrow adds these: all structs of a column have the same fields.
    """
    if isinstance(value, dict):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def unpack(own: str) -> pa.Table:
    """Decode a record's input columns, an Arrow stream in base64, to a table with one row."""
    return pa.ipc.open_stream(base64.b64decode(own)).read_all()


def write(file: BinaryIO, entries: Callable[[], Iterable[Entry]]) -> None:
    """Write finished records as Parquet.

    entries: returns a new iterator; called twice, first to find the types of the columns. An answer
    column replaces an input column of the same name. A column of different types becomes JSON text.
    """
    json_columns: set[str] = set()
    found: dict[str, pa.DataType] = {}
    for group in _groups_of(entries()):
        for field in _table(group, json_columns).schema:
            try:
                known = pa.schema([pa.field(field.name, found.get(field.name, pa.null()))])
                both = pa.unify_schemas([known, pa.schema([field])], promote_options="permissive")
                found[field.name] = both[0].type
            except pa.ArrowException:
                json_columns.add(field.name)
                found[field.name] = pa.string()
    written = pa.schema([(name, pa.string() if pa.types.is_null(type_) else type_) for name, type_ in found.items()])
    with pq.ParquetWriter(file, written) as writer:
        for group in _groups_of(entries()):
            table = _table(group, json_columns)
            for name in found.keys() - set(table.schema.names):
                table = table.append_column(name, pa.nulls(len(table)))
            writer.write_table(table.select(written.names).cast(written))


def _groups_of(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    entries = iter(entries)
    while group := list(islice(entries, GROUP)):
        yield group


def _table(group: Sequence[Entry], json_columns: Collection[str]) -> pa.Table:
    records = [entry.added for entry in group]
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    if not any(isinstance(entry.own, str) for entry in group):
        records = [{**entry.own, **entry.added} for entry in group]  # type: ignore[dict-item]
    else:
        table = pa.concat_tables([unpack(str(entry.own)) for entry in group])
        columns = dict(zip(table.schema.names, table.columns))
    for name in dict.fromkeys(name for record in records for name in record):
        columns[name] = _column([record.get(name) for record in records], name in json_columns)
    return pa.table(columns)


def _column(values: list[Any], as_json: bool) -> pa.Array:
    if not as_json and not any(isinstance(value, dict) for value in values):
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values], pa.string())
