"""The log as of one moment, for readers without a broker; nothing is written to the store.

First the WAL is read to its end, then the manifests. So a manifest may be newer than the state but
never older: what the state calls sealed is in the table (DESIGN 7 commits there first), and what
the table has beyond `sealed_end` is in the tail still, where the plan reads it (I7). Segments that
retention takes between the two reads are gone, as if we had come later.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
import pyarrow as pa

from storage import chunk as chunks
from storage.boundary import Found, Selection, Span, resolve
from storage.clock import Clock
from storage.errors import Corrupt
from storage.manifest import Table, seal_app_id
from storage.model import SegmentFile, TopicPartition
from storage.objectstore import ObjectStore
from storage.partition import Partition
from storage.scan import (
    PartitionView,
    Range,
    Slice,
    Snapshot,
    TopicView,
    Wanted,
    run_slices,
    segment_slices,
)
from storage.slices import decode, fetch
from storage.state import ClusterState
from storage.table import open_table
from storage.wal import Wal, WalSettings

Topics = Sequence[str] | re.Pattern[str] | None
"""Names, what a whole name must match, or None for all."""

_NEVER = sys.maxsize
_READING = WalSettings(checkpoint_entries=_NEVER, checkpoint_entries_max=_NEVER)
"""A reader leaves no checkpoints behind."""


async def open_snapshot(store: ObjectStore, clock: Clock, topics: Topics) -> Snapshot:
    """The log now. Raises StoreUnfit where no cluster is, UnknownTopic, Corrupt, Unavailable."""
    view = await LogView.open(store, clock)
    try:
        return await view.snapshot(topics)
    finally:
        await view.close()


class LogView:
    """A view of a cluster that follows its WAL and takes snapshots. Owned by one event loop."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        """Use `open`."""
        self._store = store
        self._wal = Wal(store, clock, "reader", _READING)
        self._tables: dict[str, Table] = {}

    @classmethod
    async def open(cls, store: ObjectStore, clock: Clock) -> "LogView":
        view = cls(store, clock)
        await view._wal.open(found=False)
        return view

    async def refresh(self) -> None:
        """Afterwards the view holds whatever was committed before this call (I3)."""
        await self._wal.refresh()

    def offsets(self, topics: Topics) -> Snapshot:
        """The view without segments and runs: nothing to plan from, and no request.

        Raises UnknownTopic for a name.
        """
        return self._copy(topics, has_runs=False)

    async def snapshot(
        self, topics: Topics, since: Mapping[TopicPartition, int] | None = None
    ) -> Snapshot:
        """The view as it is, to plan from; raises UnknownTopic for a name.

        Segments that end before `since` are left out: who reads the tail alone asks no manifest.
        """
        snapshot = self._copy(topics, has_runs=True)
        views = [await self._with_segments(v, since or {}) for v in snapshot.topics.values()]
        return snapshot._replace(topics={view.name: view for view in views})

    async def find(self, snapshot: Snapshot, times: Iterable[tuple[TopicPartition, int]]) -> Found:
        """The first offset stamped at or after each time (ms), as of the snapshot."""
        return {(of, time): await self._find(snapshot, of, time) for of, time in times}

    async def resolve(self, selection: Selection, span: Span) -> tuple[Snapshot, list[Range]]:
        """A snapshot of what is selected, and the offsets that the span means in it."""
        snapshot = await self.snapshot(selection.topics())
        partitions = selection.partitions(snapshot)
        found = await self.find(snapshot, span.times(partitions))
        return snapshot, resolve(snapshot, partitions, span, found)

    async def close(self) -> None:
        await self._wal.close()
        for table in self._tables.values():
            table.close()
        self._tables.clear()

    def _copy(self, topics: Topics, *, has_runs: bool) -> Snapshot:
        # At once, without an await: the state moves on under us.
        state = self._wal.state
        if topics is None or isinstance(topics, re.Pattern):
            names = [name for name in state.topics if topics is None or topics.fullmatch(name)]
        else:
            names = list(topics)
        views = {name: _view_of(state, name, has_runs=has_runs) for name in sorted(set(names))}
        return Snapshot(state.cluster_id, state.seq, views)

    async def _with_segments(
        self, view: TopicView, since: Mapping[TopicPartition, int]
    ) -> TopicView:
        """With the segments that the manifest names now; a topic of a tail alone has no table."""
        table: Table | None = None
        partitions = list(view.partitions)
        for part in view.partitions:
            start = since.get(TopicPartition(view.name, part.number), part.log_start_offset)
            if max(start, part.log_start_offset) < part.sealed_end:
                table = table or await self._table(view)
                found = await _segments_of(table, view, part)
                partitions[part.number] = part._replace(segments=found)
        return view._replace(partitions=partitions)

    async def _table(self, view: TopicView) -> Table:
        table = self._tables.get(view.topic_id)
        if table is not None:
            await table.refresh()
            return table
        table = await open_table(self._store, view.prefix, view.name)
        return self._tables.setdefault(view.topic_id, table)

    async def _find(self, snapshot: Snapshot, of: TopicPartition, time: int) -> int | None:
        view = snapshot.partition(of)
        whole = Range(*of, view.log_start_offset, view.high_watermark)
        wanted = Wanted(timestamp_min=time)
        for one in chain[Slice](
            segment_slices(snapshot, whole, wanted), run_slices(snapshot, whole, wanted)
        ):
            # The first group that can have a hit has one, unless the slice cuts it off.
            for groups_max in (1, None):
                fetched = await fetch(self._store, one, wanted, groups_max=groups_max)
                hit = _first_hit(decode(one, fetched, ["offset", "timestamp"]), time)
                if hit is not None:
                    return hit
        return None


def _first_hit(batches: Iterable[pa.RecordBatch], time: int) -> int | None:
    for batch in batches:
        stamps = chunks.timestamps_us(batch.column("timestamp"))
        hits = np.flatnonzero(stamps >= time * chunks.US_PER_MS)
        if len(hits):
            return int(batch.column("offset")[int(hits[0])].as_py())
    return None


def _view_of(state: ClusterState, name: str, *, has_runs: bool) -> TopicView:
    topic = state.topic(name)
    return TopicView(
        topic.name,
        topic.topic_id,
        topic.prefix,
        state.config(topic).log_append_time,
        [
            _partition_of(number, partition, has_runs=has_runs)
            for number, partition in enumerate(topic.partitions)
        ],
    )


def _partition_of(number: int, partition: Partition, *, has_runs: bool) -> PartitionView:
    # Copies: the newest run of a partition still grows.
    runs = [msgspec.structs.replace(run) for run in partition.tail] if has_runs else []
    return PartitionView(
        number,
        partition.log_start_offset,
        partition.sealed_end,
        partition.high_watermark,
        segments=[],
        runs=runs,
    )


async def _segments_of(table: Table, view: TopicView, part: PartitionView) -> list[SegmentFile]:
    """Those of [log_start_offset, sealed_end)."""
    index = await table.segments(part.number)
    reached = index.end_offset
    if reached < part.sealed_end:  # retention may have taken the newest
        reached = await table.transaction_version(seal_app_id(part.number)) or 0
    if reached < part.sealed_end:
        raise Corrupt(
            f"{view.prefix}/_delta_log",
            f"partition {part.number} ends at {index.end_offset}, the WAL says it is sealed to "
            f"{part.sealed_end}",
        )
    found: list[SegmentFile] = []
    file = index.at_or_after(part.log_start_offset)
    while file is not None and file.base_offset < part.sealed_end:
        found.append(file)
        file = index.at_or_after(file.end_offset)
    return found
