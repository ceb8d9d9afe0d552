"""Small requests with many decisions or large answers: handlers work in slices."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.service.kafka.conftest import Client, Kafka, broker
from tests.service.kafka.test_security import _client_of
from tests.service.keyed import SETTINGS, allow
from tidelog.service import slices
from tidelog.service.kafka import wide_answers
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.group_offsets import KafkaGroupOffsets
from tidelog.service.kafka.messages import group_offsets, groups, metadata

TOPICS = 20
PARTITIONS = 30


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The turns that handlers wait for; each item takes a slice of its own."""
    waited: list[None] = []
    wait = slices._Turns.wait

    async def counted() -> None:
        waited.append(None)
        await wait()

    monkeypatch.setattr(slices._Turns, "wait", counted)
    monkeypatch.setattr(slices, "SLICE_S", -1.0)
    return waited


async def test_metadata_of_all_topics(kafka: Kafka, turns: list[None]) -> None:
    for number in range(TOPICS):
        await kafka.log.topics.create(f"t{number}", 1, {})
    client = kafka.client()
    turns.clear()
    request = metadata.MetadataRequest(topics=None)
    response = await client.ask(request, metadata.MetadataResponse, 9)
    assert len(response.topics) == TOPICS + 1
    assert len(turns) >= TOPICS
    turns.clear()
    request.include_topic_authorized_operations = True
    response = await client.ask(request, metadata.MetadataResponse, 9)
    assert all(topic.topic_authorized_operations > 0 for topic in response.topics)
    assert len(turns) >= 2 * TOPICS


async def test_topics_that_a_principal_may_not_describe(turns: list[None]) -> None:
    async with broker(**SETTINGS) as secured:
        for number in range(TOPICS):
            await secured.log.topics.create(f"t{number}", 1, {})
        client = await _client_of(secured, "stranger")
        turns.clear()
        request = metadata.DescribeTopicPartitionsRequest(
            topics=[], response_partition_limit=2_000, cursor=None
        )
        answer = metadata.DescribeTopicPartitionsResponse
        assert (await client.ask(request, answer, 0)).topics == []
        assert len(turns) >= TOPICS
        await allow(secured.log, "User:stranger", "DESCRIBE", name="t7")
        response = await client.ask(request, answer, 0)
        assert [topic.name for topic in response.topics] == ["t7"]


@pytest.fixture
def encoded_in_threads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The answers that a thread has encoded: those with more than a few elements."""
    answers: list[None] = []
    encoded = Context.encoded

    async def counted(*arguments: Any) -> EncodedAnswer:
        answers.append(None)
        return await encoded(*arguments)

    monkeypatch.setattr(Context, "encoded", counted)
    monkeypatch.setattr(wide_answers, "ELEMENTS_INLINE_MAX", PARTITIONS - 1)
    return answers


async def _commit(
    client: Client, group_id: str, partitions: int, names: Sequence[str] = ("wide",)
) -> None:
    parts = [
        group_offsets.OffsetCommitRequestPartition(
            partition_index=number, committed_offset=number, committed_metadata=None
        )
        for number in range(partitions)
    ]
    topics = [group_offsets.OffsetCommitRequestTopic(name=name, partitions=parts) for name in names]
    request = group_offsets.OffsetCommitRequest(group_id=group_id, member_id="", topics=topics)
    await client.ask(request, group_offsets.OffsetCommitResponse, 8)


@pytest.mark.parametrize("version", [7, 8])
async def test_all_offsets_of_a_group(
    kafka: Kafka, turns: list[None], encoded_in_threads: list[None], version: int
) -> None:
    await kafka.log.topics.create("wide", PARTITIONS, {})
    client = kafka.client()
    await _commit(client, "g", PARTITIONS)
    request = group_offsets.OffsetFetchRequest(group_id="g", topics=None)
    if version > 7:
        asked = group_offsets.OffsetFetchRequestGroup(group_id="g", topics=None)
        request = group_offsets.OffsetFetchRequest(groups=[asked])
    turns.clear()
    response = await client.ask(request, group_offsets.OffsetFetchResponse, version)
    (topic,) = response.topics if version == 7 else response.groups[0].topics
    assert [partition.committed_offset for partition in topic.partitions] == [*range(PARTITIONS)]
    assert len(turns) >= PARTITIONS
    assert len(encoded_in_threads) == 1


async def test_offsets_of_many_topics_pause_between_topics(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the answers move: the offsets of a topic take a slice."""
    now_s, waits = [0.0], list[None]()
    wait, committed = slices._Turns.wait, KafkaGroupOffsets._committed

    async def counted() -> None:
        waits.append(None)
        await wait()

    async def slow(*arguments: Any) -> Any:
        now_s[0] += slices.SLICE_S
        return await committed(*arguments)

    names = [f"t{number}" for number in range(TOPICS)]
    for name in names:
        await kafka.log.topics.create(name, 1, {})
    client = kafka.client()
    await _commit(client, "g", 1, names)
    monkeypatch.setattr(slices, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(slices._Turns, "wait", counted)
    monkeypatch.setattr(KafkaGroupOffsets, "_committed", slow)
    request = group_offsets.OffsetFetchRequest(group_id="g", topics=None)
    response = await client.ask(request, group_offsets.OffsetFetchResponse, 7)
    assert sorted(topic.name for topic in response.topics) == sorted(names)
    assert len(waits) >= TOPICS


async def test_groups_are_listed_in_slices(kafka: Kafka, encoded_in_threads: list[None]) -> None:
    await kafka.log.topics.create("wide", 1, {})
    client = kafka.client()
    names = [f"g{number:02}" for number in range(PARTITIONS)]
    for name in names:
        await _commit(client, name, 1)
    listed = await client.ask(groups.ListGroupsRequest(), groups.ListGroupsResponse, 4)
    assert sorted(group.group_id for group in listed.groups) == names
    described = await client.ask(
        groups.DescribeGroupsRequest(groups=names), groups.DescribeGroupsResponse, 5
    )
    assert [group.group_id for group in described.groups] == names
    assert len(encoded_in_threads) == 2
