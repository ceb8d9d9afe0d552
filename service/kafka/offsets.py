"""ListOffsets and OffsetForLeaderEpoch.

The offset for a time is exact: it is the offset of the first record with this timestamp or a later
one.
"""

from collections.abc import Iterable

from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind
from tidelog.service.kafka.messages.offsets import (
    LeaderEpochEndOffset,
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)
from tidelog.service.kafka.metadata import LEADER_EPOCH
from tidelog.service.operations.rights import DESCRIBE_TOPIC
from tidelog.service.slices import Slices
from tidelog.storage.codec.batch_header import TIMESTAMP_MS_MAX
from tidelog.storage.codec.chunk import timestamps_us
from tidelog.storage.codec.record_columns import US_PER_MS
from tidelog.storage.core.errors import LogError
from tidelog.storage.state.topic import Topic

LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = -4, -5, -6
FIRST_VERSION = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}
"""By special timestamp: the first version of ListOffsets that has it."""


class KafkaOffsets:
    """The APIs of offsets. One per listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(ListOffsetsRequest, ListOffsetsResponse, self.list_offsets, is_waiting=True),
            Api(
                OffsetForLeaderEpochRequest,
                OffsetForLeaderEpochResponse,
                self.offset_for_leader_epoch,
                is_waiting=True,
            ),
        )

    # -- ListOffsets

    async def list_offsets(
        self, request: ListOffsetsRequest, client: ApiClient
    ) -> ListOffsetsResponse:
        """Answer ListOffsets, from a view that has all records acknowledged before the request."""
        api, refusal = "ListOffsets", await self._refresh("ListOffsets")
        topics, slices, known_partitions = [], Slices(), set[tuple[str, int]]()
        for asked_topic in request.topics:
            topic = self._broker.state.topics.get(asked_topic.name)
            code = refusal or await self._context.topic_refusal(
                api, client, DESCRIBE_TOPIC, topic, asked_topic.name
            )
            answers = []
            for requested in asked_topic.partitions:
                await slices.pause()
                why, key = code, (asked_topic.name, requested.partition_index)
                if not why and key in known_partitions:  # as in Kafka: a search takes time
                    why = self._context.refusal(api, Code.INVALID_REQUEST)
                known_partitions.add(key)
                if topic is None or why:
                    answers.append(_failed(requested, why))
                else:
                    answers.append(await self._offset(topic, requested, client.version))
            await slices.pause()
            topics.append(ListOffsetsTopicResponse(name=asked_topic.name, partitions=answers))
        return ListOffsetsResponse(topics=topics)

    async def _refresh(self, api: str) -> Code:
        if self._context.is_draining:
            return self._context.refusal(api, Code.NOT_LEADER_OR_FOLLOWER)
        return await self._context.refreshed(api, RequestKind.FETCH)

    async def _offset(
        self, topic: Topic, requested: ListOffsetsPartition, version: int
    ) -> ListOffsetsPartitionResponse:
        number, timestamp = requested.partition_index, requested.timestamp
        code = self._why_not(topic, number, requested.current_leader_epoch)
        if timestamp < EARLIEST_PENDING_UPLOAD or version < FIRST_VERSION.get(timestamp, 0):
            code = code or Code.UNSUPPORTED_VERSION
        if code:
            return _failed(requested, self._context.refusal("ListOffsets", code))
        try:
            offset, found_ms = await self._find(topic, number, timestamp)
        except LogError as error:
            return _failed(requested, self._context.code("ListOffsets", error, RequestKind.FETCH))
        return ListOffsetsPartitionResponse(
            partition_index=number,
            error_code=Code.NONE,
            timestamp=found_ms,
            offset=offset,
            leader_epoch=LEADER_EPOCH if offset >= 0 else -1,
        )

    def _why_not(self, topic: Topic, number: int, epoch: int) -> Code:
        if not 0 <= number < len(topic.partitions):
            return Code.UNKNOWN_TOPIC_OR_PARTITION
        return Code.UNKNOWN_LEADER_EPOCH if epoch > LEADER_EPOCH else Code.NONE

    async def _find(self, topic: Topic, number: int, timestamp: int) -> tuple[int, int]:
        """Return the offset for a time or a special timestamp, and the timestamp of its record.

        Each is -1 if there is none.
        """
        partition = topic.partitions[number]
        match timestamp:
            case -1:
                return partition.high_watermark, -1
            case -2 | -4:
                return partition.log_start_offset, -1
            case -3:
                return await self._newest(topic, number)
            case -5 | -6:
                return -1, -1
            case _ if timestamp > TIMESTAMP_MS_MAX:
                return -1, -1
        offset = await self._broker.records.offset_for_timestamp(topic.name, number, timestamp)
        if offset is None:
            return -1, -1
        return offset, await self._timestamp(topic, number, offset)

    async def _newest(self, topic: Topic, number: int) -> tuple[int, int]:
        """Return the offset and the timestamp of the record with the greatest timestamp.

        The statistics of a tail chunk or segment are of all its records, also of those below the
        log start. If no record has the greatest timestamp of the statistics, search for the
        greatest one that a record has: each step halves the times that are left.
        """
        partition = topic.partitions[number]
        stamps = [
            piece.newest_ms
            for piece in partition.tail
            if not piece.is_lost and piece.end_offset > partition.log_start_offset
        ]
        if partition.sealed_end > partition.log_start_offset:
            files = await self._broker.stored.partition_files(topic, number)
            stamps += files.live.timestamp_max.tolist()
        newest = -1, -1
        low, high = -TIMESTAMP_MS_MAX, max(stamps, default=-TIMESTAMP_MS_MAX - 1)
        middle = high
        while low <= high:
            offset = await self._broker.records.offset_for_timestamp(topic.name, number, middle)
            if offset is None:
                high = middle - 1
            else:
                newest = offset, await self._timestamp(topic, number, offset)
                low = max(middle, newest[1]) + 1
            middle = (low + high + 1) // 2
        return newest

    async def _timestamp(self, topic: Topic, number: int, offset: int) -> int:
        """Return the timestamp of the record at an offset, or -1 if it was deleted just now."""
        fetch_result = await self._broker.records.fetch(
            topic.name, number, offset, bytes_max=1, records_max=1
        )
        if not fetch_result.pieces:
            return -1
        return int(timestamps_us(fetch_result.pieces[0].batch.column("timestamp"))[0]) // US_PER_MS

    # -- OffsetForLeaderEpoch

    async def offset_for_leader_epoch(
        self, request: OffsetForLeaderEpochRequest, client: ApiClient
    ) -> OffsetForLeaderEpochResponse:
        """Answer OffsetForLeaderEpoch. The only epoch is 0, and it ends at the high watermark."""
        api, refusal = "OffsetForLeaderEpoch", await self._refresh("OffsetForLeaderEpoch")
        topics, slices = [], Slices()
        for asked_topic in request.topics:
            topic = self._broker.state.topics.get(asked_topic.topic)
            code = refusal or await self._context.topic_refusal(
                api, client, DESCRIBE_TOPIC, topic, asked_topic.topic
            )
            answers = []
            for requested in asked_topic.partitions:
                await slices.pause()
                answers.append(self._epoch_end(topic, requested, code))
            await slices.pause()
            topics.append(OffsetForLeaderTopicResult(topic=asked_topic.topic, partitions=answers))
        return OffsetForLeaderEpochResponse(throttle_time_ms=0, topics=topics)

    def _epoch_end(
        self, topic: Topic | None, requested: OffsetForLeaderPartition, code: Code
    ) -> LeaderEpochEndOffset:
        if not code and topic is not None:
            code = self._why_not(topic, requested.partition, requested.current_leader_epoch)
            if code:
                self._context.refusal("OffsetForLeaderEpoch", code)
        answer = LeaderEpochEndOffset(error_code=code, partition=requested.partition)
        if not code and topic is not None and requested.leader_epoch == LEADER_EPOCH:
            answer.leader_epoch = LEADER_EPOCH
            answer.end_offset = topic.partitions[requested.partition].high_watermark
        return answer


def _failed(requested: ListOffsetsPartition, code: Code) -> ListOffsetsPartitionResponse:
    return ListOffsetsPartitionResponse(partition_index=requested.partition_index, error_code=code)
