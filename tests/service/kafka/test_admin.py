"""Admin clients: topics, partitions, records and configs, with each error."""

from typing import Any

import pytest

from tests.service.conftest import append
from tests.service.kafka.conftest import NODE, Client, Kafka
from tests.service.kafka.test_security import _client_of as client_of
from tests.service.kafka.test_security import secured
from tests.service.keyed import allow, refill_nothing
from tidelog.service.kafka.admin.calls import CHANGES_AT_ONCE
from tidelog.service.kafka.admin.configs import OF_BROKER, OF_CLIENT_METRICS, OF_GROUP, OF_TOPIC
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import configs, topics
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.storage.core import topic_configs
from tidelog.storage.core.actions import SetQuotas
from tidelog.storage.core.errors import CommitUnknown, OffsetOutOfRange
from tidelog.storage.log import Log

assert secured  # a fixture

LOGGER = 8


def _wanted(name: str = "new", count: int = 1, **more: Any) -> topics.CreatableTopic:
    fields = {"replication_factor": 1, "assignments": [], "configs": [], **more}
    return topics.CreatableTopic(name=name, num_partitions=count, **fields)


async def _create(
    client: Client, *wanted: topics.CreatableTopic, version: int = 7, validate_only: bool = False
) -> list[topics.CreatableTopicResult]:
    request = topics.CreateTopicsRequest(topics=[*wanted], validate_only=validate_only)
    return (await client.ask(request, topics.CreateTopicsResponse, version)).topics


def _assigned(*brokers: list[int], first: int = 0) -> list[topics.CreatableReplicaAssignment]:
    return [
        topics.CreatableReplicaAssignment(partition_index=number, broker_ids=ids)
        for number, ids in enumerate(brokers, first)
    ]


def _config(name: str, value: str | None) -> list[topics.CreatableTopicConfig]:
    return [topics.CreatableTopicConfig(name=name, value=value)]


async def _delete(
    client: Client, *names: str | bytes, version: int = 6
) -> list[topics.DeletableTopicResult]:
    if version < 6:
        request = topics.DeleteTopicsRequest(topic_names=[*map(str, names)], timeout_ms=1000)
    else:
        states = [
            topics.DeleteTopicState(name=each, topic_id=ZERO_UUID)
            if isinstance(each, str)
            else topics.DeleteTopicState(name=None, topic_id=each)
            for each in names
        ]
        request = topics.DeleteTopicsRequest(topics=states, timeout_ms=1000)
    return (await client.ask(request, topics.DeleteTopicsResponse, version)).responses


async def _grow(
    client: Client,
    *wanted: tuple[str, int],
    version: int = 3,
    validate_only: bool = False,
    brokers: list[list[int]] | None = None,
) -> list[int]:
    assigned = None
    if brokers is not None:
        assigned = [topics.CreatePartitionsAssignment(broker_ids=ids) for ids in brokers]
    request = topics.CreatePartitionsRequest(
        topics=[
            topics.CreatePartitionsTopic(name=name, count=count, assignments=assigned)
            for name, count in wanted
        ],
        timeout_ms=1000,
        validate_only=validate_only,
    )
    found = await client.ask(request, topics.CreatePartitionsResponse, version)
    return [each.error_code for each in found.results]


async def _delete_records(
    client: Client, topic: str, *offsets: tuple[int, int], version: int = 2
) -> list[tuple[int, int]]:
    """The error and the low watermark of each partition."""
    wanted = [
        topics.DeleteRecordsPartition(partition_index=number, offset=offset)
        for number, offset in offsets
    ]
    request = topics.DeleteRecordsRequest(
        topics=[topics.DeleteRecordsTopic(name=topic, partitions=wanted)], timeout_ms=1000
    )
    found = await client.ask(request, topics.DeleteRecordsResponse, version)
    return [(each.error_code, each.low_watermark) for each in found.topics[0].partitions]


async def _describe(
    client: Client, kind: int, name: str, *keys: str, version: int = 4, **more: Any
) -> configs.DescribeConfigsResult:
    resource = configs.DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=[*keys] or None
    )
    request = configs.DescribeConfigsRequest(resources=[resource], **more)
    (found,) = (await client.ask(request, configs.DescribeConfigsResponse, version)).results
    return found


async def _alter(
    client: Client,
    values: dict[str, str | None],
    kind: int = OF_TOPIC,
    name: str = "t",
    *,
    version: int = 2,
    validate_only: bool = False,
) -> tuple[int, str | None]:
    given = [configs.AlterableConfig(name=key, value=value) for key, value in values.items()]
    resource = configs.AlterConfigsResource(resource_type=kind, resource_name=name, configs=given)
    request = configs.AlterConfigsRequest(resources=[resource], validate_only=validate_only)
    (found,) = (await client.ask(request, configs.AlterConfigsResponse, version)).responses
    return found.error_code, found.error_message


async def _change(
    client: Client,
    *changes: tuple[str, int, str | None],
    kind: int = OF_TOPIC,
    name: str = "t",
    version: int = 1,
    validate_only: bool = False,
) -> tuple[int, str | None]:
    given = [
        configs.IncrementalAlterableConfig(name=key, config_operation=operation, value=value)
        for key, operation, value in changes
    ]
    resource = configs.IncrementalAlterConfigsResource(
        resource_type=kind, resource_name=name, configs=given
    )
    request = configs.IncrementalAlterConfigsRequest(
        resources=[resource], validate_only=validate_only
    )
    answer = await client.ask(request, configs.IncrementalAlterConfigsResponse, version)
    (found,) = answer.responses
    return found.error_code, found.error_message


# -- CreateTopics


@pytest.mark.parametrize("version", range(2, 8))
async def test_a_created_topic_is_there_and_described(kafka: Kafka, version: int) -> None:
    wanted = _wanted(count=2, replication_factor=3, configs=_config("retention.ms", "1000"))
    (found,) = await _create(kafka.client(), wanted, version=version)
    topic = kafka.log.state.topic("new")
    assert (found.name, found.error_code, found.error_message) == ("new", 0, None)
    assert (len(topic.partitions), topic.configs) == (2, {"retention.ms": "1000"})
    if version >= 7:
        assert found.topic_id.hex() == topic.topic_id
    if version >= 5:
        assert (found.num_partitions, found.replication_factor) == (2, 1)
        assert found.configs is not None
        shown = {each.name: (each.value, each.config_source) for each in found.configs}
        assert shown["retention.ms"] == ("1000", 1)
        assert shown["cleanup.policy"] == ("delete", 5)


async def test_validate_only_creates_nothing(kafka: Kafka) -> None:
    (found,) = await _create(kafka.client(), _wanted(count=4), validate_only=True)
    assert (found.error_code, found.num_partitions, found.topic_id) == (0, 4, ZERO_UUID)
    assert "new" not in kafka.log.state.topics
    (exists,) = await _create(kafka.client(), _wanted("t"), validate_only=True)
    assert exists.error_code == Code.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize(
    ("wanted", "partitions"),
    [
        (_wanted(count=-1, replication_factor=-1), 1),
        (_wanted(count=-1, assignments=_assigned([1, 2], [2], [3])), 3),
        (_wanted(count=2, assignments=_assigned([1], [1])), 2),
        (_wanted(replication_factor=3, configs=_config("min.insync.replicas", "2")), 1),
    ],
)
async def test_defaults_factors_and_assignments(
    kafka: Kafka, wanted: topics.CreatableTopic, partitions: int
) -> None:
    (found,) = await _create(kafka.client(), wanted)
    assert (found.error_code, found.replication_factor) == (0, 1)
    assert found.num_partitions == len(kafka.log.state.topic("new").partitions) == partitions


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (_wanted("t"), Code.TOPIC_ALREADY_EXISTS),
        (_wanted("a b"), Code.INVALID_TOPIC_EXCEPTION),
        (_wanted(""), Code.INVALID_TOPIC_EXCEPTION),
        (_wanted(".."), Code.INVALID_TOPIC_EXCEPTION),
        (_wanted("x" * 223), Code.INVALID_TOPIC_EXCEPTION),
        (_wanted(count=0), Code.INVALID_PARTITIONS),
        (_wanted(count=-2), Code.INVALID_PARTITIONS),
        (_wanted(count=10_001), Code.INVALID_PARTITIONS),
        (_wanted(replication_factor=0), Code.INVALID_REPLICATION_FACTOR),
        (_wanted(replication_factor=-2), Code.INVALID_REPLICATION_FACTOR),
        (_wanted(count=-1, assignments=_assigned([1], first=1)), Code.INVALID_REPLICA_ASSIGNMENT),
        (_wanted(count=-1, assignments=_assigned([])), Code.INVALID_REPLICA_ASSIGNMENT),
        (_wanted(count=3, assignments=_assigned([1])), Code.INVALID_REQUEST),
        (_wanted(configs=_config("no.such", "1")), Code.INVALID_CONFIG),
        (_wanted(configs=_config("retention.ms", "soon")), Code.INVALID_CONFIG),
        (_wanted(configs=_config("retention.ms", None)), Code.INVALID_CONFIG),
    ],
)
async def test_topics_that_are_refused(
    kafka: Kafka, wanted: topics.CreatableTopic, code: Code
) -> None:
    (found,) = await _create(kafka.client(), wanted)
    assert found.error_code == code
    assert found.error_message
    assert [*kafka.log.state.topics] == ["t"]
    assert kafka.counters.kafka.errors["CreateTopics", code.name] == 1


async def test_a_topic_twice_and_one_refusal_among_others(kafka: Kafka) -> None:
    wanted = [_wanted("a"), _wanted("b"), _wanted("a"), _wanted("t")]
    found = await _create(kafka.client(), *wanted)
    assert {each.name: each.error_code for each in found} == {
        "a": Code.INVALID_REQUEST,
        "b": 0,
        "t": Code.TOPIC_ALREADY_EXISTS,
    }
    assert sorted(kafka.log.state.topics) == ["b", "t"]


async def test_more_topics_than_run_at_once(kafka: Kafka) -> None:
    names = [f"n{number}" for number in range(CHANGES_AT_ONCE + 5)]
    found = await _create(kafka.client(), *map(_wanted, names))
    assert [(each.name, each.error_code) for each in found] == [(name, 0) for name in names]
    deleted = await _delete(kafka.client(), *names)
    assert {each.error_code for each in deleted} == {0}


async def test_a_commit_of_unknown_outcome_is_a_timeout(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise CommitUnknown("who knows")

    monkeypatch.setattr(kafka.log, "create_topic", lost)
    lines: list[tuple[str, int]] = []
    kafka.counters.on_change = lambda scope, code: lines.append((scope["path"], code))
    (found,) = await _create(kafka.client(), _wanted())
    assert found.error_code == Code.REQUEST_TIMED_OUT
    assert lines == [("new", Code.REQUEST_TIMED_OUT)]


# -- DeleteTopics, CreatePartitions


@pytest.mark.parametrize("version", range(1, 7))
async def test_topics_are_deleted_by_name(kafka: Kafka, version: int) -> None:
    topic_id = kafka.log.state.topic("t").topic_id
    found = await _delete(kafka.client(), "t", "unknown", version=version)
    assert [(each.name, each.error_code) for each in found] == [
        ("t", 0),
        ("unknown", Code.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert not kafka.log.state.topics
    if version >= 6:
        assert found[0].topic_id.hex() == topic_id


async def test_topics_are_deleted_by_id(kafka: Kafka) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    found = await _delete(kafka.client(), topic_id, b"x" * 16)
    assert [(each.name, each.error_code) for each in found] == [
        ("t", 0),
        (None, Code.UNKNOWN_TOPIC_ID),
    ]
    assert not kafka.log.state.topics


async def test_a_topic_of_another_name_or_twice_is_not_deleted(kafka: Kafka) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    assert [each.error_code for each in await _delete(kafka.client(), "t", "t")] == [42]
    both = topics.DeleteTopicsRequest(
        topics=[
            topics.DeleteTopicState(name="t", topic_id=topic_id),
            topics.DeleteTopicState(name=None, topic_id=ZERO_UUID),
        ],
        timeout_ms=0,
    )
    found = await kafka.client().ask(both, topics.DeleteTopicsResponse, 6)
    assert [each.error_code for each in found.responses] == [42, 42]
    assert [*kafka.log.state.topics] == ["t"]


@pytest.mark.parametrize("version", range(4))
async def test_topics_grow(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    assert await _grow(client, ("t", 5), version=version, validate_only=True) == [0]
    assert len(kafka.log.state.topic("t").partitions) == 3
    assert await _grow(client, ("t", 5), version=version) == [0]
    assert len(kafka.log.state.topic("t").partitions) == 5
    assert await _grow(client, ("t", 7), version=version, brokers=[[1], [2]]) == [0]


async def test_topics_that_do_not_grow(kafka: Kafka) -> None:
    client = kafka.client()
    for count in (3, 2, 0, -1, 10_001):
        assert await _grow(client, ("t", count)) == [Code.INVALID_PARTITIONS]
    assert await _grow(client, ("unknown", 5)) == [Code.UNKNOWN_TOPIC_OR_PARTITION]
    assert await _grow(client, ("t", 4), ("t", 5)) == [Code.INVALID_REQUEST]
    for brokers in ([[1]], [[1], []]):
        found = await _grow(client, ("t", 5), brokers=brokers)
        assert found == [Code.INVALID_REPLICA_ASSIGNMENT]
    assert len(kafka.log.state.topic("t").partitions) == 3


# -- DeleteRecords


@pytest.mark.parametrize("version", range(3))
async def test_records_are_deleted(kafka: Kafka, version: int) -> None:
    await append(kafka.log, *[b"%d" % number for number in range(5)])
    client = kafka.client()
    assert await _delete_records(client, "t", (0, 2), version=version) == [(0, 2)]
    found = await kafka.log.fetch("t", 0, 2, bytes_max=1000)
    assert (found.next_offset, found.log_start_offset) == (5, 2)
    with pytest.raises(OffsetOutOfRange):
        await kafka.log.fetch("t", 0, 1, bytes_max=1000)
    assert await _delete_records(client, "t", (0, 1), (1, 0)) == [(0, 2), (0, 0)]
    assert await _delete_records(client, "t", (0, -1), (1, -1)) == [(0, 5), (0, 0)]
    await append(kafka.log, b"next")
    found = await kafka.log.fetch("t", 0, 5, bytes_max=1000)
    assert (found.next_offset, found.log_start_offset) == (6, 5)


async def test_deleted_records_stay_deleted_after_a_seal(kafka: Kafka) -> None:
    await append(kafka.log, *[b"%d" % number for number in range(5)])
    await _delete_records(kafka.client(), "t", (0, 3))
    assert await kafka.log.seal("t") > 0
    partition = await kafka.log.offsets("t", 0)
    assert (partition.log_start_offset, partition.sealed_end) == (3, 5)
    found = await kafka.log.fetch("t", 0, 3, bytes_max=1000)
    assert (found.next_offset, found.log_start_offset) == (5, 3)
    assert await _delete_records(kafka.client(), "t", (0, 4)) == [(0, 4)]
    with pytest.raises(OffsetOutOfRange):
        await kafka.log.fetch("t", 0, 3, bytes_max=1000)


async def test_records_that_are_not_there(kafka: Kafka) -> None:
    await append(kafka.log, b"1")
    client = kafka.client()
    unknown = (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)
    beyond = (Code.OFFSET_OUT_OF_RANGE, -1)
    assert await _delete_records(client, "none", (0, 0)) == [unknown]
    found = await _delete_records(client, "t", (3, 0), (-1, 0), (0, 2), (0, -2), (0, 1))
    assert found == [unknown, unknown, beyond, beyond, (0, 1)]


# -- DescribeConfigs


@pytest.mark.parametrize("version", range(1, 5))
async def test_configs_of_a_topic(kafka: Kafka, version: int) -> None:
    await kafka.log.alter_topic("t", {"retention.ms": "1000", "flush.ms": "7"})
    client = kafka.client()
    found = await _describe(
        client,
        OF_TOPIC,
        "t",
        version=version,
        include_synonyms=True,
        include_documentation=version >= 3,
    )
    assert found.error_code == 0
    shown = {each.name: each for each in found.configs}
    assert shown.keys() == {*topic_configs.CONFIGS, "flush.ms"}
    retention, policy = shown["retention.ms"], shown["cleanup.policy"]
    assert (retention.value, retention.config_source, retention.read_only) == ("1000", 1, False)
    assert [(one.value, one.source) for one in retention.synonyms] == [
        ("1000", 1),
        ("604800000", 5),
    ]
    assert (policy.value, policy.config_source) == ("delete", 5)
    if version >= 3:
        assert (retention.config_type, policy.config_type) == (5, 7)
        assert shown["min.cleanable.dirty.ratio"].config_type == 6
        assert shown["compression.type"].config_type == 2
        assert retention.documentation


async def test_some_configs_of_a_topic(kafka: Kafka) -> None:
    client = kafka.client()
    keys = ("retention.ms", "preallocate", "no.such")
    found = await _describe(client, OF_TOPIC, "t", *keys)
    assert {each.name: (each.value, each.config_type) for each in found.configs} == {
        "retention.ms": ("604800000", 5),
        "preallocate": ("false", 1),
    }
    assert found.configs[0].synonyms == []


async def test_configs_of_many_topics(kafka: Kafka) -> None:
    names = [f"n{number}" for number in range(30)]
    for name in names:
        await kafka.log.create_topic(name, 1, {})
    resources = [
        configs.DescribeConfigsResource(
            resource_type=OF_TOPIC, resource_name=name, configuration_keys=["segment.ms"]
        )
        for name in [*names, "unknown"]
    ]
    request = configs.DescribeConfigsRequest(resources=resources)
    found = (await kafka.client().ask(request, configs.DescribeConfigsResponse, 4)).results
    assert [each.resource_name for each in found] == [*names, "unknown"]
    assert [len(each.configs) for each in found] == [1] * 30 + [0]
    assert found[-1].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_configs_of_a_broker(kafka: Kafka) -> None:
    client = kafka.client()
    found = await _describe(client, OF_BROKER, str(NODE.node_id))
    shown = {each.name: each for each in found.configs}
    assert shown["log.retention.ms"].value == "604800000"
    assert shown["num.partitions"].config_source == 4
    assert all(each.read_only for each in found.configs)
    for kind, name in ((OF_BROKER, ""), (OF_CLIENT_METRICS, "x"), (OF_GROUP, "g")):
        empty = await _describe(client, kind, name)
        assert (empty.error_code, empty.configs) == (0, [])
    for kind, name in ((OF_BROKER, "8"), (OF_BROKER, "x"), (LOGGER, "7"), (0, "t")):
        refused = await _describe(client, kind, name)
        assert (refused.error_code, refused.configs) == (Code.INVALID_REQUEST, [])
    unknown = await _describe(client, OF_TOPIC, "none")
    assert unknown.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


# -- AlterConfigs, IncrementalAlterConfigs


@pytest.mark.parametrize("version", range(3))
async def test_alter_configs_replaces_all(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    await kafka.log.alter_topic("t", {"retention.ms": "1000", "segment.ms": "500"})
    values: dict[str, str | None] = {"segment.ms": "700"}
    assert await _alter(client, values, version=version, validate_only=True) == (0, None)
    assert kafka.log.state.topic("t").configs["segment.ms"] == "500"
    assert await _alter(client, values, version=version) == (0, None)
    assert kafka.log.state.topic("t").configs == {"segment.ms": "700"}
    assert await _alter(client, {}, version=version) == (0, None)
    assert kafka.log.state.topic("t").configs == {}


@pytest.mark.parametrize("version", range(2))
async def test_incremental_alter_configs(kafka: Kafka, version: int) -> None:
    client, topic = kafka.client(), kafka.log.state.topic("t")
    change = ("retention.ms", 0, "1000")
    assert await _change(client, change, version=version, validate_only=True) == (0, None)
    assert topic.configs == {}
    assert await _change(client, change, ("flush.ms", 0, "9"), version=version) == (0, None)
    assert topic.configs == {"retention.ms": "1000", "flush.ms": "9"}
    changes = (("retention.ms", 1, None), ("cleanup.policy", 2, "compact,delete"))
    assert await _change(client, *changes, version=version) == (0, None)
    assert topic.configs == {"flush.ms": "9", "cleanup.policy": "delete,compact"}
    assert await _change(client, ("cleanup.policy", 3, "delete"), version=version) == (0, None)
    assert topic.configs["cleanup.policy"] == "compact"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("no.such", 0, "1"), Code.INVALID_CONFIG),
        (("no.such", 1, None), Code.INVALID_CONFIG),
        (("no.such", 2, "1"), Code.INVALID_CONFIG),
        (("retention.ms", 2, "1"), Code.INVALID_CONFIG),
        (("retention.ms", 3, "1"), Code.INVALID_CONFIG),
        (("retention.ms", 0, "x"), Code.INVALID_CONFIG),
        (("flush.ms", 0, "1" * 2000), Code.INVALID_CONFIG),
        (("cleanup.policy", 2, "shred"), Code.INVALID_CONFIG),
        (("cleanup.policy", 3, "delete"), Code.INVALID_CONFIG),
        (("retention.ms", 0, None), Code.INVALID_REQUEST),
        (("retention.ms", 4, "1"), Code.INVALID_REQUEST),
    ],
)
@pytest.mark.parametrize("validate_only", [True, False])
async def test_changes_that_are_refused(
    kafka: Kafka, change: tuple[str, int, str | None], code: Code, validate_only: bool
) -> None:
    client = kafka.client()
    good = ("segment.ms", 0, "500")
    found, message = await _change(client, good, change, validate_only=validate_only)
    assert found == code
    assert message
    assert change[0] in message
    assert kafka.log.state.topic("t").configs == {}


async def test_alterations_of_other_resources_and_twice(kafka: Kafka) -> None:
    client = kafka.client()
    value: dict[str, str | None] = {"retention.ms": "1"}
    assert (await _alter(client, value, name="none"))[0] == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert (await _alter(client, value, OF_BROKER, "7"))[0] == Code.INVALID_CONFIG
    assert (await _alter(client, value, OF_BROKER, ""))[0] == Code.INVALID_CONFIG
    assert (await _alter(client, value, OF_BROKER, "8"))[0] == Code.INVALID_REQUEST
    assert (await _alter(client, value, LOGGER, "7"))[0] == Code.INVALID_REQUEST
    assert (await _alter(client, {"retention.ms": None}))[0] == Code.INVALID_REQUEST
    twice = (("segment.ms", 0, "500"), ("segment.ms", 0, "600"))
    assert (await _change(client, *twice))[0] == Code.INVALID_REQUEST
    resource = configs.AlterConfigsResource(resource_type=2, resource_name="t", configs=[])
    request = configs.AlterConfigsRequest(resources=[resource] * 2, validate_only=False)
    found = (await client.ask(request, configs.AlterConfigsResponse, 2)).responses
    assert [each.error_code for each in found] == [Code.INVALID_REQUEST]
    assert kafka.log.state.topic("t").configs == {}


# -- rights, quotas, audit, drain


async def test_each_request_needs_its_right(secured: Kafka) -> None:
    client = await client_of(secured, "alice")
    refused: list[str] = []
    secured.counters.on_refusal = lambda _, scope: refused.append(scope["method"])
    forbidden, cluster = Code.TOPIC_AUTHORIZATION_FAILED, Code.CLUSTER_AUTHORIZATION_FAILED
    topic_id = bytes.fromhex(secured.log.state.topic("t").topic_id)

    async def codes() -> list[int]:
        return [
            (await _create(client, _wanted("t2")))[0].error_code,
            (await _grow(client, ("t", 2)))[0],
            (await _describe(client, OF_TOPIC, "t")).error_code,
            (await _alter(client, {"segment.ms": "500"}))[0],
            (await _change(client, ("segment.ms", 0, "600")))[0],
            (await _delete_records(client, "t", (0, 0)))[0][0],
            (await _delete(client, "t"))[0].error_code,
        ]

    assert await codes() == [forbidden] * 7
    assert refused == [
        "CreateTopics",
        "CreatePartitions",
        "DescribeConfigs",
        "AlterConfigs",
        "IncrementalAlterConfigs",
        "DeleteRecords",
        "DeleteTopics",
    ]
    assert (await _delete(client, topic_id))[0].error_code == Code.UNKNOWN_TOPIC_ID
    assert (await _describe(client, OF_BROKER, "7")).error_code == cluster
    assert (await _alter(client, {}, OF_BROKER, "7"))[0] == cluster
    for operation in ("CREATE", "ALTER", "DELETE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"):
        await allow(secured.log, "User:alice", operation, name="t", pattern="PREFIXED")
    changed: list[tuple[str, str, int, str]] = []
    secured.counters.on_change = lambda scope, code: changed.append(
        (scope["method"], scope["path"], code, scope["rights"].principal)
    )
    assert await codes() == [0] * 7
    assert changed == [
        ("CreateTopics", "t2", 0, "User:alice"),
        ("CreatePartitions", "t", 0, "User:alice"),
        ("AlterConfigs", "t", 0, "User:alice"),
        ("IncrementalAlterConfigs", "t", 0, "User:alice"),
        ("DeleteRecords", "t-0 below 0", 0, "User:alice"),
        ("DeleteTopics", "t", 0, "User:alice"),
    ]


async def test_a_creator_without_describe_configs_sees_none(secured: Kafka) -> None:
    client = await client_of(secured, "alice")
    await allow(secured.log, "User:alice", "CREATE", "CLUSTER", "kafka-cluster")
    (found,) = await _create(client, _wanted())
    assert (found.error_code, found.configs, found.num_partitions) == (0, None, -1)
    assert found.topic_config_error_code == Code.TOPIC_AUTHORIZATION_FAILED
    assert "new" in secured.log.state.topics


async def test_the_quota_of_mutations(secured: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    await allow(secured.log, "User:alice", "ALL", name="*")
    await secured.log.change_access(SetQuotas("User:alice", {"mutation_rate": 1.0}))
    refill_nothing(monkeypatch)
    client = await client_of(secured, "alice")
    wanted = [_wanted(f"n{number}") for number in range(30)]
    request = topics.CreateTopicsRequest(topics=wanted)
    found = await client.ask(request, topics.CreateTopicsResponse, 7)
    codes = [each.error_code for each in found.topics]
    assert set(codes) == {0, Code.THROTTLING_QUOTA_EXCEEDED}
    assert found.throttle_time_ms > 0
    assert client.transport.is_paused
    assert len(secured.log.state.topics) == 1 + codes.count(0)


async def test_a_broker_that_stops_changes_nothing(kafka: Kafka) -> None:
    kafka.server.listener.server.context.is_draining = True
    client = kafka.client()
    assert (await _create(client, _wanted()))[0].error_code == Code.REQUEST_TIMED_OUT
    assert (await _delete(client, "t"))[0].error_code == Code.REQUEST_TIMED_OUT
    assert [*kafka.log.state.topics] == ["t"]


# -- the log


async def test_a_log_start_moves_only_forward(kafka: Kafka) -> None:
    log: Log = kafka.log
    await append(log, b"1", b"2", b"3")
    assert await log.delete_records("t", 0, 2) == 2
    assert await log.delete_records("t", 0, 0) == 2
    entries = log.state.seq
    assert await log.delete_records("t", 0, 2) == 2
    assert log.state.seq == entries  # no commit
    with pytest.raises(OffsetOutOfRange):
        await log.delete_records("t", 0, 4)
