"""Requests that name an object many times, or with very long names: answers within bounds."""

import pytest

from tests.attack.kafka_values import wrong_values
from tests.service.kafka.conftest import Kafka
from tidelog.service.kafka.admin.topics import CREATED_MAX
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import fetch, group_offsets, groups, metadata, topics
from tidelog.service.kafka.messages.primitives import ERROR_CHARS_MAX, shown

TIMES = 50


async def test_metadata_describes_a_topic_once(kafka: Kafka) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    for named in ({"name": "t"}, {"name": None, "topic_id": topic_id}, {"name": "unknown"}):
        asked = [metadata.MetadataRequestTopic(**named) for _ in range(TIMES)]  # type: ignore[arg-type]
        request = metadata.MetadataRequest(topics=asked)
        response = await kafka.client().ask(request, metadata.MetadataResponse, 12)
        assert len(response.topics) == 1


async def test_offset_fetch_answers_each_partition_once(kafka: Kafka) -> None:
    asked = [
        group_offsets.OffsetFetchRequestTopics(name=name, partition_indexes=[0, 1, 0] * TIMES)
        for name in ("t", "none") * 5
    ]
    request = group_offsets.OffsetFetchRequest(
        groups=[
            group_offsets.OffsetFetchRequestGroup(group_id="g", topics=wanted)
            for wanted in (asked, None) * 5
        ]
    )
    response = await kafka.client().ask(request, group_offsets.OffsetFetchResponse, 8)
    group, every_topic = response.groups
    assert [
        [partition.partition_index for partition in topic.partitions] for topic in group.topics
    ] == [
        [0, 1],
        [0, 1],
    ]
    assert every_topic.topics == []
    old = [
        group_offsets.OffsetFetchRequestTopic(name="t", partition_indexes=[0, 0]) for _ in range(9)
    ]
    request = group_offsets.OffsetFetchRequest(group_id="g", topics=old)
    response = await kafka.client().ask(request, group_offsets.OffsetFetchResponse, 5)
    assert [len(topic.partitions) for topic in response.topics] == [1]


async def test_groups_are_described_and_deleted_once(kafka: Kafka) -> None:
    request = groups.DescribeGroupsRequest(groups=["g"] * TIMES)
    described = await kafka.client().ask(request, groups.DescribeGroupsResponse, 5)
    assert [group.group_id for group in described.groups] == ["g"]
    deletion = groups.DeleteGroupsRequest(groups_names=["g"] * TIMES)
    deleted = await kafka.client().ask(deletion, groups.DeleteGroupsResponse, 2)
    assert [group.group_id for group in deleted.results] == ["g"]


async def test_list_offsets_searches_a_partition_once(kafka: Kafka) -> None:
    parts = [fetch.ListOffsetsPartition(partition_index=0, timestamp=-1) for _ in range(3)]
    request = fetch.ListOffsetsRequest(
        replica_id=-1, topics=[fetch.ListOffsetsTopic(name="t", partitions=parts)]
    )
    response = await kafka.client().ask(request, fetch.ListOffsetsResponse, 7)
    codes = [partition.error_code for partition in response.topics[0].partitions]
    assert codes == [Code.NONE, Code.INVALID_REQUEST, Code.INVALID_REQUEST]


async def test_a_request_creates_a_bounded_number_of_topics(kafka: Kafka) -> None:
    wanted = [
        topics.CreatableTopic(
            name=f"n{number}", num_partitions=1, replication_factor=1, assignments=[], configs=[]
        )
        for number in range(CREATED_MAX + 1)
    ]
    request = topics.CreateTopicsRequest(topics=wanted, validate_only=True)
    response = await kafka.client().ask(request, topics.CreateTopicsResponse, 5)
    assert {topic.error_code for topic in response.topics} == {Code.INVALID_REQUEST}
    request.topics.pop()
    response = await kafka.client().ask(request, topics.CreateTopicsResponse, 5)
    assert {topic.error_code for topic in response.topics} == {Code.NONE}


async def test_wrong_values_are_answered(kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    apis = kafka.server.listener.server.apis
    for request, version in wrong_values():
        key = request.api_key
        assert key is not None
        await kafka.client().ask(request, apis[key].response, version)
    assert "bug in" not in caplog.text


def test_an_errors_message_is_cut() -> None:
    assert shown(None) is None
    assert shown("x" * ERROR_CHARS_MAX) == "x" * ERROR_CHARS_MAX
    assert shown("x" * 40_000) == "x" * ERROR_CHARS_MAX + "..."
