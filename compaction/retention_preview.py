"""The records that retention would delete after a change of configs.

Operators see them before the change.

A change counts only what it adds: records that the topic's own configs give up already are not in
its result. Records of the tail count too, although retention removes them only after their seal.
"""

from typing import NamedTuple

import numpy as np

from tidelog.compaction.plan import UNLIMITED, retention
from tidelog.storage.broker import Broker
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.manifest import SegmentColumns


class Expiry(NamedTuple):
    """Records of one partition, [start, end), their number and their bytes in storage.

    Key compaction may have removed records of the range.
    """

    partition: int
    start: int
    end: int
    records: int
    size: int


async def expiries(broker: Broker, topic: Topic, config: TopicConfig) -> list[Expiry]:
    """Return what retention would delete if the topic had this config, and does not delete now.

    Partitions without such records are left out.

    Reads the newest manifest of the topic's table, and does not keep it. Raises Unavailable.
    """
    if not _may_delete_more(topic.config, config):
        return []
    table, now_ms = broker.stored.open_table(topic), broker.clock.now_ms()
    expired = []
    for number, partition in enumerate(topic.partitions):
        columns = (await table.segments(number)).columns
        expiry = _expiry(number, partition, columns, (topic.config, config), now_ms)
        if expiry is not None:
            expired.append(expiry)
    return expired


def _may_delete_more(old_config: TopicConfig, new_config: TopicConfig) -> bool:
    """Whether one of the configs that retention obeys differs."""

    def obeyed(config: TopicConfig) -> tuple[object, ...]:
        return config.retention_ms, config.retention_bytes, "delete" in config.cleanup_policy

    return obeyed(old_config) != obeyed(new_config)


def _expiry(
    number: int,
    partition: Partition,
    columns: SegmentColumns,
    configs: tuple[TopicConfig, TopicConfig],
    now_ms: int,
) -> Expiry | None:
    start, end = (_expired_end(columns, partition, config, now_ms) for config in configs)
    if end <= start:
        return None
    is_sealed = (columns.end_offset > start) & (
        columns.end_offset <= min(end, partition.sealed_end)
    )
    begin = np.maximum(columns.base_offset[is_sealed], start)
    rows = np.minimum(columns.rows[is_sealed], columns.end_offset[is_sealed] - begin)
    tail = [chunk for chunk in partition.tail if start < chunk.end_offset <= end]
    tail_rows = sum(chunk.end_offset - max(chunk.base_offset, start) for chunk in tail)
    size = int(columns.size[is_sealed].sum()) + sum(chunk.bytes for chunk in tail)
    return Expiry(number, start, end, int(rows.sum()) + tail_rows, size)


def _expired_end(
    columns: SegmentColumns, partition: Partition, config: TopicConfig, now_ms: int
) -> int:
    """Return the end of the records whose limit is passed; a tail's chunk counts as a segment."""
    cut = retention(columns, partition, config, now_ms)
    end = partition.log_start_offset if cut is None else cut.log_start_offset
    if end < partition.sealed_end or "delete" not in config.cleanup_policy:
        return end
    remaining_bytes = partition.tail_bytes
    for chunk in partition.tail:
        remaining_bytes -= chunk.bytes
        is_old = UNLIMITED != config.retention_ms < now_ms - chunk.newest_ms
        is_over = UNLIMITED != config.retention_bytes <= remaining_bytes
        if not (is_old or is_over):
            break
        end = max(end, chunk.end_offset)
    return end
