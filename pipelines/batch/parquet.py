"""Parquet tables as input and output of batch jobs; needs pyarrow, of the extra `parquet`."""

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
from castiron.pipelines.batch.rows import Row
from castiron.pipelines.errors import PipelineError

# Rows that are read or written together.
GROUP = 1024


class Table:
    """The rows of a Parquet file."""

    def __init__(self, path: Path):
        """Open a file; raise PipelineError if it is not Parquet."""
        try:
            self.file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            # Unlike Arrow's own errors, that of a missing file has an errno.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise PipelineError(f"{path} is not a valid Parquet file ({_one_line(error)}); write it again") from None
        self.path, self.done = path, 0
        self.fault: PipelineError | None = None
        names = self.file.schema_arrow.names
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise PipelineError(f"{path} has two columns named {duplicates[0]}; rename one")
        # Without dictionaries, because Arrow serialises a row without the values of its dictionaries.
        self.schema = pa.schema([_plain_field(field) for field in self.file.schema_arrow])

    @property
    def share(self) -> float | None:
        total = self.file.metadata.num_rows
        return self.done / total if total else 1.0

    def __iter__(self) -> Iterator[Row]:
        named = str(self.schema.remove_metadata()).encode()
        for group in self._groups():
            for index in range(group.num_rows):
                # Copied, because Arrow would serialise a slice with the data of the complete group.
                columns = [pa.concat_arrays([column.slice(index, 1)]) for column in group.columns]
                row = pa.RecordBatch.from_arrays(columns, schema=group.schema)
                data = row.serialize().to_pybytes()
                yield Row(self.done, plain(row), base64.b64encode(data).decode(), named + data)
                self.done += 1

    def _groups(self) -> Iterator[pa.RecordBatch]:
        try:
            for group in self.file.iter_batches(GROUP):
                yield group.cast(self.schema)
        except (pa.ArrowException, OSError) as error:
            self.fault = PipelineError(f"{self.path} is damaged Parquet ({_one_line(error)}); the rows before it are done")


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.300}"


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type))


def _plain_type(type_: pa.DataType) -> pa.DataType:
    """Return a type, with each dictionary type in it replaced by the type of its values."""
    if pa.types.is_dictionary(type_):
        return type_.value_type
    if pa.types.is_struct(type_):
        return pa.struct([_plain_field(field) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_plain_field(type_.key_field), _plain_field(type_.item_field))
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(_plain_field(type_.value_field), type_.list_size)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return (pa.list_ if pa.types.is_list(type_) else pa.large_list)(_plain_field(type_.value_field))
    return type_


def plain(row: pa.RecordBatch) -> dict[str, Any]:
    """Return a row's columns as JSON values; times and other values that JSON lacks as text."""
    columns = {
        name: column.cast(pa.string()) if pa.types.is_temporal(column.type) else column
        for name, column in zip(row.schema.names, row.columns)
    }
    return json.loads(json.dumps({name: _without_nulls(column[0].as_py()) for name, column in columns.items()}, default=str))


def _without_nulls(value: Any) -> Any:
    """Remove null members of structs, because Arrow's structs have the members of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def unpack(own: str, schema: pa.Schema) -> pa.RecordBatch:
    """Return the row that `Row.own` holds."""
    return pa.ipc.read_record_batch(pa.py_buffer(base64.b64decode(own)), schema)


def write(file: BinaryIO, entries: Callable[[], Iterable[Entry]], schema: pa.Schema | None) -> None:
    """Write finished rows as a table; an added column replaces an input column of the same name.

    A column whose values have different types is written as JSON. `entries` is called twice: for
    the types of the columns, and for the rows. `schema`: schema of the input table, None for other
    inputs.
    """
    json_columns: set[str] = set()
    found: dict[str, pa.DataType] = {}
    for group in _groups_of(entries()):
        for field in _table(group, schema, json_columns).schema:
            try:
                known = pa.schema([pa.field(field.name, found.get(field.name, pa.null()))])
                both = pa.unify_schemas([known, pa.schema([field])], promote_options="permissive")
                found[field.name] = both[0].type
            except pa.ArrowException:
                json_columns.add(field.name)
                found[field.name] = pa.string()
    if not found and schema is not None:
        # The input has no rows.
        found = dict(zip(schema.names, schema.types))
    written = pa.schema([(name, pa.string() if pa.types.is_null(type_) else type_) for name, type_ in found.items()])
    with pq.ParquetWriter(file, written) as writer:
        for group in _groups_of(entries()):
            table = _table(group, schema, json_columns)
            for name in found.keys() - set(table.schema.names):
                table = table.append_column(name, pa.nulls(len(table)))
            writer.write_table(table.select(written.names).cast(written))


def _groups_of(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    entries = iter(entries)
    while group := list(islice(entries, GROUP)):
        yield group


def _table(group: Sequence[Entry], schema: pa.Schema | None, json_columns: Collection[str]) -> pa.Table:
    """Return finished rows as a table, with the columns `json_columns` as JSON text."""
    rows = [entry.added for entry in group]
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    if not any(isinstance(entry.own, str) for entry in group):
        rows = [{**entry.own, **entry.added} for entry in group]  # type: ignore[dict-item]
    else:
        table = pa.Table.from_batches([unpack(str(entry.own), schema) for entry in group], schema)
        columns = dict(zip(table.schema.names, table.columns))
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = _column([row.get(name) for row in rows], name in json_columns)
    return pa.table(columns)


def _column(values: list[Any], as_json: bool) -> pa.Array:
    """Return JSON values as an array; objects and values of different types become JSON text."""
    if not as_json and not any(isinstance(value, dict) for value in values):
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values], pa.string())
