"""Iceberg snapshots of versions of a table: structure, and properties over random histories."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.storage.codec.segment import NUMBERED_SCHEMA
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, InvalidRequest
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.tables import iceberg, iceberg_avro
from tidelog.storage.tables.delta import TABLE_SCHEMA
from tidelog.storage.tables.iceberg import (
    APPEND,
    DELETE,
    OVERWRITE,
    REPLACE,
    SnapshotChain,
    SnapshotStep,
    TableIdentity,
)
from tidelog.storage.tables.iceberg_avro import ADDED, DELETED, EXISTING
from tidelog.storage.tables.iceberg_filter import DEPTH_MAX, matching
from tidelog.storage.tables.manifest import SegmentColumns, TableCommit

LOCATION = "s3://bucket/topics/t-1"
TABLE = TableIdentity("0123456789abcdef0123456789abcdef", LOCATION, 1)


def segment(partition: int, base: int, end: int, unique: str = "ab") -> SegmentFile:
    path = object_keys.segment(partition, base, end, unique)
    return SegmentFile(path, partition, base, end, 100, end - base, base * 10, end * 10)


class Tables:
    """A table's versions and the objects of its Iceberg snapshots, as a store would have them."""

    def __init__(self) -> None:
        self.commits: list[TableCommit] = []
        self.files: dict[str, SegmentFile] = {}
        self.objects: dict[str, bytes] = {}
        self.chain = SnapshotChain()

    @property
    def version(self) -> int:
        return len(self.commits)

    def commit(
        self,
        added: Sequence[SegmentFile],
        removed: Sequence[SegmentFile] = (),
        *,
        data_change: bool = True,
    ) -> None:
        gone = {file.path: file.partition for file in removed}
        self.files = {path: file for path, file in self.files.items() if path not in gone}
        self.files |= {file.path: file for file in added}
        number = self.version + 1
        commit = TableCommit(
            number, added, gone, {}, data_change=data_change, at_ms=1_000_000 + 1000 * number
        )
        self.commits.append(commit)

    def columns(self) -> SegmentColumns:
        return SegmentColumns.of(list(self.files.values()))

    def load(self, *, has_log: bool = True) -> list[iceberg.IcebergSnapshot]:
        """Make the snapshots up to now; return the new ones."""
        files = self.columns()
        commits = self.commits[max(self.chain.version, 0) :] if has_log else []
        if not iceberg.needs_commits(self.chain, files):
            commits = commits[-1:]
        at_ms = self.commits[-1].at_ms
        newest = SnapshotStep(self.version, files, at_ms, APPEND)
        made = []
        for step in iceberg.steps(self.chain, newest, commits):
            grown = iceberg.grow(self.chain, step, LOCATION)
            for written in grown.objects:
                assert self.objects.setdefault(written.name, written.body) == written.body
            self.chain = grown.chain
            made.append(grown.chain.history[-1])
        return made

    def entries(self, snapshot: iceberg.IcebergSnapshot) -> list[dict[str, Any]]:
        """All entries of a snapshot, from its objects."""
        _, rows = iceberg.history_of(self.objects[snapshot.name], snapshot.name)
        entries = []
        for row in rows:
            name = row["manifest_path"].removeprefix(f"{LOCATION}/iceberg/")
            assert row["manifest_length"] == len(self.objects[name])
            entries += iceberg_avro._records(self.objects[name], name)[1]
        return entries


def paths(entries: Sequence[dict[str, Any]], *statuses: int) -> list[str]:
    return sorted(
        entry["data_file"]["file_path"].removeprefix(f"{LOCATION}/")
        for entry in entries
        if entry["status"] in statuses
    )


def test_snapshot_of_first_version() -> None:
    tables = Tables()
    files = [segment(1, 0, 5), segment(0, 0, 10)]
    tables.commit(files)
    (snapshot,) = tables.load()
    assert snapshot.snapshot_id == snapshot.sequence_number == 2
    assert snapshot.timestamp_ms == 1_001_000, "the commit's time"
    assert snapshot.parent_id is None
    entries = tables.entries(snapshot)
    assert [entry["status"] for entry in entries] == [ADDED, ADDED]
    first = entries[0]
    assert first == {
        "status": ADDED,
        "snapshot_id": 2,
        "sequence_number": 2,
        "file_sequence_number": 2,
        "data_file": {
            "content": 0,
            "file_path": f"{LOCATION}/{files[1].path}",
            "file_format": "PARQUET",
            "partition": {"partition": 0},
            "record_count": 10,
            "file_size_in_bytes": 100,
            "column_sizes": [],
            "value_counts": [{"key": 1, "value": 10}, {"key": 2, "value": 10}],
            "null_value_counts": [{"key": 1, "value": 0}, {"key": 2, "value": 0}],
            "nan_value_counts": [],
            "lower_bounds": [{"key": 1, "value": bytes(8)}, {"key": 2, "value": bytes(8)}],
            "upper_bounds": [
                {"key": 1, "value": (9).to_bytes(8, "little")},
                {"key": 2, "value": (100_999).to_bytes(8, "little")},
            ],
            "sort_order_id": None,
        },
    }
    _, (row,) = iceberg.history_of(tables.objects[snapshot.name], snapshot.name)
    assert {key: value for key, value in row.items() if key not in ("manifest_path", "x")} == {
        "manifest_length": row["manifest_length"],
        "partition_spec_id": 0,
        "content": 0,
        "sequence_number": 2,
        "min_sequence_number": 2,
        "added_snapshot_id": 2,
        "added_files_count": 2,
        "existing_files_count": 0,
        "deleted_files_count": 0,
        "added_rows_count": 15,
        "existing_rows_count": 0,
        "deleted_rows_count": 0,
        "partitions": [
            {
                "contains_null": False,
                "contains_nan": None,
                "lower_bound": bytes(4),
                "upper_bound": b"\1\0\0\0",
            }
        ],
    }


def test_metadata() -> None:
    tables = Tables()
    empty = iceberg.table_metadata(TABLE, [])
    assert (empty["current-snapshot-id"], empty["snapshots"], empty["refs"]) == (-1, [], {})
    tables.commit([segment(0, 0, 10)])
    tables.load()
    tables.commit([segment(0, 10, 20)])
    tables.load()
    metadata = iceberg.table_metadata(TABLE, tables.chain.history)
    assert metadata["table-uuid"] == "01234567-89ab-cdef-0123-456789abcdef"
    assert metadata["last-sequence-number"] == metadata["current-snapshot-id"] == 3
    assert metadata["last-updated-ms"] == 1_002_000
    older, newest = metadata["snapshots"]
    assert (older["snapshot-id"], newest["parent-snapshot-id"]) == (2, 2)
    assert newest["summary"]["total-records"] == "20"
    assert newest["manifest-list"].startswith(f"{LOCATION}/iceberg/snap-00000000000000000002-")


def test_equal_versions_give_equal_bytes() -> None:
    objects = []
    for _ in range(2):
        tables = Tables()
        tables.commit([segment(0, 0, 10), segment(1, 0, 3)])
        tables.load()
        tables.commit([segment(0, 10, 20)])
        tables.load()
        objects.append(tables.objects)
    assert objects[0] == objects[1]


def test_ids_of_columns_are_those_of_segments_and_not_in_delta() -> None:
    def ids(schema: pa.Schema) -> dict[str, int]:
        return {field.name: int((field.metadata or {})[b"PARQUET:field_id"]) for field in schema}

    own = {field["name"]: field["id"] for field in iceberg_avro.FIELDS}
    assert own == {**ids(NUMBERED_SCHEMA), "partition": 9}
    assert list(own) == TABLE_SCHEMA.names
    headers = iceberg_avro.FIELDS[4]["type"]
    item = NUMBERED_SCHEMA.field("headers").type.value_field
    assert headers["element-id"] == int(item.metadata[b"PARQUET:field_id"])

    def has_metadata(field: pa.Field) -> bool:
        inner = [field.type.field(i) for i in range(field.type.num_fields)]
        return bool(field.metadata) or any(map(has_metadata, inner))

    assert TABLE_SCHEMA.metadata is None
    assert not any(map(has_metadata, TABLE_SCHEMA)), "DuckDB reads null for nested columns"


def test_runs_of_commits_are_snapshots() -> None:
    tables = Tables()
    first = [segment(0, 0, 10), segment(0, 10, 20)]
    tables.commit(first)
    tables.load()
    more = segment(0, 20, 30)
    tables.commit([more])
    tables.commit([segment(0, 0, 20, "cd")], first, data_change=False)
    tables.commit([], [segment(0, 0, 20, "cd")])
    appended, merged, deleted = tables.load()
    kinds = [snapshot.operation for snapshot in (appended, merged, deleted)]
    assert kinds == [APPEND, REPLACE, DELETE]
    assert [appended.snapshot_id, merged.snapshot_id, deleted.snapshot_id] == [3, 4, 5]
    assert paths(tables.entries(appended), ADDED) == sorted([more.path, *(f.path for f in first)])
    assert paths(tables.entries(merged), DELETED) == [file.path for file in first]
    assert paths(tables.entries(deleted), ADDED, EXISTING) == [more.path]


def test_compaction_of_keys_is_overwrite_and_missing_log_too() -> None:
    tables = Tables()
    first = segment(0, 0, 10)
    tables.commit([first])
    tables.load()
    tables.commit([segment(0, 0, 10, "cd")], [first])
    assert [made.operation for made in tables.load()] == [OVERWRITE]
    tables.commit([segment(0, 10, 20)])
    tables.commit([segment(0, 0, 20, "ef")], list(tables.files.values()), data_change=False)
    assert [made.operation for made in tables.load(has_log=False)] == [OVERWRITE]


def test_many_runs_end_in_bounded_snapshots() -> None:
    tables = Tables()
    tables.commit([segment(0, 0, 10)])
    tables.load()
    end = 10
    for number in range(10):
        tables.commit([segment(0, end, end + 10)])
        end += 10
        tables.commit(
            [segment(0, 0, end, f"{number:02x}")], list(tables.files.values()), data_change=False
        )
    made = tables.load()
    assert len(made) == iceberg.RUNS_MAX
    assert [snapshot.operation for snapshot in made[:3]] == [OVERWRITE, REPLACE, APPEND]


def test_manifests_stay_few_and_small() -> None:
    tables = Tables()
    for number in range(105):
        tables.commit([segment(0, 10 * number, 10 * number + 10)])
        tables.load()
        assert len(tables.chain.manifests) <= iceberg.SMALL_MANIFESTS_MAX
    assert len(tables.objects) == 210, "two objects of each load"
    tables.commit([segment(1, number, number + 1) for number in range(5_100)])
    tables.load()
    assert max(len(manifest.entries.snapshot_ids) for manifest in tables.chain.manifests) <= 5_000
    assert len(tables.chain.history) == iceberg.SNAPSHOTS_MAX
    named = iceberg.named_objects(tables.chain.history)
    assert named <= tables.objects.keys()


def test_chain_read_from_objects_is_same() -> None:
    tables = Tables()
    tables.commit([segment(0, 0, 10), segment(1, 0, 3)])
    tables.load()
    tables.commit([segment(0, 10, 20)], [segment(1, 0, 3)])
    tables.load()
    name = tables.chain.history[-1].name
    history, rows = iceberg.history_of(tables.objects[name], name)
    chain = iceberg.chain_of(history, rows, tables.objects, LOCATION)
    assert chain.history == list(tables.chain.history)
    for read, kept in zip(chain.manifests, tables.chain.manifests, strict=True):
        assert read.name == kept.name
        assert read.row == kept.row
        for left, right in zip(read.entries.files[:-1], kept.entries.files[:-1], strict=True):
            assert np.array_equal(np.asarray(left), np.asarray(right))
        assert np.array_equal(read.entries.snapshot_ids, kept.entries.snapshot_ids)


@pytest.mark.parametrize("body", [b"", b"Obj\1", b"no avro at all", b"Obj\1" + bytes(40)])
def test_damaged_object_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt, match="is no Avro file"):
        iceberg.history_of(body, "snap")


def test_snapshots_without_their_files_are_not_listed() -> None:
    tables = Tables()
    tables.commit([segment(0, 0, 10)])
    tables.load()
    tables.commit([], [segment(0, 0, 10)])
    tables.load()
    tables.commit([segment(0, 10, 20)])
    tables.load()
    history = tables.chain.history
    assert len(iceberg.readable(history, 1_002_000 + 99, 100)) == 3
    assert [one.snapshot_id for one in iceberg.readable(history, 1_002_000 + 100, 100)] == [3, 4]


def test_time_of_snapshot_does_not_go_back() -> None:
    tables = Tables()
    tables.commit([segment(0, 0, 10)])
    tables.load()
    tables.commit([segment(0, 10, 20)])
    tables.commits[-1] = tables.commits[-1]._replace(at_ms=5)
    (snapshot,) = tables.load()
    assert snapshot.timestamp_ms == 1_001_000


# -- random histories


class Deed(NamedTuple):
    kind: str
    partition: int
    count: int


deeds = st.lists(
    st.builds(
        Deed,
        st.sampled_from(["seal", "seal", "merge", "retain", "compact", "load", "load"]),
        st.integers(0, 2),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=40,
)


class World:
    """A table under seal, merge, retention, compaction and delete-records, and loads of it."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.ends = dict.fromkeys(range(3), 0)
        self.number = 0
        self.sealed_rows: dict[int, set[int]] = {partition: set() for partition in range(3)}

    def unique(self) -> str:
        self.number += 1
        return f"{self.number:04x}"

    def of(self, partition: int) -> list[SegmentFile]:
        files = [file for file in self.tables.files.values() if file.partition == partition]
        return sorted(files, key=lambda file: file.base_offset)

    def do(self, deed: Deed) -> None:
        files = self.of(deed.partition)
        if deed.kind == "seal":
            base = self.ends[deed.partition]
            self.ends[deed.partition] = end = base + 10 * deed.count
            self.tables.commit([segment(deed.partition, base, end, self.unique())])
        elif deed.kind == "merge" and len(files) > 1:
            merged = files[: deed.count + 1]
            span = merged[0].base_offset, merged[-1].end_offset
            output = segment(deed.partition, *span, self.unique())
            output = output._replace(rows=sum(file.rows for file in merged))
            self.tables.commit([output], merged, data_change=False)
        elif deed.kind == "retain" and files:
            self.tables.commit([], files[: deed.count])
        elif deed.kind == "compact" and files:
            output = segment(deed.partition, files[0].base_offset, files[0].end_offset)
            output = output._replace(
                path=object_keys.segment(
                    deed.partition, files[0].base_offset, files[0].end_offset, self.unique()
                ),
                rows=max(files[0].rows - deed.count, 1),
            )
            self.tables.commit([output], files[:1])


@settings(max_examples=80, deadline=None)
@given(deeds)
def test_snapshots_equal_table_and_statuses_are_right(history: list[Deed]) -> None:
    world = World()
    tables = world.tables
    known: set[str] = set()
    for deed in [*history, Deed("load", 0, 0)]:
        if deed.kind != "load":
            world.do(deed)
            continue
        if not tables.version or (not tables.files and tables.chain.newest is None):
            continue
        if tables.chain.version == tables.version:
            continue
        for snapshot in tables.load():
            check_snapshot(tables, snapshot, known)
            known = set(paths(tables.entries(snapshot), ADDED, EXISTING))
        assert known == set(tables.files), "as the Delta table"
        assert tables.chain.version == tables.version or not tables.chain.history
        total = int(tables.chain.history[-1].summary["total-records"])
        assert total == sum(file.rows for file in tables.files.values())
        ids = [snapshot.snapshot_id for snapshot in tables.chain.history]
        assert ids == sorted(set(ids))


def check_snapshot(tables: Tables, snapshot: iceberg.IcebergSnapshot, known: set[str]) -> None:
    """Added files are new, deleted ones were in the snapshot before, and the others stayed."""
    entries = tables.entries(snapshot)
    is_own = [entry for entry in entries if entry["snapshot_id"] == snapshot.snapshot_id]
    added, deleted = set(paths(is_own, ADDED)), set(paths(is_own, DELETED))
    live = paths(entries, ADDED, EXISTING)
    assert len(live) == len(set(live)), "no file twice"
    assert set(live) == (known - deleted) | added
    assert deleted <= known
    assert not added & known
    for entry in entries:
        assert entry["sequence_number"] <= snapshot.sequence_number
        if entry["status"] != DELETED:
            assert entry["sequence_number"] == entry["snapshot_id"]
    if snapshot.operation == APPEND:
        assert added
        assert not deleted
    if snapshot.operation == DELETE:
        assert deleted
        assert not added
    if snapshot.operation == REPLACE:
        rows = {file.path: file.rows for commit in tables.commits for file in commit.added}
        assert sum(rows[path] for path in added) == sum(rows[path] for path in deleted)


# -- filters

FILES = [segment(0, 0, 10), segment(0, 10, 20), segment(1, 0, 10)]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (None, [0, 1, 2]),
        (True, [0, 1, 2]),
        (False, []),
        ({"type": "true"}, [0, 1, 2]),
        ({"type": "eq", "term": "offset", "value": 15}, [1]),
        ({"type": "lt", "term": "offset", "value": 10}, [0, 2]),
        ({"type": "lt-eq", "term": "offset", "value": 10}, [0, 1, 2]),
        ({"type": "gt", "term": "offset", "value": 9}, [1]),
        ({"type": "gt-eq", "term": "offset", "value": 9}, [0, 1, 2]),
        ({"type": "in", "term": "offset", "values": [12, 99, 13]}, [1]),
        ({"type": "in", "term": "offset", "values": []}, []),
        ({"type": "eq", "term": "partition", "value": 1}, [2]),
        ({"type": "gt", "term": "timestamp", "value": "1970-01-01T00:00:00.150000+00:00"}, [1]),
        ({"type": "lt", "term": "timestamp", "value": "1970-01-01T00:00:00.100000+00:00"}, [0, 2]),
        ({"type": "eq", "term": "value", "value": "x"}, [0, 1, 2]),
        ({"type": "not-eq", "term": "offset", "value": 3}, [0, 1, 2]),
        ({"type": "not", "child": {"type": "eq", "term": "offset", "value": 3}}, [0, 1, 2]),
        ({"type": "eq", "term": "offset", "value": "x"}, [0, 1, 2]),
        ({"type": "eq", "term": "offset", "value": 2**80}, [0, 1, 2]),
        ({"type": "eq", "term": ["offset"], "value": 1}, [0, 1, 2]),
        ({"type": "eq", "term": "timestamp", "value": "yesterday"}, [0, 1, 2]),
        ({"type": "eq", "term": "timestamp", "value": "1970-01-01T00:00:00"}, [0, 1, 2]),
        (
            {
                "type": "and",
                "left": {"type": "gt-eq", "term": "offset", "value": 10},
                "right": {"type": "eq", "term": "partition", "value": 1},
            },
            [],
        ),
        (
            {
                "type": "or",
                "left": {"type": "gt-eq", "term": "offset", "value": 10},
                "right": {"type": "eq", "term": "partition", "value": 1},
            },
            [1, 2],
        ),
        ([1], [0, 1, 2]),
        ({"type": {}}, [0, 1, 2]),
    ],
)
def test_filter_keeps_files_that_may_match(expression: Any, expected: list[int]) -> None:
    assert np.flatnonzero(matching(expression, SegmentColumns.of(FILES))).tolist() == expected


def test_deep_filter_is_refused() -> None:
    expression: Any = True
    for _ in range(DEPTH_MAX + 1):
        expression = {"type": "or", "left": expression, "right": False}
    with pytest.raises(InvalidRequest, match="levels"):
        matching(expression, SegmentColumns.of(FILES))


def test_timestamps_at_their_bounds() -> None:
    files = SegmentColumns.of(
        [segment(0, 0, 10)._replace(timestamp_min=-(2**63) // 1000, timestamp_max=2**63 // 1000)]
    )
    expression = {"type": "eq", "term": "timestamp", "value": "2026-01-01T00:00:00+00:00"}
    assert matching(expression, files).all()
    chain = iceberg.grow(SnapshotChain(), SnapshotStep(1, files, 1, APPEND), LOCATION).chain
    json.dumps(iceberg.table_metadata(TABLE, chain.history))
