"""Every API with every kind of principal: a client gets what its rights allow, and no more.

The APIs come from the table of the listener. An API without a row in ROWS fails.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.service.kafka.conftest import Client, Kafka, batch
from tests.service.kafka.test_produce import _request
from tests.service.kafka.test_security import JOINING, _authenticate, _client_of
from tests.service.keyed import ADMIN_KEY, allow
from tidelog.service.kafka.apis import SASL_KEYS
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import (
    configs,
    fetch,
    group_offsets,
    groups,
    log_dirs,
    metadata,
    offsets,
    produce,
    topics,
)
from tidelog.service.kafka.messages.schema import Message, Structure, members_of

STRANGER, READER, WRITER, TENANT, ADMIN = "stranger", "reader", "writer", "tenant", "admin"
GRANTS = {
    STRANGER: (),
    READER: (("READ", "TOPIC", "t"), ("READ", "GROUP", "g")),
    WRITER: (("WRITE", "TOPIC", "t"),),
    TENANT: (("ALL", "TOPIC", "other"), ("ALL", "GROUP", "other")),
}
"""By user: operations on resources. The requests of ROWS name topic t and group g."""
EVERYONE = frozenset(GRANTS)
READS, WRITES = frozenset({READER}), frozenset({WRITER})
DESCRIBES = READS | WRITES
DENIALS = {
    Code.TOPIC_AUTHORIZATION_FAILED,
    Code.GROUP_AUTHORIZATION_FAILED,
    Code.CLUSTER_AUTHORIZATION_FAILED,
}
TOPIC_RESOURCE = 2


class Row(NamedTuple):
    """A request, and the users of GRANTS that are not refused."""

    request: Message
    version: int
    allowed: frozenset[str]


def committing() -> group_offsets.OffsetCommitRequest:
    partition = group_offsets.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=0, committed_metadata=None
    )
    topic = group_offsets.OffsetCommitRequestTopic(name="t", partitions=[partition])
    return group_offsets.OffsetCommitRequest(group_id="g", member_id="", topics=[topic])


def altering() -> configs.IncrementalAlterConfigsRequest:
    change = configs.IncrementalAlterableConfig(
        name="retention.ms", config_operation=0, value="3600000"
    )
    resource = configs.IncrementalAlterConfigsResource(
        resource_type=TOPIC_RESOURCE, resource_name="t", configs=[change]
    )
    return configs.IncrementalAlterConfigsRequest(resources=[resource], validate_only=False)


def altering_all() -> configs.AlterConfigsRequest:
    change = configs.AlterableConfig(name="retention.ms", value="3600000")
    resource = configs.AlterConfigsResource(
        resource_type=TOPIC_RESOURCE, resource_name="t", configs=[change]
    )
    return configs.AlterConfigsRequest(resources=[resource], validate_only=False)


def fetching() -> fetch.FetchRequest:
    partition = fetch.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1000)
    topic = fetch.FetchTopic(topic="t", partitions=[partition])
    return fetch.FetchRequest(max_wait_ms=0, min_bytes=0, topics=[topic])


def listing_offsets() -> offsets.ListOffsetsRequest:
    partition = offsets.ListOffsetsPartition(partition_index=0, timestamp=-1)
    topic = offsets.ListOffsetsTopic(name="t", partitions=[partition])
    return offsets.ListOffsetsRequest(replica_id=-1, topics=[topic])


def epochs() -> offsets.OffsetForLeaderEpochRequest:
    partition = offsets.OffsetForLeaderPartition(partition=0, leader_epoch=0)
    topic = offsets.OffsetForLeaderTopic(topic="t", partitions=[partition])
    return offsets.OffsetForLeaderEpochRequest(topics=[topic])


def deleting_records() -> topics.DeleteRecordsRequest:
    partition = topics.DeleteRecordsPartition(partition_index=0, offset=0)
    topic = topics.DeleteRecordsTopic(name="t", partitions=[partition])
    return topics.DeleteRecordsRequest(topics=[topic], timeout_ms=1000)


def creating() -> topics.CreateTopicsRequest:
    topic = topics.CreatableTopic(
        name="new", num_partitions=1, replication_factor=1, assignments=[], configs=[]
    )
    return topics.CreateTopicsRequest(topics=[topic])


def growing() -> topics.CreatePartitionsRequest:
    topic = topics.CreatePartitionsTopic(name="t", count=2, assignments=None)
    return topics.CreatePartitionsRequest(topics=[topic], timeout_ms=1000, validate_only=False)


def describing_configs() -> configs.DescribeConfigsRequest:
    resource = configs.DescribeConfigsResource(
        resource_type=TOPIC_RESOURCE, resource_name="t", configuration_keys=None
    )
    return configs.DescribeConfigsRequest(resources=[resource])


def deleting_offsets() -> group_offsets.OffsetDeleteRequest:
    partition = group_offsets.OffsetDeleteRequestPartition(partition_index=0)
    topic = group_offsets.OffsetDeleteRequestTopic(name="t", partitions=[partition])
    return group_offsets.OffsetDeleteRequest(group_id="g", topics=[topic])


ROWS: dict[str, Row] = {
    "Produce": Row(_request((0, batch(b"x"))), 9, WRITES),
    "Fetch": Row(fetching(), 12, READS),
    "ListOffsets": Row(listing_offsets(), 7, DESCRIBES),
    "OffsetForLeaderEpoch": Row(epochs(), 4, DESCRIBES),
    "Metadata": Row(
        metadata.MetadataRequest(topics=[metadata.MetadataRequestTopic(name="t")]), 9, DESCRIBES
    ),
    "DescribeTopicPartitions": Row(
        metadata.DescribeTopicPartitionsRequest(topics=[metadata.TopicRequest(name="t")]),
        0,
        DESCRIBES,
    ),
    "FindCoordinator": Row(metadata.FindCoordinatorRequest(key="g"), 3, READS),
    "DescribeCluster": Row(
        metadata.DescribeClusterRequest(include_cluster_authorized_operations=False), 0, EVERYONE
    ),
    "InitProducerId": Row(
        produce.InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1),
        4,
        WRITES | {TENANT},
    ),
    "DescribeLogDirs": Row(log_dirs.DescribeLogDirsRequest(topics=None), 4, frozenset()),
    "ListPartitionReassignments": Row(log_dirs.ListPartitionReassignmentsRequest(), 0, frozenset()),
    "CreateTopics": Row(creating(), 5, frozenset()),
    "DeleteTopics": Row(
        topics.DeleteTopicsRequest(topic_names=["t"], timeout_ms=1000), 5, frozenset()
    ),
    "DeleteRecords": Row(deleting_records(), 2, frozenset()),
    "CreatePartitions": Row(growing(), 2, frozenset()),
    "DescribeConfigs": Row(describing_configs(), 4, frozenset()),
    "AlterConfigs": Row(altering_all(), 1, frozenset()),
    "IncrementalAlterConfigs": Row(altering(), 1, frozenset()),
    "JoinGroup": Row(JOINING, 3, READS),
    "SyncGroup": Row(
        groups.SyncGroupRequest(group_id="g", generation_id=1, member_id="m", assignments=[]),
        0,
        READS,
    ),
    "Heartbeat": Row(
        groups.HeartbeatRequest(group_id="g", generation_id=1, member_id="m"), 0, READS
    ),
    "ConsumerGroupHeartbeat": Row(
        groups.ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=0),
        1,
        EVERYONE,
    ),
    "LeaveGroup": Row(groups.LeaveGroupRequest(group_id="g", member_id="m"), 0, READS),
    "ListGroups": Row(groups.ListGroupsRequest(), 4, EVERYONE),
    "DescribeGroups": Row(groups.DescribeGroupsRequest(groups=["g"]), 4, READS),
    "DeleteGroups": Row(groups.DeleteGroupsRequest(groups_names=["g"]), 1, frozenset()),
    "OffsetCommit": Row(committing(), 8, READS),
    "OffsetFetch": Row(group_offsets.OffsetFetchRequest(group_id="g", topics=None), 7, READS),
    "OffsetDelete": Row(deleting_offsets(), 0, frozenset()),
}


@pytest.fixture
async def secured(secured: Kafka) -> Kafka:
    await secured.log.topics.create("other", 1, {})
    return secured


def codes_in(answer: Any) -> Iterator[int]:
    """Return all error codes of an answer."""
    if isinstance(answer, list):
        for item in answer:
            yield from codes_in(item)
    elif isinstance(answer, Structure):
        for member in members_of(type(answer)):
            value = getattr(answer, member.name)
            if member.name == "error_code":
                yield value
            else:
                yield from codes_in(value)


async def is_denied(kafka: Kafka, client: Client, name: str) -> bool:
    response = next(
        api.response for api in kafka.server.listener.server.apis.values() if api.name == name
    )
    answer = await client.ask(ROWS[name].request, response, ROWS[name].version)
    codes = [*codes_in(answer)]
    assert codes, "the answer has an error code"
    assert Code.UNKNOWN_SERVER_ERROR not in codes, name
    return bool(DENIALS & {*codes})


async def test_each_api_after_the_login_has_a_row(secured: Kafka) -> None:
    apis = secured.server.listener.server.apis
    assert {api.name for key, api in apis.items() if key not in SASL_KEYS} == ROWS.keys()


@pytest.mark.parametrize("user", GRANTS)
async def test_a_principal_gets_what_it_was_granted_and_no_more(secured: Kafka, user: str) -> None:
    for operation, resource_type, name in GRANTS[user]:
        await allow(secured.log, f"User:{user}", operation, resource_type, name)
    client = await _client_of(secured, user)
    served = set()
    for name, row in ROWS.items():
        before = secured.log.state.encode()
        if not await is_denied(secured, client, name):
            served.add(name)
        if user not in row.allowed:
            assert secured.log.state.encode() == before, f"{name} has no effect"
    assert served == {name for name, row in ROWS.items() if user in row.allowed}


async def test_the_administrator_is_denied_nothing(secured: Kafka) -> None:
    client = secured.client()
    assert (await _authenticate(client, ADMIN, ADMIN_KEY)).error_code == 0
    assert not [name for name in ROWS if await is_denied(secured, client, name)]


@pytest.mark.parametrize("name", ROWS)
async def test_a_client_without_a_login_is_disconnected(secured: Kafka, name: str) -> None:
    before = secured.log.state.encode()
    with pytest.raises(ConnectionError):
        await is_denied(secured, secured.client(), name)
    assert secured.counters.kafka.closed["unauthenticated"] == 1
    assert secured.log.state.encode() == before


async def test_lists_have_no_names_of_other_tenants(secured: Kafka) -> None:
    await allow(secured.log, f"User:{READER}", "READ", "GROUP", "g")
    reader = await _client_of(secured, READER)
    assert not await is_denied(secured, reader, "JoinGroup")
    await allow(secured.log, f"User:{TENANT}", "ALL", "TOPIC", "other")
    tenant = await _client_of(secured, TENANT)
    everything = metadata.MetadataRequest(topics=None)
    seen = await tenant.ask(everything, metadata.MetadataResponse, 9)
    assert [topic.name for topic in seen.topics] == ["other"]
    for client, names in ((reader, ["g"]), (tenant, [])):
        listed = await client.ask(groups.ListGroupsRequest(), groups.ListGroupsResponse, 4)
        assert [group.group_id for group in listed.groups] == names
