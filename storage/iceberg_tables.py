"""The Iceberg tables of a broker's topics: snapshots are made when clients load them.

storage/tables/iceberg.py decides; this module lists, reads and creates the objects. Objects are
created before a manifest list that names them, and each by create-if-absent under a name that
follows from its content. So brokers that make the same snapshot write the same objects, in any
order. Two brokers that make different snapshots at the same moment may have the same parent; then
the older one is in no history, and a stream that read it starts again.

**On a crash**: after a manifest and before its list, nothing names the manifest, and collection
deletes it. After the list, the snapshot is complete.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import pyarrow as pa

from tidelog.storage.core.errors import Corrupt, ObjectNotFound
from tidelog.storage.core.log_settings import IcebergSettings
from tidelog.storage.core.model import ReadBounds, SegmentFile
from tidelog.storage.log_engine import Log
from tidelog.storage.runtime.tasks import together
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import Created, upload
from tidelog.storage.tables import iceberg
from tidelog.storage.tables.delta import DeltaStore
from tidelog.storage.tables.foreign_commits import HISTORY_MAX
from tidelog.storage.tables.iceberg import (
    IcebergSnapshot,
    SnapshotChain,
    SnapshotObject,
    SnapshotStep,
    TableIdentity,
)
from tidelog.storage.tables.iceberg_avro import SEALED, UNPARTITIONED, Record
from tidelog.storage.tables.iceberg_filter import Expression, matching
from tidelog.storage.tables.iceberg_tail import HALF_DAY_MS, TailPlace, tail_snapshot
from tidelog.storage.tables.manifest import (
    ManifestVersion,
    SegmentColumns,
    SegmentIndex,
    Table,
    TableCommit,
)

log = logging.getLogger("tidelog.iceberg")

TAIL_BYTES_MAX = 64 * 1024 * 1024
"""Of the records of a tail in a snapshot, stored and in memory. A larger tail is sealed instead."""
FILES_MAX = 500_000
"""Files of all tables whose entries stay in memory (I10), in ~200 bytes each."""
_TOPICS_MAX = 1_000
_READS_MAX = 16  # manifests that are read at the same time
_MADE_MAX = 2  # snapshots that are made at the same time
_UNKNOWN_MS = 2**62  # commit times from here on are no times
_PLANNED_MAX = 2
"""Versions of a topic whose files stay in memory for plans: the newest, and that of its reader."""


class LoadedTable(NamedTuple):
    """A topic's Iceberg table: its metadata, and the URI that the metadata would have."""

    metadata: Record
    metadata_location: str


class PlannedFiles(NamedTuple):
    """Files of a snapshot. `location` is the URI of the topic's folder."""

    snapshot_id: int
    location: str
    files: Sequence[SegmentFile]
    has_more: bool
    """Whether more files match."""


class _TopicTable:
    """One topic's table in the memory of this broker."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.history: Sequence[IcebergSnapshot] = ()
        self.chain: SnapshotChain | None = None
        """With the entries of the manifests; None: they were not read."""
        self.rows: Sequence[Record] = ()
        """Of the newest manifest list."""
        self.ends: dict[int, int] = {}
        """The end of each partition's segments in the newest snapshot."""
        self.tail: IcebergSnapshot | None = None
        """The newest snapshot with the tail; None: there is no tail above the segments."""
        self.tail_key: tuple[object, ...] = ()
        self.made_s: float | None = None
        self.unwritten: tuple[int, Sequence[IcebergSnapshot]] = -1, ()
        """The version of the last load for plans, and its history."""
        self.planned: OrderedDict[int, SegmentColumns] = OrderedDict()
        """Files of the last versions that clients plan, by snapshot id."""

    @property
    def weight(self) -> int:
        files = sum(len(columns.path) for columns in self.planned.values())
        chain = self.chain or SnapshotChain()
        return files + sum(len(manifest.entries.snapshot_ids) for manifest in chain.manifests)


class IcebergTables:
    """The Iceberg tables of one broker, owned by its event loop.

    The methods raise the errors of the store, and TableInDoubt if a partition cannot be read.
    """

    def __init__(self, log: Log, settings: IcebergSettings) -> None:
        self._log = log
        self._refresh_s = settings.refresh_s
        self._has_tail = settings.has_tail
        self._tables: OrderedDict[str, _TopicTable] = OrderedDict()
        self._making = asyncio.Semaphore(_MADE_MAX)

    async def load(self, topic: Topic) -> LoadedTable:
        """Return the table, with manifests in the store for its newest version.

        The version is at most `refresh_s` old.
        """
        own = self._own(topic)
        async with own.turn:
            now_s = asyncio.get_running_loop().time()
            if own.made_s is None or now_s - own.made_s >= self._refresh_s:
                async with self._making:
                    await self._make_all(topic, own)
                own.made_s = now_s
            history, tail = own.history, own.tail
        self._forget_oldest()
        return self._loaded(topic, history, tail)

    async def load_planned(self, topic: Topic) -> LoadedTable:
        """Return the table for clients that let the broker plan their scans. Write nothing.

        It has only the snapshot of the newest version, whose manifest list may not exist.
        """
        own = self._own(topic)
        table = await self._log.tables.of(topic, age_max_s=self._refresh_s)
        view = await table.newest()
        version, history = own.unwritten
        if version != view.version:
            history = await self._unwritten(topic, table, view, own)
            own.unwritten = view.version, history
        self._forget_oldest()
        return self._loaded(topic, history)

    async def _unwritten(
        self, topic: Topic, table: Table, view: ManifestVersion, own: _TopicTable
    ) -> Sequence[IcebergSnapshot]:
        """Return the snapshot of a version, if it has files; its objects are not written."""
        files = await self._served(topic, table, view)
        if not len(files.path):
            return ()
        commits = await self._commits(table, view, 1)
        step = _newest_step(view, files, commits)
        _keep_planned(own, view.version + 1, files)
        return [iceberg.unwritten(step, await self._list_name(topic, view.version, files))]

    async def plan(
        self, topic: Topic, snapshot_id: int | None, expression: Expression, first: int, count: int
    ) -> PlannedFiles | None:
        """Return the files of a snapshot that may have rows that match, `count` from `first` on.

        Without an id, it is the newest snapshot. If the table's log does not have its version any
        more, return None. Raises InvalidRequest for an expression of too many levels.
        """
        files, snapshot_id = await self._planned_files(topic, snapshot_id)
        self._forget_oldest()
        if files is None:
            return None
        is_needed = await asyncio.to_thread(matching, expression, files)
        files = files.filter(is_needed)
        total = len(files.path)
        page = SegmentIndex(files.between(min(first, total), min(first + count, total)))
        return PlannedFiles(snapshot_id, self._location(topic), list(page), first + count < total)

    async def _planned_files(
        self, topic: Topic, snapshot_id: int | None
    ) -> tuple[SegmentColumns | None, int]:
        own = self._own(topic)
        if snapshot_id is not None and snapshot_id in own.planned:
            return own.planned[snapshot_id], snapshot_id
        table = await self._log.tables.of(topic, age_max_s=self._refresh_s)
        view = await table.newest()
        if snapshot_id is not None and snapshot_id > view.version + 1:  # of another broker
            await table.refresh()
            view = await table.newest()
        if snapshot_id is None or snapshot_id == view.version + 1:
            snapshot_id = view.version + 1
            files = await self._served(topic, table, view)
        else:
            if not 0 < snapshot_id <= view.version:
                return None, snapshot_id
            async with self._making:
                older = await table.files_at(snapshot_id - 1)
            if older is None:
                return None, snapshot_id
            files = older.filter(older.base_offset >= 0)
        _keep_planned(own, snapshot_id, files)
        return files, snapshot_id

    # -- one topic

    def _own(self, topic: Topic) -> _TopicTable:
        own = self._tables.setdefault(topic.topic_id, _TopicTable())
        self._tables.move_to_end(topic.topic_id)
        return own

    def _forget_oldest(self) -> None:
        """Drop the tables of deleted topics, and those that no client has loaded for long."""
        topic_of = self._log.state.topic_of_id
        for topic_id in [topic_id for topic_id in self._tables if topic_of(topic_id) is None]:
            del self._tables[topic_id]
        weight = sum(own.weight for own in self._tables.values())
        while len(self._tables) > 1 and (weight > FILES_MAX or len(self._tables) > _TOPICS_MAX):
            weight -= self._tables.popitem(last=False)[1].weight

    def _location(self, topic: Topic) -> str:
        """Return the URI of the topic's folder."""
        store = self._log.store
        if not hasattr(store, "table_uri"):
            return f"{store.url}{topic.prefix}"
        uri = cast("DeltaStore", store).table_uri(topic.prefix)
        return f"file://{uri}" if uri.startswith("/") else uri

    async def _list_name(self, topic: Topic, version: int, files: SegmentColumns) -> str:
        return await asyncio.to_thread(iceberg.list_name, version, files, self._location(topic))

    def _loaded(
        self,
        topic: Topic,
        history: Sequence[IcebergSnapshot],
        tail: IcebergSnapshot | None = None,
    ) -> LoadedTable:
        grace_ms = self._log.state.bounds.now.file_grace_ms
        listed = iceberg.readable(history, self._log.clock.now_ms(), grace_ms)
        listed += [] if tail is None else [tail]
        identity = TableIdentity(topic.topic_id, self._location(topic), topic.created_ms)
        name = iceberg.metadata_name(listed[-1] if listed else None)
        specs = (SEALED, UNPARTITIONED) if self._has_tail else (SEALED,)
        metadata = iceberg.table_metadata(identity, listed, specs)
        return LoadedTable(metadata, f"{identity.location}/{name}")

    async def _served(self, topic: Topic, table: Table, view: ManifestVersion) -> SegmentColumns:
        """Return the files that readers use of a version."""
        if view.is_readable():
            return view.columns
        files = SegmentColumns.of([])
        for number in range(len(topic.partitions)):
            files = files.joined((await table.segments(number)).columns)
        return files

    async def _commits(self, table: Table, view: ManifestVersion, count: int) -> list[TableCommit]:
        """Return the last commits up to a loaded version, the oldest first."""
        commits = await table.commits(count + max(table.version - view.version, 0))
        return [commit for commit in reversed(commits) if commit.version <= view.version][-count:]

    # -- snapshots

    async def _make_all(self, topic: Topic, own: _TopicTable) -> None:
        """Make the snapshots of segments, and then that of the tail above them."""
        if not self._has_tail:
            table = await self._log.tables.of(topic, age_max_s=self._refresh_s)
            await self._make(topic, table, own)
            return
        if sum(partition.tail_bytes for partition in topic.partitions) > TAIL_BYTES_MAX:
            await self._log.sealer.seal(topic)
        # The table after the bounds: a seal is in the table before it is in the WAL, so the
        # segments reach the sealed ends of these bounds.
        bounds = _TailBounds.of(topic, self._log.state.seq)
        table = await self._log.tables.of(topic)
        await table.refresh()
        await self._make(topic, table, own)
        if not await self._make_tail(topic, own, bounds):
            await self._log.sealer.seal(topic)
            await table.refresh()
            await self._make(topic, table, own)
            own.tail, own.tail_key = None, ()

    async def _make_tail(self, topic: Topic, own: _TopicTable, bounds: "_TailBounds") -> bool:
        """Make the snapshot of the tail. Return False if it has more than TAIL_BYTES_MAX."""
        newest = own.history[-1] if own.history else None
        now_ms = self._log.clock.now_ms()
        spans = {
            number: (max(start, own.ends.get(number, 0)), end)
            for number, (start, end) in bounds.spans.items()
            if max(start, own.ends.get(number, 0)) < end
        }
        key = (None if newest is None else newest.name, now_ms // HALF_DAY_MS, *spans.items())
        if own.tail_key == key:
            return True
        batches: dict[int, list[pa.RecordBatch]] = {}
        budget = TAIL_BYTES_MAX
        for number, (start, end) in spans.items():
            limits = ReadBounds(budget, offset_end=end)
            result = await self._log.reader.read(topic, number, start, limits)
            if result.next_offset < end:
                return False
            budget = max(budget - result.weight, 1)
            parts = [piece.batch for piece in result.pieces if piece.batch.num_rows]
            if parts:
                batches[number] = parts
        own.tail, own.tail_key = None, key
        if batches:
            place = TailPlace(0 if newest is None else newest.version, bounds.seq, now_ms)
            location = self._location(topic)
            tail_files = await asyncio.to_thread(
                tail_snapshot, newest, own.rows, batches, place, bounds.committed_ms, location
            )
            for created in tail_files.objects:
                await self._create(topic, created)
            own.tail = tail_files.snapshot
        return True

    async def _make(self, topic: Topic, table: Table, own: _TopicTable) -> None:
        """Make the snapshots up to the loaded version, unless they are there."""
        view = await table.newest()
        files = await self._served(topic, table, view)
        name = await self._list_name(topic, view.version, files)
        newest = own.history[-1] if own.history else None
        if newest is not None and newest.name == name:
            return
        listed = await self._listed(topic)
        if listed and max(listed) > view.version:  # another broker has read a newer version
            await table.refresh()
            view = await table.newest()
            files = await self._served(topic, table, view)
            name = await self._list_name(topic, view.version, files)
        if name in listed.get(view.version, ()):
            own.history, own.rows = await self._read_list(topic, name)
            own.chain, own.ends = None, _ends_of(files)
            return
        chain = await self._base(topic, own, listed, view.version)
        if not len(files.path) and chain.newest is None:
            own.history, own.rows, own.chain, own.ends = (), (), None, {}
            return
        count = view.version - chain.version
        is_split = await asyncio.to_thread(iceberg.needs_commits, chain, files)
        commits = await self._commits(table, view, min(count, HISTORY_MAX) if is_split else 1)
        step = _newest_step(view, files, commits)
        for next_step in await asyncio.to_thread(iceberg.steps, chain, step, commits):
            chain = await self._grow(topic, own, chain, next_step)
        own.rows = [manifest.row for manifest in chain.manifests]
        own.ends = _ends_of(files)

    async def _listed(self, topic: Topic) -> dict[int, list[str]]:
        """Return the names of the stored manifest lists, by version."""
        names: dict[int, list[str]] = {}
        folder = iceberg.folder(topic.prefix)
        async for info in self._log.store.list(f"{folder}snap-"):
            name = info.key.removeprefix(folder)
            parsed = iceberg.parse_name(name)
            if parsed is not None and parsed.is_list:
                names.setdefault(parsed.version, []).append(name)
        return names

    async def _base(
        self, topic: Topic, own: _TopicTable, listed: dict[int, list[str]], version: int
    ) -> SnapshotChain:
        """Return the chain of the newest stored snapshot before a version.

        If there is none, or it cannot be read, return an empty chain.
        """
        versions = [number for number in listed if number < version]
        if not versions:
            return SnapshotChain()
        names = listed[max(versions)]
        newest = None if own.chain is None else own.chain.newest
        if own.chain is not None and newest is not None and newest.name in names:
            return own.chain
        try:
            history, rows = await self._read_list(topic, names[0])
            return await self._read_chain(topic, history, rows)
        except (ObjectNotFound, Corrupt) as error:
            log.warning("topic %s: its Iceberg table begins again: %s", topic.name, error)
            return SnapshotChain()

    async def _read_list(
        self, topic: Topic, name: str
    ) -> tuple[list[IcebergSnapshot], list[Record]]:
        body = await self._log.store.get(f"{iceberg.folder(topic.prefix)}{name}")
        return await asyncio.to_thread(iceberg.history_of, body, name)

    async def _read_chain(
        self, topic: Topic, history: Sequence[IcebergSnapshot], rows: Sequence[Record]
    ) -> SnapshotChain:
        folder = iceberg.folder(topic.prefix)
        names = history[-1].manifests
        reads = [self._log.store.get(f"{folder}{name}") for name in names]
        bodies = dict(zip(names, await together(*reads, at_once=_READS_MAX), strict=True))
        location = self._location(topic)
        return await asyncio.to_thread(iceberg.chain_of, history, rows, bodies, location)

    async def _grow(
        self, topic: Topic, own: _TopicTable, chain: SnapshotChain, step: SnapshotStep
    ) -> SnapshotChain:
        """Make one snapshot, and create its objects."""
        location = self._location(topic)
        grown = await asyncio.to_thread(iceberg.grow, chain, step, location)
        *manifests, manifest_list = grown.objects
        for created in manifests:
            await self._create(topic, created)
        stored = await self._create(topic, manifest_list)
        own.history, own.chain = grown.chain.history, grown.chain
        if stored != manifest_list.body:  # another broker was first, maybe with another parent
            history, rows = await asyncio.to_thread(iceberg.history_of, stored, manifest_list.name)
            own.chain = await self._read_chain(topic, history, rows)
            own.history = history
        return own.chain

    async def _create(self, topic: Topic, created: SnapshotObject) -> bytes:
        """Create an object unless it exists; return what is stored."""
        store, key = self._log.store, f"{iceberg.folder(topic.prefix)}{created.name}"
        if await store.create(key, [created.body]) is Created.DONE:
            return created.body
        await upload(store, key, [created.body])
        return await store.get(key)


class _TailBounds(NamedTuple):
    """The offsets of a topic that may be in tails, at one number of the WAL."""

    seq: int
    committed_ms: int
    """The time of the newest entry with records of the tails."""
    spans: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, topic: Topic, seq: int) -> "_TailBounds":
        tails = {number: part for number, part in enumerate(topic.partitions) if part.tail}
        return cls(
            seq,
            max((part.tail[-1].committed_ms for part in tails.values()), default=0),
            {
                number: (max(part.log_start_offset, part.sealed_end), part.high_watermark)
                for number, part in tails.items()
            },
        )


def _ends_of(files: SegmentColumns) -> dict[int, int]:
    ends: dict[int, int] = {}
    for number, end in zip(files.partition.tolist(), files.end_offset.tolist(), strict=True):
        ends[number] = max(ends.get(number, 0), end)
    return ends


def _newest_step(
    view: ManifestVersion, files: SegmentColumns, commits: Sequence[TableCommit]
) -> SnapshotStep:
    """Return a version as a snapshot, with the time of its commit."""
    at_ms = commits[-1].at_ms if commits and commits[-1].version == view.version else 0
    if not at_ms:
        times = files.committed_ms[files.committed_ms < _UNKNOWN_MS]
        at_ms = int(times.max()) if len(times) else 0
    return SnapshotStep(view.version, files, at_ms, iceberg.APPEND)


def _keep_planned(own: _TopicTable, snapshot_id: int, files: SegmentColumns) -> None:
    own.planned[snapshot_id] = files
    own.planned.move_to_end(snapshot_id)
    while len(own.planned) > _PLANNED_MAX:
        own.planned.popitem(last=False)
