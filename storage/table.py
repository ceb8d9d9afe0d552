"""The manifest on Delta Lake: one Delta table per topic (DESIGN 7, 10). Alone imports deltalake.

And if we die in `add`? Before Delta's commit: files that nothing names, for the collector. After
it: the commit counts; whoever refreshes finds its files and transactions. The commit itself is a
create-if-absent of `_delta_log/<version>.json` with the three outcomes of DESIGN 4, and the client
below deltalake repeats requests: one's own success may come back as a conflict. So after anything
but a clean success the table is read back, and our paths, which are unique, are there or not.

On S3, deltalake 1.6 needs `conditional_put=etag` (its default; `S3Store` says it all the same), and
neither `AWS_S3_LOCKING_PROVIDER` nor `AWS_COPY_IF_NOT_EXISTS` as an option or in the environment: a
commit is then one PUT with `If-None-Match: *`, safe for any number of writers without a lock. On a
folder it links a temporary file to the name, and syncs nothing: `_sync_log` does (I1).

deltalake releases the GIL but blocks its thread, and a `DeltaTable` is for one at a time: all calls
run in two small pools of the process. The threads of its own runtime inherit the priority of the
thread that used it first, which is one of those that read.
"""

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, TypeVarTuple, cast
from weakref import WeakKeyDictionary

import deltalake
import msgspec
import pyarrow as pa
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    PostCommitHookProperties,
    RemoveAction,
)

from storage.chunk import RECORD_SCHEMA
from storage.clock import Clock, SystemClock
from storage.errors import CommitUnknown, Corrupt, NotFound, StoreUnfit, Unavailable
from storage.manifest import (
    Catalog,
    ManifestConflict,
    MemoryManifest,
    SegmentColumns,
    SegmentIndex,
    Table,
    View,
    care_app_id,
    check_transactions,
    removed_of,
    seal_app_id,
    statistics,
    transactions_of,
)
from storage.model import SegmentFile
from storage.objectstore import ObjectStore

__all__ = [
    "DeltaManifest",
    "ManifestConflict",
    "MemoryManifest",
    "SegmentIndex",
    "Table",
    "care_app_id",
    "open_table",
    "seal_app_id",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TABLE_SCHEMA = pa.schema([*RECORD_SCHEMA, pa.field("partition", pa.int32())])
"""What engines see: the columns of a segment, and the partition that its path says."""

CHECKPOINT_INTERVAL = 50
"""Commits from one checkpoint to the next: an open reads so many small objects at most."""
_PROPERTIES = {
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
    "delta.logRetentionDuration": "interval 7 days",  # for versions that a checkpoint covers
    "tidelog.format": "1",
}

_FOLLOWED_MAX = 10  # commits whose transactions are read one by one; past it they are forgotten
_RETRIES = {"max_retries": "3", "retry_timeout": "15s"}  # deltalake's own: 10, within 180 s
_LOG_FILES = ("json", "checkpoint.parquet")
_COMMIT = re.compile(r"/\d{20}\.json$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOWEST_PRIORITY = 19


def _lower_priority() -> None:
    # A checkpoint of 20,000 files is 70 ms of Parquet. Only Linux has priorities of threads.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


_reads = ThreadPoolExecutor(2, "tidelog-manifest")
_commits = ThreadPoolExecutor(2, "tidelog-commit", initializer=_lower_priority)
_catalogs: WeakKeyDictionary[ObjectStore, Catalog] = WeakKeyDictionary()


class DeltaStore(ObjectStore, Protocol):
    """A store that other programs can read by URI. Where that takes options, it also has
    `deltalake_options()`, asked each time because credentials expire."""

    def table_uri(self, key: str) -> str:
        """What a Delta table at `key` is opened by."""
        ...


async def open_table(store: ObjectStore, prefix: str, name: str) -> Table:
    """The manifest at `prefix`: Delta on a store that has URIs, else in memory. Reads nothing yet.

    Memory manifests live in the store's `tables`: wrappers around one store share them by showing
    that attribute. A store without it gets a catalog of its own.
    """
    if hasattr(store, "table_uri"):
        return DeltaManifest(cast("DeltaStore", store), prefix, name)
    catalog: Catalog | None = getattr(store, "tables", None)
    tables = _catalogs.setdefault(store, {}) if catalog is None else catalog
    return MemoryManifest(tables, prefix, lambda: getattr(store, "now_ms", 0))


class DeltaManifest:
    """A `Table` on deltalake. Owned by one event loop; any number may work on one table.

    One call at a time has the `DeltaTable`, `_turn` says which; `segments` needs no turn once
    something is loaded. A cancelled call returns when its thread has, so that the turn stays true.
    """

    def __init__(
        self, store: DeltaStore, prefix: str, name: str = "", clock: Clock | None = None
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._delta = _Delta(store.table_uri(prefix), name, clock or SystemClock())
        self._turn = asyncio.Lock()
        self._view: View | None = None
        # Those that were ever asked for, as of the view's version.
        self._transactions: dict[str, int | None] = {}

    @property
    def version(self) -> int:
        return -1 if self._view is None else self._view.version

    async def segments(self, partition: int) -> SegmentIndex:
        view = self._view
        if view is None:
            async with self._turn:
                view = self._view or await self._refresh(_reads)
        return view.segments(partition)

    async def refresh(self) -> None:
        async with self._turn:
            await self._refresh(_reads)

    async def transaction_version(self, app_id: str) -> int | None:
        async with self._turn:
            if self._view is None:
                await self._refresh(_reads)
            return await self._found(app_id)

    async def add(self, files: Sequence[SegmentFile], transactions: Mapping[str, int]) -> None:
        await self._commit(_Change(files, transactions))

    async def replace(
        self,
        removed: Sequence[SegmentFile],
        added: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        *,
        data_change: bool,
    ) -> None:
        await self._commit(_Change(added, transactions, removed, data_change))

    async def paths(self) -> set[str]:
        async with self._turn:
            return (self._view or await self._refresh(_reads)).paths()

    async def removed_since(self, since_ms: int) -> set[str]:
        found: set[str] = set()
        async for info in self._store.list(f"{self._prefix}/_delta_log/"):
            if info.modified_ms >= since_ms and _COMMIT.search(info.key):
                try:
                    found |= removed_of(await self._store.get(info.key))
                except msgspec.DecodeError as error:
                    raise Corrupt(info.key, f"is no commit: {error}") from error
        return found

    async def _commit(self, change: "_Change") -> None:
        async with self._turn:
            if (self._view or await self._refresh(_commits)).version < 0:
                await self._create()
            problem = await self._try(change)
            try:
                view = await self._refresh(_commits)
            except Unavailable as error:
                raise CommitUnknown(f"cannot read back what was committed: {error}") from problem
            if problem is None or change.is_in(view):
                return
            found = await self._all_found(change.transactions)
            check_transactions(change.added, change.transactions, found)
            if isinstance(problem, ManifestConflict):
                raise problem
            reason = f"commit to table {self._prefix} failed: {_why(problem)}"
            raise CommitUnknown(reason) from problem

    def close(self) -> None:
        self._view = None
        self._transactions.clear()
        self._delta.table = None

    # --- all of these have the turn

    async def _try(self, change: "_Change") -> Exception | None:
        """Commit onto the loaded version; what went wrong, if anything did."""
        try:
            found = await self._all_found(change.transactions)
            check_transactions(change.added, change.transactions, found)
            if change.removed and not (self._view and self._view.has(change.removed)):
                raise ManifestConflict("files are not in the table any more")
            await self._call(_commits, self._delta.commit, change)
        except (ManifestConflict, DeltaError, OSError) as error:
            return error
        return None

    async def _create(self) -> None:
        """Make the table. Of two creators one is refused by the store, and finds the other's."""
        options = await self._options()
        problem = await self._call(_commits, self._delta.create, options)
        if (await self._refresh(_commits)).version < 0:
            raise Unavailable(f"table {self._prefix} cannot be made: {_why(problem)}")

    async def _refresh(self, pool: Executor) -> View:
        options = await self._options()
        await self._call(pool, self._delta.refresh, options)
        return await self._follow(pool)

    async def _follow(self, pool: Executor) -> View:
        """Take over the version that the DeltaTable has reached: its files and transactions."""
        version = self._delta.version
        if self._view is None or self._view.version != version:
            transactions = await self._transactions_at(version)
            self._view = await self._call(pool, self._delta.view, self._prefix)
            self._transactions = transactions
        return self._view

    async def _transactions_at(self, version: int) -> dict[str, int | None]:
        """The known transactions, brought up to `version`.

        deltalake finds one by reading every commit since the last checkpoint, for each anew: 60
        requests and 0.3 s where the commits that are new, read once for all of them, cost a few.
        """
        known = dict(self._transactions)
        if not known or version - self.version > _FOLLOWED_MAX:
            return {}
        try:
            for each in range(self.version + 1, version + 1):
                key = f"{self._prefix}/_delta_log/{each:020d}.json"
                known.update(transactions_of(await self._store.get(key)))
        except (NotFound, Unavailable, msgspec.DecodeError):
            return {}  # cleaned away, or of a shape not known here: deltalake is asked again
        return known

    async def _found(self, app_id: str) -> int | None:
        # A refresh that was cancelled may have left the DeltaTable ahead of the view.
        await self._follow(_reads)
        if app_id not in self._transactions:
            call = self._delta.transaction_version
            self._transactions[app_id] = await self._call(_reads, call, app_id)
        return self._transactions[app_id]

    async def _all_found(self, app_ids: Mapping[str, int]) -> dict[str, int | None]:
        return {app_id: await self._found(app_id) for app_id in app_ids}

    async def _options(self) -> dict[str, str]:
        ask = getattr(self._store, "deltalake_options", None)
        options = {} if ask is None else await ask()
        return _RETRIES | options if options else {}  # a folder takes none

    async def _call(self, pool: Executor, call: Callable[[*Ts], T], *args: *Ts) -> T:
        future = asyncio.get_running_loop().run_in_executor(pool, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()  # nobody else will look at it
            raise


class _Delta:
    """The blocking half: a DeltaTable and what is done with it in a thread, one call at a time."""

    def __init__(self, uri: str, name: str, clock: Clock) -> None:
        self.table: deltalake.DeltaTable | None = None
        self._uri = uri
        self._directory = None if "://" in uri else Path(uri)
        self._name = name
        self._clock = clock
        self._synced = -1
        if self._directory is not None and "%" in uri:
            raise StoreUnfit(f"folder {uri} has a % in its path, which Delta does not open")

    @property
    def version(self) -> int:
        return -1 if self.table is None else self.table.version()

    def refresh(self, options: dict[str, str]) -> None:
        """Go to the newest version; open anew where that fails, for expired credentials' sake.
        When it raises Unavailable, what was loaded stays."""
        table = self.table
        try:
            if table is None or not _is_updated(table):
                table = deltalake.DeltaTable(self._uri, storage_options=options)
            self._sync(table.version())
        except TableNotFoundError as error:
            if self.table is not None:
                raise Unavailable(f"table {self._uri} is gone") from error
        except (DeltaError, OSError) as error:
            raise Unavailable(f"table {self._uri} cannot be read: {_why(error)}") from error
        else:
            self.table = table

    def _sync(self, version: int) -> None:
        if self._directory is None or version <= self._synced:
            return
        if os.access(self._directory, os.W_OK):  # else nobody commits from here, nor counts on it
            _sync_log(self._directory / "_delta_log", self._synced + 1, version)
        self._synced = version

    def create(self, options: dict[str, str]) -> Exception | None:
        """Commit version 0; what went wrong, if anything did. Without retries, because a retry
        would commit another schema as version 1 (so would `mode="ignore"`)."""
        try:
            deltalake.DeltaTable.create(
                self._uri,
                TABLE_SCHEMA,
                mode="error",
                partition_by=["partition"],
                name=self._name or None,
                description="records of a tidelog topic; written by its brokers alone",
                configuration=_PROPERTIES,
                storage_options=options,
                commit_properties=CommitProperties(max_commit_retries=0),
                raise_if_key_not_exists=False,
            )
        except (DeltaError, OSError) as error:
            return error
        return None

    def commit(self, change: "_Change") -> None:
        """One commit that fits on the loaded version; the DeltaTable stays at that version."""
        assert self.table is not None
        now_ms = self._clock.now_ms()
        # Else every commit would list the whole log to look for what has expired.
        is_checkpoint = (self.version + 2) % CHECKPOINT_INTERVAL == 0
        self.table.create_write_transaction(
            [
                *(_add_action(file, now_ms, change.data_change) for file in change.added),
                *(_remove_action(file, now_ms, change.data_change) for file in change.removed),
            ],
            mode="append",
            schema=TABLE_SCHEMA,
            partition_by=["partition"],
            commit_properties=CommitProperties(
                app_transactions=[
                    deltalake.Transaction(app_id, version)
                    for app_id, version in change.transactions.items()
                ]
            ),
            post_commithook_properties=PostCommitHookProperties(
                create_checkpoint=True, cleanup_expired_logs=is_checkpoint
            ),
        )

    def view(self, prefix: str) -> View:
        if self.table is None:
            return View(-1, prefix, SegmentColumns.of([]))
        stream = pa.RecordBatchReader.from_stream(self.table.get_add_actions(flatten=True))
        try:
            return View(self.version, prefix, SegmentColumns.of_adds(stream.read_all()))
        except (pa.ArrowException, KeyError) as error:
            raise Corrupt(f"{prefix}/_delta_log", f"is no manifest: {error}") from error

    def transaction_version(self, app_id: str) -> int | None:
        if self.table is None:
            return None
        try:
            return self.table.transaction_version(app_id)
        except (DeltaError, OSError) as error:
            raise Unavailable(f"table {self._uri} cannot be read: {_why(error)}") from error


def _is_updated(table: deltalake.DeltaTable) -> bool:
    try:
        table.update_incremental()
    except (DeltaError, OSError):
        return False
    return True


class _Change(NamedTuple):
    """What one commit does."""

    added: Sequence[SegmentFile]
    transactions: Mapping[str, int]
    removed: Sequence[SegmentFile] = ()
    data_change: bool = True

    def is_in(self, view: View) -> bool:
        if not self.removed:
            return view.has(self.added)
        return view.shows(self.added, self.removed)


def _remove_action(file: SegmentFile, now_ms: int, data_change: bool) -> RemoveAction:
    return RemoveAction(
        path=file.path,
        data_change=data_change,
        deletion_timestamp=now_ms,
        size=file.size,
        partition_values={"partition": str(file.partition)},
    )


def _add_action(file: SegmentFile, now_ms: int, data_change: bool) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values={"partition": str(file.partition)},
        modification_time=now_ms,
        data_change=data_change,
        stats=statistics(file),
    )


def _sync_log(directory: Path, first: int, last: int) -> None:
    """Make versions [first, last] of a log survive a power cut, together with the names.

    Without it the WAL could say that a tail is sealed of which the table knows nothing any more
    (I7). Others' versions are synced too: a hole below ours would cost the whole table. Those
    before the newest hundred were, by whoever made or loaded the hundred after them.
    """
    versions = range(max(first, last - 2 * CHECKPOINT_INTERVAL), last + 1)
    names = [f"{version:020d}.{kind}" for version in versions for kind in _LOG_FILES]
    for path in [*(directory / name for name in [*names, "_last_checkpoint"]), directory]:
        with contextlib.suppress(FileNotFoundError):
            _sync(path)
    if first == 0:
        _sync(directory.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why(error: Exception | None) -> str:
    """The first lines of what deltalake says, without colours and its backtrace."""
    lines = _COLOUR.sub("", str(error)).splitlines()
    return " ".join(line.strip() for line in lines[:3])[:300]
