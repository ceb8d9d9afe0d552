"""Iceberg snapshots of a topic's table, beside its Delta log and over the same files. Pure.

The snapshot of a table's version has the id and the sequence number `version + 1`, and the time of
the version's commit: never the time of a request, because DuckDB reads the newest snapshot that is
not after the start of its transaction.

Snapshots are made when a client loads the table, so most versions have none. A snapshot's parent is
the newest one before it. If the versions between them only added files, or only removed some, they
are one snapshot (`append`, `delete`). If they did both, there is a snapshot for each run of commits
of one kind: readers of the appends must not see the rows of a merge twice (`replace`).

Objects are under `<topic>/iceberg/`. A manifest's name has the version that wrote it and a hash of
its bytes, and a manifest list's name has the version and a hash of the table's files. So brokers
that make the same snapshot use the same names, and a table that was repaired has other ones.

A manifest list's header has the snapshots before it, with the names of their manifests: one object
tells a reader of a topic everything, and collection what to keep.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.tables import iceberg_avro
from tidelog.storage.tables.iceberg_avro import (
    NO_ENTRIES,
    EntryColumns,
    ManifestContent,
    PartitionSpec,
    Record,
)
from tidelog.storage.tables.manifest import SegmentColumns, TableCommit

SNAPSHOTS_MAX = 100
"""Snapshots that a table lists, the newest ones."""
SNAPSHOT_MS_MAX = 7 * 86_400_000
"""Age of the oldest snapshot that a new one lists: as long as the table's log keeps its version."""
RUNS_MAX = 8
"""Snapshots that one read makes. If there are more runs of commits, the first ones become one
snapshot, whose operation is `overwrite`: a stream that is so far behind must start again."""
ENTRIES_MAX = 5_000
"""Entries of a manifest: 250 KB."""
SMALL_MANIFESTS_MAX = 50
"""Manifests of fewer than ENTRIES_MAX entries. More are written as one."""

APPEND, DELETE, REPLACE, OVERWRITE = "append", "delete", "replace", "overwrite"

_HISTORY = "tidelog.history"
_NAME = re.compile(r"(snap|manifest)-(\d{20})-[0-9a-f]{16}\.avro")


class IcebergSnapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A snapshot as the history in a manifest list's header has it.

    `name` is that of its manifest list, `manifests` are those of its manifests.
    """

    snapshot_id: int
    name: str
    timestamp_ms: int
    summary: dict[str, str]
    manifests: list[str]
    parent_id: int | None = None
    sequence: int = 0
    """0: the snapshot's id."""

    @property
    def sequence_number(self) -> int:
        return self.sequence or self.snapshot_id

    @property
    def version(self) -> int:
        """The table's version, for a snapshot of segments alone."""
        return self.snapshot_id - 1

    @property
    def operation(self) -> str:
        return self.summary["operation"]


_history = msgspec.json.Decoder(list[IcebergSnapshot])


class StoredManifest(NamedTuple):
    """A manifest: its row in manifest lists, its name, and its live entries."""

    name: str
    row: Record
    entries: EntryColumns


class SnapshotChain(NamedTuple):
    """The newest snapshot with its manifests, and the snapshots before it, the oldest first."""

    history: Sequence[IcebergSnapshot] = ()
    manifests: Sequence[StoredManifest] = ()

    @property
    def newest(self) -> IcebergSnapshot | None:
        return self.history[-1] if self.history else None

    @property
    def version(self) -> int:
        return -1 if self.newest is None else self.newest.version

    def paths(self) -> pa.Array:
        """Return the paths of all files."""
        paths = [manifest.entries.files.path for manifest in self.manifests]
        return pa.concat_arrays([pa.array([], pa.string()), *paths])


class SnapshotStep(NamedTuple):
    """The next snapshot of a chain: a version of the table, its files, and how it came about."""

    version: int
    files: SegmentColumns
    timestamp_ms: int
    operation: str


class SnapshotObject(NamedTuple):
    """An object to create below the table's `iceberg/`."""

    name: str
    body: bytes


class GrownChain(NamedTuple):
    """A chain with one more snapshot, and the objects to create, the manifest list last."""

    chain: SnapshotChain
    objects: Sequence[SnapshotObject]


class TableIdentity(NamedTuple):
    """The topic in a table's metadata. `location` is the URI of the topic's folder."""

    topic_id: str
    location: str
    created_ms: int


def folder(prefix: str) -> str:
    """Return the folder of a topic's objects of Iceberg, with a slash at the end."""
    return f"{prefix}/{object_keys.ICEBERG}"


class ObjectName(NamedTuple):
    """The parts of the name of an object below `iceberg/`."""

    version: int
    is_list: bool


def parse_name(name: str) -> ObjectName | None:
    """Parse the name of a manifest or a manifest list. For any other name, return None."""
    match = _NAME.fullmatch(name)
    return None if match is None else ObjectName(int(match[2]), match[1] == "snap")


def is_object(path: str) -> bool:
    """Return whether a path below a topic's prefix is that of an object of Iceberg."""
    name = path.removeprefix(object_keys.ICEBERG)
    return name != path and parse_name(name) is not None


def named_objects(history: Sequence[IcebergSnapshot]) -> set[str]:
    """Return the names of all objects that these snapshots need."""
    return {name for snapshot in history for name in (snapshot.name, *snapshot.manifests)}


def list_name(version: int, files: SegmentColumns, location: str) -> str:
    """Return the name of the manifest list of a version with these files.

    Its rows name the files by URI, so a copy of the store has other lists: `location` is the URI of
    the topic's folder.
    """
    digest = hashlib.blake2b(f"{location}\n".encode(), digest_size=8)
    paths: list[Any] = files.path.to_pylist()
    for path in sorted(paths):
        digest.update(f"{path}\n".encode())
    return f"snap-{version:020d}-{digest.hexdigest()}.avro"


# -- from versions to snapshots


def needs_commits(chain: SnapshotChain, files: SegmentColumns) -> bool:
    """Return whether `steps` needs the commits since the chain's newest snapshot."""
    if chain.newest is None:
        return False
    is_new, is_gone = _changes(chain.paths(), files.path)
    return bool(is_new.any() and is_gone.any())


def steps(
    chain: SnapshotChain,
    newest: SnapshotStep,
    commits: Sequence[TableCommit],
) -> list[SnapshotStep]:
    """Return the snapshots that lead from a chain to the table's version `newest`.

    `commits` are those after the chain's newest snapshot up to this version, the oldest first, if
    `needs_commits`. If commits are missing, or do not lead to the files of `newest`, return one
    snapshot. The operation of `newest` is that of a chain without a snapshot.
    """
    if chain.newest is None:
        return [newest]
    is_new, is_gone = _changes(chain.paths(), newest.files.path)
    if not is_gone.any():
        return [newest._replace(operation=APPEND)]
    if not is_new.any():
        return [newest._replace(operation=DELETE)]
    numbers = [commit.version for commit in commits]
    if numbers != list(range(chain.version + 1, newest.version + 1)):
        return [newest._replace(operation=OVERWRITE)]
    entries = [manifest.entries.files for manifest in chain.manifests]
    files = SegmentColumns.of([])
    for columns in entries:
        files = files.joined(columns)
    replayed = list(_replayed(files, _runs(commits)))
    is_new, is_gone = _changes(replayed[-1].files.path, newest.files.path)
    if is_new.any() or is_gone.any():
        return [newest._replace(operation=OVERWRITE)]
    return replayed


class _CommitRun(NamedTuple):
    """Successive commits of one kind."""

    operation: str
    commits: Sequence[TableCommit]


def _operation_of(commit: TableCommit) -> str | None:
    if commit.added and commit.removed:
        return OVERWRITE if commit.data_change else REPLACE
    if commit.removed:
        return DELETE
    return APPEND if commit.added else None


def _runs(commits: Sequence[TableCommit]) -> list[_CommitRun]:
    runs: list[_CommitRun] = []
    for commit in commits:
        operation = _operation_of(commit)
        if operation is None:
            continue
        if runs and runs[-1].operation == operation:
            runs[-1] = _CommitRun(operation, [*runs[-1].commits, commit])
        else:
            runs.append(_CommitRun(operation, [commit]))
    surplus = len(runs) - RUNS_MAX
    if surplus > 0:
        oldest = [commit for run in runs[: surplus + 1] for commit in run.commits]
        runs = [_CommitRun(OVERWRITE, oldest), *runs[surplus + 1 :]]
    return runs


def _replayed(files: SegmentColumns, runs: Sequence[_CommitRun]) -> Iterator[SnapshotStep]:
    for run in runs:
        added: dict[str, Any] = {}
        removed: set[str] = set()
        for commit in run.commits:
            for path in commit.removed:
                if added.pop(path, None) is None:
                    removed.add(path)
            added.update((file.path, file) for file in commit.added)
        is_gone = _is_in(files.path, pa.array(sorted(removed), pa.string()))
        files = files.filter(~is_gone).joined(SegmentColumns.of(list(added.values())))
        last = run.commits[-1]
        yield SnapshotStep(last.version, files, last.at_ms, run.operation)


def grow(chain: SnapshotChain, step: SnapshotStep, location: str) -> GrownChain:
    """Return the chain with the next snapshot. `location` is the URI of the topic's folder."""
    snapshot_id = step.version + 1
    contents, untouched = _contents(chain, step, snapshot_id)
    manifests = list(untouched)
    objects: list[SnapshotObject] = []
    for content in contents:
        written = iceberg_avro.write_manifest(content, snapshot_id, location)
        name = _manifest_name(step.version, written.body)
        row = written.row | {"manifest_path": f"{location}/{object_keys.ICEBERG}{name}"}
        manifests.append(StoredManifest(name, row, content.live))
        objects.append(SnapshotObject(name, written.body))
    parent = chain.newest
    since_ms = 0 if parent is None else parent.timestamp_ms
    snapshot = IcebergSnapshot(
        snapshot_id,
        list_name(step.version, step.files, location),
        max(step.timestamp_ms, since_ms),
        _summary(step, contents),
        [manifest.name for manifest in manifests],
        None if parent is None else parent.snapshot_id,
    )
    grown = SnapshotChain((*_listed(chain.history, snapshot), snapshot), manifests)
    rows = [manifest.row for manifest in manifests]
    body = iceberg_avro.write_manifest_list(rows, _header(grown.history))
    return GrownChain(grown, [*objects, SnapshotObject(snapshot.name, body)])


def unwritten(step: SnapshotStep, name: str) -> IcebergSnapshot:
    """Return a snapshot without a parent, for clients that read no manifest."""
    content = ManifestContent(EntryColumns(step.files, np.zeros(len(step.files.path), np.int64)))
    return IcebergSnapshot(step.version + 1, name, step.timestamp_ms, _summary(step, [content]), [])


def _manifest_name(version: int, body: bytes) -> str:
    digest = hashlib.blake2b(body, digest_size=8).hexdigest()
    return f"manifest-{version:020d}-{digest}.avro"


def _contents(
    chain: SnapshotChain, step: SnapshotStep, snapshot_id: int
) -> tuple[list[ManifestContent], list[StoredManifest]]:
    """Return the new manifests of a snapshot, and those of its parent that it takes over."""
    is_new, _ = _changes(chain.paths(), step.files.path)
    new_files = step.files.filter(is_new)
    added = EntryColumns(new_files, np.full(len(new_files.path), snapshot_id, np.int64))
    existing = deleted = NO_ENTRIES
    untouched: list[StoredManifest] = []
    small: list[StoredManifest] = []
    for manifest in chain.manifests:
        is_kept = _is_in(manifest.entries.files.path, step.files.path)
        if not is_kept.all():
            existing = existing.joined(manifest.entries.filter(is_kept))
            deleted = deleted.joined(manifest.entries.filter(~is_kept))
        elif len(is_kept) >= ENTRIES_MAX:
            untouched.append(manifest)
        elif len(is_kept):
            small.append(manifest)
    if len(small) >= SMALL_MANIFESTS_MAX:
        for manifest in small:
            existing = existing.joined(manifest.entries)
    else:
        untouched += small
    content = ManifestContent(added.sorted(), existing.sorted(), deleted.sorted())
    return list(_split(content)), untouched


def _split(content: ManifestContent) -> Iterator[ManifestContent]:
    """Divide entries into manifests of at most ENTRIES_MAX entries of one status."""
    if sum(len(entries.snapshot_ids) for entries in content) <= ENTRIES_MAX:
        if any(len(entries.snapshot_ids) for entries in content):
            yield content
        return
    for status, entries in content._asdict().items():
        for first in range(0, len(entries.snapshot_ids), ENTRIES_MAX):
            end = min(first + ENTRIES_MAX, len(entries.snapshot_ids))
            yield ManifestContent(**{status: entries.between(first, end)})


def _summary(step: SnapshotStep, contents: Sequence[ManifestContent]) -> dict[str, str]:
    def sums(kind: str) -> tuple[int, int]:
        entries = [getattr(content, kind) for content in contents]
        files = sum(len(part.snapshot_ids) for part in entries)
        return files, sum(int(part.files.rows.sum()) for part in entries)

    added_files, added_rows = sums("added")
    deleted_files, deleted_rows = sums("deleted")
    numbers = {
        "added-data-files": added_files,
        "added-records": added_rows,
        "deleted-data-files": deleted_files,
        "deleted-records": deleted_rows,
        "total-data-files": len(step.files.path),
        "total-records": int(step.files.rows.sum()),
        "total-files-size": int(step.files.size.sum()),
        "total-delete-files": 0,
        "total-position-deletes": 0,
        "total-equality-deletes": 0,
    }
    return {"operation": step.operation, **{name: str(value) for name, value in numbers.items()}}


def _listed(
    history: Sequence[IcebergSnapshot], snapshot: IcebergSnapshot
) -> Sequence[IcebergSnapshot]:
    """Return the snapshots before a new one that it lists."""
    oldest_ms = snapshot.timestamp_ms - SNAPSHOT_MS_MAX
    listed = [older for older in history if older.timestamp_ms >= oldest_ms or older is history[-1]]
    return listed[-(SNAPSHOTS_MAX - 1) :]


def _header(history: Sequence[IcebergSnapshot]) -> dict[str, str]:
    snapshot = history[-1]
    parent = snapshot.parent_id
    return {
        "snapshot-id": str(snapshot.snapshot_id),
        "parent-snapshot-id": "null" if parent is None else str(parent),
        "sequence-number": str(snapshot.sequence_number),
        "format-version": "2",
        _HISTORY: msgspec.json.encode(history).decode(),
    }


def _changes(old: pa.Array, new: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return which new paths are not among the old ones, and which old ones are gone."""
    return ~_is_in(new, old), ~_is_in(old, new)


def _is_in(paths: pa.Array, values: pa.Array) -> np.ndarray:
    result: Any = pc.is_in(paths, value_set=values)
    return result.to_numpy(zero_copy_only=False).astype(bool)


# -- from objects


def history_of(body: bytes, name: str) -> tuple[list[IcebergSnapshot], list[Record]]:
    """Decode a manifest list: its snapshot and those before it, and its rows. Raises Corrupt."""
    header, rows = iceberg_avro.read_manifest_list(body, name)
    try:
        history = _history.decode(header.get(_HISTORY, ""))
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(name, f"has no history of snapshots: {error}") from error
    if not history:
        raise Corrupt(name, "has no history of snapshots")
    return history, rows


def chain_of(
    history: Sequence[IcebergSnapshot],
    rows: Sequence[Record],
    bodies: Mapping[str, bytes],
    location: str,
) -> SnapshotChain:
    """Return the chain of a manifest list, from the objects of its manifests. Raises Corrupt."""
    manifests = []
    for row in rows:
        name = row["manifest_path"].rpartition("/")[2]
        entries = iceberg_avro.read_manifest(bodies[name], name, location)
        manifests.append(StoredManifest(name, row, entries))
    return SnapshotChain(history, manifests)


# -- metadata


def readable(
    history: Sequence[IcebergSnapshot], now_ms: int, file_grace_ms: int
) -> list[IcebergSnapshot]:
    """Return the snapshots whose files are all in the store.

    Collection may have deleted those that a later snapshot removed, if it is older than the grace.
    """
    first = 0
    for index, snapshot in enumerate(history):
        if snapshot.operation != APPEND and now_ms - snapshot.timestamp_ms >= file_grace_ms:
            first = index
    return list(history[first:])


def metadata_name(snapshot: IcebergSnapshot | None) -> str:
    """Return the name of a table's metadata. It is in the answer alone, not in the store.

    It differs for each snapshot: clients take the metadata as unchanged if its name is.
    """
    name = "none" if snapshot is None else snapshot.name.removesuffix(".avro")
    return f"{object_keys.ICEBERG}{name}.metadata.json"


def table_metadata(
    table: TableIdentity,
    history: Sequence[IcebergSnapshot],
    specs: Sequence[PartitionSpec] = (iceberg_avro.SEALED,),
) -> Record:
    """Return a table's metadata, of version 2, as an object of JSON."""
    newest = history[-1] if history else None
    snapshots = [_snapshot_json(table, snapshot) for snapshot in history]
    newest_ms = table.created_ms if newest is None else newest.timestamp_ms
    return {
        "format-version": 2,
        "table-uuid": _uuid(table.topic_id),
        "location": table.location,
        "last-sequence-number": max([0, *(snapshot.sequence_number for snapshot in history)]),
        "last-updated-ms": newest_ms,
        "last-column-id": iceberg_avro.PARTITION_ID,
        "current-schema-id": 0,
        "schemas": [iceberg_avro.SCHEMA],
        "default-spec-id": 0,
        "partition-specs": [spec.as_json for spec in specs],
        "last-partition-id": 1000,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {"schema.name-mapping.default": iceberg_avro.NAME_MAPPING},
        "current-snapshot-id": -1 if newest is None else newest.snapshot_id,
        "refs": {}
        if newest is None
        else {"main": {"snapshot-id": newest.snapshot_id, "type": "branch"}},
        "snapshots": snapshots,
        "snapshot-log": [
            {"timestamp-ms": snapshot.timestamp_ms, "snapshot-id": snapshot.snapshot_id}
            for snapshot in history
        ],
        "metadata-log": [],
    }


def _uuid(topic_id: str) -> str:
    """Return a topic's id, which is 32 hexadecimal digits, in the form of a UUID."""
    ends = (0, 8, 12, 16, 20, 32)
    return "-".join(topic_id[start:end] for start, end in pairwise(ends))


def _snapshot_json(table: TableIdentity, snapshot: IcebergSnapshot) -> Record:
    parent = snapshot.parent_id
    return {
        "snapshot-id": snapshot.snapshot_id,
        **({} if parent is None else {"parent-snapshot-id": parent}),
        "sequence-number": snapshot.sequence_number,
        "timestamp-ms": snapshot.timestamp_ms,
        "manifest-list": f"{table.location}/{object_keys.ICEBERG}{snapshot.name}",
        "summary": snapshot.summary,
        "schema-id": 0,
    }


def metadata_json(metadata: Record) -> bytes:
    """Return the text of a table's metadata."""
    return json.dumps(metadata, separators=(",", ":")).encode()
