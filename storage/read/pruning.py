"""The parts of a topic in which a record can match a condition, found without a read. Pure.

The manifest and the WAL name the partition, the offsets and the times of each segment and tail
chunk. Arrow simplifies a condition by such bounds, and says whether it can still hold. So each
condition that Arrow can evaluate prunes, also one with `or`, `not` or a cast.

An expression of bounds costs 50 microseconds. So neighbours share one, in blocks; only those of a
block in which a record can match get expressions of their own.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from tidelog.storage.codec.record_columns import TIMESTAMP_TYPE, US_PER_MS
from tidelog.storage.read.log_snapshot import PartitionSnapshot, TopicSnapshot
from tidelog.storage.read.plan import Extent, times_of

Part = TypeVar("Part")

BLOCK_PARTS = 32
"""Neighbours that share an expression of bounds. The square root of some thousand."""
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_FORMAT, _FILES = ds.ParquetFileFormat(), fs.LocalFileSystem()


class ArrowCondition:
    """A condition on the records of a table, and the columns that it reads."""

    def __init__(self, expression: pc.Expression, schema: pa.Schema) -> None:
        self.expression = expression
        self._schema = schema
        self.columns = columns_of(schema, expression)
        self._is_bounded = not self.columns.isdisjoint({"partition", "offset", "timestamp"})

    def may_match(self, extent: Extent) -> bool:
        """Return whether a record of this extent may match."""
        return not self._is_bounded or bool(self._indexes([extent]))

    def _matching(self, parts: Sequence[Part], extents: Sequence[Extent]) -> Sequence[Part]:
        """Return the parts of a partition in which a record can match; each has its extent."""
        if not self._is_bounded or not parts:
            return parts
        blocks = [
            range(first, min(first + BLOCK_PARTS, len(parts)))
            for first in range(0, len(parts), BLOCK_PARTS)
        ]
        wide = [Extent.around([extents[index] for index in block]) for block in blocks]
        indexes = [index for position in self._indexes(wide) for index in blocks[position]]
        if len(blocks) < len(parts):
            near = self._indexes([extents[index] for index in indexes])
            indexes = [indexes[position] for position in near]
        return [parts[index] for index in indexes]

    def pruned(self, topic: TopicSnapshot) -> TopicSnapshot:
        """Return the topic without the segments and tail chunks in which no record can match."""
        return topic._replace(partitions=[self._pruned(part) for part in topic.partitions])

    def _pruned(self, part: PartitionSnapshot) -> PartitionSnapshot:
        number = part.number
        segments = [
            Extent(
                number, file.base_offset, file.end_offset, file.timestamp_min, file.timestamp_max
            )
            for file in part.segments
        ]
        tail = [
            Extent(number, chunk.base_offset, chunk.end_offset, *times_of(chunk))
            for chunk in part.tail
        ]
        return part._replace(
            segments=self._matching(part.segments, segments), tail=self._matching(part.tail, tail)
        )

    def _indexes(self, extents: Sequence[Extent]) -> list[int]:
        """Return the indexes of the extents in which a record can match.

        Arrow prunes the files of a dataset. These have no bytes, and are never opened.
        """
        fragments = [
            _FORMAT.make_fragment(str(index), _FILES, self._guarantee(extent))
            for index, extent in enumerate(extents)
        ]
        if not fragments:
            return []
        files = ds.FileSystemDataset(fragments, self._schema, _FORMAT, _FILES)
        return [int(fragment.path) for fragment in files.get_fragments(self.expression)]

    def _guarantee(self, extent: Extent) -> pc.Expression:
        """Return what holds for all records of an extent, of the columns that are read."""
        facts = [pc.field("partition") == pa.scalar(extent.partition, pa.int32())]
        if "offset" in self.columns:
            facts.append(pc.field("offset") >= extent.start)
            facts.append(pc.field("offset") <= extent.end - 1)
        if "timestamp" in self.columns:
            first_us = extent.timestamp_min * US_PER_MS
            last_us = extent.timestamp_max * US_PER_MS + US_PER_MS - 1
            if first_us >= _INT64_MIN:
                facts.append(pc.field("timestamp") >= pa.scalar(first_us, TIMESTAMP_TYPE))
            if last_us <= _INT64_MAX:
                facts.append(pc.field("timestamp") <= pa.scalar(last_us, TIMESTAMP_TYPE))
        whole = facts[0]
        for fact in facts[1:]:
            whole = whole & fact
        return whole


def columns_of(schema: pa.Schema, expression: pc.Expression) -> frozenset[str]:
    """Return the columns of the schema that the expression reads.

    Arrow does not tell them, but it refuses an expression on a table without one of them. Raises
    the errors of Arrow for an expression that the schema does not fit.
    """
    _bind(schema, expression)
    return frozenset(name for name in schema.names if _needs(schema, expression, name))


def _needs(schema: pa.Schema, expression: pc.Expression, name: str) -> bool:
    try:
        _bind(pa.schema([field for field in schema if field.name != name]), expression)
    except pa.ArrowInvalid:
        return True
    return False


def _bind(schema: pa.Schema, expression: pc.Expression) -> None:
    dataset: Any = ds.dataset(schema.empty_table())
    dataset.scanner(columns={"bound": expression})
