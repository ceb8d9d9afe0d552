"""Checkpoints of a table's Delta log: the state after a version, in one Parquet file. Pure.

Made from the checkpoint before and the commits since, without a load of the table. The columns of
20,000 files are filtered and joined by Arrow, not row by row. Only what `commit_json` and deltalake
write is understood; for a log with anything else the result is None, and deltalake makes the
checkpoint.
"""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_TEXTS = pa.map_(pa.string(), pa.string())
_FILE = [("path", pa.string()), ("partitionValues", _TEXTS), ("size", pa.int64())]
ADD = pa.struct(
    [*_FILE, ("modificationTime", pa.int64()), ("dataChange", pa.bool_()), ("stats", pa.string())]
)
REMOVE = pa.struct(
    [
        *_FILE,
        ("deletionTimestamp", pa.int64()),
        ("dataChange", pa.bool_()),
        ("extendedFileMetadata", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("txn", pa.struct([("appId", pa.string()), ("version", pa.int64())])),
        ("add", ADD),
        ("remove", REMOVE),
        (
            "metaData",
            pa.struct(
                [
                    ("id", pa.string()),
                    ("name", pa.string()),
                    ("description", pa.string()),
                    ("format", pa.struct([("provider", pa.string()), ("options", _TEXTS)])),
                    ("schemaString", pa.string()),
                    ("partitionColumns", pa.list_(pa.string())),
                    ("createdTime", pa.int64()),
                    ("configuration", _TEXTS),
                ]
            ),
        ),
        (
            "protocol",
            pa.struct([("minReaderVersion", pa.int32()), ("minWriterVersion", pa.int32())]),
        ),
    ]
)
"""The columns of Delta's first kind of checkpoint, as far as a plain table has them."""
_ONCE = ("metaData", "protocol")
_COMMIT_INFO = "commitInfo"
_json = msgspec.json.Decoder(dict[str, Any])


class LogCheckpoint(NamedTuple):
    """A checkpoint's Parquet, and its pointer, the object `_last_checkpoint`."""

    body: bytes
    pointer: bytes


class _Unknown(Exception):
    """The log has something that this module does not write into a checkpoint."""


def checkpoint_of(
    version: int, last: bytes | None, commits: Sequence[bytes], removed_since_ms: int
) -> LogCheckpoint | None:
    """Return the checkpoint of a version.

    `last` is the Parquet of the checkpoint before (None: there is none), `commits` are those after
    it, up to `version`. Files that were removed before `removed_since_ms` are left out.
    """
    try:
        columns = _replayed(_columns_of(last), commits, removed_since_ms)
    except (_Unknown, KeyError, pa.ArrowException, msgspec.DecodeError):
        return None
    if any(len(columns[name]) != 1 for name in _ONCE):
        return None
    rows = pa.concat_tables(
        [
            pa.table({name: column}, pa.schema([SCHEMA.field(name)]))
            for name, column in columns.items()
        ],
        promote_options="default",
    ).select(SCHEMA.names)
    sink = io.BytesIO()
    pq.write_table(rows, sink, compression="snappy")
    body = sink.getvalue()
    pointer = {
        "version": version,
        "size": rows.num_rows,
        "sizeInBytes": len(body),
        "numOfAddFiles": len(columns["add"]),
    }
    return LogCheckpoint(body, msgspec.json.encode(pointer))


def _columns_of(checkpoint: bytes | None) -> dict[str, pa.Array]:
    """Return the rows of each kind of action."""
    if checkpoint is None:
        return {field.name: pa.array([], field.type) for field in SCHEMA}
    table = pq.ParquetFile(pa.BufferReader(checkpoint)).read()
    for name in set(table.column_names) - set(SCHEMA.names):
        if table.column(name).null_count < table.num_rows:
            raise _Unknown(name)
    return {field.name: _cast(_present(table, field.name), field.type) for field in SCHEMA}


def _present(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column.filter(column.is_valid())


def _cast(column: Any, to: pa.DataType) -> pa.Array:
    """Return the fields of SCHEMA. Raises _Unknown if another field has a value."""
    kind = column.type
    if not pa.types.is_struct(kind):
        return column.cast(to)
    names = {kind.field(index).name for index in range(kind.num_fields)}
    own_names = {to.field(index).name for index in range(to.num_fields)}
    for name in names - own_names - {"stats", "lastUpdated"}:
        if pc.struct_field(column, name).null_count < len(column):
            raise _Unknown(name)
    fields = [to.field(index) for index in range(to.num_fields)]
    arrays = [
        _cast(pc.struct_field(column, field.name), field.type)
        if field.name in names
        else pa.nulls(len(column), field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _replayed(
    columns: dict[str, pa.Array], commits: Sequence[bytes], removed_since_ms: int
) -> dict[str, pa.Array]:
    """Return the rows after the commits."""
    new: dict[str, dict[str, Any]] = {name: {} for name in SCHEMA.names}
    for body in commits:
        for raw in body.splitlines():
            for kind, action in _json.decode(raw).items():
                if kind != _COMMIT_INFO:
                    _take(new, kind, action)
    changed = pa.array([*new["add"], *new["remove"]], pa.string())
    for kind in ("add", "remove"):
        old = columns[kind]
        is_kept = ~_is_in(pc.struct_field(old, "path"), changed)
        if kind == "remove":
            times: Any = pc.fill_null(pc.struct_field(old, "deletionTimestamp"), 0)
            is_kept &= times.to_numpy() >= removed_since_ms
        columns[kind] = pa.concat_arrays(
            [old.filter(pa.array(is_kept)), _rows(new[kind].values(), old.type)]
        )
    transactions = columns["txn"]
    is_kept = ~_is_in(pc.struct_field(transactions, "appId"), pa.array(list(new["txn"])))
    columns["txn"] = pa.concat_arrays(
        [transactions.filter(pa.array(is_kept)), _rows(new["txn"].values(), transactions.type)]
    )
    for kind in _ONCE:
        if new[kind]:
            columns[kind] = _rows(new[kind].values(), columns[kind].type)
    return columns


def _take(new: dict[str, dict[str, Any]], kind: str, action: dict[str, Any]) -> None:
    if kind not in new:
        raise _Unknown(kind)
    own_names = {
        SCHEMA.field(kind).type.field(i).name for i in range(SCHEMA.field(kind).type.num_fields)
    }
    strange = [name for name in action if name not in own_names and action[name] is not None]
    if set(strange) - {"stats", "lastUpdated"}:
        raise _Unknown(f"{kind}.{strange}")
    if kind in {"add", "remove"}:
        path = action["path"]
        new["remove" if kind == "add" else "add"].pop(path, None)
        new[kind][path] = action
    else:
        new[kind][action["appId"] if kind == "txn" else ""] = action


def _rows(actions: Any, kind: pa.DataType) -> pa.Array:
    return pa.array([_as_pairs(action, kind) for action in actions], kind)


def _as_pairs(value: Any, kind: pa.DataType) -> Any:
    """Return the value with each object of texts as pairs, as Arrow takes a map."""
    if isinstance(value, dict) and pa.types.is_map(kind):
        return list(value.items())
    if isinstance(value, dict) and pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return {field.name: _as_pairs(value.get(field.name), field.type) for field in fields}
    return value


def _is_in(column: Any, values: pa.Array) -> np.ndarray:
    result: Any = pc.is_in(column, value_set=values.cast(pa.string()))
    return result.to_numpy(zero_copy_only=False).astype(bool)
