"""The manifest on Delta Lake: one Delta table per topic (DESIGN 8).

Only this module uses deltalake. **On a crash** in `add` before Delta's commit, no table names the
new files, and collection deletes them. After the commit, a refresh finds its files and
transactions.

Delta's commit is a create-if-absent of `_delta_log/<version>.json`, with the three outcomes of
DESIGN 4. deltalake's HTTP client repeats requests, so a commit that succeeded may raise a conflict.
After any error this module reads the table back. The paths of each commit are unique, so if the
table has them, the commit succeeded.

On S3, deltalake 1.6 needs `conditional_put=etag` (its default; `S3Store` sets it too). The options
and environment variables `AWS_S3_LOCKING_PROVIDER` and `AWS_COPY_IF_NOT_EXISTS` must not be set. A
commit is then one PUT with `If-None-Match: *`, safe for any number of writers without a lock. In a
folder deltalake links a temporary file to the commit's name without fsync, so `sync_log` calls
fsync (I1).

deltalake releases the GIL but blocks the thread that calls it. A `DeltaTable` allows one call at a
time. All calls run in two small thread pools of the process. deltalake's runtime threads inherit
the priority of the first thread that uses deltalake, which is a thread of `_reads`.

`TableChange` is the content of one commit.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
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

from tidelog.storage.codec.record_columns import RECORD_SCHEMA
from tidelog.storage.core.errors import (
    CommitUnknown,
    Corrupt,
    ObjectNotFound,
    StoreUnfit,
    Unavailable,
)
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.runtime.clock import Clock, SystemClock
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.runtime.threads import lower_priority
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables import delta_log
from tidelog.storage.tables.delta_json import interval_ms, statistics, transactions_of
from tidelog.storage.tables.delta_requests import CHECKPOINT_INTERVAL, DeltaRequests
from tidelog.storage.tables.foreign_commits import served
from tidelog.storage.tables.manifest import (
    NO_RESET,
    ManifestConflict,
    ManifestVersion,
    Removal,
    SegmentColumns,
    SegmentIndex,
    Table,
    TableCommit,
    check_transactions,
)
from tidelog.storage.tables.memory import Catalog, MemoryManifest


class TableChange(NamedTuple):
    """The content of one commit."""

    added: Sequence[SegmentFile]
    transactions: Mapping[str, int]
    removed: Sequence[SegmentFile] = ()
    data_change: bool = True
    reset: Mapping[str, int] = NO_RESET

    def is_in(self, view: ManifestVersion) -> bool:
        if not self.removed:
            return view.has(self.added)
        return view.shows(self.added, self.removed)


def remove_action(file: SegmentFile, now_ms: int, data_change: bool) -> RemoveAction:
    return RemoveAction(
        path=file.path,
        data_change=data_change,
        deletion_timestamp=now_ms,
        size=file.size,
        partition_values={"partition": str(file.partition)},
    )


def add_action(file: SegmentFile, now_ms: int, data_change: bool) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values={"partition": str(file.partition)},
        modification_time=now_ms,
        data_change=data_change,
        stats=statistics(file),
    )


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TABLE_SCHEMA = pa.schema([*RECORD_SCHEMA, pa.field("partition", pa.int32())])
"""The table's columns: the columns of a segment, and the partition from the segment's path."""

_LOG_RETENTION = "delta.logRetentionDuration"
_PROPERTIES = {
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
    _LOG_RETENTION: "interval 7 days",  # for commits that a checkpoint covers
    # Only collection cleans up the log, because it obeys holds (DESIGN 8).
    "delta.enableExpiredLogCleanup": "false",
    "tidelog.format": "1",
}

_APPEND_ONLY = "delta.appendOnly"
_ASKED_MAX = 4  # for more transactions, read all of them from the log at once
_FOLLOWED_MAX = 10  # after more new commits than this, drop the known transactions
_RETRIES = {"max_retries": "3", "retry_timeout": "15s"}  # deltalake's defaults: 10 retries in 180 s
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_reads = ThreadPoolExecutor(4, "tidelog-manifest")
_commits = ThreadPoolExecutor(8, "tidelog-commit", initializer=lower_priority)
_catalogs: WeakKeyDictionary[ObjectStore, Catalog] = WeakKeyDictionary()


class DeltaStore(ObjectStore, Protocol):
    """A store that other programs can read by URI.

    If access needs options, the store also has `deltalake_options()`. This method is called before
    each use, because credentials expire.
    """

    def table_uri(self, key: str) -> str:
        """Return the URI that opens the Delta table at `key`."""


def open_table(store: ObjectStore, prefix: str, name: str) -> Table:
    """Return the manifest at `prefix`: on Delta if the store has URIs, else in memory. Does no IO.

    The store's attribute `tables` is the catalog of its memory manifests. All wrappers of a store
    have the same catalog. A store without this attribute gets its own catalog.
    """
    if hasattr(store, "table_uri"):
        return DeltaManifest(cast("DeltaStore", store), prefix, name)
    catalog: Catalog | None = getattr(store, "tables", None)
    tables = _catalogs.setdefault(store, {}) if catalog is None else catalog
    return MemoryManifest(tables, prefix, lambda: getattr(store, "now_ms", 0))


class DeltaManifest:
    """A `Table` on deltalake. Owned by one event loop; several instances may use one table.

    The lock `_turn` allows one call at a time on the `DeltaTable`. After the first load, `segments`
    needs no lock. A cancelled method keeps the lock until its call in a thread has ended.
    """

    def __init__(
        self, store: DeltaStore, prefix: str, name: str = "", clock: Clock | None = None
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._delta = _Delta(store.table_uri(prefix), name, clock or SystemClock())
        self._requests = DeltaRequests(store, prefix)
        self._turn = asyncio.Lock()
        self._view: ManifestVersion | None = None
        self._served: ManifestVersion | None = None
        # The version of each transaction that a caller has requested, as of the view.
        self._transactions: dict[str, int | None] = {}

    @property
    def version(self) -> int:
        return -1 if self._view is None else self._view.version

    async def segments(self, partition: int) -> SegmentIndex:
        if self._served is None:
            async with self._turn:
                if self._served is None:
                    await self._refresh(_reads)
        assert self._served is not None
        return self._served.segments(partition)

    async def refresh(self) -> None:
        async with self._turn:
            await self._refresh(_reads)

    async def transaction_version(self, app_id: str) -> int | None:
        async with self._turn:
            if self._view is None:
                await self._refresh(_reads)
            return await self._found(app_id)

    async def transaction_versions(self, app_ids: Sequence[str]) -> Mapping[str, int | None]:
        async with self._turn:
            if self._view is None:
                await self._refresh(_reads)
            return await self._found_all(app_ids)

    async def add(self, files: Sequence[SegmentFile], transactions: Mapping[str, int]) -> None:
        await self._commit(TableChange(files, transactions))

    async def replace(
        self,
        removed: Sequence[SegmentFile],
        added: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        *,
        data_change: bool,
        reset: Mapping[str, int] = NO_RESET,
    ) -> None:
        await self._commit(TableChange(added, transactions, removed, data_change, reset))

    async def paths(self) -> set[str]:
        async with self._turn:
            return (self._view or await self._refresh(_reads)).paths()

    async def removed_since(self, since_ms: int) -> list[Removal]:
        return await delta_log.removed_since(self._store, self._prefix, since_ms)

    async def newest(self) -> ManifestVersion:
        async with self._turn:
            return self._view or await self._refresh(_reads)

    async def commits(self, count: int) -> list[TableCommit]:
        async with self._turn:
            version = (self._view or await self._refresh(_reads)).version
        return await delta_log.commits_to(self._store, self._prefix, version, count)

    async def files_at(self, version: int) -> SegmentColumns | None:
        async with self._turn:
            return await self._files_at(version)

    async def log_retention_ms(self) -> int | None:
        async with self._turn:
            if self._view is None:
                await self._refresh(_reads)
            return await self._call(_reads, self._delta.log_retention_ms)

    async def _commit(self, change: TableChange) -> None:
        async with self._turn:
            if (self._view or await self._refresh(_commits)).version < 0:
                await self._create()
            problem = await self._try(change)
            try:
                view = await self._refresh(_commits)
            except (Unavailable, Corrupt) as error:
                raise CommitUnknown(f"cannot read the table after a commit: {error}") from problem
            if problem is None or change.is_in(view):
                return
            await self._check(change)
            if isinstance(problem, ManifestConflict):
                raise problem
            reason = f"commit to table {self._prefix} failed: {_why(problem)}"
            raise CommitUnknown(reason) from problem

    # --- callers of the methods below hold `_turn`

    async def _try(self, change: TableChange) -> Exception | None:
        """Commit on top of the loaded version; return the error, if any."""
        try:
            await self._check(change)
            if change.removed and not (self._view and self._view.has(change.removed)):
                raise ManifestConflict("files to remove are not in the table: refresh, plan again")
            self._requests.count_commit(self._delta.version + 1)
            await self._call(_commits, self._delta.commit, change)
        except (ManifestConflict, DeltaError, OSError) as error:
            return error
        return None

    async def _create(self) -> None:
        """Create the table. If another process created it first, load that table."""
        options = await self._options()
        self._requests.count_create()
        problem = await self._call(_commits, self._delta.create, options)
        if (await self._refresh(_commits)).version < 0:
            raise Unavailable(f"table {self._prefix} cannot be created: {_why(problem)}")

    async def _refresh(self, pool: Executor) -> ManifestVersion:
        options = await self._options()
        old_version = self._delta.version
        try:
            await self._call(pool, self._delta.refresh, options)
        except Unavailable:
            await delta_log.find_damage(self._store, self._prefix)
            raise
        if old_version < 0:
            self._requests.count_open(self._delta.version)
        else:
            self._requests.count_update(old_version, self._delta.version)
        return await self._follow(pool)

    async def _follow(self, pool: Executor) -> ManifestVersion:
        """Take the files and transactions of the DeltaTable's version into the view."""
        version = self._delta.version
        if self._view is None or self._view.version != version:
            transactions = await self._transactions_at(version)
            view = await self._call(pool, self._delta.view, self._prefix)
            history = _History(
                partial(delta_log.commits_to, self._store, self._prefix, version), self._files_at
            )
            self._served = await served(history, view)
            self._view = view
            self._transactions = transactions
        return self._view

    async def _files_at(self, version: int) -> SegmentColumns | None:
        options = await self._options()
        self._requests.count_open(version)
        return await self._call(_reads, self._delta.files_at, version, self._prefix, options)

    async def _transactions_at(self, version: int) -> dict[str, int | None]:
        """Return the known transactions, updated to `version`.

        An empty result means that deltalake must read them.

        For each transaction, deltalake reads all commits since the last checkpoint: 60 requests and
        0.3 s. This method reads the new commits once for all transactions: a few requests.
        """
        transactions = dict(self._transactions)
        if not transactions or version - self.version > _FOLLOWED_MAX:
            return {}
        try:
            for number in range(self.version + 1, version + 1):
                key = f"{self._prefix}/_delta_log/{number:020d}.json"
                transactions.update(transactions_of(await self._store.get(key)))
        except (ObjectNotFound, Unavailable, msgspec.DecodeError):
            return {}  # deleted by a cleanup of the log, or in an unknown form
        return transactions

    async def _found(self, app_id: str) -> int | None:
        # After a cancelled refresh, the DeltaTable may have a newer version than the view.
        await self._follow(_reads)
        if app_id not in self._transactions:
            call = self._delta.transaction_version
            self._requests.count_transaction_search(self._delta.version)
            self._transactions[app_id] = await self._call(_reads, call, app_id)
        return self._transactions[app_id]

    async def _found_all(self, app_ids: Iterable[str]) -> dict[str, int | None]:
        await self._follow(_reads)
        unknown = [app_id for app_id in app_ids if app_id not in self._transactions]
        if len(unknown) > _ASKED_MAX:
            # Read them as of the view's version, because the log may have newer commits.
            every = await delta_log.transactions_at(self._store, self._prefix, self.version)
            if every is not None:
                self._transactions |= {app_id: every.get(app_id) for app_id in unknown}
        transactions = self._transactions
        return {
            app_id: transactions[app_id] if app_id in transactions else await self._found(app_id)
            for app_id in app_ids
        }

    async def _check(self, change: TableChange) -> None:
        versions = await self._found_all(change.transactions)
        check_transactions(change.added, change.transactions, versions)

    async def _options(self) -> dict[str, str]:
        ask = getattr(self._store, "deltalake_options", None)
        options = {} if ask is None else await ask()
        return _RETRIES | options if options else {}  # a folder has no options

    async def _call(self, pool: Executor, call: Callable[[*Ts], T], *args: *Ts) -> T:
        future = asyncio.get_running_loop().run_in_executor(pool, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            retrieve_exception(future)
            raise


class _History(NamedTuple):
    """The history of a manifest up to a version, for a caller that holds `_turn`."""

    commits: Callable[[int], Awaitable[list[TableCommit]]]
    files_at: Callable[[int], Awaitable[SegmentColumns | None]]


class _Delta:
    """A DeltaTable with its blocking calls. They run one at a time, in threads of the pools."""

    def __init__(self, uri: str, name: str, clock: Clock) -> None:
        self.table: deltalake.DeltaTable | None = None
        self._uri = uri
        self._directory = None if "://" in uri else Path(uri)
        self._name = name
        self._clock = clock
        self._synced = -1
        if self._directory is not None and "%" in uri:
            raise StoreUnfit(f"Delta cannot open folder {uri}: its path has a %")

    @property
    def version(self) -> int:
        return -1 if self.table is None else self.table.version()

    def refresh(self, options: dict[str, str]) -> None:
        """Load the newest version.

        If this fails, open the table again, because credentials may have expired. If this method
        raises Unavailable, the loaded version stays.
        """
        table = self.table
        try:
            if table is None or not _is_updated(table):
                table = deltalake.DeltaTable(self._uri, storage_options=options)
            self._sync(table.version())
        except TableNotFoundError as error:
            if self.table is not None:
                raise Unavailable(f"table {self._uri} was deleted") from error
        except (DeltaError, OSError) as error:
            raise Unavailable(f"table {self._uri} cannot be read: {_why(error)}") from error
        else:
            self.table = table

    def _sync(self, version: int) -> None:
        if self._directory is None or version <= self._synced:
            return
        if os.access(self._directory, os.W_OK):  # without write access, this process never commits
            delta_log.sync_log(self._directory / "_delta_log", self._synced + 1, version)
        self._synced = version

    def create(self, options: dict[str, str]) -> Exception | None:
        """Commit version 0; return the error, if any.

        There are no retries, because a retry would commit the schema a second time, as version 1.
        `mode="ignore"` would do the same.
        """
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

    def commit(self, change: TableChange) -> None:
        """Commit a change that fits the loaded version. The DeltaTable stays at that version."""
        assert self.table is not None
        now_ms = self._clock.now_ms()
        # Another program may set this property. It forbids removals that change data, so a change
        # with removals says that it changes no data.
        is_append_only = self.table.metadata().configuration.get(_APPEND_ONLY) == "true"
        data_change = change.data_change and not (change.removed and is_append_only)
        self.table.create_write_transaction(
            [
                *(add_action(file, now_ms, data_change) for file in change.added),
                *(remove_action(file, now_ms, data_change) for file in change.removed),
            ],
            mode="append",
            schema=TABLE_SCHEMA,
            partition_by=["partition"],
            commit_properties=CommitProperties(
                app_transactions=[
                    deltalake.Transaction(app_id, version)
                    for app_id, version in (*change.transactions.items(), *change.reset.items())
                ]
            ),
            post_commithook_properties=PostCommitHookProperties(
                create_checkpoint=True, cleanup_expired_logs=False
            ),
        )

    def view(self, prefix: str) -> ManifestVersion:
        if self.table is None:
            return ManifestVersion(-1, prefix, SegmentColumns.of([]))
        return ManifestVersion(self.version, prefix, _files_of(self.table, prefix))

    def files_at(self, version: int, prefix: str, options: dict[str, str]) -> SegmentColumns | None:
        """Return the files of a version, or None if deltalake cannot open it.

        Then its commits are gone, or the store does not answer.
        """
        try:
            table = deltalake.DeltaTable(self._uri, version=version, storage_options=options)
        except (DeltaError, OSError):
            return None
        return _files_of(table, prefix)

    def log_retention_ms(self) -> int | None:
        if self.table is None:
            return None
        configuration = self.table.metadata().configuration
        return interval_ms(configuration.get(_LOG_RETENTION, _PROPERTIES[_LOG_RETENTION]))

    def transaction_version(self, app_id: str) -> int | None:
        if self.table is None:
            return None
        try:
            return self.table.transaction_version(app_id)
        except (DeltaError, OSError) as error:
            raise Unavailable(f"table {self._uri} cannot be read: {_why(error)}") from error


def _files_of(table: deltalake.DeltaTable, prefix: str) -> SegmentColumns:
    stream = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True))
    try:
        return SegmentColumns.of_adds(stream.read_all())
    except (pa.ArrowException, KeyError) as error:
        raise Corrupt(f"{prefix}/_delta_log", f"is not a manifest: {error}") from error


def _is_updated(table: deltalake.DeltaTable) -> bool:
    try:
        table.update_incremental()
    except (DeltaError, OSError):
        return False
    return True


def _why(error: Exception | None) -> str:
    """Return the first three lines of deltalake's error, without colours and backtrace."""
    lines = _COLOUR.sub("", str(error)).splitlines()
    return " ".join(line.strip() for line in lines[:3])[:300]
