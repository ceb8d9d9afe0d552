"""The tail of a topic in an Iceberg snapshot: a Parquet file with records of all partitions. Pure.

The snapshot's parent is the newest snapshot of segments. It is in no other snapshot's history, so a
stream of appends does not follow it. All its objects are collected a day after their creation: the
half-day in their names keeps a broker from naming objects that are older.
"""

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.storage.codec.segment import NUMBERED_SCHEMA
from tidelog.storage.core import object_keys
from tidelog.storage.tables import iceberg_avro
from tidelog.storage.tables.iceberg import APPEND, IcebergSnapshot, SnapshotObject
from tidelog.storage.tables.iceberg_avro import PARTITION_ID, Record

HALF_DAY_MS = 43_200_000
_NAME = re.compile(r"tail-\d{20}-\d{20}-\d{1,10}-[0-9a-f]{16}\.(?:avro|parquet)")
_FIRST_ID = 2**62
"""Ids of these snapshots begin here. Those of segments are numbers of versions, far below."""
_SCHEMA = NUMBERED_SCHEMA.append(
    pa.field("partition", pa.int32(), metadata={b"PARQUET:field_id": str(PARTITION_ID).encode()})
)


class TailPlace(NamedTuple):
    """Which tail it is: the table's version below it, and the WAL's number at its end."""

    version: int
    seq: int
    now_ms: int

    def name(self, body: bytes, kind: str) -> str:
        digest = hashlib.blake2b(body, digest_size=8).hexdigest()
        half_day = self.now_ms // HALF_DAY_MS
        return f"tail-{self.version:020d}-{self.seq:020d}-{half_day}-{digest}.{kind}"


class TailSnapshot(NamedTuple):
    """A snapshot with a tail, and the objects to create, the manifest list last."""

    snapshot: IcebergSnapshot
    objects: Sequence[SnapshotObject]


def is_tail_object(path: str) -> bool:
    """Return whether a path below a topic's prefix is that of an object of a tail."""
    name = path.removeprefix(object_keys.ICEBERG)
    return name != path and _NAME.fullmatch(name) is not None


def tail_snapshot(
    parent: IcebergSnapshot | None,
    rows: Sequence[Record],
    batches: Mapping[int, Sequence[pa.RecordBatch]],
    place: TailPlace,
    committed_ms: int,
    location: str,
) -> TailSnapshot:
    """Return the snapshot of a parent, with these rows in its manifest list, and a tail.

    `batches` has the records by partition. `committed_ms` is the time of the newest record's entry.
    """
    folder = f"{location}/{object_keys.ICEBERG}"
    records = _table(batches)
    sink = io.BytesIO()
    pq.write_table(records, sink, compression="zstd", store_schema=False)
    data = SnapshotObject(place.name(sink.getvalue(), "parquet"), sink.getvalue())
    snapshot_id = _FIRST_ID + place.seq
    sequence = 1 if parent is None else parent.sequence_number + 1
    written = iceberg_avro.write_tail_manifest(
        f"{folder}{data.name}", records.num_rows, len(data.body), snapshot_id, sequence
    )
    manifest = SnapshotObject(place.name(written.body, "avro"), written.body)
    row = written.row | {"manifest_path": f"{folder}{manifest.name}"}
    header = {
        "snapshot-id": str(snapshot_id),
        "parent-snapshot-id": "null" if parent is None else str(parent.snapshot_id),
        "sequence-number": str(sequence),
        "format-version": "2",
    }
    body = iceberg_avro.write_manifest_list([*rows, row], header)
    manifest_list = SnapshotObject(place.name(body, "avro"), body)
    snapshot = IcebergSnapshot(
        snapshot_id,
        manifest_list.name,
        max(committed_ms, 0 if parent is None else parent.timestamp_ms),
        _summary(parent, records.num_rows, len(data.body)),
        [],
        None if parent is None else parent.snapshot_id,
        sequence,
    )
    return TailSnapshot(snapshot, [data, manifest, manifest_list])


def _table(batches: Mapping[int, Sequence[pa.RecordBatch]]) -> pa.Table:
    tables = []
    for number, parts in sorted(batches.items()):
        for part in parts:
            partition: Any = pa.array(np.full(part.num_rows, number, np.int32))
            tables.append(pa.Table.from_arrays([*part.columns, partition], names=_SCHEMA.names))
    return pa.concat_tables(tables).cast(_SCHEMA)


def _summary(parent: IcebergSnapshot | None, rows: int, size: int) -> dict[str, str]:
    old = {} if parent is None else parent.summary
    totals = {"total-data-files": 1, "total-records": rows, "total-files-size": size}
    return {
        "operation": APPEND,
        "added-data-files": "1",
        "added-records": str(rows),
        **{name: str(int(old.get(name, "0")) + more) for name, more in totals.items()},
        "total-delete-files": "0",
        "total-position-deletes": "0",
        "total-equality-deletes": "0",
    }
