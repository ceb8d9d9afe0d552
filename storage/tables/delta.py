"""The manifest on Delta Lake: one Delta table per topic (DESIGN 8).

Only this module uses deltalake. **On a crash** in `add` before the commit, no table names the new
files, and collection deletes them. After the commit, a refresh finds its files and transactions.

A commit is a create-if-absent of `_delta_log/<version>.json`. The log makes its commits itself
(commit_put): one PUT above the loaded version. If another commit has the version, this module
reads it, and decides again. So a commit needs no look at the newest version before it, and the
loaded version advances by the commits that this process makes or reads. deltalake loads tables and
creates them, and it makes the commits and checkpoints of tables that other programs have given
properties that this module does not know (`TableProperties.is_plain`).

deltalake's HTTP client repeats requests, so a commit of it that succeeded may raise a conflict.
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
"""

import asyncio
import contextlib
import logging
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
from tidelog.storage.store.moments import NEVER, Moment, age_s, moment_now
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables import commit_put, delta_log
from tidelog.storage.tables.commit_put import (
    LOG_RETENTION,
    NEWEST_S_MIN,
    TableProperties,
    commit_key,
)
from tidelog.storage.tables.delta_json import (
    commit_body,
    commit_of,
    is_plain_path,
    statistics,
    transactions_of,
)
from tidelog.storage.tables.delta_log import LogTail
from tidelog.storage.tables.delta_requests import CHECKPOINT_INTERVAL, DeltaRequests
from tidelog.storage.tables.foreign_commits import served
from tidelog.storage.tables.log_checkpoint import checkpoint_of
from tidelog.storage.tables.manifest import (
    NO_RESET,
    ManifestConflict,
    ManifestVersion,
    Removal,
    SegmentColumns,
    SegmentIndex,
    Table,
    TableChange,
    TableCommit,
    check_transactions,
)
from tidelog.storage.tables.memory import Catalog, MemoryManifest


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


log = logging.getLogger("tidelog.tables")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TABLE_SCHEMA = pa.schema([*RECORD_SCHEMA, pa.field("partition", pa.int32())])
"""The table's columns: the columns of a segment, and the partition from the segment's path."""

_PROPERTIES = {
    commit_put.CHECKPOINT_INTERVAL: str(CHECKPOINT_INTERVAL),
    LOG_RETENTION: "interval 7 days",  # for commits that a checkpoint covers
    # Only collection cleans up the log, because it obeys holds (DESIGN 8).
    "delta.enableExpiredLogCleanup": "false",
    "tidelog.format": "1",
}

_ASKED_MAX = 4  # for more transactions, read all of them from the log at once
_FOLLOWED_MAX = 10  # after more new commits than this, drop the known transactions
_READ_MAX = 50  # after more new commits than this, load the table
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


def open_table(store: ObjectStore, prefix: str, name: str, clock: Clock | None = None) -> Table:
    """Return the manifest at `prefix`: on Delta if the store has URIs, else in memory. Does no IO.

    `clock` is that of the process that commits; without it, the machine's.

    The store's attribute `tables` is the catalog of its memory manifests. All wrappers of a store
    have the same catalog. A store without this attribute gets its own catalog.
    """
    if hasattr(store, "table_uri"):
        return DeltaManifest(cast("DeltaStore", store), prefix, name, clock)
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
        self._clock = clock or SystemClock()
        self._delta = _Delta(store.table_uri(prefix), name, self._clock)
        self._requests = DeltaRequests(store, prefix)
        self._turn = asyncio.Lock()
        self._view: ManifestVersion | None = None
        self._served: ManifestVersion | None = None
        # The version of each transaction that a caller has requested, as of the view; of all
        # transactions if there is a tail.
        self._transactions: dict[str, int | None] = {}
        self._tail: LogTail | None = None
        # None: there is no table, or deltalake must commit to it.
        self._properties: TableProperties | None = None
        self._was_newest = NEVER
        """The newest known moment at which no version was after the loaded one."""

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
            return (await self._found_all([app_id]))[app_id]

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
            if self._properties is not None:
                return self._properties.log_retention_ms
            return await self._call(_reads, self._delta.log_retention_ms)

    async def _commit(self, change: TableChange) -> None:
        async with self._turn:
            if (self._view or await self._refresh(_commits)).version < 0:
                await self._create()
            while self._may_commit(change):
                if await self._commit_next(change):
                    return await self._checkpoint()
            return await self._commit_by_deltalake(change)

    # --- callers of the methods below hold `_turn`

    def _may_commit(self, change: TableChange) -> bool:
        """Return whether a change is one that this module can write."""
        files = (*change.added, *change.removed)
        return self._properties is not None and all(is_plain_path(file.path) for file in files)

    async def _commit_next(self, change: TableChange) -> bool:
        """Commit above the loaded version, and load the commit; return whether it is done.

        If it is not, the loaded version has moved. **On a crash** after the PUT, the commit is in
        the table. Raises ManifestConflict, CommitUnknown, StoreRefused.
        """
        assert self._properties is not None
        assert self._view is not None
        if await self._is_too_old():
            await self._load(_commits)
            return False
        if change.is_in(self._view):
            return True
        try:
            await self._check(change)
        except ManifestConflict:
            await self._refresh(_commits)  # it may be done
            if change.is_in(self._view):
                return True
            await self._check(change)
        if not self._may_commit(change):
            return False
        return await self._put(change)

    async def _put(self, change: TableChange) -> bool:
        """PUT a change that fits the loaded version; as `_commit_next`."""
        assert self._properties is not None
        # A table that only takes appends forbids removals that change data, so a change with
        # removals says that it changes no data.
        if change.removed and self._properties.is_append_only:
            change = change._replace(data_change=False)
        body = commit_body(change, self._clock.now_ms(), self._clock.new_id().hex())
        key = commit_key(self._prefix, self.version + 1)
        started, newest_s_max = self._now(), self._properties.newest_s_max
        other = await commit_put.put_commit(self._store, key, body)
        if self._newest_age_s() > newest_s_max:
            # Suspended: the version may have been there, and be gone behind a checkpoint.
            self._forget()
            raise CommitUnknown(f"the commit {key} took too long: it may not be in the table")
        if other is not None:
            if not await self._take(other, _commits):
                await self._load(_commits)
                raise ManifestConflict(f"{key} is a commit of another program: start again")
            return False
        try:
            await self._take(body, _commits, is_own=True)
        except (Unavailable, Corrupt) as error:
            raise CommitUnknown(f"cannot read the table after a commit: {error}") from error
        self._was_newest = started
        return True

    def _now(self) -> Moment:
        return moment_now(self._store, self._clock)

    def _newest_age_s(self) -> float:
        return age_s(self._store, self._clock, self._was_newest)

    async def _is_too_old(self) -> bool:
        """Return whether versions after the loaded one may be gone, behind a checkpoint."""
        assert self._properties is not None
        age = self._newest_age_s()
        if age <= NEWEST_S_MIN:
            return False
        if age > self._properties.newest_s_max:
            return True
        return await delta_log.last_checkpoint(self._store, self._prefix) > self.version

    async def _checkpoint(self) -> None:
        """Write a checkpoint of the loaded version if one is due.

        **On a crash** before it or in it, the next commit writes one. If the store fails, too.
        """
        tail, properties = self._tail, self._properties
        if tail is None or properties is None:
            return
        if tail.version - tail.checkpoint < properties.checkpoint_interval:
            return
        try:
            last, commits = await tail.read(self._store, self._prefix)
            since_ms = self._clock.now_ms() - (properties.file_retention_ms or 0)
            checkpoint = await self._call(
                _commits, checkpoint_of, tail.version, last, commits, since_ms
            )
            if checkpoint is None:
                self._requests.count_checkpoint(tail.version)
                await self._call(_commits, self._delta.checkpoint, await self._options())
            else:
                key = delta_log.checkpoint_key(self._prefix, tail.version)
                await self._store.put(key, [checkpoint.body])
                await self._store.put(delta_log.pointer_key(self._prefix), [checkpoint.pointer])
        except (ObjectNotFound, Unavailable) as error:
            log.warning("the log of table %s gets no checkpoint yet: %s", self._prefix, error)
            return
        self._tail = LogTail(tail.version)

    async def _commit_by_deltalake(self, change: TableChange) -> None:
        problem = await self._try(change)
        try:
            view = await self._load(_commits)
        except (Unavailable, Corrupt) as error:
            raise CommitUnknown(f"cannot read the table after a commit: {error}") from problem
        if problem is None or change.is_in(view):
            return
        await self._check(change)
        if isinstance(problem, ManifestConflict):
            raise problem
        reason = f"commit to table {self._prefix} failed: {_why(problem)}"
        raise CommitUnknown(reason) from problem

    async def _try(self, change: TableChange) -> Exception | None:
        """Commit on top of the loaded version; return the error, if any."""
        try:
            if self._delta.version != self.version:
                await self._load(_commits, is_kept=True)
            await self._check(change)
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
        """Load the newest version."""
        if self._view is None or self._properties is None or not await self._read_on(pool):
            return await self._load(pool)
        return self._view

    async def _read_on(self, pool: Executor) -> bool:
        """Read the commits after the loaded version into it.

        Return False if this does not lead to the newest version: then load the table.
        """
        for _ in range(_READ_MAX):
            assert self._properties is not None
            started = self._now()
            try:
                body = await self._store.get(commit_key(self._prefix, self.version + 1))
            except ObjectNotFound:
                break
            if not await self._take(body, pool):
                return False
        else:
            return False
        try:  # the loaded version: the log may be gone
            await self._store.get_range(commit_key(self._prefix, self.version), 0, 1)
        except ObjectNotFound:
            return False
        if self._newest_age_s() > self._properties.newest_s_max:
            return False  # a version after this one may have been there, and be gone
        self._was_newest = started
        return True

    async def _take(self, body: bytes, pool: Executor, *, is_own: bool = False) -> bool:
        """Take the next commit into the view.

        Return False, and change nothing, if the commit is not in the form of the log's own ones.
        """
        assert self._view is not None
        next_view = await self._call(pool, self._after, self._view, body, is_own)
        if next_view is None:
            return False
        view, transactions = next_view
        served_view = await self._served_of(view)
        self._view, self._served = view, served_view
        self._transactions.update(transactions)
        if self._tail is not None:
            self._tail.append(body)
        return True

    def _after(
        self, view: ManifestVersion, body: bytes, is_own: bool
    ) -> tuple[ManifestVersion, Mapping[str, int]] | None:
        """Return the version after a commit, and the commit's transactions. In a thread."""
        version = view.version + 1
        try:
            commit = commit_of(body, version)
        except msgspec.DecodeError:
            return None
        if not is_own:
            if not commit.is_plain or commit.is_foreign:
                return None
            self._delta.sync(version)
        return view.after(commit), commit.transactions

    async def _served_of(self, view: ManifestVersion) -> ManifestVersion:
        commits = partial(delta_log.commits_to, self._store, self._prefix, view.version)
        return await served(_History(commits, self._files_at), view)

    async def _load(self, pool: Executor, *, is_kept: bool = False) -> ManifestVersion:
        """Load the newest version by deltalake; if `is_kept`, deltalake can commit above it."""
        options = await self._options()
        old_version, started = self._delta.version, self._now()
        try:
            await self._call(pool, self._delta.refresh, options)
        except Unavailable:
            await delta_log.find_damage(self._store, self._prefix)
            raise
        if old_version < 0:
            self._requests.count_open(self._delta.version)
        else:
            self._requests.count_update(old_version, self._delta.version)
        view = await self._follow(pool)
        properties = await self._call(pool, self._delta.properties)
        self._properties = properties if properties and properties.is_plain else None
        self._was_newest = started
        if self._properties is not None and not is_kept:
            self._delta.close()  # the view has all of it, and advances without it
        return view

    def _forget(self) -> None:
        """Drop the loaded version; what readers use stays until the next one."""
        self._view = self._properties = self._tail = None
        self._transactions = {}
        self._delta.close()

    async def _follow(self, pool: Executor) -> ManifestVersion:
        """Take the files and transactions of the DeltaTable's version into the view."""
        version = self._delta.version
        if self._view is None or self._view.version != version:
            transactions = await self._transactions_at(version)
            view = await self._call(pool, self._delta.view, self._prefix)
            self._served = await self._served_of(view)
            self._view = view
            self._transactions = transactions
            self._tail = None
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

    async def _found_all(self, app_ids: Iterable[str]) -> dict[str, int | None]:
        if self._properties is not None and self._tail is None:
            await self._read_tail()
        if self._tail is not None:
            return {app_id: self._transactions.get(app_id) for app_id in app_ids}
        # After a cancelled load, the DeltaTable may have a newer version than the view.
        await self._follow(_reads)
        unknown = [app_id for app_id in app_ids if app_id not in self._transactions]
        if len(unknown) > _ASKED_MAX:
            # Read them as of the view's version, because the log may have newer commits.
            every = await delta_log.transactions_at(self._store, self._prefix, self.version)
            if every is not None:
                self._transactions |= {app_id: every[0].get(app_id) for app_id in unknown}
        for app_id in unknown:
            if app_id not in self._transactions:
                call = self._delta.transaction_version
                self._requests.count_transaction_search(self._delta.version)
                self._transactions[app_id] = await self._call(_reads, call, app_id)
        return {app_id: self._transactions[app_id] for app_id in app_ids}

    async def _read_tail(self) -> None:
        """Read all transactions. If the log has another form than ours, let deltalake do it."""
        for _ in range(2):
            result = await delta_log.transactions_at(self._store, self._prefix, self.version)
            if result is not None:
                transactions, self._tail = result
                self._transactions = dict(transactions)
                return
            # The last checkpoint may be after the loaded version.
            await self._load(_reads, is_kept=True)
        self._properties = None

    async def _check(self, change: TableChange) -> None:
        versions = await self._found_all(change.transactions)
        check_transactions(change.added, change.transactions, versions)
        if change.removed and not (self._view and self._view.has(change.removed)):
            raise ManifestConflict("files to remove are not in the table: refresh, plan again")

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
        self._has_loaded = False
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
            self.sync(table.version())
        except TableNotFoundError as error:
            if self._has_loaded:
                raise Unavailable(f"table {self._uri} was deleted") from error
        except (DeltaError, OSError) as error:
            raise Unavailable(f"table {self._uri} cannot be read: {_why(error)}") from error
        else:
            self.table, self._has_loaded = table, True

    def close(self) -> None:
        """Drop the loaded version."""
        self.table = None

    def sync(self, version: int) -> None:
        """Make the log's versions up to this one durable (I1)."""
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
        properties = self.properties()
        is_append_only = properties is not None and properties.is_append_only
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
                    for app_id, version in change.all_transactions.items()
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

    def properties(self) -> TableProperties | None:
        """Return what a commit to the loaded version obeys, or None if there is no table."""
        if self.table is None:
            return None
        protocol, metadata = self.table.protocol(), self.table.metadata()
        own = deltalake.Schema.from_arrow(TABLE_SCHEMA).to_json(), _PROPERTIES
        return commit_put.properties_of(
            protocol,
            self.table.schema().to_json(),
            metadata.partition_columns,
            metadata.configuration,
            own,
        )

    def log_retention_ms(self) -> int | None:
        properties = self.properties()
        return None if properties is None else properties.log_retention_ms

    def checkpoint(self, options: dict[str, str]) -> None:
        """Write a checkpoint of the newest version, of whatever form the log is."""
        try:
            deltalake.DeltaTable(self._uri, storage_options=options).create_checkpoint()
        except (DeltaError, OSError) as error:
            raise Unavailable(f"table {self._uri} gets no checkpoint: {_why(error)}") from error

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
