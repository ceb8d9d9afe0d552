"""A table that is ahead of the WAL: it has records that the WAL does not call sealed yet.

This is so after a sealer crashed between its commit to the table and its action in the WAL, and
while another sealer is between these two steps. It is also so if the table is from another moment
than the WAL, as in a bad copy. A sealer repeats the action only if the records in the table equal
the tail.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tidelog.storage.core.errors import Corrupt, TableInDoubt, Unavailable
from tidelog.storage.core.model import ReadBounds, SegmentFile
from tidelog.storage.read.reader import Reader
from tidelog.storage.read.segment_reader import between
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.seal import uploads
from tidelog.storage.seal.encode import TailSegments
from tidelog.storage.seal.uploads import CommitUploads, Uploader
from tidelog.storage.state.cluster_state import Topic
from tidelog.storage.tables.foreign_commits import hole
from tidelog.storage.tables.manifest import (
    ManifestConflict,
    Table,
    clean_app_id,
    in_no_segment,
    lost_app_id,
    maintenance_app_id,
)
from tidelog.storage.tables.open_tables import OpenTables

log = logging.getLogger("tidelog.sealer")

COMPARED_BYTES = 4 * 1024 * 1024
"""Bytes of the tail that are in memory at once while the tail is compared with a segment."""


class TablesAhead:
    """A sealer's checks of tables that are ahead. Owned by one event loop."""

    def __init__(
        self,
        reader: Reader,
        clock: Clock,
        tables: OpenTables,
        segments: TailSegments,
        uploader: Uploader,
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._tables = tables
        self._segments = segments
        self._uploader = uploader

    async def check(self, topic: Topic, table: Table, number: int, base: int, end: int) -> None:
        """Verify [base, end), which the table has and the WAL does not call sealed. If another
        sealer, or a sealer that crashed, put these records there, they equal the tail. If the table
        is from another moment than the WAL, they differ. Replace old segments (see the module
        docstring)."""
        index = await table.segments(number)
        missing_span = hole(index, base, end)
        why = None if missing_span is None else in_no_segment(*missing_span)
        cleaned = await table.transaction_version(clean_app_id(number)) or 0
        if cleaned > base:  # compacted at a later moment than that of this WAL
            why = f"key compaction ran up to {cleaned}, the WAL is sealed to {base}"
        # Records below the log start are deleted: a new segment needs only the others.
        is_log_start = base <= topic.partitions[number].log_start_offset
        old: list[SegmentFile] = []
        for file in index:
            if why is not None or file.end_offset <= base or file.base_offset >= end:
                continue
            age_ms = await self._age_ms(topic, file)
            is_deleted = age_ms == math.inf
            has_lost = False
            if not is_deleted:
                is_equal, has_lost = await self._compared(topic, number, file, base)
                if not is_equal:
                    why = f"{file.path} has other records than the WAL at these offsets"
                    continue
            is_old = has_lost or age_ms > uploads.UPLOAD_AGE_MAX_S * 1000
            if is_old and (file.base_offset >= base or is_log_start):
                old.append(file)
            elif is_deleted:
                why = f"{file.path} was deleted, and has records below offset {base}"
            elif has_lost:
                why = f"{file.path} has lost records, and records below offset {base}"
        if why is None:
            below = [file for file in index if file.end_offset <= base]
            for file in old:  # one commit each: no upload gets old while the next segment is read
                await self._renew(topic, table, file, base, below)
            return
        await self._tables.refresh()
        current = self._tables.topic_of_id(topic.topic_id)
        if current is None or current.partitions[number].sealed_end >= end:
            return  # `Sealed` was written meanwhile: they may be compacted or removed since
        if (start := current.partitions[number].log_start_offset) > base:
            await self.check(current, table, number, start, end)  # those below may be removed since
            return
        doubt = TableInDoubt(topic.prefix, table.version, f"partition {number}: {why}")
        self._tables.doubt(topic, doubt)
        raise doubt

    async def _compared(
        self, topic: Topic, number: int, file: SegmentFile, base: int
    ) -> tuple[bool, bool]:
        """Return whether a segment's records from `base` on equal the records of the log, and
        whether the segment also has lost records. It has them if an operator gave them up after
        their upload."""
        partition = topic.partitions[number]
        offset, has_lost = max(file.base_offset, base), False
        async for batch in self._reader.read_segment(topic, file):
            rows = between(batch, offset, file.end_offset)
            kept_rows = _without(rows, partition.lost(offset, file.end_offset))
            has_lost = has_lost or kept_rows.num_rows < rows.num_rows
            rows = kept_rows
            while rows.num_rows:
                first = int(rows.column("offset")[0].as_py())
                if not partition.is_gone(offset, first):
                    return False, has_lost
                result = await self._reader.read(topic, number, first, ReadBounds(COMPARED_BYTES))
                if not result.pieces:
                    return False, has_lost
                for piece in result.pieces:
                    count = min(rows.num_rows, piece.batch.num_rows)
                    if not rows.slice(0, count).equals(piece.batch.slice(0, count)):
                        return False, has_lost
                    if count:
                        offset = int(rows.column("offset")[count - 1].as_py()) + 1
                        rows = rows.slice(count)
        return partition.is_gone(offset, file.end_offset), has_lost

    async def _age_ms(self, topic: Topic, file: SegmentFile) -> float:
        """Return the age of a segment's object by this machine's clock or the store's, whichever is
        later. If there is no object, return infinity."""
        key = f"{topic.prefix}/{file.path}"
        async for info in self._reader.store.list(key):
            return max(self._clock.now_ms(), self._reader.store.seen_ms) - info.modified_ms
        log.warning("%s was deleted before its table named it; its records are in the tail", key)
        return math.inf

    async def _renew(
        self, topic: Topic, table: Table, file: SegmentFile, base: int, below: Sequence[SegmentFile]
    ) -> None:
        """In the table, replace a segment of the tail's records by new ones, from `base` on. If
        `base` cuts the segment, it is the log start: then the segments below leave the table with
        it, because a hole would be behind them.

        **On a crash** before the commit, files that nothing names are left. After it, the next
        sealer finds young segments."""
        number = file.partition
        app_id = maintenance_app_id(number)
        start = max(file.base_offset, base)
        work, damage = CommitUploads(), dict[int, Corrupt]()
        encoded = self._segments.encoded(topic, {number: (start, file.end_offset)}, damage)
        segments = [segment async for segment in encoded]
        for error in damage.values():
            raise error
        async with self._uploader.uploading(topic, work) as upload:
            for segment in segments:
                await upload(segment)
        added = [done.file for done in work.take_done()]
        if not added or added[-1].end_offset != file.end_offset:
            raise Corrupt(
                f"{topic.prefix}/{file.path}",
                "has records that an operator has given up since (tidelog repair --lost)",
            )
        self._uploader.check_age(topic, work.started)
        locked = {app_id: (await table.transaction_version(app_id) or 0) + 1}
        lost = topic.partitions[number].lost(start, file.end_offset)
        if lost and lost[-1][1] > (await table.transaction_version(lost_app_id(number)) or 0):
            locked[lost_app_id(number)] = lost[-1][1]
        is_cut = start > file.base_offset
        removed = [*below, file] if is_cut else [file]
        try:
            await table.replace(removed, added, locked, data_change=is_cut)
        except ManifestConflict as conflict:
            raise Unavailable(f"sealing {topic.name}: {conflict}: retry") from conflict
        self._uploader.check_age(topic, work.started)


def _without(rows: pa.RecordBatch, ranges: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Return the rows whose offsets are in none of the ranges."""
    if not ranges:
        return rows
    offsets = rows.column("offset").to_numpy()
    is_kept = np.ones(len(offsets), dtype=bool)
    for first, end in ranges:
        is_kept &= (offsets < first) | (offsets >= end)
    return rows if is_kept.all() else rows.filter(pa.array(is_kept))
