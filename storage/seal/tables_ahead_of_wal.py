"""A table that is ahead of the WAL: it has records that the WAL does not call sealed yet.

This is so after a sealer crashed between its commit to the table and its action in the WAL, and
while another sealer is between these two steps. It is also so if the table is from another moment
than the WAL, as in a bad copy. A sealer repeats the action only if the records in the table equal
the tail.
"""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidelog.storage.core.errors import Corrupt, TableInDoubt
from tidelog.storage.core.model import ReadBounds, SegmentFile
from tidelog.storage.read.reader import Reader
from tidelog.storage.read.segment_reader import between
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.seal import uploads
from tidelog.storage.seal.encode import TailSegments
from tidelog.storage.seal.uploads import CommitUploads, SegmentUpload, Uploader
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.foreign_commits import hole
from tidelog.storage.tables.manifest import (
    ManifestConflict,
    Table,
    clean_app_id,
    in_no_segment,
    lost_app_id,
    maintenance_app_id,
    seal_app_id,
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

    async def check(
        self, topic: Topic, table: Table, number: int, base: int, end: int
    ) -> int | None:
        """Verify [base, end), which the table has and the WAL does not call sealed.

        If another sealer, or a sealer that crashed, put these records there, they equal the tail.
        If the table is from another moment than the WAL, they differ. Replace old segments (see the
        module docstring).

        Return the offset to which the tail is sealed now, or None if no record of it is. Segments
        of lost records at the end of the tail are sealed with the next records. Raises
        ManifestConflict if another sealer was faster.
        """
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
            return await self._renew_all(topic, table, number, base, end, old)
        await self._tables.refresh()
        current = self._tables.topic_of_id(topic.topic_id)
        if current is None or current.partitions[number].sealed_end >= end:
            return end  # `Sealed` was written meanwhile: they may be compacted or removed since
        partition = current.partitions[number]
        start = max(base, partition.log_start_offset, partition.sealed_end)
        if start > base or current is not topic:
            # Those below may be removed since; `topic` of an old view may lack records.
            return await self.check(current, table, number, start, end)
        doubt = TableInDoubt(topic.prefix, table.version, f"partition {number}: {why}")
        self._tables.doubt(topic, doubt)
        raise doubt

    async def _compared(
        self, topic: Topic, number: int, file: SegmentFile, base: int
    ) -> tuple[bool, bool]:
        """Return if a segment's records from `base` on equal the log's, and if it has lost ones.

        It has them if an operator gave them up after their upload.
        """
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
        """Return the age of a segment's object by this machine's clock or the store's.

        The later clock counts. If there is no object, return infinity.
        """
        key = f"{topic.prefix}/{file.path}"
        async for info in self._reader.store.list(key):
            return max(self._clock.now_ms(), self._reader.store.seen_ms) - info.modified_ms
        log.warning("%s was deleted before its table named it; its records are in the tail", key)
        return math.inf

    async def _renew_all(
        self,
        topic: Topic,
        table: Table,
        number: int,
        base: int,
        end: int,
        old: Sequence[SegmentFile],
    ) -> int | None:
        """Replace each old segment in a commit of its own; return as `check`.

        So no upload gets old while the next segment is read.
        """
        ahead = [file for file in await table.segments(number) if file.end_offset > base]
        sealed_to, renewed_to = end, base
        for file in old:
            if file.end_offset <= renewed_to:
                continue  # replaced together with the segment before it
            renewal = _renewal(topic.partitions[number], ahead, file, base)
            if renewal is None:
                return file.base_offset if file.base_offset > base else None
            await self._renew(topic, table, number, renewal)
            renewed_to = renewal.end
            sealed_to = max(sealed_to, renewed_to)
        return sealed_to

    async def _renew(self, topic: Topic, table: Table, number: int, renewal: "_Renewal") -> None:
        """In the table, replace segments of the tail's records by new ones.

        If they are cut, it is at the log start: then the segments below leave the table with them,
        because a hole would be behind them.

        **On a crash** before the commit, files that nothing names are left. After it, the next
        sealer finds young segments.
        """
        work, damage = CommitUploads(), dict[int, Corrupt]()
        encoded = self._segments.encoded(topic, {number: (renewal.start, renewal.end)}, damage)
        segments = [segment async for segment in encoded]
        for error in damage.values():
            raise error
        async with self._uploader.uploading(topic, work) as upload:
            for segment in segments:
                await upload(segment)
        uploads_done = work.take_done()
        added = [upload_done.file for upload_done in uploads_done]
        await self._tables.refresh()
        current = self._tables.topic_of_id(topic.topic_id)
        is_changed = current is None or current.partitions[number].sealed_end > renewal.start
        if is_changed or not added or added[-1].end_offset != renewal.end:
            await self._uploader.remove(topic, added)
            raise ManifestConflict(f"the tail of partition {number} has changed")
        index = await table.segments(number)
        is_cut = renewal.start > renewal.files[0].base_offset
        below = [file for file in index if is_cut and file.end_offset <= renewal.start]
        transactions = await _transactions(table, number, renewal, uploads_done[-1])
        self._uploader.check_age(topic, work.started)
        has_lost = any(upload_done.lost_end > renewal.start for upload_done in uploads_done)
        removed = [*below, *renewal.files]
        await table.replace(removed, added, transactions, data_change=is_cut or has_lost)
        self._uploader.check_age(topic, work.started)


class _Renewal(NamedTuple):
    """The replacement of consecutive segments by the records [start, end) of the tail."""

    files: Sequence[SegmentFile]
    start: int
    end: int


def _renewal(
    partition: Partition, ahead: Sequence[SegmentFile], file: SegmentFile, base: int
) -> _Renewal | None:
    """Return how to replace a segment: from `base` on, alone if possible.

    A segment has at least one record: if all those of `file` are lost, the next segment of `ahead`
    is replaced with it, or else the next records of the tail are added. Return None if the tail has
    no other records.
    """
    start = max(file.base_offset, base)
    kept_chunks = (
        chunk for chunk in partition.tail if chunk.end_offset > start and not chunk.is_lost
    )
    if (chunk := next(kept_chunks, None)) is None:
        return None
    files = [file]
    for following in ahead:
        if files[-1].end_offset <= min(chunk.base_offset, following.base_offset):
            files.append(following)
    end = files[-1].end_offset
    return _Renewal(files, start, end if chunk.base_offset < end else chunk.end_offset)


async def _transactions(
    table: Table, number: int, renewal: _Renewal, last: SegmentUpload
) -> dict[str, int]:
    """Return the transactions of a replacement.

    If it adds records after the replaced segments, it is a seal, too. Raises ManifestConflict if
    another sealer has sealed these records meanwhile.
    """
    app_ids = maintenance_app_id(number), lost_app_id(number), seal_app_id(number)
    versions = [await table.transaction_version(app_id) or 0 for app_id in app_ids]
    replaced_to = renewal.files[-1].end_offset
    if renewal.end > replaced_to and versions[-1] != replaced_to:
        raise ManifestConflict(f"partition {number} is sealed to {versions[-1]}")
    new_versions = versions[0] + 1, last.lost_end, renewal.end
    return {
        app_id: new_version
        for app_id, version, new_version in zip(app_ids, versions, new_versions, strict=True)
        if new_version > version
    }


def _without(rows: pa.RecordBatch, ranges: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Return the rows whose offsets are in none of the ranges."""
    if not ranges:
        return rows
    offsets = rows.column("offset").to_numpy()
    is_kept = np.ones(len(offsets), dtype=bool)
    for first, end in ranges:
        is_kept &= (offsets < first) | (offsets >= end)
    return rows if is_kept.all() else rows.filter(pa.array(is_kept))
