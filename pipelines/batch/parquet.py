"""Tables in Parquet, a group of rows at a time; needs pyarrow, of the extra `parquet`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from castiron.pipelines.batch.row import Row
from castiron.pipelines.errors import PipelineError

# Rows that are read or written at once.
GROUP = 1024
# What a row keeps, and what was added to it.
Result = tuple[Mapping[str, Any] | str, Mapping[str, Any]]


class Table:
    """The rows of a file."""

    def __init__(self, path: Path):
        try:
            self.file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise PipelineError(f"{path} is not Parquet: {error}") from None
        self.path, self.done = path, 0
        self.fault: PipelineError | None = None
        names = self.file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise PipelineError(f"{path} has two columns {twice[0]}: give each a name of its own")
        # Words of a dictionary are no part of a row: they stand in it themselves.
        self.schema = pa.schema([_plain_field(field) for field in self.file.schema_arrow])

    @property
    def share(self) -> float | None:
        total = self.file.metadata.num_rows
        return self.done / total if total else 1.0

    def __iter__(self) -> Iterator[Row]:
        named = str(self.schema.remove_metadata()).encode()
        for group in self._groups():
            for at in range(group.num_rows):
                # Anew, because a slice's own bytes are those of the whole group.
                columns = [pa.concat_arrays([column.slice(at, 1)]) for column in group.columns]
                one = pa.RecordBatch.from_arrays(columns, schema=group.schema)
                data = one.serialize().to_pybytes()
                yield Row(self.done, plain(one), base64.b64encode(data).decode(), named + data)
                self.done += 1

    def _groups(self) -> Iterator[pa.RecordBatch]:
        try:
            for group in self.file.iter_batches(GROUP):
                yield group.cast(self.schema)
        except (pa.ArrowException, OSError) as error:
            why = " ".join(str(error).split())
            self.fault = PipelineError(f"{self.path} is not whole Parquet: {why:.300}; its rows so far are done")


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type))


def _plain_type(type_: pa.DataType) -> pa.DataType:
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
    """A row's columns as JSON has them: times and numbers that it has no words for as text."""
    columns = {
        name: column.cast(pa.string()) if pa.types.is_temporal(column.type) else column
        for name, column in zip(row.schema.names, row.columns)
    }
    return json.loads(json.dumps({name: _bare(column[0].as_py()) for name, column in columns.items()}, default=str))


def _bare(value: Any) -> Any:
    """Without members that are null: a struct has those of all rows."""
    if isinstance(value, dict):
        return {name: _bare(member) for name, member in value.items() if member is not None}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def unpack(kept: str, schema: pa.Schema) -> pa.RecordBatch:
    """The row that a `Row` keeps."""
    return pa.ipc.read_record_batch(pa.py_buffer(base64.b64decode(kept)), schema)


def write(file: BinaryIO, results: Callable[[], Iterable[Result]], schema: pa.Schema | None) -> None:
    """A table of what rows kept and what was added to them, which is read twice: for the types of all columns, and to be
    written. `schema`: that of the rows where they come from a table; a column that is added replaces one of its name.
    Columns whose values have no one type are JSON."""
    texts: set[str] = set()
    found: dict[str, pa.DataType] = {}
    for group in groups(results(), GROUP):
        for field in _table(group, schema, texts).schema:
            try:
                known = pa.field(field.name, found.get(field.name, pa.null()))
                found[field.name] = pa.unify_schemas([pa.schema([known]), pa.schema([field])], promote_options="permissive")[
                    0
                ].type
            except pa.ArrowException:
                texts.add(field.name)
                found[field.name] = pa.string()
    if not found and schema is not None:
        # A table without rows.
        found = dict(zip(schema.names, schema.types))
    whole = pa.schema([(name, pa.string() if pa.types.is_null(type_) else type_) for name, type_ in found.items()])
    with pq.ParquetWriter(file, whole) as writer:
        for group in groups(results(), GROUP):
            table = _table(group, schema, texts)
            for name in found.keys() - set(table.schema.names):
                table = table.append_column(name, pa.nulls(len(table)))
            writer.write_table(table.select(whole.names).cast(whole))


def groups(items: Iterable[Result], size: int) -> Iterator[list[Result]]:
    """So many at a time."""
    items = iter(items)
    while group := list(islice(items, size)):
        yield group


def _table(group: Sequence[Result], schema: pa.Schema | None, texts: Collection[str]) -> pa.Table:
    """Some rows with what was added to them, where the columns `texts` are JSON."""
    rows: list[Mapping[str, Any]] = [added for _, added in group]
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    if not any(isinstance(kept, str) for kept, _ in group):
        rows = [{**kept, **added} for kept, added in group]  # type: ignore[dict-item]
    else:
        table = pa.Table.from_batches([unpack(str(kept), schema) for kept, _ in group], schema)
        columns = dict(zip(table.schema.names, table.columns))
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = _column([row.get(name) for row in rows], name in texts)
    return pa.table(columns)


def _column(values: list[Any], text: bool) -> pa.Array:
    """Values of JSON; as text, or where they are objects or have no one type."""
    if not text and not any(isinstance(value, dict) for value in values):
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values], pa.string())
