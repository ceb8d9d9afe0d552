"""Requests of Kafka's protocol with wrong and extreme values, all of which get an answer.

The values are the longest strings, and numbers at their ends.
"""

from collections import Counter

from tests.service.kafka.wire import framed
from tests.support.broker import Broker
from tests.tools.attack.kafka_client import sent
from tests.tools.attack.measure import VICTIM
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
from tidelog.service.kafka.messages.schema import Message

LONG = "\x01" * 32_767
"""A message quotes each of these characters with four."""
PARTITIONS = (-(2**31), -1, 0, 2**31 - 1)
OFFSETS = (-(2**63), -2, -1, 0, 2**63 - 1)


def fetched(bytes_max: int) -> fetch.FetchTopic:
    parts = [
        fetch.FetchPartition(partition=n, fetch_offset=o, partition_max_bytes=bytes_max)
        for n in PARTITIONS
        for o in (-(2**63), -1, 0, 2**63 - 1)
    ]
    return fetch.FetchTopic(topic=VICTIM, partitions=parts)


def grown(times: int) -> topics.CreatePartitionsRequest:
    topic = topics.CreatePartitionsTopic(name=LONG, count=5, assignments=None)
    return topics.CreatePartitionsRequest(topics=[topic] * times, timeout_ms=1, validate_only=False)


def wrong_values() -> list[tuple[Message, int]]:
    """Return the requests and their versions."""
    creatable = topics.CreatableTopic(
        name=LONG, num_partitions=1, replication_factor=1, assignments=[], configs=[]
    )
    bad_config = topics.CreatableTopic(
        name="ok",
        num_partitions=1,
        replication_factor=1,
        assignments=[],
        configs=[topics.CreatableTopicConfig(name=LONG, value=None)],
    )
    alter = configs.AlterConfigsRequest(
        resources=[
            configs.AlterConfigsResource(
                resource_type=2,
                resource_name=VICTIM,
                configs=[configs.AlterableConfig(name=LONG, value=LONG)],
            )
        ],
        validate_only=False,
    )
    incremental = configs.IncrementalAlterConfigsRequest(
        resources=[
            configs.IncrementalAlterConfigsResource(
                resource_type=4, resource_name=LONG, configs=[]
            ),
            configs.IncrementalAlterConfigsResource(
                resource_type=4,
                resource_name="",
                configs=[
                    configs.IncrementalAlterableConfig(name=LONG, config_operation=0, value=LONG)
                ],
            ),
            configs.IncrementalAlterConfigsResource(
                resource_type=2,
                resource_name=VICTIM,
                configs=[
                    configs.IncrementalAlterableConfig(
                        name="cleanup.policy", config_operation=9, value=LONG
                    )
                ],
            ),
        ],
        validate_only=False,
    )
    return [
        (topics.CreateTopicsRequest(topics=[creatable, creatable]), 2),
        (topics.CreateTopicsRequest(topics=[creatable, bad_config]), 2),
        (topics.CreateTopicsRequest(topics=[creatable, bad_config]), 7),
        (grown(2), 0),
        (grown(1), 0),
        (topics.DeleteTopicsRequest(topic_names=[LONG, LONG], timeout_ms=1), 1),
        (topics.DeleteTopicsRequest(topic_names=[LONG], timeout_ms=1), 5),
        (alter, 0),
        (incremental, 0),
        (
            configs.DescribeConfigsRequest(
                resources=[
                    configs.DescribeConfigsResource(
                        resource_type=kind, resource_name=LONG, configuration_keys=[LONG]
                    )
                    for kind in (2, 4, 16, 32, 99)
                ]
            ),
            1,
        ),
        (groups.DescribeGroupsRequest(groups=[LONG]), 6),
        (groups.DescribeGroupsRequest(groups=[LONG]), 0),
        (groups.DeleteGroupsRequest(groups_names=[LONG]), 0),
        (groups.HeartbeatRequest(group_id=LONG, generation_id=-(2**31), member_id=LONG), 0),
        (
            groups.SyncGroupRequest(group_id="g", generation_id=1, member_id=LONG, assignments=[]),
            0,
        ),
        (
            groups.JoinGroupRequest(
                group_id="g",
                session_timeout_ms=6000,
                rebalance_timeout_ms=1,
                member_id=LONG,
                group_instance_id=LONG,
                protocol_type=LONG,
                protocols=[groups.JoinGroupRequestProtocol(name=LONG, metadata=b"")],
            ),
            5,
        ),
        (
            groups.JoinGroupRequest(
                group_id="g",
                session_timeout_ms=-1,
                rebalance_timeout_ms=-(2**31),
                member_id="",
                group_instance_id="a\nb",
                protocol_type="",
                protocols=[],
            ),
            5,
        ),
        (metadata.FindCoordinatorRequest(key=LONG), 1),
        (metadata.FindCoordinatorRequest(key=LONG, key_type=99), 1),
        (
            metadata.MetadataRequest(topics=[metadata.MetadataRequestTopic(name=LONG)]),
            1,
        ),
        (
            produce.ProduceRequest(
                acks=1,
                timeout_ms=-(2**31),
                topic_data=[
                    produce.TopicProduceData(
                        name=LONG,
                        partition_data=[produce.PartitionProduceData(index=-(2**31), records=None)],
                    )
                ],
            ),
            8,
        ),
        (
            fetch.FetchRequest(
                max_wait_ms=-(2**31),
                min_bytes=-(2**31),
                max_bytes=-(2**31),
                session_id=-(2**31),
                session_epoch=-(2**31),
                topics=[fetched(-(2**31))],
            ),
            8,
        ),
        (
            fetch.FetchRequest(
                max_wait_ms=0,
                min_bytes=0,
                max_bytes=2**31 - 1,
                topics=[fetched(2**31 - 1)],
            ),
            8,
        ),
        (
            offsets.ListOffsetsRequest(
                replica_id=-1,
                topics=[
                    offsets.ListOffsetsTopic(
                        name=NEIGHBOUR,
                        partitions=[
                            offsets.ListOffsetsPartition(partition_index=n, timestamp=stamp)
                            for n in PARTITIONS
                            for stamp in (-(2**63), -7, -6, -5, -4, -3, -2, -1, 0, 2**62, 2**63 - 1)
                        ],
                    )
                ],
            ),
            11,
        ),
        (
            topics.DeleteRecordsRequest(
                topics=[
                    topics.DeleteRecordsTopic(
                        name=VICTIM,
                        partitions=[
                            topics.DeleteRecordsPartition(partition_index=n, offset=offset)
                            for n in PARTITIONS
                            for offset in OFFSETS
                        ],
                    )
                ],
                timeout_ms=-1,
            ),
            2,
        ),
        (
            group_offsets.OffsetCommitRequest(
                group_id="g",
                member_id="",
                generation_id_or_member_epoch=-(2**31),
                topics=[
                    group_offsets.OffsetCommitRequestTopic(
                        name=VICTIM,
                        partitions=[
                            group_offsets.OffsetCommitRequestPartition(
                                partition_index=n,
                                committed_offset=offset,
                                committed_leader_epoch=-(2**31),
                                committed_metadata="\x00" * 4096,
                            )
                            for n in PARTITIONS
                            for offset in OFFSETS
                        ],
                    )
                ],
            ),
            8,
        ),
        (groups.LeaveGroupRequest(group_id="none", members=[]), 3),
        (groups.LeaveGroupRequest(group_id="none", member_id=""), 0),
    ]


def wrong_values_sent(scale: float, broker: Broker) -> str:
    """Send each request on a connection of its own. Return those that are not answered."""
    every = wrong_values()
    counts = Counter[str]()
    for request, version in every[:: max(int(0.2 / scale), 1)]:
        outcome = sent(broker, [framed(request, version)])
        is_answered = outcome == "1 x answered"
        name = f"{type(request).__name__} version {version}"
        counts["answered" if is_answered else f"{name}: FAILED, {outcome}"] += 1
    return ", ".join(f"{count} x {outcome}" for outcome, count in counts.items())
