"""DescribeLogDirs and ListPartitionReassignments: where partitions are stored, for Kafka's tools.

All data is in the object store. The answer of a broker has one directory, the store, with the
partitions that this broker leads. So a tool that adds up the sizes of all brokers counts each
partition once.
"""

import contextlib
from collections.abc import Iterable

from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from tidelog.service.kafka.metadata import KafkaMetadata
from tidelog.service.operations.rights import DESCRIBE_CLUSTER
from tidelog.service.slices import Slices
from tidelog.storage.core.errors import LogError
from tidelog.storage.state.topic import Topic


class Placement:
    """The APIs of places and sizes. One per listener."""

    def __init__(self, context: Context, metadata: KafkaMetadata) -> None:
        self._context = context
        self._broker = context.broker
        self._metadata = metadata

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(
                DescribeLogDirsRequest,
                DescribeLogDirsResponse,
                self.describe_log_dirs,
                is_waiting=True,
            ),
            Api(
                ListPartitionReassignmentsRequest,
                ListPartitionReassignmentsResponse,
                self.list_partition_reassignments,
            ),
        )

    async def describe_log_dirs(
        self, request: DescribeLogDirsRequest, client: ApiClient
    ) -> DescribeLogDirsResponse:
        """Answer DescribeLogDirs: the bytes of tables and tails."""
        if code := await self._refusal("DescribeLogDirs", client):
            return DescribeLogDirsResponse(throttle_time_ms=0, error_code=code, results=[])
        state = self._broker.state
        if request.topics is None:
            numbers_by_topic = {
                name: range(len(topic.partitions)) for name, topic in state.topics.items()
            }
        else:
            numbers_by_topic = {
                asked_topic.topic: dict.fromkeys(asked_topic.partitions)  # type: ignore[misc]
                for asked_topic in request.topics
            }
        topics, slices = [], Slices()
        for name, numbers in numbers_by_topic.items():
            topic = state.topics.get(name)
            if topic is None:
                continue
            leaders = self._metadata.leaders(topic, "")
            own = [
                number
                for number in numbers
                if 0 <= number < len(leaders) and leaders[number] == self._metadata.listener.node_id
            ]
            sizes = []
            for number in own:
                await slices.pause()
                size = await self._size(topic, number)
                sizes.append(
                    DescribeLogDirsPartition(
                        partition_index=number,
                        partition_size=size,
                        offset_lag=0,
                        is_future_key=False,
                    )
                )
            topics.append(DescribeLogDirsTopic(name=name, partitions=sizes))
        result = DescribeLogDirsResult(
            error_code=Code.NONE, log_dir=self._broker.store_url, topics=topics
        )
        return DescribeLogDirsResponse(throttle_time_ms=0, results=[result])

    async def _size(self, topic: Topic, number: int) -> int:
        """Return the bytes of a partition's tail and of its segments, if the table can be read."""
        partition = topic.partitions[number]
        size = partition.tail_bytes
        if partition.sealed_end > partition.log_start_offset:
            with contextlib.suppress(LogError):
                files = await self._broker.stored.partition_files(topic, number)
                size += int(files.live.size.sum())
        return size

    async def list_partition_reassignments(
        self, request: ListPartitionReassignmentsRequest, client: ApiClient
    ) -> ListPartitionReassignmentsResponse:
        """Answer ListPartitionReassignments: there are none, because no broker owns a partition."""
        code = await self._refusal("ListPartitionReassignments", client)
        return ListPartitionReassignmentsResponse(
            throttle_time_ms=0, error_code=code, error_message=None, topics=[]
        )

    async def _refusal(self, api: str, client: ApiClient) -> Code:
        return await self._context.right_refusal(api, client, DESCRIBE_CLUSTER)
