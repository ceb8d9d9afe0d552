"""Admin clients: topics, partitions and records, with each error; rights, quotas, audit lines."""

from typing import Any

import pytest

from tests.service.conftest import append
from tests.service.kafka.admin_requests import (
    alter,
    alter_some,
    assigned,
    config,
    create,
    delete,
    delete_records,
    describe,
    grow,
    wanted_topic,
)
from tests.service.kafka.conftest import Kafka
from tests.service.kafka.test_security import _client_of as client_of
from tests.service.keyed import allow, refill_nothing
from tidelog.service.kafka.admin.configs import OF_BROKER, OF_TOPIC
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import topics
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.operations.change_request import CHANGES_AT_ONCE
from tidelog.service.security.audit import Audit
from tidelog.storage.broker import Broker
from tidelog.storage.core.actions import SetQuotas
from tidelog.storage.core.errors import CommitUnknown, OffsetOutOfRange

# -- CreateTopics


@pytest.mark.parametrize("version", range(2, 8))
async def test_a_created_topic_is_there_and_described(kafka: Kafka, version: int) -> None:
    wanted = wanted_topic(count=2, replication_factor=3, configs=config("retention.ms", "1000"))
    (result,) = await create(kafka.client(), wanted, version=version)
    topic = kafka.log.state.topic("new")
    assert (result.name, result.error_code, result.error_message) == ("new", 0, None)
    assert (len(topic.partitions), topic.configs) == (2, {"retention.ms": "1000"})
    if version >= 7:
        assert result.topic_id.hex() == topic.topic_id
    if version >= 5:
        assert (result.num_partitions, result.replication_factor) == (2, 1)
        assert result.configs is not None
        shown = {entry.name: (entry.value, entry.config_source) for entry in result.configs}
        assert shown["retention.ms"] == ("1000", 1)
        assert shown["cleanup.policy"] == ("delete", 5)


async def test_validate_only_creates_nothing(kafka: Kafka) -> None:
    (result,) = await create(kafka.client(), wanted_topic(count=4), validate_only=True)
    assert (result.error_code, result.num_partitions, result.topic_id) == (0, 4, ZERO_UUID)
    assert "new" not in kafka.log.state.topics
    (exists,) = await create(kafka.client(), wanted_topic("t"), validate_only=True)
    assert exists.error_code == Code.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize(
    ("wanted", "partitions"),
    [
        (wanted_topic(count=-1, replication_factor=-1), 1),
        (wanted_topic(count=-1, assignments=assigned([1, 2], [2], [3])), 3),
        (wanted_topic(count=2, assignments=assigned([1], [1])), 2),
        (wanted_topic(replication_factor=3, configs=config("min.insync.replicas", "2")), 1),
    ],
)
async def test_defaults_factors_and_assignments(
    kafka: Kafka, wanted: topics.CreatableTopic, partitions: int
) -> None:
    (result,) = await create(kafka.client(), wanted)
    assert (result.error_code, result.replication_factor) == (0, 1)
    assert result.num_partitions == len(kafka.log.state.topic("new").partitions) == partitions


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (wanted_topic("t"), Code.TOPIC_ALREADY_EXISTS),
        (wanted_topic("a b"), Code.INVALID_TOPIC_EXCEPTION),
        (wanted_topic(""), Code.INVALID_TOPIC_EXCEPTION),
        (wanted_topic(".."), Code.INVALID_TOPIC_EXCEPTION),
        (wanted_topic("x" * 223), Code.INVALID_TOPIC_EXCEPTION),
        (wanted_topic(count=0), Code.INVALID_PARTITIONS),
        (wanted_topic(count=-2), Code.INVALID_PARTITIONS),
        (wanted_topic(count=10_001), Code.INVALID_PARTITIONS),
        (wanted_topic(replication_factor=0), Code.INVALID_REPLICATION_FACTOR),
        (wanted_topic(replication_factor=-2), Code.INVALID_REPLICATION_FACTOR),
        (
            wanted_topic(count=-1, assignments=assigned([1], first=1)),
            Code.INVALID_REPLICA_ASSIGNMENT,
        ),
        (wanted_topic(count=-1, assignments=assigned([])), Code.INVALID_REPLICA_ASSIGNMENT),
        (wanted_topic(count=3, assignments=assigned([1])), Code.INVALID_REQUEST),
        (wanted_topic(configs=config("no.such", "1")), Code.INVALID_CONFIG),
        (wanted_topic(configs=config("retention.ms", "soon")), Code.INVALID_CONFIG),
        (wanted_topic(configs=config("retention.ms", None)), Code.INVALID_CONFIG),
    ],
)
async def test_refused_topics(kafka: Kafka, wanted: topics.CreatableTopic, code: Code) -> None:
    (result,) = await create(kafka.client(), wanted)
    assert result.error_code == code
    assert result.error_message
    assert [*kafka.log.state.topics] == ["t"]
    assert kafka.counters.kafka.errors["CreateTopics", code.name] == 1


async def test_a_topic_twice_and_one_refusal_among_others(kafka: Kafka) -> None:
    wanted = [wanted_topic("a"), wanted_topic("b"), wanted_topic("a"), wanted_topic("t")]
    results = await create(kafka.client(), *wanted)
    assert {result.name: result.error_code for result in results} == {
        "a": Code.INVALID_REQUEST,
        "b": 0,
        "t": Code.TOPIC_ALREADY_EXISTS,
    }
    assert sorted(kafka.log.state.topics) == ["b", "t"]


async def test_more_topics_than_run_at_once(kafka: Kafka) -> None:
    names = [f"n{number}" for number in range(CHANGES_AT_ONCE + 5)]
    results = await create(kafka.client(), *map(wanted_topic, names))
    assert [(result.name, result.error_code) for result in results] == [(name, 0) for name in names]
    deleted = await delete(kafka.client(), *names)
    assert {result.error_code for result in deleted} == {0}


async def test_unknown_commit_is_a_timeout(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise CommitUnknown("who knows")

    monkeypatch.setattr(kafka.log.topics, "create", lost)
    lines: list[dict[str, Any]] = []
    kafka.context.audit = Audit(kafka.log, kafka.counters, lines.append)
    (result,) = await create(kafka.client(), wanted_topic())
    assert result.error_code == Code.REQUEST_TIMED_OUT
    (line,) = lines
    assert (line["request"], line["status"]) == ("CreateTopics new", Code.REQUEST_TIMED_OUT)


# -- DeleteTopics, CreatePartitions


@pytest.mark.parametrize("version", range(1, 7))
async def test_topics_are_deleted_by_name(kafka: Kafka, version: int) -> None:
    topic_id = kafka.log.state.topic("t").topic_id
    results = await delete(kafka.client(), "t", "unknown", version=version)
    assert [(result.name, result.error_code) for result in results] == [
        ("t", 0),
        ("unknown", Code.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert not kafka.log.state.topics
    if version >= 6:
        assert results[0].topic_id.hex() == topic_id


async def test_topics_are_deleted_by_id(kafka: Kafka) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    results = await delete(kafka.client(), topic_id, b"x" * 16)
    assert [(result.name, result.error_code) for result in results] == [
        ("t", 0),
        (None, Code.UNKNOWN_TOPIC_ID),
    ]
    assert not kafka.log.state.topics


async def test_a_topic_of_another_name_or_twice_is_not_deleted(kafka: Kafka) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    assert [result.error_code for result in await delete(kafka.client(), "t", "t")] == [42]
    both = topics.DeleteTopicsRequest(
        topics=[
            topics.DeleteTopicState(name="t", topic_id=topic_id),
            topics.DeleteTopicState(name=None, topic_id=ZERO_UUID),
        ],
        timeout_ms=0,
    )
    response = await kafka.client().ask(both, topics.DeleteTopicsResponse, 6)
    assert [result.error_code for result in response.responses] == [42, 42]
    assert [*kafka.log.state.topics] == ["t"]


@pytest.mark.parametrize("version", range(4))
async def test_topics_grow(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    assert await grow(client, ("t", 5), version=version, validate_only=True) == [0]
    assert len(kafka.log.state.topic("t").partitions) == 3
    assert await grow(client, ("t", 5), version=version) == [0]
    assert len(kafka.log.state.topic("t").partitions) == 5
    assert await grow(client, ("t", 7), version=version, brokers=[[1], [2]]) == [0]


async def test_topics_that_do_not_grow(kafka: Kafka) -> None:
    client = kafka.client()
    for count in (3, 2, 0, -1, 10_001):
        assert await grow(client, ("t", count)) == [Code.INVALID_PARTITIONS]
    assert await grow(client, ("unknown", 5)) == [Code.UNKNOWN_TOPIC_OR_PARTITION]
    assert await grow(client, ("t", 4), ("t", 5)) == [Code.INVALID_REQUEST]
    for brokers in ([[1]], [[1], []]):
        codes = await grow(client, ("t", 5), brokers=brokers)
        assert codes == [Code.INVALID_REPLICA_ASSIGNMENT]
    assert len(kafka.log.state.topic("t").partitions) == 3


# -- DeleteRecords


@pytest.mark.parametrize("version", range(3))
async def test_records_are_deleted(kafka: Kafka, version: int) -> None:
    await append(kafka.log, *[b"%d" % number for number in range(5)])
    client = kafka.client()
    assert await delete_records(client, "t", (0, 2), version=version) == [(0, 2)]
    fetched_page = await kafka.log.records.fetch("t", 0, 2, bytes_max=1000)
    assert (fetched_page.next_offset, fetched_page.log_start_offset) == (5, 2)
    with pytest.raises(OffsetOutOfRange):
        await kafka.log.records.fetch("t", 0, 1, bytes_max=1000)
    assert await delete_records(client, "t", (0, 1), (1, 0)) == [(0, 2), (0, 0)]
    assert await delete_records(client, "t", (0, -1), (1, -1)) == [(0, 5), (0, 0)]
    await append(kafka.log, b"next")
    fetched_page = await kafka.log.records.fetch("t", 0, 5, bytes_max=1000)
    assert (fetched_page.next_offset, fetched_page.log_start_offset) == (6, 5)


async def test_deleted_records_stay_deleted_after_a_seal(kafka: Kafka) -> None:
    await append(kafka.log, *[b"%d" % number for number in range(5)])
    await delete_records(kafka.client(), "t", (0, 3))
    assert await kafka.log.records.seal("t") > 0
    partition = await kafka.log.records.offsets("t", 0)
    assert (partition.log_start_offset, partition.sealed_end) == (3, 5)
    fetched_page = await kafka.log.records.fetch("t", 0, 3, bytes_max=1000)
    assert (fetched_page.next_offset, fetched_page.log_start_offset) == (5, 3)
    assert await delete_records(kafka.client(), "t", (0, 4)) == [(0, 4)]
    with pytest.raises(OffsetOutOfRange):
        await kafka.log.records.fetch("t", 0, 3, bytes_max=1000)


async def test_records_that_are_not_there(kafka: Kafka) -> None:
    await append(kafka.log, b"1")
    client = kafka.client()
    unknown = (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)
    beyond = (Code.OFFSET_OUT_OF_RANGE, -1)
    assert await delete_records(client, "none", (0, 0)) == [unknown]
    results = await delete_records(client, "t", (3, 0), (-1, 0), (0, 2), (0, -2), (0, 1))
    assert results == [unknown, unknown, beyond, beyond, (0, 1)]


# -- rights, quotas, audit, drain


async def test_each_request_needs_its_right(secured: Kafka) -> None:
    client = await client_of(secured, "alice")
    lines: list[dict[str, Any]] = []
    secured.context.audit = Audit(secured.log, secured.counters, lines.append)
    forbidden, cluster = Code.TOPIC_AUTHORIZATION_FAILED, Code.CLUSTER_AUTHORIZATION_FAILED
    topic_id = bytes.fromhex(secured.log.state.topic("t").topic_id)

    async def codes() -> list[int]:
        return [
            (await create(client, wanted_topic("t2")))[0].error_code,
            (await grow(client, ("t", 2)))[0],
            (await describe(client, OF_TOPIC, "t")).error_code,
            (await alter(client, {"segment.ms": "500"}))[0],
            (await alter_some(client, ("segment.ms", 0, "600")))[0],
            (await delete_records(client, "t", (0, 0)))[0][0],
            (await delete(client, "t"))[0].error_code,
        ]

    assert await codes() == [forbidden] * 7
    assert {line["event"] for line in lines} == {"denied"}
    assert [line["request"] for line in lines] == [
        "CreateTopics",
        "CreatePartitions",
        "DescribeConfigs",
        "AlterConfigs",
        "IncrementalAlterConfigs",
        "DeleteRecords",
        "DeleteTopics",
    ]
    assert (await delete(client, topic_id))[0].error_code == Code.UNKNOWN_TOPIC_ID
    assert (await describe(client, OF_BROKER, "7")).error_code == cluster
    assert (await alter(client, {}, OF_BROKER, "7"))[0] == cluster
    assert (await describe(client, OF_BROKER, "")).error_code == cluster
    changes: dict[str, str | None] = {"log.roll.ms": "900"}
    assert (await alter(client, changes, OF_BROKER, ""))[0] == cluster
    for operation in ("CREATE", "ALTER", "DELETE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"):
        await allow(secured.log, "User:alice", operation, name="t", pattern="PREFIXED")
    lines.clear()
    assert await codes() == [0] * 7
    assert {(line["event"], line["status"], line["principal"]) for line in lines} == {
        ("change", 0, "User:alice")
    }
    assert [line["request"] for line in lines] == [
        "CreateTopics t2",
        "CreatePartitions t",
        "AlterConfigs t",
        "IncrementalAlterConfigs t",
        "DeleteRecords t-0 below 0",
        "DeleteTopics t",
    ]
    for operation in ("DESCRIBE_CONFIGS", "ALTER_CONFIGS"):
        await allow(secured.log, "User:alice", operation, "CLUSTER", "kafka-cluster")
    assert (await alter(client, changes, OF_BROKER, ""))[0] == 0
    assert (await describe(client, OF_BROKER, "")).configs[0].value == "900"
    assert lines[-1]["request"] == "AlterConfigs defaults: log.roll.ms=900"


async def test_a_creator_without_describe_configs_sees_none(secured: Kafka) -> None:
    client = await client_of(secured, "alice")
    await allow(secured.log, "User:alice", "CREATE", "CLUSTER", "kafka-cluster")
    (result,) = await create(client, wanted_topic())
    assert (result.error_code, result.configs, result.num_partitions) == (0, None, -1)
    assert result.topic_config_error_code == Code.TOPIC_AUTHORIZATION_FAILED
    assert "new" in secured.log.state.topics


async def test_the_quota_of_mutations(secured: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    await allow(secured.log, "User:alice", "ALL", name="*")
    await secured.log.access.change(SetQuotas("User:alice", {"mutation_rate": 1.0}))
    refill_nothing(monkeypatch)
    client = await client_of(secured, "alice")
    wanted = [wanted_topic(f"n{number}") for number in range(30)]
    request = topics.CreateTopicsRequest(topics=wanted)
    response = await client.ask(request, topics.CreateTopicsResponse, 7)
    codes = [topic.error_code for topic in response.topics]
    assert set(codes) == {0, Code.THROTTLING_QUOTA_EXCEEDED}
    assert response.throttle_time_ms > 0
    assert client.transport.is_paused
    assert len(secured.log.state.topics) == 1 + codes.count(0)


async def test_a_broker_that_stops_changes_nothing(kafka: Kafka) -> None:
    kafka.server.listener.server.context.is_draining = True
    client = kafka.client()
    assert (await create(client, wanted_topic()))[0].error_code == Code.REQUEST_TIMED_OUT
    assert (await delete(client, "t"))[0].error_code == Code.REQUEST_TIMED_OUT
    assert [*kafka.log.state.topics] == ["t"]


# -- the log


async def test_a_log_start_moves_only_forward(kafka: Kafka) -> None:
    log: Broker = kafka.log
    await append(log, b"1", b"2", b"3")
    assert await log.topics.delete_records("t", 0, 2) == 2
    assert await log.topics.delete_records("t", 0, 0) == 2
    entries = log.state.seq
    assert await log.topics.delete_records("t", 0, 2) == 2
    assert log.state.seq == entries  # no commit
    with pytest.raises(OffsetOutOfRange):
        await log.topics.delete_records("t", 0, 4)
