"""An error of the log in any handler is an answer with a code, not the end of the connection."""

import contextlib
import gc
import random
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.service.kafka.conftest import Client, Kafka, broker
from tests.service.kafka.definitions import Interpreter, load
from tests.support.faults import Call, Fault, FaultyStore
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.error_responses import called, kind_of
from tidelog.service.kafka.errors import Code, RequestKind, code_of
from tidelog.service.kafka.messages import (
    fetch,
    group_offsets,
    groups,
    metadata,
    offsets,
    produce,
    topics,
)
from tidelog.service.kafka.messages.compiler import decoder
from tidelog.service.kafka.messages.schema import Message, Structure, members_of
from tidelog.service.security.caller import ALL_RIGHTS
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.store.memory import MemoryStore

DRAWS = 8
"""Requests of each version. Some have no item, and then some answers have no code."""


def apis_of(kafka: Kafka) -> list[tuple[Api, int]]:
    """Return each API that a handler serves, with each of its versions."""
    apis = kafka.server.listener.server.apis.values()
    return [(api, version) for api in apis if api.serve for version in api.request.versions]


def invented(api: Api, version: int, count: int = 1) -> list[Any]:
    """Return requests with values of all kinds, the same at each run."""
    oracle, draw = Interpreter(load(api.request.__name__), version), random.Random(api.name)
    decode = decoder(api.request, version)
    return [decode(oracle.write(oracle.invent(draw)), 0) for _ in range(count)]


def codes_of(answer: object, version: int) -> Iterator[int]:
    """Yield all codes that an answer has in this version."""
    if isinstance(answer, list):
        for item in answer:
            yield from codes_of(item, version)
    elif isinstance(answer, Structure):
        for member in members_of(type(answer)):
            value = getattr(answer, member.name)
            if member.name != "error_code":
                yield from codes_of(value, version)
            elif version in member.versions:
                yield value


def refused(kafka: Kafka, api: Api, request: Message, version: int) -> Any:
    """Return the answer, through its bytes, to a request whose handler raises Unavailable."""
    context = kafka.server.listener.server.context
    client = ApiClient(version, "c", "192.0.2.1", "", ALL_RIGHTS)
    api = Api(api.request, api.response, _raise)
    body = b"".join(api.encode(called(context, api, _raise, request, client), version))
    return decoder(api.response, version)(body, 0)


async def test_each_api_has_an_answer_to_an_error_of_the_log(kafka: Kafka) -> None:
    for api, version in apis_of(kafka):
        answers = [
            set(codes_of(refused(kafka, api, request, version), version))
            for request in invented(api, version, DRAWS)
        ]
        codes = {code for answer_codes in answers for code in answer_codes}
        expected = {code_of(Unavailable(""), kind_of(api.request))}
        assert codes == expected, (api.name, version)


async def test_an_exception_in_a_coroutine_is_answered_alike(kafka: Kafka) -> None:
    async def raises(*_: object) -> None:
        _raise()

    context = kafka.server.listener.server.context
    for api, version in apis_of(kafka):
        (request,) = invented(api, version)
        client = ApiClient(version, "c", "192.0.2.1", "", ALL_RIGHTS)
        apis = [Api(api.request, api.response, serve) for serve in (_raise, raises)]
        answers = [
            called(context, apis[0], _raise, request, client),
            await called(context, apis[1], raises, request, client),
        ]
        answer_bytes, other = (b"".join(api.encode(answer, version)) for answer in answers)
        assert answer_bytes == other


async def test_a_client_that_leaves_before_its_task_begins_calls_no_handler(kafka: Kafka) -> None:
    """A coroutine of the handler without an await would be a line in the broker's log."""
    requests: list[object] = []

    async def serve(request: object, _: ApiClient) -> None:
        requests.append(request)

    first_api, version = apis_of(kafka)[0]
    api = Api(first_api.request, first_api.response, serve)
    client = ApiClient(version, "c", "192.0.2.1", "", ALL_RIGHTS)
    with warnings.catch_warnings(record=True) as caught:
        called(kafka.server.listener.server.context, api, serve, None, client).close()
        gc.collect()
    assert (requests, [str(warning.message) for warning in caught]) == ([], [])


def _raise(*_: object) -> None:
    raise Unavailable("the store does not answer")


async def test_an_answer_has_an_item_for_each_item_of_the_request(kafka: Kafka) -> None:
    apis = kafka.server.listener.server.apis
    storage, coordinator = Code.KAFKA_STORAGE_ERROR, Code.COORDINATOR_NOT_AVAILABLE
    list_offsets = offsets.ListOffsetsRequest(
        replica_id=-1,
        topics=[
            offsets.ListOffsetsTopic(
                name=name,
                partitions=[
                    offsets.ListOffsetsPartition(partition_index=number, timestamp=-1)
                    for number in numbers
                ],
            )
            for name, numbers in (("t", [0, 2]), ("u", [1]))
        ],
    )
    response = refused(kafka, apis[2], list_offsets, 7)
    assert [(topic.name, _partitions(topic)) for topic in response.topics] == [
        ("t", [(0, storage), (2, storage)]),
        ("u", [(1, storage)]),
    ]
    assert response.topics[0].partitions[0].offset == -1
    named = [group_offsets.OffsetFetchRequestTopic(name="t", partition_indexes=[0, 3])]
    committed = group_offsets.OffsetFetchRequest(group_id="g", topics=named)
    (topic,) = refused(kafka, apis[9], committed, 1).topics
    assert (topic.name, _partitions(topic)) == ("t", [(0, coordinator), (3, coordinator)])
    group = group_offsets.OffsetFetchRequestGroup(group_id="g", topics=None)
    committed = group_offsets.OffsetFetchRequest(groups=[group])
    (answer,) = refused(kafka, apis[9], committed, 8).groups
    assert (answer.group_id, answer.error_code, answer.topics) == ("g", coordinator, [])
    keys = metadata.FindCoordinatorRequest(key_type=0, coordinator_keys=["g", "h"])
    response = refused(kafka, apis[10], keys, 4)
    assert [(item.key, item.error_code, item.node_id) for item in response.coordinators] == [
        ("g", coordinator, -1),
        ("h", coordinator, -1),
    ]
    deleted = refused(kafka, apis[42], groups.DeleteGroupsRequest(groups_names=["g", "h"]), 2)
    assert [(item.group_id, item.error_code) for item in deleted.results] == [
        ("g", coordinator),
        ("h", coordinator),
    ]
    old = topics.DeleteTopicsRequest(topic_names=["t", "u"], timeout_ms=1)
    deleted_topics = refused(kafka, apis[20], old, 5)
    assert [item.name for item in deleted_topics.responses] == ["t", "u"]


def _partitions(topic: Any) -> list[tuple[int, int]]:
    return [(partition.partition_index, partition.error_code) for partition in topic.partitions]


@contextlib.asynccontextmanager
async def failing() -> AsyncIterator[tuple[Kafka, Client]]:
    """A broker with topic `t` and a client; the store answers no read of the WAL in the block."""
    is_on = False

    def plan(call: Call) -> Fault | None:
        is_read = call.verb in ("get", "get_range", "list")
        return Fault.UNAVAILABLE if is_on and is_read else None

    async with broker(object_store=FaultyStore(MemoryStore(), plan)) as kafka:
        await kafka.log.topics.create("t", 1, {})
        client = kafka.client()
        is_on = True
        yield kafka, client
        is_on = False


async def test_each_api_answers_while_the_store_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The handlers read the WAL to its end, because they do not know the topics of the requests."""
    async with failing() as (kafka, client):
        for api, version in apis_of(kafka):
            (request,) = invented(api, version)
            if isinstance(request, produce.ProduceRequest):
                request.acks = 1  # with 0 there is no answer
            await client.ask(request, api.response, version)
    assert "bug in" not in caplog.text


@pytest.mark.parametrize("version", [0, 9, 12])
async def test_metadata_on_failed_store_has_known_topics(version: int) -> None:
    async with failing() as (_, client):
        asked = [metadata.MetadataRequestTopic(name=name) for name in ("t", "unknown", "a b")]
        request = metadata.MetadataRequest(topics=asked)
        response = await client.ask(request, metadata.MetadataResponse, version)
        assert len(response.brokers) == 1
        assert {topic.name: topic.error_code for topic in response.topics} == {
            "t": Code.NONE,
            "unknown": Code.KAFKA_STORAGE_ERROR,
            "a b": Code.INVALID_TOPIC_EXCEPTION,
        }


async def test_fetch_while_the_store_fails_reads_the_topics_that_are_known() -> None:
    async with failing() as (_, client):
        asked = [
            fetch.FetchTopic(
                topic=name,
                partitions=[
                    fetch.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=100)
                ],
            )
            for name in ("t", "unknown")
        ]
        request = fetch.FetchRequest(max_wait_ms=0, min_bytes=0, topics=asked)
        response = await client.ask(request, fetch.FetchResponse, 11)
        codes = {topic.topic: topic.partitions[0].error_code for topic in response.responses}
        assert codes == {"t": Code.NONE, "unknown": Code.KAFKA_STORAGE_ERROR}


def test_each_request_has_a_kind() -> None:
    assert kind_of(metadata.FindCoordinatorRequest) is RequestKind.GROUP
    assert kind_of(metadata.MetadataRequest) is RequestKind.FETCH
    assert kind_of(topics.CreateTopicsRequest) is RequestKind.ADMIN
