"""A table beyond the WAL's `sealed_end`, compared with the tail, which has the same records.

A sealer that crashed between its two commits leaves such a table. So does a copy or a restore that
took the table from a later moment than the WAL: then the records differ, and a seal would replace
acknowledged ones.
"""

from tidelog.storage.core import chunk as chunks
from tidelog.storage.core.errors import NotFound
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.io.object_store import ObjectStore
from tidelog.storage.read.segment_reader import SegmentReader, StoreRanges, between
from tidelog.storage.state.partition import Partition


async def differs(
    store: ObjectStore, prefix: str, partition: Partition, file: SegmentFile
) -> str | None:
    """Return how a segment differs from the tail at the same offsets; None if it does not, or if
    its object is gone. Raises Corrupt."""
    ranges = StoreRanges(store)
    reader = SegmentReader(ranges)
    key = f"{prefix}/{file.path}"
    at = max(file.base_offset, partition.sealed_end)
    end = min(file.end_offset, partition.high_watermark)  # as far as this state knows the tail
    try:
        footer = await reader.footer(key, file.size)
        groups = footer.groups_between(at, end)
        async for _, whole in reader.batches(key, footer, groups):
            batch = between(whole, at, end)
            for run in partition.tail:
                if not batch.num_rows:
                    break
                first = int(batch.column("offset")[0].as_py())
                if run.base_offset <= first < run.end_offset:
                    if not partition.is_gone(at, first):
                        return f"has no record at {at}, where the WAL has one"
                    at = first
                    count = min(run.end_offset - at, batch.num_rows)
                    body = await ranges.read(run.object_key, run.position, run.size)
                    tail = run.records_of(run.decode(body)).slice(at - run.base_offset, count)
                    if not batch.slice(0, count).equals(chunks.with_offsets(tail, at)):
                        return f"has other records of [{at}, {at + count}) than the WAL"
                    batch, at = batch.slice(count), at + count
    except NotFound:
        return None
    return None if partition.is_gone(at, end) else f"has no record at {at}, where the WAL has one"
