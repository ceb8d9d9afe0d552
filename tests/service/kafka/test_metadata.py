"""Metadata and coordinators: node ids, zones, leaders, topics that are unknown or forbidden."""

from collections import Counter

import pytest

from tests.service.kafka.conftest import NODE, Kafka, broker
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.metadata import (
    Cursor,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    TopicRequest,
)
from tidelog.service.kafka.metadata import KafkaMetadata, KafkaNode, nodes_of, zone_of
from tidelog.storage.cluster.liveness import KafkaListener, Member
from tidelog.storage.codec.batch_header import TRANSACTIONS_NOT_SERVED


def _peer(number: int, node_id: int, zone: str = "", started_ms: int = 1) -> Member:
    return Member(
        f"{number:032x}",
        "",
        "",
        "",
        started_ms,
        kafka=(KafkaListener(f"h{number}", 9092, node_id, zone),),
    )


@pytest.mark.parametrize("version", range(14))
async def test_metadata_in_each_version(kafka: Kafka, version: int) -> None:
    asked = [MetadataRequestTopic(name="t"), MetadataRequestTopic(name="unknown")]
    response = await kafka.client().ask(MetadataRequest(topics=asked), MetadataResponse, version)
    (node,) = response.brokers
    assert (node.node_id, node.host, node.port) == (7, "broker.example", 9092)
    if version >= 1:
        assert node.rack == "eu-1a"
        assert response.controller_id == 7
    topic, unknown = response.topics
    assert (topic.name, topic.error_code) == ("t", 0)
    assert [(partition.leader_id, partition.replica_nodes) for partition in topic.partitions] == [
        (7, [7])
    ] * 3
    assert (unknown.name, unknown.error_code) == ("unknown", Code.UNKNOWN_TOPIC_OR_PARTITION)


async def test_all_topics_and_none(kafka: Kafka) -> None:
    client = kafka.client()
    for version, topics, names in ((0, [], ["t"]), (9, None, ["t"]), (9, [], [])):
        response = await client.ask(MetadataRequest(topics=topics), MetadataResponse, version)
        assert [topic.name for topic in response.topics] == names


async def test_topics_by_id_and_names_that_are_not_valid(kafka: Kafka) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    asked = [
        MetadataRequestTopic(name=None, topic_id=topic_id),
        MetadataRequestTopic(name=None, topic_id=b"x" * 16),
        MetadataRequestTopic(name="a b"),
        MetadataRequestTopic(name="."),
    ]
    response = await kafka.client().ask(MetadataRequest(topics=asked), MetadataResponse, 12)
    assert [(topic.name, topic.error_code) for topic in response.topics] == [
        ("t", 0),
        (None, Code.UNKNOWN_TOPIC_ID),
        ("a b", Code.INVALID_TOPIC_EXCEPTION),
        (".", Code.INVALID_TOPIC_EXCEPTION),
    ]


async def test_an_unknown_id_in_versions_that_need_a_name(kafka: Kafka) -> None:
    asked = MetadataRequest(topics=[MetadataRequestTopic(name=None, topic_id=b"x" * 16)])
    for version, name in ((10, ""), (11, ""), (12, None)):
        response = await kafka.client().ask(asked, MetadataResponse, version)
        assert (response.topics[0].name, response.topics[0].error_code) == (
            name,
            Code.UNKNOWN_TOPIC_ID,
        )


async def test_a_topic_is_created_only_if_the_setting_allows_it() -> None:
    asked = MetadataRequest(topics=[MetadataRequestTopic(name="new")])
    async with broker(auto_create_topics=True, default_partitions=2) as kafka:
        response = await kafka.client().ask(asked, MetadataResponse, 9)
        assert len(response.topics[0].partitions) == 2
        asked.topics = [MetadataRequestTopic(name="other")]
        asked.allow_auto_topic_creation = False
        response = await kafka.client().ask(asked, MetadataResponse, 9)
        assert response.topics[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    async with broker() as kafka:
        asked.allow_auto_topic_creation = True
        response = await kafka.client().ask(asked, MetadataResponse, 9)
        assert response.topics[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_metadata_of_many_partitions_holds_no_loop(kafka: Kafka) -> None:
    for number in range(4):
        await kafka.log.topics.create(f"many-{number}", 2_000, {})
    response = await kafka.client().ask(MetadataRequest(topics=None), MetadataResponse, 12)
    assert sum(len(topic.partitions) for topic in response.topics) == 8_003


def test_zones_of_client_ids() -> None:
    assert zone_of("az=eu-1a,app") == "eu-1a"
    assert zone_of("app,diskless_az=b") == "b"
    assert zone_of("app|src->dst|az=c|x") == "c"
    assert zone_of("ws_az=d-consumer-1") == "d-consumer-1"
    assert zone_of("jazz=x") == zone_of("") == zone_of("az") == ""


def test_of_two_brokers_with_one_node_id_the_first_is_named() -> None:
    me = KafkaNode(1, "me", 1, "", "f" * 32)
    peers = [_peer(2, 1, started_ms=5), _peer(3, 9, started_ms=5), _peer(4, 9, started_ms=4)]
    assert [node.host for node in nodes_of(me, 6, peers)] == ["h2", "h4"]
    assert [node.host for node in nodes_of(me, 4, peers)] == ["me", "h4"]
    assert [node.host for node in nodes_of(me, 4, [Member("a", "", "", "", 1)])] == ["me"]


async def test_leaders_spread_over_brokers_and_stay_in_the_zone(kafka: Kafka) -> None:
    topic = await kafka.log.topics.create("spread", 300, {})
    assert topic is not None
    membership = kafka.log._membership
    membership.others = [_peer(2, 2, "a"), _peer(3, 3, "a"), _peer(4, 4, "b")]
    handlers: KafkaMetadata = kafka.server.metadata
    counts = Counter(handlers.leaders(topic, ""))
    assert set(counts) == {2, 3, 4, 7}
    assert min(counts.values()) > 40
    assert set(handlers.leaders(topic, "a")) == {2, 3}
    assert set(handlers.leaders(topic, "b")) == {4}
    assert handlers.leaders(topic, "no such zone") == handlers.leaders(topic, "")
    before = handlers.leaders(topic, "")
    membership.others = membership.others[:2]
    after = handlers.leaders(topic, "")
    assert all(old in (new, 4) for old, new in zip(before, after, strict=True))


async def test_a_stopping_broker_names_the_others(kafka: Kafka) -> None:
    kafka.log._membership.others = [_peer(2, 2)]
    handlers: KafkaMetadata = kafka.server.metadata
    assert [node.node_id for node in handlers.nodes()] == [2, 7]
    kafka.server.begin_drain()
    kafka.server.listener.server.context.is_draining = True
    assert [node.node_id for node in handlers.nodes()] == [2]
    kafka.log._membership.others = []
    assert [node.node_id for node in handlers.nodes()] == [7]


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_describe_cluster(kafka: Kafka, version: int) -> None:
    request = DescribeClusterRequest(include_cluster_authorized_operations=True)
    response = await kafka.client().ask(request, DescribeClusterResponse, version)
    assert response.cluster_id == kafka.log.identity.cluster_id
    assert [(node.broker_id, node.rack) for node in response.brokers] == [(7, NODE.zone)]
    assert response.cluster_authorized_operations > 0


async def test_pages_of_partitions(kafka: Kafka) -> None:
    await kafka.log.topics.create("a", 2, {})
    client, cursor, rows = kafka.client(), None, list[tuple[str | None, int]]()
    for _ in range(10):
        request = DescribeTopicPartitionsRequest(
            topics=[TopicRequest(name="t"), TopicRequest(name="a"), TopicRequest(name="b")],
            response_partition_limit=2,
            cursor=cursor,
        )
        page = await client.ask(request, DescribeTopicPartitionsResponse, 0)
        for topic in page.topics:
            if topic.error_code:
                rows.append((topic.name, -topic.error_code))
            for partition in topic.partitions:
                assert partition.eligible_leader_replicas == partition.last_known_elr == []
                rows.append((topic.name, partition.partition_index))
        cursor = page.next_cursor
        if cursor is None:
            break
        assert isinstance(cursor, Cursor)
    unknown = -Code.UNKNOWN_TOPIC_OR_PARTITION
    assert rows == [("a", 0), ("a", 1), ("b", unknown), ("t", 0), ("t", 1), ("t", 2)]


@pytest.mark.parametrize("version", range(7))
async def test_coordinators(kafka: Kafka, version: int, caplog: pytest.LogCaptureFixture) -> None:
    client = kafka.client()
    transactional = 35 if version >= 4 else 53
    for key_type, code in ((0, 0), (1, transactional), (2, 42)):
        if key_type and version == 0:
            continue
        request = FindCoordinatorRequest(key="g", key_type=key_type, coordinator_keys=["g"])
        response = await client.ask(request, FindCoordinatorResponse, version)
        (coordinator,) = response.coordinators if version >= 4 else [response]
        expected = (0, 7, "broker.example", 9092) if not code else (code, -1, "", -1)
        assert (
            coordinator.error_code,
            coordinator.node_id,
            coordinator.host,
            coordinator.port,
        ) == expected
        if key_type == 1:
            assert coordinator.error_message == TRANSACTIONS_NOT_SERVED
            await client.ask(request, FindCoordinatorResponse, version)
    line = f"Kafka client 'test' at 192.0.2.1: refused FindCoordinator: {TRANSACTIONS_NOT_SERVED}"
    assert caplog.messages == ([f"{line} 'g'"] if version else []), "each client has one line"
