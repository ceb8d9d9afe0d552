"""Repair of tables in doubt (DESIGN 8): a proposal for each table, and its repair on request.

- *restore*: the table gets the files that the log's own commits made, without files of other
  programs and without seals of another WAL. No acknowledged record is lost. A restore needs the
  objects of these files. Collection deletes no object of a table in doubt, but another program's
  VACUUM may have deleted some.
- *adopt*: the rows that the other program left are written again as segments. Records whose offsets
  have no row are lost for good. The report names these offsets, and readers pass over them as after
  a key compaction.

Each way is one commit of the table under the maintenance locks of its partitions. **On a crash**
before the commit, uploads that no version names remain for collection. After the commit, the table
is whole. If a sealer or a rewrite commits meanwhile, the repair raises ManifestConflict: run it
again.
"""

import io
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.compaction.maintenance_session import MaintenanceSession, topics_of
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.record_columns import RECORD_SCHEMA
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import MoveLogStart
from tidelog.storage.core.errors import ObjectNotFound, TableInDoubt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.segment_reader import SegmentReader, StoreRanges, between
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectStore, upload
from tidelog.storage.tables.foreign_commits import HISTORY_MAX, confirmed, doubt_of
from tidelog.storage.tables.manifest import (
    ManifestVersion,
    SegmentColumns,
    SegmentIndex,
    Table,
    TableCommit,
    clean_app_id,
    maintenance_app_id,
    seal_app_id,
    sealed_to,
)

RESTORE = "restore"
ADOPT = "adopt"
NONE = "none"


class Repair(NamedTuple):
    """The repair of one topic: why its table is in doubt, and the way out, or why there is none.

    `lost` has the partition, offset and end offset of records that no longer exist.
    """

    topic: str
    version: int
    why: str
    way: str
    what: str
    added: int = 0
    removed: int = 0
    lost: Sequence[tuple[int, int, int]] = ()
    is_done: bool = False


_Piece: TypeAlias = SegmentFile | pa.Table
"""A segment in the table, or rows of files that are not segments."""


class _TableChange(NamedTuple):
    """The files that a commit takes out of a table and puts into it, and its transactions."""

    removed: list[SegmentFile]
    added: list[SegmentFile]
    reset: dict[str, int]
    partitions: set[int]
    data_change: bool = True


async def repair(
    cluster: MaintenanceSession,
    names: Sequence[str] | None,
    *,
    is_dry: bool,
    way: str | None = None,
) -> list[Repair]:
    """Repair the tables in doubt of these topics (all if None).

    If `is_dry`, only propose the repairs. `way` chooses between restore and adopt; if it is None,
    restore where this is possible, else adopt.

    Raises UnknownTopic. After Unavailable, CommitUnknown or ManifestConflict, run again.
    """
    await cluster.refresh()
    repairs: list[Repair] = []

    async def repair_one(topic: Topic) -> None:
        repairs.extend(await _repair(cluster, topic, is_dry=is_dry, way=way))

    await cluster.for_each(topics_of(cluster.state, names), repair_one)
    return repairs


async def undo_rearrangement(cluster: MaintenanceSession, topic: Topic) -> bool:
    """Restore a table if another program only moved rows to other files, as OPTIMIZE does.

    That program's commits must say so. Return whether the table was restored. Raises the errors of
    `repair`.
    """
    table = await cluster.table(topic)
    newest = await table.newest()
    foreign = [commit for commit in await table.commits(HISTORY_MAX) if commit.is_foreign]
    if not foreign or any(commit.data_change for commit in foreign):
        return False
    change = await _restored(cluster, topic, table, newest, set())
    if not isinstance(change, _TableChange):
        return False
    await _commit(table, change._replace(data_change=False))
    return True


async def _repair(
    cluster: MaintenanceSession, topic: Topic, *, is_dry: bool, way: str | None
) -> list[Repair]:
    why = await _doubt(cluster, topic)
    if why is None:
        return []
    try:
        table = await cluster.table(topic)
        newest = await table.newest()
    except TableInDoubt as error:  # deltalake cannot read it
        advice = "restore _delta_log from a copy of the store; let no other program commit to it"
        return [Repair(topic.name, error.version, why, NONE, advice)]
    current = cluster.state.topic_of_id(topic.topic_id)
    if current is None:
        return []
    ahead = await _strange(cluster, topic, table)
    change = await _restored(cluster, current, table, newest, ahead)
    proposed = Repair(topic.name, newest.version, why, NONE, str(change))
    lost: list[tuple[int, int, int]] = []
    if isinstance(change, _TableChange) and way != ADOPT:
        advice = f"restore what the log put there: {_told(change)}"
        proposed = proposed._replace(way=RESTORE, what=advice)
    elif way != RESTORE and not ahead:
        adoption = _Adoption(cluster, current, newest)
        change = await adoption.change(is_dry=is_dry)
        lost = adoption.lost
        if isinstance(change, _TableChange):
            advice = f"adopt the rows that are there: {_told(change)}"
            proposed = proposed._replace(way=ADOPT, what=advice, lost=lost)
        else:
            proposed = proposed._replace(what=f"{proposed.what}; {change}")
    if not isinstance(change, _TableChange) or proposed.way == NONE:
        return [proposed]
    proposed = proposed._replace(added=len(change.added), removed=len(change.removed))
    if not is_dry:
        if change.partitions:
            await _commit(table, change)
        await _pass_over(cluster, current, lost, await table.newest())
    return [proposed._replace(is_done=not is_dry)]


async def _doubt(cluster: MaintenanceSession, topic: Topic) -> str | None:
    """Return why the topic's table is in doubt, or None.

    Find also the faults that otherwise only a seal finds.
    """
    try:
        table = await cluster.checked_table(topic)
    except TableInDoubt as error:
        return error.why
    if ahead := await _strange(cluster, topic, table):
        return f"partition {min(ahead)}: its newest segments have other records than the WAL"
    if behind := await _behind(cluster, topic, table):
        return f"partition {min(behind)}: the transaction of its last seal is lost"
    return None


def _told(change: _TableChange) -> str:
    return f"{len(change.removed)} files out of the table, {len(change.added)} into it"


async def _commit(table: Table, change: _TableChange) -> None:
    locks = {}
    for number in change.partitions:
        app_id = maintenance_app_id(number)
        locks[app_id] = (await table.transaction_version(app_id) or 0) + 1
    await table.replace(
        change.removed, change.added, locks, data_change=change.data_change, reset=change.reset
    )


# -- restore


async def differs(
    store: ObjectStore, prefix: str, partition: Partition, file: SegmentFile
) -> str | None:
    """Return how a segment differs from the tail at the same offsets.

    If it does not differ, or if its object is gone, return None. Raises Corrupt.

    A sealer that crashed between its two commits leaves segments beyond the sealed end, with the
    records of the tail. A table that was copied or restored from a later moment than the WAL also
    has segments beyond the sealed end, but with other records. A seal would replace acknowledged
    records by these other records.
    """
    ranges = StoreRanges(store)
    reader = SegmentReader(ranges)
    key = f"{prefix}/{file.path}"
    offset = max(file.base_offset, partition.sealed_end)
    end = min(file.end_offset, partition.high_watermark)  # as far as this state knows the tail
    try:
        footer = await reader.footer(key, file.size)
        groups = footer.groups_between(offset, end)
        async for _, whole in reader.batches(key, footer, groups):
            batch = between(whole, offset, end)
            for run in partition.tail:
                if not batch.num_rows:
                    break
                first = int(batch.column("offset")[0].as_py())
                if run.base_offset <= first < run.end_offset:
                    if not partition.is_gone(offset, first):
                        return f"has no record at {offset}, where the WAL has one"
                    offset = first
                    count = min(run.end_offset - offset, batch.num_rows)
                    body = await ranges.read(run.object_key, run.position, run.size)
                    tail = run.records_of(run.decode(body)).slice(offset - run.base_offset, count)
                    if not batch.slice(0, count).equals(chunks.with_offsets(tail, offset)):
                        return f"has other records of [{offset}, {offset + count}) than the WAL"
                    batch, offset = batch.slice(count), offset + count
    except ObjectNotFound:
        return None
    return (
        None
        if partition.is_gone(offset, end)
        else f"has no record at {offset}, where the WAL has one"
    )


async def _strange(cluster: MaintenanceSession, topic: Topic, table: Table) -> set[int]:
    """Return the partitions whose segments beyond the sealed end are not from this WAL."""
    newest = await table.newest()
    await cluster.refresh()  # an older state lacks the newest seals of this WAL
    current = cluster.state.topic_of_id(topic.topic_id)
    numbers: set[int] = set()
    if current is None:
        return numbers
    for number, partition in enumerate(current.partitions):
        cleaned = await table.transaction_version(clean_app_id(number)) or 0
        files = [file for file in newest.files(number) if file.end_offset > partition.sealed_end]
        if cleaned > partition.sealed_end:
            numbers.add(number)
        for file in files:
            is_beyond = file.end_offset > partition.high_watermark
            if is_beyond or await differs(cluster.store, topic.prefix, partition, file):
                numbers.add(number)
    return numbers


async def _behind(cluster: MaintenanceSession, topic: Topic, table: Table) -> set[int]:
    """Return the partitions whose seals in the table do not reach the WAL's sealed end."""
    current = cluster.state.topic_of_id(topic.topic_id)
    partitions = [] if current is None else current.partitions
    return {
        number
        for number, partition in enumerate(partitions)
        if await sealed_to(table, number) < partition.sealed_end
    }


async def _restored(
    cluster: MaintenanceSession,
    topic: Topic,
    table: Table,
    newest: ManifestVersion,
    ahead: set[int],
) -> "_TableChange | str":
    """Return the change that restores the files of the log's own commits.

    If there is no such change, return why.
    """
    partitions = topic.partitions

    def is_foreign(commit: TableCommit) -> bool:
        marks = [seal_app_id(number) for number in ahead]
        cleans = [clean_app_id(number) for number in range(len(partitions))]
        ends = [partitions[number].sealed_end for number in ahead]
        limits = dict(zip(marks, ends, strict=True))
        limits |= {
            mark: partition.sealed_end for mark, partition in zip(cleans, partitions, strict=True)
        }
        return commit.is_foreign or any(
            version > limits.get(app_id, version) for app_id, version in commit.transactions.items()
        )

    sealed_ends = [partition.sealed_end for partition in partitions]
    is_whole = partial(_is_whole, partitions=partitions, sealed_ends=sealed_ends)
    target: ManifestVersion | None = newest
    if ahead or not is_whole(newest):
        target = await confirmed(table, newest, is_whole, is_foreign)
    if target is None:
        return "no whole version of the table can be made from the log's own commits"
    target_files = {file.path: file for file in target.files()}
    listed = {info.key async for info in cluster.store.list(f"{topic.prefix}/")}
    missing_paths = [
        path for path in sorted(target_files) if f"{topic.prefix}/{path}" not in listed
    ]
    if missing_paths:
        return f"{len(missing_paths)} objects were deleted, the first is {missing_paths[0]}"
    there = {file.path: file for file in newest.files()}
    removed = [file for path, file in there.items() if path not in target_files]
    added = [file for path, file in target_files.items() if path not in there]
    changed = {file.partition for file in (*removed, *added)}
    reset: dict[str, int] = {}
    spans = target.spans()
    for number, partition in enumerate(partitions):
        end = max(partition.sealed_end, spans.get(number, (0, 0))[1])
        if (await table.transaction_version(seal_app_id(number)) or 0) != end:
            reset[seal_app_id(number)] = end
        if (await table.transaction_version(clean_app_id(number)) or 0) > partition.sealed_end:
            reset[clean_app_id(number)] = partition.sealed_end
        if reset.keys() & {seal_app_id(number), clean_app_id(number)}:
            changed.add(number)
    return _TableChange(removed, added, reset, changed)


def _is_whole(
    version: ManifestVersion, *, partitions: Sequence[Partition], sealed_ends: Sequence[int]
) -> bool:
    return doubt_of(version, partitions, sealed_ends) is None


# -- adopt


class _Adoption:
    """The adoption of one table: segments with all rows of its newest version, of any program."""

    def __init__(self, cluster: MaintenanceSession, topic: Topic, newest: ManifestVersion) -> None:
        self._cluster = cluster
        self._topic = topic
        self._newest = newest
        self.lost: list[tuple[int, int, int]] = []

    async def change(self, *, is_dry: bool) -> "_TableChange | str":
        """Return the change, or why none is possible; unless `is_dry`, upload its segments."""
        change = _TableChange([], [], {}, set())
        for number, partition in enumerate(self._topic.partitions):
            try:
                await self._partition(number, partition, change, is_dry=is_dry)
            except (ValueError, pa.ArrowException, ObjectNotFound) as error:
                return f"the rows of partition {number} cannot be adopted: {error}"
        return change

    async def _partition(
        self, number: int, partition: Partition, change: _TableChange, *, is_dry: bool
    ) -> None:
        files = self._newest.files(number)
        own = [file for file in files if file.base_offset >= 0]
        foreign = [file for file in files if file.base_offset < 0]
        rows = await self._rows(foreign)
        pieces: list[tuple[int, _Piece]] = [(file.base_offset, file) for file in own]
        pieces += _runs(rows, own)
        pieces.sort(key=itemgetter(0))
        start, end = partition.log_start_offset, partition.sealed_end
        bounds = [first for first, _ in pieces] + [max(end, _end(pieces[-1][1]) if pieces else 0)]
        if pieces:
            bounds[0] = min(bounds[0], start)
        elif start < end:
            self.lost.append((number, start, end))
        clean_end = 0
        for index, (first, piece) in enumerate(pieces):
            base, upto = bounds[index], bounds[index + 1]
            if _end(piece) > upto:
                raise ValueError(f"offset {upto} is in two files")
            holes = list(_holes(piece, max(base, start) if index == 0 else base, upto))
            self.lost += [(number, *span) for span in holes]
            clean_end = max([clean_end, *(span[1] for span in holes)])
            if isinstance(piece, SegmentFile) and (base, upto) == (first, piece.end_offset):
                continue
            change.added.append(await self._write(number, base, upto, piece, is_dry=is_dry))
            if isinstance(piece, SegmentFile):
                change.removed.append(piece)
            change.partitions.add(number)
        change.removed.extend(foreign)
        if foreign:
            change.partitions.add(number)
        if clean_end:
            change.reset[clean_app_id(number)] = clean_end

    async def _rows(self, foreign: Sequence[SegmentFile]) -> pa.Table:
        tables = []
        for file in foreign:
            body = await self._cluster.store.get(f"{self._topic.prefix}/{file.path}")
            read = pq.read_table(io.BytesIO(body), columns=RECORD_SCHEMA.names)
            tables.append(read.cast(RECORD_SCHEMA))
        return pa.concat_tables(tables or [RECORD_SCHEMA.empty_table()]).sort_by("offset")

    async def _write(
        self, number: int, base: int, end: int, piece: _Piece, *, is_dry: bool
    ) -> SegmentFile:
        """Upload the piece as a segment with [base, end) in its name, unless `is_dry`."""
        path = object_keys.segment(number, base, end, self._cluster.clock.new_id().hex())
        key = f"{self._topic.prefix}/{path}"
        if isinstance(piece, SegmentFile):
            if not is_dry:
                body = await self._cluster.store.get(f"{self._topic.prefix}/{piece.path}")
                await upload(self._cluster.store, key, [body])
            return piece._replace(path=path, base_offset=base, end_offset=end)
        config = self._topic.config
        written = segments.write(
            piece.combine_chunks().to_batches(),
            codec=config.compression_type,
            is_json=False,
            level=self._cluster.state.level,
        )
        if not is_dry:
            await upload(self._cluster.store, key, [memoryview(written.body)])
        stamps = written.timestamp_min, written.timestamp_max
        return SegmentFile(path, number, base, end, written.size, written.rows, *stamps)


def _end(piece: _Piece) -> int:
    if isinstance(piece, SegmentFile):
        return piece.end_offset
    return int(piece.column("offset")[-1].as_py()) + 1


def _runs(rows: pa.Table, own: Sequence[SegmentFile]) -> "Iterator[tuple[int, pa.Table]]":
    """Split rows, which are sorted by offset, wherever a segment of `own` lies between two rows.

    Raises ValueError if an offset occurs twice.
    """
    offsets = rows.column("offset").to_numpy()
    if (offsets[1:] <= offsets[:-1]).any():
        raise ValueError("an offset is in two files")
    index = SegmentIndex(SegmentColumns.of(sorted(own, key=lambda file: file.base_offset)))
    first = 0
    while first < len(offsets):
        file = index.at_or_after(int(offsets[first]))
        if file is not None and file.base_offset <= offsets[first]:
            raise ValueError(f"offset {offsets[first]} is in two files")
        end = len(offsets) if file is None else int(offsets.searchsorted(file.base_offset))
        yield int(offsets[first]), rows.slice(first, end - first)
        first = end


def _holes(piece: _Piece, base: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [base, end) that a piece does not have.

    A segment counts as having all offsets of the range in its name, because key compaction may have
    removed records.
    """
    if isinstance(piece, SegmentFile):
        spans = [(piece.base_offset, piece.end_offset)]
    else:
        offsets = piece.column("offset").to_numpy()
        spans = [(int(offset), int(offset) + 1) for offset in offsets]
    for first, last in spans:
        if first > base:
            yield base, first
        base = max(base, last)
    if base < end:
        yield base, end


async def _pass_over(
    cluster: MaintenanceSession,
    topic: Topic,
    lost: Sequence[tuple[int, int, int]],
    newest: ManifestVersion,
) -> None:
    """Move the log start of a partition without files past its lost records."""
    spans = newest.spans()
    await cluster.commit(
        [
            MoveLogStart(topic.topic_id, number, end)
            for number, _, end in lost
            if number not in spans
        ]
    )
