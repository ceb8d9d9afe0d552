"""Iceberg v2's manifests and manifest lists, in Avro. Pure.

The schema has the field ids of a segment's columns (codec.segment); id 9 is the partition, which is
not in a segment: readers take it from the manifest. These ids must not reach Delta's schema, else
DuckDB returns null for nested columns of the Delta table (TABLE_SCHEMA has no metadata).

Equal arguments give equal bytes: the sync marker follows from the header.
"""

import hashlib
import io
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import fastavro
import numpy as np

from tidelog.storage.codec.record_columns import US_PER_MS
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.tables.manifest import SegmentColumns

Record = dict[str, Any]

ADDED, EXISTING, DELETED = 1, 0, 2
"""Statuses of an entry, by Iceberg's numbers."""

PARTITION_ID = 9
FIELDS: list[Record] = [
    {"id": 1, "name": "offset", "required": False, "type": "long"},
    {"id": 2, "name": "timestamp", "required": False, "type": "timestamptz"},
    {"id": 3, "name": "key", "required": False, "type": "binary"},
    {"id": 4, "name": "value", "required": False, "type": "binary"},
    {
        "id": 5,
        "name": "headers",
        "required": False,
        "type": {
            "type": "list",
            "element-id": 6,
            "element-required": False,
            "element": {
                "type": "struct",
                "fields": [
                    {"id": 7, "name": "key", "required": False, "type": "string"},
                    {"id": 8, "name": "value", "required": False, "type": "binary"},
                ],
            },
        },
    },
    {"id": PARTITION_ID, "name": "partition", "required": False, "type": "int"},
]
SCHEMA: Record = {"type": "struct", "schema-id": 0, "fields": FIELDS}
NAME_MAPPING = json.dumps(
    [
        *({"field-id": field["id"], "names": [field["name"]]} for field in FIELDS[:4]),
        {
            "field-id": 5,
            "names": ["headers"],
            "fields": [
                {
                    "field-id": 6,
                    "names": ["element", "item", "array"],
                    "fields": [
                        {"field-id": 7, "names": ["key"]},
                        {"field-id": 8, "names": ["value"]},
                    ],
                }
            ],
        },
        {"field-id": PARTITION_ID, "names": ["partition"]},
    ]
)
"""For segments of level 1, which have no field ids."""


class PartitionSpec(NamedTuple):
    """How the files of a manifest are partitioned."""

    spec_id: int
    fields: Sequence[Record]

    @property
    def as_json(self) -> Record:
        return {"spec-id": self.spec_id, "fields": list(self.fields)}


SEALED = PartitionSpec(
    0,
    [
        {
            "name": "partition",
            "transform": "identity",
            "source-id": PARTITION_ID,
            "field-id": 1000,
        }
    ],
)
"""Of segments: each has the records of one partition of the topic."""
UNPARTITIONED = PartitionSpec(1, [])
"""Of a tail's file, which has the records of all partitions."""

_INT64_MAX = 2**63 - 1
_long = struct.Struct("<q").pack
_int = struct.Struct("<i").pack


def _map_of(name: str, key_id: int, value_id: int, value: str) -> Record:
    pair = {
        "type": "record",
        "name": f"k{key_id}_v{value_id}",
        "fields": [
            {"name": "key", "type": "int", "field-id": key_id},
            {"name": "value", "type": value, "field-id": value_id},
        ],
    }
    kind = {"type": "array", "logicalType": "map", "items": pair}
    return {"name": name, "type": ["null", kind], "default": None}


def _optional(name: str, kind: Any, field_id: int) -> Record:
    return {"name": name, "type": ["null", kind], "default": None, "field-id": field_id}


def _required(name: str, kind: Any, field_id: int) -> Record:
    return {"name": name, "type": kind, "field-id": field_id}


def _entry_schema(spec: PartitionSpec) -> Any:
    values = [_optional(field["name"], "int", field["field-id"]) for field in spec.fields]
    data_file = {
        "type": "record",
        "name": "r2",
        "fields": [
            _required("content", "int", 134),
            _required("file_path", "string", 100),
            _required("file_format", "string", 101),
            _required("partition", {"type": "record", "name": "r102", "fields": values}, 102),
            _required("record_count", "long", 103),
            _required("file_size_in_bytes", "long", 104),
            _map_of("column_sizes", 117, 118, "long") | {"field-id": 108},
            _map_of("value_counts", 119, 120, "long") | {"field-id": 109},
            _map_of("null_value_counts", 121, 122, "long") | {"field-id": 110},
            _map_of("nan_value_counts", 138, 139, "long") | {"field-id": 137},
            _map_of("lower_bounds", 126, 127, "bytes") | {"field-id": 125},
            _map_of("upper_bounds", 129, 130, "bytes") | {"field-id": 128},
            _optional("sort_order_id", "int", 140),
        ],
    }
    fields = [
        _required("status", "int", 0),
        _optional("snapshot_id", "long", 1),
        _optional("sequence_number", "long", 3),
        _optional("file_sequence_number", "long", 4),
        _required("data_file", data_file, 2),
    ]
    return fastavro.parse_schema({"type": "record", "name": "manifest_entry", "fields": fields})


_ENTRY_SCHEMAS = {spec.spec_id: _entry_schema(spec) for spec in (SEALED, UNPARTITIONED)}
_PARTITION_SUMMARY = {
    "type": "record",
    "name": "r508",
    "fields": [
        _required("contains_null", "boolean", 509),
        _optional("contains_nan", "boolean", 518),
        _optional("lower_bound", "bytes", 510),
        _optional("upper_bound", "bytes", 511),
    ],
}
_LIST_SCHEMA = fastavro.parse_schema(
    {
        "type": "record",
        "name": "manifest_file",
        "fields": [
            _required("manifest_path", "string", 500),
            _required("manifest_length", "long", 501),
            _required("partition_spec_id", "int", 502),
            _required("content", "int", 517),
            _required("sequence_number", "long", 515),
            _required("min_sequence_number", "long", 516),
            _required("added_snapshot_id", "long", 503),
            _required("added_files_count", "int", 504),
            _required("existing_files_count", "int", 505),
            _required("deleted_files_count", "int", 506),
            _required("added_rows_count", "long", 512),
            _required("existing_rows_count", "long", 513),
            _required("deleted_rows_count", "long", 514),
            _optional(
                "partitions",
                {"type": "array", "items": _PARTITION_SUMMARY, "element-id": 508},
                507,
            ),
        ],
    }
)


class EntryColumns(NamedTuple):
    """Files of a manifest, one array per field, and the snapshot that added each."""

    files: SegmentColumns
    snapshot_ids: np.ndarray
    """Also their sequence numbers: both follow the table's version."""

    @classmethod
    def of(cls, files: Sequence[SegmentFile], snapshot_ids: Sequence[int]) -> "EntryColumns":
        return cls(SegmentColumns.of(files), np.array(snapshot_ids, dtype=np.int64))

    def filter(self, is_kept: np.ndarray) -> "EntryColumns":
        return EntryColumns(self.files.filter(is_kept), self.snapshot_ids[is_kept])

    def joined(self, other: "EntryColumns") -> "EntryColumns":
        ids = np.concatenate([self.snapshot_ids, other.snapshot_ids])
        return EntryColumns(self.files.joined(other.files), ids)

    def sorted(self) -> "EntryColumns":
        order = np.lexsort((self.files.base_offset, self.files.partition))
        return EntryColumns(
            SegmentColumns(
                self.files.path.take(order), *(array[order] for array in self.files[1:])
            ),
            self.snapshot_ids[order],
        )

    def between(self, first: int, end: int) -> "EntryColumns":
        return EntryColumns(self.files.between(first, end), self.snapshot_ids[first:end])


NO_ENTRIES = EntryColumns.of([], [])


class WrittenManifest(NamedTuple):
    """A manifest's object, and its row in manifest lists but for the path."""

    body: bytes
    row: Record


class ManifestContent(NamedTuple):
    """The entries of a new manifest, by status."""

    added: EntryColumns = NO_ENTRIES
    existing: EntryColumns = NO_ENTRIES
    deleted: EntryColumns = NO_ENTRIES

    @property
    def live(self) -> EntryColumns:
        return self.existing.joined(self.added)


def write_manifest(content: ManifestContent, snapshot_id: int, location: str) -> WrittenManifest:
    """Encode a manifest of segments that the snapshot writes. `location` is the table's URI."""
    records = (
        record
        for status, entries in (
            (EXISTING, content.existing),
            (ADDED, content.added),
            (DELETED, content.deleted),
        )
        for record in _entries(status, entries, snapshot_id, location)
    )
    numbers = np.concatenate([entries.files.partition for entries in content])
    live_ids = content.live.snapshot_ids
    row = _row(SEALED, snapshot_id, content)
    row["min_sequence_number"] = int(live_ids.min()) if len(live_ids) else snapshot_id
    row["partitions"] = [
        {
            "contains_null": False,
            "contains_nan": None,
            "lower_bound": _int(int(numbers.min())),
            "upper_bound": _int(int(numbers.max())),
        }
    ]
    return _written(records, SEALED, row)


def write_tail_manifest(
    uri: str, rows: int, size: int, snapshot_id: int, sequence: int
) -> WrittenManifest:
    """Encode the manifest of one file with the records of all partitions."""
    data_file = {
        "content": 0,
        "file_path": uri,
        "file_format": "PARQUET",
        "partition": {},
        "record_count": rows,
        "file_size_in_bytes": size,
    }
    record = {
        "status": ADDED,
        "snapshot_id": snapshot_id,
        "sequence_number": sequence,
        "file_sequence_number": sequence,
        "data_file": data_file,
    }
    row = _row(UNPARTITIONED, snapshot_id, ManifestContent())
    row |= {
        "sequence_number": sequence,
        "min_sequence_number": sequence,
        "added_files_count": 1,
        "added_rows_count": rows,
        "partitions": [],
    }
    return _written([record], UNPARTITIONED, row)


def read_manifest(body: bytes, name: str, location: str) -> EntryColumns:
    """Decode the files of a manifest that are not deleted. Raises Corrupt."""
    files: list[SegmentFile] = []
    snapshot_ids: list[int] = []
    for record in _records(body, name)[1]:
        if record["status"] == DELETED:
            continue
        snapshot_ids.append(record["snapshot_id"])
        data = record["data_file"]
        path = data["file_path"].removeprefix(f"{location}/")
        if path == data["file_path"]:
            raise Corrupt(name, f"names {path}, which is not below {location}")
        low, high = (_bounds(data[kind]) for kind in ("lower_bounds", "upper_bounds"))
        files.append(
            SegmentFile(
                path,
                data["partition"]["partition"],
                low[0],
                high[0] + 1,
                data["file_size_in_bytes"],
                data["record_count"],
                low[1] // US_PER_MS,
                high[1] // US_PER_MS,
            )
        )
    return EntryColumns.of(files, snapshot_ids)


def write_manifest_list(rows: Sequence[Record], header: Mapping[str, str]) -> bytes:
    return _avro(_LIST_SCHEMA, rows, header)


def read_manifest_list(body: bytes, name: str) -> tuple[dict[str, str], list[Record]]:
    """Decode a manifest list: its header and its rows. Raises Corrupt."""
    return _records(body, name)


def _entries(
    status: int, entries: EntryColumns, snapshot_id: int, location: str
) -> Iterable[Record]:
    path, *numbers = entries.files[:-1]
    columns = (path.to_pylist(), *(array.tolist() for array in numbers))
    for file_path, partition, base, end, size, rows, low_ms, high_ms, added_by in zip(
        *columns, entries.snapshot_ids.tolist(), strict=True
    ):
        # A file whose commit names no timestamps has the widest bounds.
        low_us = max(low_ms * US_PER_MS, -_INT64_MAX)
        high_us = min(high_ms * US_PER_MS + US_PER_MS - 1, _INT64_MAX)
        yield {
            "status": status,
            "snapshot_id": snapshot_id if status == DELETED else added_by,
            "sequence_number": added_by,
            "file_sequence_number": added_by,
            "data_file": {
                "content": 0,
                "file_path": f"{location}/{file_path}",
                "file_format": "PARQUET",
                "partition": {"partition": partition},
                "record_count": rows,
                "file_size_in_bytes": size,
                # Empty, not absent: PyIceberg's table of the entries needs all maps.
                "column_sizes": [],
                "nan_value_counts": [],
                "value_counts": [{"key": 1, "value": rows}, {"key": 2, "value": rows}],
                "null_value_counts": [{"key": 1, "value": 0}, {"key": 2, "value": 0}],
                "lower_bounds": [
                    {"key": 1, "value": _long(base)},
                    {"key": 2, "value": _long(low_us)},
                ],
                "upper_bounds": [
                    {"key": 1, "value": _long(end - 1)},
                    {"key": 2, "value": _long(high_us)},
                ],
            },
        }


def _row(spec: PartitionSpec, snapshot_id: int, content: ManifestContent) -> Record:
    row: Record = {
        "partition_spec_id": spec.spec_id,
        "content": 0,
        "sequence_number": snapshot_id,
        "min_sequence_number": snapshot_id,
        "added_snapshot_id": snapshot_id,
    }
    for kind, entries in content._asdict().items():
        row[f"{kind}_files_count"] = len(entries.snapshot_ids)
        row[f"{kind}_rows_count"] = int(entries.files.rows.sum())
    return row


def _written(records: Iterable[Record], spec: PartitionSpec, row: Record) -> WrittenManifest:
    header = {
        "schema": json.dumps(SCHEMA),
        "schema-id": "0",
        "partition-spec": json.dumps(list(spec.fields)),
        "partition-spec-id": str(spec.spec_id),
        "format-version": "2",
        "content": "data",
    }
    body = _avro(_ENTRY_SCHEMAS[spec.spec_id], records, header)
    return WrittenManifest(body, row | {"manifest_length": len(body)})


def _avro(schema: Any, records: Iterable[Record], header: Mapping[str, str]) -> bytes:
    """Encode a file. If `records` is a generator, other threads run between two of them."""
    marker = hashlib.blake2b(repr(sorted(header.items())).encode(), digest_size=16)
    sink = io.BytesIO()
    fastavro.writer(
        sink,
        schema,
        iter(records),
        codec="deflate",
        metadata=dict(header),
        sync_marker=marker.digest(),
    )
    return sink.getvalue()


def _records(body: bytes, name: str) -> tuple[dict[str, str], list[Record]]:
    try:
        reader = fastavro.reader(io.BytesIO(body))
        # Not `list(reader)`: it would hold the GIL for all records.
        records = [dict(cast("Record", record)) for record in reader]
        return dict(reader.metadata), records
    except (ValueError, EOFError, KeyError, IndexError, TypeError, OSError) as error:
        raise Corrupt(name, f"is no Avro file of Iceberg: {error}") from error


def _bounds(pairs: Sequence[Record]) -> tuple[int, int]:
    """Return the bounds of the offset and of the timestamp in microseconds."""
    by_id = {pair["key"]: int.from_bytes(pair["value"], "little", signed=True) for pair in pairs}
    return by_id[1], by_id[2]
