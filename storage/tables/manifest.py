"""The manifest of a topic's table: segments by offset, and transactions as locks. Pure.

`Table` is the interface, `MemoryManifest` its reference implementation; storage/tables/delta.py
implements it on Delta Lake. A commit adds files together with application transactions, which are
the lock between sealers. The version of a partition's seal transaction is the end offset of the
partition in the table. A commit that adds [base, end) must find the version `base`, and sets it to
`end` (I7). Each implementation checks two things: the version in the loaded table, and that no
later commit has the same transaction. Delta checks only the second, from the loaded version on.
This is not enough: if a reader refreshes the table while a sealer writes its files, the check
misses another sealer's commit before that refresh.

Commits that remove files (retention, merge, compaction) use another transaction of the partition as
their lock. Its version is a counter. Without this lock, two commits that remove one file would both
succeed, and the table would have the rows twice. Sealers only add files and do not use that
transaction.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.storage.codec.record_columns import US_PER_MS
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, LogError, TableInDoubt
from tidelog.storage.core.model import SegmentFile

_SEGMENT = r"^partition=(?P<partition>\d{1,9})/(?P<base>\d{20})-(?P<end>\d{20})-[0-9a-f]+\.parquet$"
"""The form that `object_keys.parse_segment` parses. Arrow matches 20,000 paths in 8 ms without the
GIL."""
_MAINTENANCE = "care-"
_UNKNOWN_MS = 2**63 - 1
"""Commit time of a segment if its commit names no time. Retention keeps such a segment."""
NO_RESET: Mapping[str, int] = MappingProxyType({})


class ManifestConflict(LogError):
    """The refusal of a commit that does not fit the table, because another commit was first.

    Nothing has changed: refresh and start again.
    """


def maintenance_app_id(partition: int) -> str:
    """Return the application id of commits that remove the partition's files.

    Its version is a counter.
    """
    return f"{_MAINTENANCE}{partition}"


def seal_app_id(partition: int) -> str:
    """Return the application id of a partition's seal; its version is the table's end offset."""
    return f"seal-{partition}"


def clean_app_id(partition: int) -> str:
    """Return the application id of key compaction.

    Its version in a table is the offset up to which key compaction ran: rows may be missing only
    below this offset.
    """
    return f"clean-{partition}"


def lost_app_id(partition: int) -> str:
    """Return the application id of lost records.

    Its version in a table is the end offset of the newest records that were given up before they
    were sealed. A segment that begins below this offset may not have all rows.
    """
    return f"lost-{partition}"


class Table(Protocol):
    """One topic's manifest, at the version that was last loaded. Safe for concurrent tasks.

    The first call loads the newest version; `refresh`, `add` and `replace` load it again. A topic
    without a seal has no table, and its version is -1. Methods raise `Unavailable` if the store
    cannot be read.
    """

    @property
    def version(self) -> int:
        """The loaded version."""

    async def segments(self, partition: int) -> "SegmentIndex":
        """Return the partition's segments.

        Raises Corrupt, for this partition only, if segments overlap or a file is no segment.
        """

    async def refresh(self) -> None:
        """Load the newest version."""

    async def transaction_version(self, app_id: str) -> int | None:
        """Return the last version of an application's transaction, or None without one."""

    async def transaction_versions(self, app_ids: Sequence[str]) -> Mapping[str, int | None]:
        """Return `transaction_version` of each application: thousands in a few requests."""

    async def add(self, files: Sequence[SegmentFile], transactions: Mapping[str, int]) -> None:
        """Commit all files and all transactions, or nothing.

        Returns when the commit is durable and loaded. Idempotent: a retry with the same files
        succeeds.

        If a partition's seal is in `transactions`, the files of this partition must begin at its
        end in the table, have no hole and end at the given version. The version of any other
        transaction must grow.

        Raises ManifestConflict if nothing was added and nothing will be: refresh and start again.
        Raises CommitUnknown if the commit may be done or may still happen. After a cancellation,
        too, it may be done or may still happen. The commit can no longer happen when
        `transaction_version` has changed after a `refresh`. A retry with the same files is safe.
        """

    async def replace(
        self,
        removed: Sequence[SegmentFile],
        added: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        *,
        data_change: bool,
        reset: Mapping[str, int] = NO_RESET,
    ) -> None:
        """Commit the replacement of `removed` by `added`, or nothing.

        `transactions` holds each partition's maintenance transaction, one above the version from
        which the caller made its plan. `data_change` is False if the rows stay the same: streaming
        readers then skip the commit. `reset` sets other transactions to any version, for a repair.

        The objects of `removed` stay for active readers; `removed_since` finds the objects to keep.
        Raises the errors of `add`. Raises ManifestConflict also if one of `removed` is not in the
        table. Without `added`, it returns also if another commit has removed all of `removed`,
        maybe in exchange for other files: then the caller looks at the new version.
        """

    async def paths(self) -> set[str]:
        """Return the paths of all files of the loaded version, segments or not."""

    async def removed_since(self, since_ms: int) -> "list[Removal]":
        """Return the commits at or after `since_ms`, by the store's clock, that removed files."""

    async def newest(self) -> "ManifestVersion":
        """Return the loaded version as it is in the table.

        `segments` returns only the files that readers may use (storage.tables.foreign_commits).
        """

    async def commits(self, count: int) -> "list[TableCommit]":
        """Return the last `count` commits up to the loaded version, the newest first.

        Returns fewer if the table's log does not have them any more. Raises Corrupt.
        """

    async def files_at(self, version: int) -> "SegmentColumns | None":
        """Return the files of an older version, or None if the table's log does not have it."""

    async def log_retention_ms(self) -> int | None:
        """Return the table's property `delta.logRetentionDuration` in ms.

        If its value cannot be parsed, or the table has no log in the store, return None.
        """


class Removal(NamedTuple):
    """One commit that removed files, and the files that it added in their place."""

    at_ms: int
    removed: frozenset[str]
    added: frozenset[str]


class TableCommit(NamedTuple):
    """One version of a table: the files that it added and removed, and its author.

    `base_offset` of an added file is -1 if its path is not the path of a segment; `removed` has the
    partition of each path.
    """

    version: int
    added: Sequence[SegmentFile]
    removed: Mapping[str, int]
    transactions: Mapping[str, int]
    author: str = ""
    data_change: bool = True
    """False if the writer of the commit says that no row changed, but rows were moved to other
    files."""
    added_ms: Sequence[int] = ()
    """When each added file was committed, by its writer's wall clock."""
    is_plain: bool = True
    """Whether the commit has only files and transactions, in the form of the log's own commits."""
    at_ms: int = 0
    """When it was committed, by its writer's wall clock; 0 if it does not say."""

    @property
    def is_foreign(self) -> bool:
        """Return whether another program changed files.

        The log's own commits add only segments, and have a transaction for each partition that they
        change.
        """
        if any(file.base_offset < 0 for file in self.added):
            return True
        cared = {number for number in self.removed.values() if not self._has_lock(number)}
        sealed = {file.partition for file in self.added if not self._has_lock(file.partition)}
        return bool(cared) or any(seal_app_id(number) not in self.transactions for number in sealed)

    def _has_lock(self, number: int) -> bool:
        return maintenance_app_id(number) in self.transactions


class TableChange(NamedTuple):
    """The content of one commit before it has a version."""

    added: Sequence[SegmentFile]
    transactions: Mapping[str, int]
    removed: Sequence[SegmentFile] = ()
    data_change: bool = True
    reset: Mapping[str, int] = NO_RESET

    def is_in(self, view: "ManifestVersion") -> bool:
        """Return whether this change is done. Paths of added files are unique to their commit."""
        if not self.removed:
            return view.has(self.added)
        return view.shows(self.added, self.removed)

    @property
    def all_transactions(self) -> dict[str, int]:
        return {**self.transactions, **self.reset}


def removed_paths(removals: Iterable[Removal]) -> set[str]:
    """Return the paths of all files that these commits removed."""
    return {path for removal in removals for path in removal.removed}


class SegmentColumns(NamedTuple):
    """Segment files, one array per field. `base_offset` is -1 if a file is no segment."""

    path: pa.Array
    partition: np.ndarray
    base_offset: np.ndarray
    end_offset: np.ndarray
    size: np.ndarray
    rows: np.ndarray
    timestamp_min: np.ndarray
    timestamp_max: np.ndarray
    committed_ms: np.ndarray
    """When a commit added the segment, by the wall clock of the commit's writer; not in
    SegmentFile."""

    @classmethod
    def of(
        cls, files: Sequence[SegmentFile], committed_ms: Sequence[int] | None = None
    ) -> "SegmentColumns":
        rows = (file if _is_segment(file) else file._replace(base_offset=-1) for file in files)
        numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(-1, 7)
        unknown = [_UNKNOWN_MS] * len(files)
        committed = np.array(unknown if committed_ms is None else committed_ms, dtype=np.int64)
        paths = pa.array([file.path for file in files], pa.string())
        return cls(paths, *np.column_stack([numbers, committed]).T)

    @classmethod
    def of_adds(cls, adds: pa.Table) -> "SegmentColumns":
        """Convert deltalake's `get_add_actions(flatten=True)`.

        Offsets come from the path, because statistics are only bounds. If the listed partition
        differs from the path's, the file counts as no segment, because Delta's log, which has no
        checksum, may be damaged. Raises pa.ArrowException, KeyError.
        """
        path = adds.column("path").combine_chunks()
        name = pc.extract_regex(path, _SEGMENT)
        partition = _numbers(adds.column("partition.partition"), -1)
        is_there = _numbers(pc.struct_field(name, "partition"), -1) == partition
        return cls(
            path,
            partition,
            np.where(is_there, _numbers(pc.struct_field(name, "base"), -1), -1),
            _numbers(pc.struct_field(name, "end"), -1),
            _numbers(adds.column("size_bytes"), 0),
            _numbers(adds.column("num_records"), 0),
            # Missing if a timestamp has no ISO form: then the file may hold any timestamp.
            _numbers(adds.column("min.timestamp"), -(2**63)) // US_PER_MS,
            _numbers(adds.column("max.timestamp"), 2**63 - 1) // US_PER_MS,
            _numbers(adds.column("modification_time"), _UNKNOWN_MS),
        )

    def newest_ms(self, now_ms: int) -> np.ndarray:
        """Return for each segment the time that decides its age.

        This is the time of its newest record, or of its commit if the record's timestamp is after
        `now_ms`. Such a timestamp does not show the age: until the time of the timestamp, retention
        would keep the segment and all segments after it.
        """
        return np.where(self.timestamp_max > now_ms, self.committed_ms, self.timestamp_max)

    def sorted(self) -> "SegmentColumns":
        order = np.lexsort((self.base_offset, self.partition))
        return SegmentColumns(self.path.take(order), *(array[order] for array in self[1:]))

    def filter(self, is_kept: np.ndarray) -> "SegmentColumns":
        if is_kept.all():
            return self
        return SegmentColumns(
            self.path.filter(pa.array(is_kept)), *(array[is_kept] for array in self[1:])
        )

    def joined(self, other: "SegmentColumns") -> "SegmentColumns":
        return SegmentColumns(
            pa.concat_arrays([self.path, other.path]),
            *(np.concatenate(pair) for pair in zip(self[1:], other[1:], strict=True)),
        )

    def of_offsets(self, start: int, end: int) -> "SegmentColumns":
        """Return the segments that hold offsets of [start, end).

        `self` has the segments of one partition, sorted.
        """
        first = int(np.searchsorted(self.end_offset, start, side="right"))
        last = int(np.searchsorted(self.base_offset, end, side="left"))
        return self.between(first, max(last, first))

    def between(self, first: int, end: int) -> "SegmentColumns":
        """Return positions [first, end), without a copy."""
        path, *numbers = self
        return SegmentColumns(path[first:end], *(array[first:end] for array in numbers))


def in_no_segment(offset: int, end: int) -> str:
    """Return the words for a hole: the offsets [offset, end)."""
    return f"{_range(offset, end)} in no segment"


def in_two_segments(offset: int, end: int) -> str:
    """Return the words for an overlap: the offsets [offset, end)."""
    return f"{_range(offset, end)} in two segments"


def _range(offset: int, end: int) -> str:
    return f"offsets {offset} to {end - 1} are" if end - offset > 1 else f"offset {offset} is"


def _is_segment(file: SegmentFile) -> bool:
    """Return whether the path is a segment's and names the partition that lists the file."""
    name = object_keys.parse_segment(file.path)
    return name is not None and name.partition == file.partition


def _numbers(column: pa.Array | pa.ChunkedArray, missing: int) -> np.ndarray:
    integers: Any = column.cast(pa.int64())
    return integers.fill_null(missing).to_numpy()


class SegmentIndex:
    """The segments of one partition in offset order, none overlapping; immutable."""

    def __init__(self, columns: SegmentColumns) -> None:
        self.columns = columns
        """All segments as arrays, for plans over 100,000 segments. Read-only."""
        self._newest = np.maximum.accumulate(columns.timestamp_max)  # in a file and all before it

    def __len__(self) -> int:
        return len(self.columns.path)

    def __getitem__(self, position: int) -> SegmentFile:
        path, *numbers = (array[position] for array in self.columns[:-1])
        return SegmentFile(path.as_py(), *map(int, numbers))

    def __iter__(self) -> Iterator[SegmentFile]:
        path, *numbers = self.columns[:-1]
        return map(SegmentFile, path.to_pylist(), *(array.tolist() for array in numbers))

    @property
    def end_offset(self) -> int:
        return self[len(self) - 1].end_offset if len(self) else 0

    def at_or_after(self, offset: int) -> SegmentFile | None:
        """Return the segment that covers `offset`, else the next segment.

        After the last, return None.
        """
        position = int(np.searchsorted(self.columns.end_offset, offset, side="right"))
        return self[position] if position < len(self) else None

    def between(self, start: int, end: int) -> list[SegmentFile]:
        """Return the segments that hold offsets of [start, end)."""
        return list(SegmentIndex(self.columns.of_offsets(start, end)))

    def covered_to(self, offset: int) -> int:
        """Return the end of the run without a hole that begins with the segment of `offset`."""
        base, end = self.columns.base_offset, self.columns.end_offset
        first = int(np.searchsorted(end, offset, side="right"))
        gaps = np.flatnonzero(base[first + 1 :] != end[first:-1])
        return int(end[first + int(gaps[0])] if len(gaps) else end[-1])

    def since(self, timestamp: int) -> Iterator[SegmentFile]:
        """Yield the segments with records at or after `timestamp` (ms), in offset order."""
        for position in range(int(np.searchsorted(self._newest, timestamp)), len(self)):
            if self.columns.timestamp_max[position] >= timestamp:
                yield self[position]


async def segments_to(table: Table, partition: int, sealed_end: int, prefix: str) -> SegmentIndex:
    """Return a partition's segments of the loaded version.

    Raises Corrupt if both the segments and the seals of the table at `prefix` end before
    `sealed_end`.
    """
    index = await table.segments(partition)
    if index.end_offset < sealed_end and await sealed_to(table, partition) < sealed_end:
        raise Corrupt(
            f"{prefix}/_delta_log",
            f"partition {partition} ends at {index.end_offset}, the WAL is sealed to {sealed_end}",
        )
    return index


async def sealed_to(table: Table, partition: int) -> int:
    """Return the end of a partition's seals, also if retention removed the newest segment."""
    return await table.transaction_version(seal_app_id(partition)) or 0


class ManifestVersion:
    """The files of one version of a table; a partition's index is built on first use."""

    def __init__(self, version: int, prefix: str, columns: SegmentColumns) -> None:
        self.version = version
        self.prefix = prefix
        self.columns = columns.sorted()
        self._indexes: dict[int, SegmentIndex] = {}
        partition, base, end = (
            self.columns.partition,
            self.columns.base_offset,
            self.columns.end_offset,
        )
        is_next = partition[1:] == partition[:-1]
        self._is_wrong = base < 0
        self._is_wrong[1:] |= is_next & (base[1:] < end[:-1])
        # A wrong file may have no offset range, so a gap after it is not counted as a hole.
        self._is_hole = np.zeros(len(base), bool)
        self._is_hole[1:] = is_next & (base[1:] > end[:-1]) & ~self._is_wrong[:-1]

    def after(self, commit: TableCommit) -> "ManifestVersion":
        """Return the next version: this one with a plain commit. Takes O(files of the table)."""
        old, removed = self.columns, pa.array(list(commit.removed), pa.string())
        is_left = ~pc.is_in(old.path, value_set=removed).to_numpy(zero_copy_only=False)
        added = SegmentColumns.of(commit.added, commit.added_ms)
        return ManifestVersion(commit.version, self.prefix, old.filter(is_left).joined(added))

    def segments(self, partition: int) -> SegmentIndex:
        """Return a partition's segments.

        Raises TableInDoubt if files overlap or one is no segment.
        """
        index = self._indexes.get(partition)
        if index is None:
            first, end = self._between(partition)
            if self._is_wrong[first:end].any():
                why = self._wrong(first + int(np.argmax(self._is_wrong[first:end])))
                raise TableInDoubt(self.prefix, self.version, why)
            index = self._indexes[partition] = SegmentIndex(self.columns.between(first, end))
        return index

    def is_readable(self, partition: int | None = None) -> bool:
        """Return whether all files of a partition are segments that do not overlap.

        If `partition` is None, check all partitions.
        """
        first, end = (0, None) if partition is None else self._between(partition)
        return not self._is_wrong[first:end].any()

    def fault(self) -> str | None:
        """Return a text about the first file that is no segment or overlaps.

        Else return one about the first hole, or None.
        """
        if self._is_wrong.any():
            return self._wrong(int(np.argmax(self._is_wrong)))
        if self._is_hole.any():
            index = int(np.argmax(self._is_hole))
            ends, bases = self.columns.end_offset, self.columns.base_offset
            partition_name = f"partition {self.columns.partition[index]}"
            return f"{partition_name}: {in_no_segment(ends[index - 1], bases[index])}"
        return None

    def spans(self) -> dict[int, tuple[int, int]]:
        """Return the first and the end offset of each partition that has files."""
        numbers, first, counts = np.unique(
            self.columns.partition, return_index=True, return_counts=True
        )
        bases = self.columns.base_offset[first].tolist()
        ends = self.columns.end_offset[first + counts - 1].tolist()
        return dict(zip(numbers.tolist(), zip(bases, ends, strict=True), strict=True))

    def files(self, partition: int | None = None) -> list[SegmentFile]:
        """Return the files of a partition (None: all), also files that are no segments."""
        first, end = (0, len(self.columns.path)) if partition is None else self._between(partition)
        return list(SegmentIndex(self.columns.between(first, end)))

    def has(self, files: Sequence[SegmentFile]) -> bool:
        """Return whether all the files are in the table. If `files` is empty, return False."""
        return bool(files) and self._count(files) == len(files)

    def shows(self, added: Sequence[SegmentFile], removed: Sequence[SegmentFile]) -> bool:
        """Return whether the commit that adds and removes these files is done.

        Paths of added files are unique to their commit.
        """
        return self._count(added) == len(added) and not self._count(removed)

    def _count(self, files: Sequence[SegmentFile]) -> int:
        paths = pa.array([file.path for file in files], pa.string())
        return pc.is_in(paths, value_set=self.columns.path).true_count

    def paths(self) -> set[str]:
        paths: list[Any] = self.columns.path.to_pylist()
        return set(paths)

    def _between(self, partition: int) -> tuple[int, int]:
        first, end = np.searchsorted(self.columns.partition, [partition, partition + 1])
        return int(first), int(end)

    def _wrong(self, index: int) -> str:
        path = self.columns.path[index].as_py()
        partition_name = f"partition {self.columns.partition[index]}"
        return f"{partition_name}: {path!r} is not a segment, or overlaps the one before it"


def check_transactions(
    files: Sequence[SegmentFile],
    transactions: Mapping[str, int],
    versions: Mapping[str, int | None],
) -> None:
    """Raise ManifestConflict unless the commit fits a table with these transaction `versions`."""
    assert transactions, "a commit without a transaction could be applied twice"
    ranges: dict[str, list[tuple[int, int]]] = {}
    for file in files:
        if maintenance_app_id(file.partition) not in transactions:  # else it replaces segments
            span = (file.base_offset, file.end_offset)
            ranges.setdefault(seal_app_id(file.partition), []).append(span)
    for app_id, version in transactions.items():
        now = versions[app_id] or 0
        reached = None
        for base, end in sorted(ranges.get(app_id, [])):
            assert reached in {None, base}, f"{app_id}: no file begins at {reached}"
            if reached is None and base != now:
                raise ManifestConflict(f"{app_id} is at {now}, the files begin at {base}")
            reached = end
        assert reached in {None, version}, f"{app_id}: files end at {reached}, not at {version}"
        if app_id.startswith(_MAINTENANCE) and version != now + 1:
            raise ManifestConflict(f"{app_id} is at {now}, {version} is not the next version")
        if reached is None and now >= version:
            raise ManifestConflict(f"{app_id} is at {now}, {version} is not greater")
