"""The handlers of groups and committed offsets, at all versions of their messages."""

import asyncio
import logging
from typing import Any

import pytest

from tests.service.conftest import QUIET, until
from tests.service.kafka.conftest import Client, Kafka, broker
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import consumer_protocol
from tidelog.service.kafka.messages import group_offsets as offsets
from tidelog.service.kafka.messages import groups as messages
from tidelog.service.kafka.messages.consumer_protocol import (
    AssignedPartitions,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)
from tidelog.service.operations.change_request import HttpChange
from tidelog.service.security.caller import ALL_RIGHTS
from tidelog.storage.codec.consumer_protocol import assigned
from tidelog.storage.core.actions import MemberConfig
from tidelog.storage.core.errors import GroupNotEmpty
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.state.principal_shares import CLIENT_BYTES
from tidelog.storage.store.memory import MemoryStore

SUBSCRIPTION = consumer_protocol.encode(ConsumerProtocolSubscription(topics=["t"]), 1)
ASSIGNMENT = consumer_protocol.encode(
    ConsumerProtocolAssignment(
        assigned_partitions=[AssignedPartitions(topic="t", partitions=[0, 2])]
    ),
    0,
)


async def join(
    client: Client, version: int = 9, member_id: str = "", group: str = "g", **more
) -> messages.JoinGroupResponse:
    asked = messages.JoinGroupRequest(
        group_id=group,
        session_timeout_ms=more.pop("session_ms", 10_000),
        rebalance_timeout_ms=20_000 if version >= 1 else -1,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=SUBSCRIPTION)],
        **more,
    )
    answer = await client.ask(asked, messages.JoinGroupResponse, version)
    if answer.error_code == Code.MEMBER_ID_REQUIRED:
        return await join(client, version, answer.member_id, group, **more)
    return answer


async def member(client: Client, group: str = "g", version: int = 5) -> tuple[str, int]:
    """Join as the only member and get an assignment."""
    joined = await join(client, group=group)
    asked = messages.SyncGroupRequest(
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        protocol_type="consumer" if version >= 5 else None,
        protocol_name="range" if version >= 5 else None,
        assignments=[
            messages.SyncGroupRequestAssignment(member_id=joined.member_id, assignment=ASSIGNMENT)
        ],
    )
    synced = await client.ask(asked, messages.SyncGroupResponse, version)
    assert (synced.error_code, synced.assignment) == (Code.NONE, ASSIGNMENT)
    if version >= 5:
        assert (synced.protocol_type, synced.protocol_name) == ("consumer", "range")
    return joined.member_id, joined.generation_id


async def committed(
    client: Client,
    offset: int,
    member_id: str = "",
    generation: int = -1,
    version: int = 9,
    group: str = "g",
) -> list[int]:
    """Commit partition 0, and one that does not exist; return the codes."""
    asked = offsets.OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member_id,
        topics=[
            offsets.OffsetCommitRequestTopic(
                name="t" if version < 10 else "",
                partitions=[
                    offsets.OffsetCommitRequestPartition(
                        partition_index=number, committed_offset=offset, committed_metadata="m"
                    )
                    for number in (0, 9)
                ],
            )
        ],
    )
    answer = await client.ask(asked, offsets.OffsetCommitResponse, version)
    return [partition.error_code for partition in answer.topics[0].partitions]


@pytest.mark.parametrize("version", range(10))
async def test_join_in_each_version(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    wrong = await join(client, version, session_ms=1_000)
    assert wrong.error_code == Code.INVALID_SESSION_TIMEOUT
    assert wrong.protocol_name == (None if version >= 7 else "")
    answer = await join(client, version)
    assert (answer.error_code, answer.generation_id, answer.leader) == (0, 1, answer.member_id)
    assert [group_member.metadata for group_member in answer.members] == [SUBSCRIPTION]
    assert answer.protocol_name == "range"
    assert answer.member_id.startswith("test-")


@pytest.mark.parametrize("version", range(6))
async def test_sync_heartbeat_and_leave_in_each_version(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    me, generation = await member(client, version=version)
    beat = messages.HeartbeatRequest(group_id="g", generation_id=generation, member_id=me)
    answer = await client.ask(beat, messages.HeartbeatResponse, min(version, 4))
    assert answer.error_code == Code.NONE
    other = messages.HeartbeatRequest(group_id="none", generation_id=1, member_id=me)
    answer = await client.ask(other, messages.HeartbeatResponse, min(version, 4))
    assert answer.error_code == Code.UNKNOWN_MEMBER_ID
    both = [messages.MemberIdentity(member_id=member_id) for member_id in ("ghost", me)]
    leave = messages.LeaveGroupRequest(
        group_id="g", member_id=me if version < 3 else "", members=both if version >= 3 else []
    )
    left = await client.ask(leave, messages.LeaveGroupResponse, version)
    assert left.error_code == Code.NONE
    if version >= 3:
        assert [group_member.error_code for group_member in left.members] == [
            Code.UNKNOWN_MEMBER_ID,
            Code.NONE,
        ]
    assert not kafka.log.state.members.has_members("g")


async def test_offsets_of_resets_delete_what_is_committed(kafka: Kafka) -> None:
    client = kafka.client()
    me, generation = await member(client)
    assert (await committed(client, 5, me, generation))[0] == Code.NONE
    assert (await committed(client, -2, me, generation + 1))[0] == Code.ILLEGAL_GENERATION
    assert "g" in kafka.log.state.committed_offsets
    codes = await committed(client, -2, me, generation)
    assert codes == [Code.NONE, Code.UNKNOWN_TOPIC_OR_PARTITION]
    assert "g" not in kafka.log.state.committed_offsets


@pytest.mark.parametrize(
    ("repeated", "last"), [([5, 3], 3), ([-1, 4], 4), ([4, -1], None), ([7] * 20_000, 7)]
)
async def test_the_last_offset_of_a_repeated_partition_counts(
    kafka: Kafka, repeated: list[int], last: int | None
) -> None:
    made = [
        offsets.OffsetCommitRequestPartition(
            partition_index=0, committed_offset=offset, committed_metadata=""
        )
        for offset in repeated
    ]
    topics = [offsets.OffsetCommitRequestTopic(name="t", partitions=made)]
    asked = offsets.OffsetCommitRequest(group_id="g", member_id="", topics=topics)
    entries = []
    commit_offsets = kafka.log.groups.kafka.commit_offsets

    async def counted(
        group: str, who: Any, generation: int, offsets: Any, gone_partitions: Any
    ) -> Any:
        entries.append(len(offsets) + len(gone_partitions))
        return await commit_offsets(group, who, generation, offsets, gone_partitions)

    kafka.log.groups.kafka.commit_offsets = counted
    answer = await kafka.client().ask(asked, offsets.OffsetCommitResponse, 8)
    assert [partition.error_code for partition in answer.topics[0].partitions] == [0] * len(
        repeated
    )
    assert entries == [1], "an entry has a partition once"
    offset = kafka.log.groups.committed_offsets("g").get(TopicPartition("t", 0))
    assert (None if offset is None else offset.offset) == last


async def test_offset_fetch_has_what_was_committed_at_another_broker() -> None:
    """I3: the brokers share a store, and the other broker announces nothing."""
    store, settings = MemoryStore(), QUIET._replace(poll_interval_s=3600.0)
    asked = offsets.OffsetFetchRequest(
        groups=[offsets.OffsetFetchRequestGroup(group_id="g", topics=None)]
    )
    async with (
        broker(settings, object_store=store) as writing,
        broker(settings, object_store=store) as reading,
    ):
        await writing.log.topics.create("t", 1, {})
        for offset in range(1, 4):
            assert (await committed(writing.client(), offset))[0] == Code.NONE
            answer = await reading.client().ask(asked, offsets.OffsetFetchResponse, 9)
            (topic,) = answer.groups[0].topics
            committed_offsets = [partition.committed_offset for partition in topic.partitions]
            assert committed_offsets == [offset]


@pytest.mark.parametrize("version", range(2, 11))
async def test_offset_commit_in_each_version(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    if version >= 10:
        assert await committed(client, 5, version=version) == [Code.UNKNOWN_TOPIC_ID] * 2
        return
    unknown = Code.UNKNOWN_TOPIC_OR_PARTITION
    assert await committed(client, 5, version=version) == [Code.NONE, unknown]
    assert kafka.log.groups.committed_offsets("g")[TopicPartition("t", 0)].offset == 5
    me, generation = await member(client)
    assert await committed(client, 6, version=version) == [Code.UNKNOWN_MEMBER_ID, unknown]
    assert await committed(client, 6, me, 0, version) == [Code.ILLEGAL_GENERATION, unknown]
    assert await committed(client, 7, me, generation, version) == [Code.NONE, unknown]
    assert await committed(client, -3, me, generation, version) == [Code.INVALID_REQUEST, unknown]
    assert kafka.log.groups.committed_offsets("g")[TopicPartition("t", 0)].offset == 7


@pytest.mark.parametrize("version", range(1, 11))
async def test_offset_fetch_in_each_version(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    assert (await committed(client, 5))[0] == Code.NONE
    if version < 8:
        asked = offsets.OffsetFetchRequest(
            group_id="g",
            topics=[
                offsets.OffsetFetchRequestTopic(name="t", partition_indexes=[0, 1]),
                offsets.OffsetFetchRequestTopic(name="none", partition_indexes=[0]),
            ],
        )
        answer = await client.ask(asked, offsets.OffsetFetchResponse, version)
        partitions = [partition for topic in answer.topics for partition in topic.partitions]
        if version >= 2:
            every = offsets.OffsetFetchRequest(group_id="g", topics=None)
            all_of = await client.ask(every, offsets.OffsetFetchResponse, version)
            assert [topic.name for topic in all_of.topics] == ["t"]
    else:
        topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
        topics = [
            offsets.OffsetFetchRequestTopics(name="t", partition_indexes=[0, 1]),
            offsets.OffsetFetchRequestTopics(name="none", partition_indexes=[0]),
        ]
        if version >= 10:
            topics = [
                offsets.OffsetFetchRequestTopics(topic_id=asked_id, partition_indexes=numbers)
                for asked_id, numbers in ((topic_id, [0, 1]), (b"x" * 16, [0]))
            ]
        asked = offsets.OffsetFetchRequest(
            groups=[
                offsets.OffsetFetchRequestGroup(group_id="g", topics=topics),
                offsets.OffsetFetchRequestGroup(group_id="other", topics=None),
                offsets.OffsetFetchRequestGroup(group_id="g", topics=None),
            ]
        )
        answer = await client.ask(asked, offsets.OffsetFetchResponse, version)
        group, other, every_group = answer.groups
        assert (other.topics, other.error_code) == ([], Code.NONE)
        assert [partition.committed_offset for partition in every_group.topics[0].partitions] == [5]
        partitions = [partition for topic in group.topics for partition in topic.partitions]
    last = Code.UNKNOWN_TOPIC_ID if version >= 10 else Code.NONE
    assert [
        (partition.committed_offset, partition.metadata, partition.error_code)
        for partition in partitions
    ] == [
        (5, "m", Code.NONE),
        (-1, "", Code.NONE),
        (-1, "", last),
    ]


async def described(client: Client, group: str, version: int = 6) -> messages.DescribedGroup:
    asked = messages.DescribeGroupsRequest(groups=[group])
    return (await client.ask(asked, messages.DescribeGroupsResponse, version)).groups[0]


@pytest.mark.parametrize("version", range(7))
async def test_describe_groups_in_each_version(kafka: Kafka, version: int) -> None:
    client = kafka.client("192.0.2.9")
    me, _ = await member(client)
    group = await described(client, "g", version)
    assert (group.group_state, group.protocol_type, group.protocol_data) == (
        "Stable",
        "consumer",
        "range",
    )
    (group_member,) = group.members
    assert (group_member.member_id, group_member.client_id, group_member.client_host) == (
        me,
        "test",
        "/192.0.2.9",
    )
    assert (group_member.member_metadata, group_member.member_assignment) == (
        SUBSCRIPTION,
        ASSIGNMENT,
    )
    none = await described(client, "none", version)
    assert none.group_state == "Dead"
    assert none.error_code == (Code.GROUP_ID_NOT_FOUND if version >= 6 else Code.NONE)


async def test_groups_of_rest_are_described_as_consumers(kafka: Kafka) -> None:
    await kafka.log.groups.rest.join("rest", "r", MemberConfig(client_id="curl"))
    await kafka.log.groups.rest.subscribe("rest", "r", ["t"])
    client = kafka.client()
    group = await described(client, "rest")
    assert (group.group_state, group.protocol_data) == ("Stable", "sticky")
    assert assigned(group.members[0].member_assignment) == [("t", (0, 1, 2))]
    refused = await join(client, group="rest")
    assert refused.error_code == Code.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize("version", range(6))
async def test_list_groups_in_each_version(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    await member(client)
    await kafka.log.groups.rest.join("rest", "r", MemberConfig())
    answer = await client.ask(messages.ListGroupsRequest(), messages.ListGroupsResponse, version)
    assert [(group.group_id, group.protocol_type) for group in answer.groups] == [
        ("g", "consumer"),
        ("rest", "consumer"),
    ]
    if version >= 4:
        for states, number in ((["STABLE"], 2), (["empty"], 0)):
            request = messages.ListGroupsRequest(states_filter=states)
            answer = await client.ask(request, messages.ListGroupsResponse, version)
            assert len(answer.groups) == number
    if version >= 5:
        request = messages.ListGroupsRequest(types_filter=["consumer"])
        assert not (await client.ask(request, messages.ListGroupsResponse, version)).groups


async def test_delete_groups_and_offsets(kafka: Kafka) -> None:
    client = kafka.client()
    me, generation = await member(client)
    assert (await committed(client, 5, me, generation))[0] == Code.NONE

    async def deleted(*names: str) -> list[int]:
        asked = messages.DeleteGroupsRequest(groups_names=list(names))
        answer = await client.ask(asked, messages.DeleteGroupsResponse, 2)
        return [result.error_code for result in answer.results]

    async def forgotten(group: str) -> tuple[int, list[int]]:
        asked = offsets.OffsetDeleteRequest(
            group_id=group,
            topics=[
                offsets.OffsetDeleteRequestTopic(
                    name="t",
                    partitions=[
                        offsets.OffsetDeleteRequestPartition(partition_index=number)
                        for number in (0, 9)
                    ],
                )
            ],
        )
        answer = await client.ask(asked, offsets.OffsetDeleteResponse, 0)
        return answer.error_code, [
            partition.error_code for topic in answer.topics for partition in topic.partitions
        ]

    assert await deleted("g", "none") == [Code.NON_EMPTY_GROUP, Code.GROUP_ID_NOT_FOUND]
    code = Code.GROUP_SUBSCRIBED_TO_TOPIC
    assert await forgotten("g") == (Code.NONE, [code, code])
    assert await forgotten("none") == (Code.GROUP_ID_NOT_FOUND, [])
    leave = messages.LeaveGroupRequest(
        group_id="g", members=[messages.MemberIdentity(member_id=me)]
    )
    await client.ask(leave, messages.LeaveGroupResponse, 5)
    assert await forgotten("g") == (Code.NONE, [Code.NONE, Code.UNKNOWN_TOPIC_OR_PARTITION])
    assert kafka.log.groups.committed_offsets("g") == {}
    assert (await committed(client, 6))[0] == Code.NONE
    assert await deleted("g") == [Code.NONE]
    assert kafka.log.state.members.get("g") is None


async def test_group_that_clients_join_is_not_deleted(kafka: Kafka) -> None:
    client = kafka.client()
    assert (await committed(client, 5))[0] == Code.NONE
    assert (await join(client)).error_code == Code.NONE
    operations = kafka.server.listener.server.context.operations.groups
    with pytest.raises(GroupNotEmpty):  # the state has no member before the first SyncGroup
        await operations.delete(HttpChange(ALL_RIGHTS), "g")
    assert kafka.log.groups.committed_offsets("g")


async def test_a_group_id_that_is_not_valid(kafka: Kafka) -> None:
    client = kafka.client()
    assert (await join(client, group="")).error_code == Code.INVALID_GROUP_ID
    beat = messages.HeartbeatRequest(group_id="", generation_id=1, member_id="m")
    answer = await client.ask(beat, messages.HeartbeatResponse, 4)
    assert answer.error_code == Code.INVALID_GROUP_ID


async def test_who_waits_is_answered_when_the_broker_stops() -> None:
    async with broker() as made:
        await made.log.topics.create("t", 3, {})
        first, second = made.client(), made.client()
        me, generation = await member(first)
        waiting = asyncio.create_task(join(second))
        while True:
            beat = messages.HeartbeatRequest(group_id="g", generation_id=generation, member_id=me)
            answer = await first.ask(beat, messages.HeartbeatResponse, 4)
            if answer.error_code == Code.REBALANCE_IN_PROGRESS:
                break
            await asyncio.sleep(0)
        made.log.drain()
        assert (await waiting).error_code == Code.NOT_COORDINATOR


async def test_members_that_wait_for_others_hold_no_memory_of_requests() -> None:
    """All members of a group with large subscriptions can join: the group counts their bytes."""
    members, size = 5, 70_000
    settings = QUIET._replace(group_delay_s=60.0)
    async with broker(settings, buffer_bytes_max=8 << 20, request_bytes_max=1 << 20) as made:
        memory, groups = made.server.listener.server.memory, made.log.groups.kafka
        asked = messages.JoinGroupRequest(
            group_id="g",
            session_timeout_ms=10_000,
            rebalance_timeout_ms=100_000,
            member_id="",
            protocol_type="consumer",
            protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=bytes(size))],
            reason="x" * size,
        )
        assert memory.decoded.limit < 2 * 3 * size, "two requests do not fit"
        for _ in range(members):
            client = made.client()
            client.send(asked, 3)
        await until(lambda: groups.used.total(CLIENT_BYTES) > members * size)
        assert (memory.used, memory.decoded.used) == (0, 0)
        assert groups.used.total(CLIENT_BYTES) < members * (size + 1_000)
        made.log.drain()
        await asyncio.sleep(0)


async def test_below_level_4_clients_get_an_error_and_the_log_stays_readable(kafka: Kafka) -> None:
    client = kafka.client()
    assert (await committed(client, 5))[0] == Code.NONE
    kafka.log.state.level = 3
    try:
        assert (await join(client)).error_code == Code.UNSUPPORTED_VERSION
        asked = offsets.OffsetDeleteRequest(group_id="g", topics=[])
        answer = await client.ask(asked, offsets.OffsetDeleteResponse, 0)
        assert answer.error_code == Code.UNSUPPORTED_VERSION
    finally:
        kafka.log.state.level = 4


@pytest.mark.parametrize("version", messages.ConsumerGroupHeartbeatRequest.versions)
async def test_a_group_of_kip_848_is_refused_and_each_client_has_one_line(
    kafka: Kafka, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    asked = messages.ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=0)
    client = kafka.client()
    with caplog.at_level(logging.WARNING, "tidelog.kafka"):
        for client_id in ("one", "one", "two"):
            answer = await client.ask(
                asked, messages.ConsumerGroupHeartbeatResponse, version, client_id
            )
            assert answer.error_code == Code.UNSUPPORTED_VERSION
            assert "set group.protocol=classic" in answer.error_message
    assert caplog.messages == [
        f"Kafka client {client_id!r} at 192.0.2.1: refused ConsumerGroupHeartbeat: "
        "group.protocol=consumer (KIP-848) is not served: set group.protocol=classic"
        for client_id in ("one", "two")
    ]
    name = "ConsumerGroupHeartbeat", "UNSUPPORTED_VERSION"
    assert kafka.counters.kafka.errors[name] == 3
