"""What a topic's table is to the log: segments by offset, transactions that fence sealers. Pure.

`Table` is the seam; `MemoryManifest`, here, is its reference implementation, and storage/table.py
the one on Delta Lake. A commit adds files together with application transactions, which are the
lock between sealers. The transaction of a partition's seal has as version the offset up to which
the table holds the partition: a commit that adds [base, end) must find `base` and leaves `end`
(I7). Both halves of that are checked by every implementation: what the loaded version says, and
that no commit after it had the same transaction. The second alone, which is what Delta does, would
let a sealer pass whose table a reader refreshed while it was writing its files.

What takes files out of a table (retention, merging, compaction) is locked by a transaction of the
partition of its own, which counts: two that remove the same file would both pass otherwise, and the
rows would be there twice. Sealers only add and never meet it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage import keys
from storage.errors import Corrupt, LogError
from storage.model import SegmentFile

T = TypeVar("T")

_US_PER_MS = 1000
_SEGMENT = r"^partition=(?P<partition>\d{1,9})/(?P<base>\d{20})-(?P<end>\d{20})-[0-9a-f]+\.parquet$"
"""`keys.parse_segment` for 20,000 paths at once, 8 ms without the GIL."""
_CARE = "care-"
_ISO_MS = range(-62_135_596_800_000, 253_402_300_800_000)  # years 1 to 9999


class ManifestConflict(LogError):
    """Another commit moved a transaction first: nothing was added; refresh and start again."""


def care_app_id(partition: int) -> str:
    """The application id of whatever removes a partition's files; its version counts commits."""
    return f"{_CARE}{partition}"


def seal_app_id(partition: int) -> str:
    """The application id of a partition's seal; its version is the end of what the table holds."""
    return f"seal-{partition}"


class Table(Protocol):
    """One topic's manifest, as of the version that was last loaded. Safe for concurrent tasks.

    The first call loads; `refresh` and `add` go on to the newest version. A topic that was never
    sealed has no table yet, and version -1. Raises `Unavailable` when the store cannot be read.
    """

    @property
    def version(self) -> int:
        """The loaded version."""
        ...

    async def segments(self, partition: int) -> "SegmentIndex":
        """The partition's segments. Raises Corrupt, for this partition alone, when they overlap or
        when a file of somebody else's is among them."""
        ...

    async def refresh(self) -> None:
        """Load the newest version."""
        ...

    async def transaction_version(self, app_id: str) -> int | None:
        """The last version of an application's transaction; None when it never committed."""
        ...

    async def add(self, files: Sequence[SegmentFile], transactions: Mapping[str, int]) -> None:
        """One commit: all files and all transactions, or nothing. Returns when it is durable and
        loaded. What was done once is done: a retry with the same files succeeds.

        Files of a partition whose seal is in `transactions` go on where the table ends, without a
        hole, and end at the version given; the version of any other transaction must grow.

        Raises ManifestConflict: nothing was added and nothing will be; refresh, start again.
        CommitUnknown, or a cancellation: this call may have taken effect, or still may until
        `transaction_version` after a `refresh` has moved; retrying with the same files is safe.
        """
        ...

    async def replace(
        self,
        removed: Sequence[SegmentFile],
        added: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        *,
        data_change: bool,
    ) -> None:
        """One commit: `removed` go and `added` come, or nothing. `transactions` names the care of
        every partition with its next version, one more than what the caller planned upon.
        `data_change` is False where the same rows only lie elsewhere: streams pass over it.

        The objects of `removed` stay, for readers under way; `removed_since` says for how long they
        must. Raises as `add` does; ManifestConflict also when one of `removed` is gone already.
        """
        ...

    async def paths(self) -> set[str]:
        """Paths of all files of the loaded version, also of such as are no segments."""
        ...

    async def removed_since(self, since_ms: int) -> set[str]:
        """Paths that were removed by a commit not older than `since_ms`, by the store's clock."""
        ...

    def close(self) -> None:
        """Forget what is loaded. Idempotent."""
        ...


class SegmentColumns(NamedTuple):
    """SegmentFiles, one array a field; `base_offset` is -1 where a path is no segment's."""

    path: pa.Array
    partition: np.ndarray
    base_offset: np.ndarray
    end_offset: np.ndarray
    size: np.ndarray
    rows: np.ndarray
    timestamp_min: np.ndarray
    timestamp_max: np.ndarray

    @classmethod
    def of(cls, files: Sequence[SegmentFile]) -> "SegmentColumns":
        rows = (file if _is_segment(file) else file._replace(base_offset=-1) for file in files)
        numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(-1, 7)
        return cls(pa.array([file.path for file in files], pa.string()), *numbers.T)

    @classmethod
    def of_adds(cls, adds: pa.Table) -> "SegmentColumns":
        """From deltalake's `get_add_actions(flatten=True)`. Offsets are those of the path, because
        statistics are only bounds, and what is listed in another partition than its path says is no
        segment: Delta's log has no checksum. Raises pa.ArrowException, KeyError."""
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
            # None for a time that has no ISO text: such a file may hold any.
            _numbers(adds.column("min.timestamp"), -(2**63)) // _US_PER_MS,
            _numbers(adds.column("max.timestamp"), 2**63 - 1) // _US_PER_MS,
        )

    def sorted(self) -> "SegmentColumns":
        """By partition, then offset."""
        order = np.lexsort((self.base_offset, self.partition))
        return SegmentColumns(self.path.take(order), *(array[order] for array in self[1:]))

    def between(self, first: int, end: int) -> "SegmentColumns":
        """Positions [first, end), without a copy."""
        path, *numbers = self
        return SegmentColumns(path[first:end], *(array[first:end] for array in numbers))


def _is_segment(file: SegmentFile) -> bool:
    """Whether its path is one, and of the partition that it is listed in."""
    name = keys.parse_segment(file.path)
    return name is not None and name.partition == file.partition


def _numbers(column: pa.Array | pa.ChunkedArray, missing: int) -> np.ndarray:
    integers: Any = column.cast(pa.int64())
    return integers.fill_null(missing).to_numpy()


class SegmentIndex:
    """The segments of one partition in offset order, none overlapping; immutable."""

    def __init__(self, columns: SegmentColumns) -> None:
        self._columns = columns
        self._newest = np.maximum.accumulate(columns.timestamp_max)  # of a file and all before

    def __len__(self) -> int:
        return len(self._columns.path)

    def __getitem__(self, position: int) -> SegmentFile:
        path, *numbers = (array[position] for array in self._columns)
        return SegmentFile(path.as_py(), *map(int, numbers))

    def __iter__(self) -> Iterator[SegmentFile]:
        path, *numbers = self._columns
        return map(SegmentFile, path.to_pylist(), *(array.tolist() for array in numbers))

    @property
    def columns(self) -> SegmentColumns:
        """All of them as arrays, for plans over 100,000: look, do not touch."""
        return self._columns

    @property
    def end_offset(self) -> int:
        """End of the last segment; 0 when there is none."""
        return self[len(self) - 1].end_offset if len(self) else 0

    def at_or_after(self, offset: int) -> SegmentFile | None:
        """The segment that covers `offset`, or the next one where that offset is gone."""
        position = int(np.searchsorted(self._columns.end_offset, offset, side="right"))
        return self[position] if position < len(self) else None

    def since(self, timestamp: int) -> Iterator[SegmentFile]:
        """The segments with records at or after `timestamp` (ms), in offset order."""
        for position in range(int(np.searchsorted(self._newest, timestamp)), len(self)):
            if self._columns.timestamp_max[position] >= timestamp:
                yield self[position]


class View:
    """The files of one version of a table; indexes of partitions are made when asked for."""

    def __init__(self, version: int, prefix: str, columns: SegmentColumns) -> None:
        self.version = version
        self._prefix = prefix
        self._columns = columns.sorted()
        self._indexes: dict[int, SegmentIndex] = {}

    def segments(self, partition: int) -> SegmentIndex:
        """Raises Corrupt when the partition's files are not a sequence of segments."""
        index = self._indexes.get(partition)
        if index is None:
            first, end = np.searchsorted(self._columns.partition, [partition, partition + 1])
            columns = self._columns.between(int(first), int(end))
            self._check(partition, columns)
            index = self._indexes[partition] = SegmentIndex(columns)
        return index

    def has(self, files: Sequence[SegmentFile]) -> bool:
        """Whether every one of the files is in the table."""
        paths = pa.array([file.path for file in files], pa.string())
        return bool(pc.all(pc.is_in(paths, value_set=self._columns.path)).as_py())

    def has_any(self, files: Sequence[SegmentFile]) -> bool:
        """Whether one of the files is in the table."""
        paths = pa.array([file.path for file in files], pa.string())
        return bool(pc.any(pc.is_in(paths, value_set=self._columns.path), min_count=0).as_py())

    def shows(self, added: Sequence[SegmentFile], removed: Sequence[SegmentFile]) -> bool:
        """Whether the commit that adds and removes these is done; what is added has paths that are
        nobody else's."""
        return (not added or self.has(added)) and not self.has_any(removed)

    def paths(self) -> set[str]:
        paths: list[Any] = self._columns.path.to_pylist()
        return set(paths)

    def _check(self, partition: int, columns: SegmentColumns) -> None:
        wrong = columns.base_offset < 0
        wrong[1:] |= columns.base_offset[1:] < columns.end_offset[:-1]
        if wrong.any():
            path = columns.path[int(np.argmax(wrong))].as_py()
            why = f"{path!r} is no segment, or overlaps the one before it"
            raise Corrupt(f"{self._prefix}/_delta_log", f"partition {partition}: {why}")


def check_transactions(
    files: Sequence[SegmentFile],
    transactions: Mapping[str, int],
    found: Mapping[str, int | None],
) -> None:
    """Raises ManifestConflict unless a commit of these fits on a table that has the transactions
    `found`."""
    assert transactions, "a commit without a transaction could be done twice"
    ranges: dict[str, list[tuple[int, int]]] = {}
    for file in files:
        span = (file.base_offset, file.end_offset)
        ranges.setdefault(seal_app_id(file.partition), []).append(span)
    for app_id, version in transactions.items():
        now = found[app_id] or 0
        reached = None
        for base, end in sorted(ranges.get(app_id, [])):
            assert reached in {None, base}, f"{app_id}: no file begins at {reached}"
            if reached is None and base != now:
                raise ManifestConflict(f"{app_id} is at {now}, the files begin at {base}")
            reached = end
        assert reached in {None, version}, f"{app_id}: files end at {reached}, not at {version}"
        if app_id.startswith(_CARE) and version != now + 1:
            raise ManifestConflict(f"{app_id} is at {now}, {version} does not follow")
        if reached is None and now >= version:
            raise ManifestConflict(f"{app_id} is at {now} already, {version} does not follow")


class MemoryCommit(NamedTuple):
    """One version of a table in memory."""

    files: tuple[SegmentFile, ...]
    transactions: Mapping[str, int]
    removed: frozenset[str] = frozenset()
    at_ms: int = 0


Catalog: TypeAlias = dict[str, list[MemoryCommit]]
"""Tables by prefix: the list of their commits, index = version."""


class MemoryManifest:
    """A table in a catalog, for tests and simulations. All that were made of one catalog and prefix
    see one table; each has a loaded version of its own."""

    def __init__(
        self, catalog: Catalog, prefix: str, now_ms: Callable[[], int] = lambda: 0
    ) -> None:
        self._catalog = catalog
        self._prefix = prefix
        self._now_ms = now_ms
        self._view: View | None = None

    @property
    def version(self) -> int:
        return -1 if self._view is None else self._view.version

    async def segments(self, partition: int) -> SegmentIndex:
        return self._loaded().segments(partition)

    async def refresh(self) -> None:
        self._load()

    async def transaction_version(self, app_id: str) -> int | None:
        return self._found(app_id, self._loaded().version)

    async def add(self, files: Sequence[SegmentFile], transactions: Mapping[str, int]) -> None:
        loaded = self._loaded().version
        if not self._load().has(files):
            self._commit(loaded, MemoryCommit(tuple(files), dict(transactions)))

    async def replace(
        self,
        removed: Sequence[SegmentFile],
        added: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        *,
        data_change: bool,
    ) -> None:
        loaded = self._loaded().version
        newest = self._load()
        if newest.shows(added, removed):
            return
        if not newest.has(removed):
            raise ManifestConflict("files are not in the table any more")
        paths = frozenset(file.path for file in removed)
        self._commit(loaded, MemoryCommit(tuple(added), dict(transactions), paths))

    async def paths(self) -> set[str]:
        return self._loaded().paths()

    async def removed_since(self, since_ms: int) -> set[str]:
        commits = self._catalog.get(self._prefix, [])
        return {path for commit in commits if commit.at_ms >= since_ms for path in commit.removed}

    def _commit(self, loaded: int, commit: MemoryCommit) -> None:
        transactions = commit.transactions
        found = {app_id: self._found(app_id, loaded) for app_id in transactions}
        check_transactions(commit.files, transactions, found)
        commits = self._catalog.setdefault(self._prefix, [MemoryCommit((), {})])
        for later in commits[loaded + 1 :]:
            if moved := later.transactions.keys() & transactions.keys():
                raise ManifestConflict(f"{sorted(moved)} moved after version {loaded}")
        commits.append(commit._replace(at_ms=self._now_ms()))
        self._load()

    def close(self) -> None:
        self._view = None

    def _loaded(self) -> View:
        return self._view or self._load()

    def _load(self) -> View:
        commits = self._catalog.get(self._prefix, [])
        gone = frozenset[str]().union(*(commit.removed for commit in commits))
        files = [file for each in commits for file in each.files if file.path not in gone]
        self._view = View(len(commits) - 1, self._prefix, SegmentColumns.of(files))
        return self._view

    def _found(self, app_id: str, version: int) -> int | None:
        for commit in reversed(self._catalog.get(self._prefix, [])[: version + 1]):
            if app_id in commit.transactions:
                return commit.transactions[app_id]
        return None


# --- the JSON of Delta's log


def statistics(file: SegmentFile) -> str:
    """A file's statistics as the Delta protocol has them, for engines to skip files by.

    Bounds, not values: the largest offset is less than `end_offset - 1` after key compaction, and a
    timestamp's microseconds are not known here. `tightBounds` says when the offsets are exact.
    """
    low: dict[str, int | str] = {"offset": file.base_offset}
    high: dict[str, int | str] = {"offset": file.end_offset - 1}
    if file.timestamp_min in _ISO_MS and file.timestamp_max in _ISO_MS:
        low["timestamp"] = f"{np.datetime64(file.timestamp_min, 'ms')}Z"
        high["timestamp"] = f"{np.datetime64(file.timestamp_max, 'ms')}999Z"
    facts = {
        "numRecords": file.rows,
        "minValues": low,
        "maxValues": high,
        "nullCount": {"offset": 0, "timestamp": 0},
        "tightBounds": file.rows == file.end_offset - file.base_offset,
    }
    return msgspec.json.encode(facts).decode()


def transactions_of(commit: bytes) -> dict[str, int]:
    """The application transactions of one commit, JSON lines; raises msgspec.DecodeError."""
    lines = _lines_of(commit, b'"txn"')
    return {txn.app_id: txn.version for txn in (_read(_txn_line, line).txn for line in lines)}


def removed_of(commit: bytes) -> set[str]:
    """The paths that one commit removed, JSON lines; raises msgspec.DecodeError."""
    lines = _lines_of(commit, b'"remove"')
    return {unquote(_read(_remove_line, line).remove.path) for line in lines}


def _lines_of(commit: bytes, kind: bytes) -> Iterator[bytes]:
    return (line for line in commit.splitlines() if line[:12].lstrip(b"{ ").startswith(kind))


def _read(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    try:
        return decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


class _Transaction(msgspec.Struct, rename="camel"):
    app_id: str
    version: int


class _TransactionLine(msgspec.Struct):
    txn: _Transaction


class _Remove(msgspec.Struct):
    path: str


class _RemoveLine(msgspec.Struct):
    remove: _Remove


_remove_line = msgspec.json.Decoder(_RemoveLine)
_txn_line = msgspec.json.Decoder(_TransactionLine)
