"""Small requests with many decisions or large answers: handlers work in slices."""

import pytest

from tests.service.kafka.conftest import Kafka, broker
from tests.service.kafka.test_security import _client_of
from tests.service.keyed import SETTINGS, allow
from tidelog.service.http import paging
from tidelog.service.kafka.messages import metadata

TOPICS = 20


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The turns that handlers wait for; each item takes a slice of its own."""
    waited: list[None] = []
    wait = paging._Turns.wait

    async def counted() -> None:
        waited.append(None)
        await wait()

    monkeypatch.setattr(paging._Turns, "wait", counted)
    monkeypatch.setattr(paging, "SLICE_S", -1.0)
    return waited


async def test_metadata_of_all_topics(kafka: Kafka, turns: list[None]) -> None:
    for number in range(TOPICS):
        await kafka.log.create_topic(f"t{number}", 1, {})
    client = kafka.client()
    turns.clear()
    request = metadata.MetadataRequest(topics=None)
    found = await client.ask(request, metadata.MetadataResponse, 9)
    assert len(found.topics) == TOPICS + 1
    assert len(turns) >= TOPICS
    turns.clear()
    request.include_topic_authorized_operations = True
    found = await client.ask(request, metadata.MetadataResponse, 9)
    assert all(each.topic_authorized_operations > 0 for each in found.topics)
    assert len(turns) >= 2 * TOPICS


async def test_topics_that_a_principal_may_not_describe(turns: list[None]) -> None:
    async with broker(**SETTINGS) as secured:
        for number in range(TOPICS):
            await secured.log.create_topic(f"t{number}", 1, {})
        client = await _client_of(secured, "stranger")
        turns.clear()
        request = metadata.DescribeTopicPartitionsRequest(
            topics=[], response_partition_limit=2_000, cursor=None
        )
        answer = metadata.DescribeTopicPartitionsResponse
        assert (await client.ask(request, answer, 0)).topics == []
        assert len(turns) >= TOPICS
        await allow(secured.log, "User:stranger", "DESCRIBE", name="t7")
        found = await client.ask(request, answer, 0)
        assert [each.name for each in found.topics] == ["t7"]
