"""Requests of Kafka's protocol with as many elements as fit into their frames."""

import struct
import time
from collections.abc import Callable, Mapping

from tests.service.kafka.wire import framed
from tests.support.record_batches import sent as batch_of
from tests.tools.attack.measure import MIB, VICTIM, scaled
from tests.tools.attack.probes import NEIGHBOUR
from tidelog.service.kafka.messages import (
    configs,
    fetch,
    group_offsets,
    groups,
    metadata,
    offsets,
    produce,
    topics,
)
from tidelog.service.kafka.messages.primitives import encode_varint
from tidelog.service.kafka.messages.schema import Message
from tidelog.storage.codec.record_columns import Rows

WIDE = "wide"
"""The name of a topic with many partitions."""
ELEMENTS = 99_000
"""Elements of one request: the decoders allow 100,000."""
PRODUCE_ELEMENTS = 9_900


def cut(request: Message, version: int, most: int = MIB) -> bytes:
    """Return the bytes of a request. Raises AssertionError if the frame is too large."""
    data = framed(request, version)
    assert len(data) <= most + 4, f"{type(request).__name__}: {len(data)} bytes"
    return data


def batch(size: int = 10, records: int = 1, codec: int = 0) -> bytes:
    now = [int(time.time() * 1000)] * records
    return batch_of(Rows(now, [b"k"] * records, [b"x" * size] * records), codec=codec)


def names(count: int, size: int = 1) -> list[str]:
    return [f"{number:x}".rjust(size, "n") for number in range(count)]


def wide_fetch(partitions: int) -> fetch.FetchTopic:
    """Return the part of a Fetch for the first partitions of the wide topic, a byte of each."""
    parts = [
        fetch.FetchPartition(partition=n, fetch_offset=0, partition_max_bytes=1)
        for n in range(partitions)
    ]
    return fetch.FetchTopic(topic=WIDE, partitions=parts)


def long_arrays(scale: float) -> Mapping[str, Callable[[], bytes]]:
    """Return a request for each API whose request has an array, with as many elements as fit."""
    many = scaled(ELEMENTS, scale, 10)
    fit = scaled(40_000, scale, 10)

    def listed(timestamp: int) -> bytes:
        parts = [
            offsets.ListOffsetsPartition(partition_index=0, timestamp=timestamp)
            for _ in range(int(fit * 1.5))
        ]
        return cut(
            offsets.ListOffsetsRequest(
                replica_id=-1, topics=[offsets.ListOffsetsTopic(name=NEIGHBOUR, partitions=parts)]
            ),
            7,
        )

    requests: dict[str, Callable[[], bytes]] = {
        "Metadata": lambda: cut(
            metadata.MetadataRequest(
                topics=[metadata.MetadataRequestTopic(name=WIDE) for _ in range(many)]
            ),
            9,
        ),
        "Metadata of new names": lambda: cut(
            metadata.MetadataRequest(
                topics=[metadata.MetadataRequestTopic(name=name) for name in names(many)]
            ),
            9,
        ),
        "Fetch": lambda: cut(
            fetch.FetchRequest(
                max_wait_ms=0, min_bytes=MIB, topics=[wide_fetch(scaled(30_000, scale, 10))]
            ),
            12,
        ),
        "Fetch of unknown topics": lambda: cut(
            fetch.FetchRequest(
                max_wait_ms=0,
                min_bytes=1,
                topics=[fetch.FetchTopic(topic=name, partitions=[]) for name in names(many)],
            ),
            12,
        ),
        "ListOffsets by time": lambda: listed(1),
        "ListOffsets of the newest": lambda: listed(-3),
        "ListOffsets of unknown topics": lambda: cut(
            offsets.ListOffsetsRequest(
                replica_id=-1,
                topics=[offsets.ListOffsetsTopic(name=name, partitions=[]) for name in names(many)],
            ),
            7,
        ),
        "OffsetForLeaderEpoch": lambda: cut(
            offsets.OffsetForLeaderEpochRequest(
                topics=[
                    offsets.OffsetForLeaderTopic(
                        topic=VICTIM,
                        partitions=[offsets.OffsetForLeaderPartition(partition=0, leader_epoch=0)],
                    )
                    for _ in range(fit)
                ]
            ),
            4,
        ),
        "FindCoordinator": lambda: cut(
            metadata.FindCoordinatorRequest(coordinator_keys=names(many)), 4
        ),
        "DescribeTopicPartitions": lambda: cut(
            metadata.DescribeTopicPartitionsRequest(
                topics=[metadata.TopicRequest(name=name) for name in names(many)]
            ),
            0,
        ),
        "OffsetCommit": lambda: cut(
            group_offsets.OffsetCommitRequest(
                group_id="g",
                member_id="",
                topics=[
                    group_offsets.OffsetCommitRequestTopic(
                        name=VICTIM,
                        partitions=[
                            group_offsets.OffsetCommitRequestPartition(
                                partition_index=0, committed_offset=0, committed_metadata=None
                            )
                        ]
                        * int(fit * 1.2),
                    )
                ],
            ),
            8,
        ),
        "OffsetCommit of unknown topics": lambda: cut(
            group_offsets.OffsetCommitRequest(
                group_id="g",
                member_id="",
                topics=[
                    group_offsets.OffsetCommitRequestTopic(name=name, partitions=[])
                    for name in names(many)
                ],
            ),
            8,
        ),
        "OffsetFetch": lambda: cut(
            group_offsets.OffsetFetchRequest(
                groups=[
                    group_offsets.OffsetFetchRequestGroup(group_id="g", topics=None)
                    for _ in range(many)
                ]
            ),
            8,
        ),
        "OffsetDelete": lambda: cut(
            group_offsets.OffsetDeleteRequest(
                group_id="g",
                topics=[
                    group_offsets.OffsetDeleteRequestTopic(
                        name=VICTIM,
                        partitions=[group_offsets.OffsetDeleteRequestPartition(partition_index=0)],
                    )
                    for _ in range(fit)
                ],
            ),
            0,
        ),
        "LeaveGroup": lambda: cut(
            groups.LeaveGroupRequest(
                group_id="g",
                members=[groups.MemberIdentity(member_id=name) for name in names(many)],
            ),
            4,
        ),
        "JoinGroup": lambda: cut(
            groups.JoinGroupRequest(
                group_id="g",
                session_timeout_ms=6000,
                rebalance_timeout_ms=100,
                member_id="",
                protocol_type="consumer",
                protocols=[
                    groups.JoinGroupRequestProtocol(name=name, metadata=b"") for name in names(many)
                ],
            ),
            6,
        ),
        "DescribeGroups": lambda: cut(groups.DescribeGroupsRequest(groups=names(many)), 5),
        "DeleteGroups": lambda: cut(groups.DeleteGroupsRequest(groups_names=names(many)), 2),
        "CreateTopics": lambda: cut(
            topics.CreateTopicsRequest(
                topics=[
                    topics.CreatableTopic(
                        name=name,
                        num_partitions=1,
                        replication_factor=1,
                        assignments=[],
                        configs=[],
                    )
                    for name in names(many * 3 // 5)
                ],
                validate_only=True,
            ),
            5,
        ),
        "DeleteTopics": lambda: cut(
            topics.DeleteTopicsRequest(topic_names=names(many), timeout_ms=1000),
            5,
        ),
        "CreatePartitions": lambda: cut(
            topics.CreatePartitionsRequest(
                topics=[
                    topics.CreatePartitionsTopic(name=name, count=5, assignments=None)
                    for name in names(many * 4 // 5)
                ],
                timeout_ms=1000,
                validate_only=False,
            ),
            2,
        ),
        "DeleteRecords": lambda: cut(
            topics.DeleteRecordsRequest(
                topics=[
                    topics.DeleteRecordsTopic(
                        name=VICTIM,
                        partitions=[
                            topics.DeleteRecordsPartition(partition_index=n, offset=-(2**63))
                            for n in range(fit)
                        ],
                    )
                ],
                timeout_ms=1000,
            ),
            2,
        ),
        "DescribeConfigs": lambda: cut(
            configs.DescribeConfigsRequest(
                resources=[
                    configs.DescribeConfigsResource(
                        resource_type=2, resource_name=name, configuration_keys=None
                    )
                    for name in names(many)
                ]
            ),
            4,
        ),
        "DescribeConfigs of keys": lambda: cut(
            configs.DescribeConfigsRequest(
                resources=[
                    configs.DescribeConfigsResource(
                        resource_type=2, resource_name=VICTIM, configuration_keys=names(many)
                    )
                ]
            ),
            4,
        ),
        "IncrementalAlterConfigs": lambda: cut(
            configs.IncrementalAlterConfigsRequest(
                resources=[
                    configs.IncrementalAlterConfigsResource(
                        resource_type=2,
                        resource_name=VICTIM,
                        configs=[
                            configs.IncrementalAlterableConfig(
                                name="cleanup.policy", config_operation=2, value="delete"
                            )
                        ]
                        * fit,
                    )
                ],
                validate_only=False,
            ),
            1,
        ),
        "Produce of partitions": lambda: cut(
            produce.ProduceRequest(
                acks=1,
                timeout_ms=1000,
                topic_data=[
                    produce.TopicProduceData(
                        name=VICTIM,
                        partition_data=[
                            produce.PartitionProduceData(index=0, records=memoryview(batch()))
                        ]
                        * scaled(PRODUCE_ELEMENTS, scale, 10),
                    )
                ],
            ),
            9,
            100 * MIB,
        ),
        "Produce of unknown topics": lambda: cut(
            produce.ProduceRequest(
                acks=1,
                timeout_ms=1000,
                topic_data=[
                    produce.TopicProduceData(name=name, partition_data=[])
                    for name in names(scaled(PRODUCE_ELEMENTS, scale, 10))
                ],
            ),
            9,
        ),
        "tagged fields": lambda: tagged(many),
    }
    return requests


def tagged(count: int) -> bytes:
    head = struct.pack(">hhihB", 3, 9, 1, 0, 0)
    body = b"\1\0\0\0" + encode_varint(count) + b"\x64\0" * count
    return struct.pack(">i", len(head + body)) + head + body
