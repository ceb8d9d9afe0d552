"""Audit lines of Kafka clients: refused rights, failed authentications, changes; and floods."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.service.kafka.conftest import Client, Kafka, batch, broker
from tests.service.kafka.test_fetch import _fetch, _wanted
from tests.service.kafka.test_groups import committed, member
from tests.service.kafka.test_produce import _produce, _request
from tests.service.kafka.test_security import JOINING, _authenticate, _client_of
from tests.service.keyed import ADMIN_KEY, SETTINGS, allow
from tidelog.service.kafka import group_offsets
from tidelog.service.kafka.connections import connection, handshake
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import group_offsets as messages
from tidelog.service.kafka.messages import groups, log_dirs, metadata, offsets
from tidelog.service.kafka.messages.produce import InitProducerIdRequest, InitProducerIdResponse
from tidelog.service.kafka.messages.schema import Message
from tidelog.service.security import audit
from tidelog.storage.core.actions import DeleteKey

Lines = list[dict[str, Any]]
COMMIT = messages.OffsetCommitRequest(group_id="g", member_id="", topics=[])
BEAT = groups.HeartbeatRequest(group_id="g", generation_id=1, member_id="m")
LISTED = offsets.ListOffsetsRequest(
    replica_id=-1,
    topics=[
        offsets.ListOffsetsTopic(
            name="t", partitions=[offsets.ListOffsetsPartition(partition_index=0, timestamp=-1)]
        )
    ],
)
REASSIGNED = log_dirs.ListPartitionReassignmentsRequest(timeout_ms=0, topics=None)
DESCRIBED = metadata.DescribeTopicPartitionsRequest(topics=[metadata.TopicRequest(name="t")])
PRODUCER = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0)
REFUSED: dict[str, tuple[Message, type[Message], int, str]] = {
    "Metadata": (
        metadata.MetadataRequest(topics=[metadata.MetadataRequestTopic(name="t")]),
        metadata.MetadataResponse,
        9,
        "DESCRIBE topic 't'",
    ),
    "DescribeTopicPartitions": (
        DESCRIBED,
        metadata.DescribeTopicPartitionsResponse,
        0,
        "DESCRIBE topic 't'",
    ),
    "ListOffsets": (LISTED, offsets.ListOffsetsResponse, 5, "DESCRIBE topic 't'"),
    "InitProducerId": (PRODUCER, InitProducerIdResponse, 4, "IDEMPOTENT_WRITE the cluster"),
    "FindCoordinator": (
        metadata.FindCoordinatorRequest(key="g"),
        metadata.FindCoordinatorResponse,
        3,
        "DESCRIBE group 'g'",
    ),
    "JoinGroup": (JOINING, groups.JoinGroupResponse, 3, "READ group 'g'"),
    "Heartbeat": (BEAT, groups.HeartbeatResponse, 3, "READ group 'g'"),
    "OffsetCommit": (COMMIT, messages.OffsetCommitResponse, 7, "READ group 'g'"),
    "OffsetFetch": (
        messages.OffsetFetchRequest(group_id="g", topics=None),
        messages.OffsetFetchResponse,
        7,
        "DESCRIBE group 'g'",
    ),
    "OffsetDelete": (
        messages.OffsetDeleteRequest(group_id="g", topics=[]),
        messages.OffsetDeleteResponse,
        0,
        "DELETE group 'g'",
    ),
    "DescribeGroups": (
        groups.DescribeGroupsRequest(groups=["g"]),
        groups.DescribeGroupsResponse,
        5,
        "DESCRIBE group 'g'",
    ),
    "DeleteGroups": (
        groups.DeleteGroupsRequest(groups_names=["g"]),
        groups.DeleteGroupsResponse,
        2,
        "DELETE group 'g'",
    ),
    "DescribeLogDirs": (
        log_dirs.DescribeLogDirsRequest(topics=None),
        log_dirs.DescribeLogDirsResponse,
        4,
        "DESCRIBE the cluster",
    ),
    "ListPartitionReassignments": (
        REASSIGNED,
        log_dirs.ListPartitionReassignmentsResponse,
        0,
        "DESCRIBE the cluster",
    ),
}


@pytest.fixture
async def secured(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Kafka, Lines]]:
    """A broker that needs keys, with the topic `t`, and the lines of its audit log."""
    monkeypatch.setattr(handshake, "FAILED_DELAY_S", 0.01)
    monkeypatch.setattr(connection, "CLOSE_DELAY_S", 0.01)
    async with broker(**SETTINGS, auto_create_topics=True) as made:
        yield made, await _audited(made)


async def _audited(kafka: Kafka) -> Lines:
    await kafka.log.topics.create("t", 2, {})
    lines: Lines = []
    kafka.context.audit = audit.Audit(kafka.log, kafka.counters, lines.append)
    return lines


def _taken(lines: Lines) -> list[tuple[Any, ...]]:
    """Take the lines: event, principal, address, request, status."""
    names = ("event", "principal", "client", "request", "status")
    rows = [tuple(line.get(name) for name in names) for line in lines]
    lines.clear()
    return rows


async def _admin(kafka: Kafka) -> Client:
    client = kafka.client()
    assert (await _authenticate(client, "admin", ADMIN_KEY)).error_code == 0
    return client


async def test_refused_rights_of_records(secured: tuple[Kafka, Lines]) -> None:
    kafka, lines = secured
    client = await _client_of(kafka, "mallory")
    (written,) = await _produce(client, _request((0, batch(b"x"))))
    (read,) = await _fetch(client, _wanted((0, 0)))
    assert [written.error_code, read.error_code] == [Code.TOPIC_AUTHORIZATION_FAILED] * 2
    assert lines[0]["reason"] == "not authorized: User:mallory may not WRITE topic 't'"
    assert lines[1]["reason"] == "not authorized: User:mallory may not READ topic 't'"
    assert _taken(lines) == [
        ("denied", "User:mallory", "192.0.2.1", api, 403) for api in ("Produce", "Fetch")
    ]


@pytest.mark.parametrize("api", REFUSED)
async def test_a_refused_right_of_each_api(secured: tuple[Kafka, Lines], api: str) -> None:
    kafka, lines = secured
    client = await _client_of(kafka, "mallory")
    request, kind, version, right = REFUSED[api]
    await client.ask(request, kind, version)
    (line,) = lines
    assert line["reason"] == f"not authorized: User:mallory may not {right}"
    assert _taken(lines) == [("denied", "User:mallory", "192.0.2.1", api, 403)]


async def test_failed_authentications(secured: tuple[Kafka, Lines]) -> None:
    kafka, lines = secured
    for user, secret, authzid in (("admin", "wrong", ""), ("", "x", ""), ("admin", "x", "bob")):
        response = await _authenticate(kafka.client(), user, secret, authzid)
        assert response.error_code == Code.SASL_AUTHENTICATION_FAILED
    none = ("unauthenticated", None, "192.0.2.1", "SaslAuthenticate", 401)
    assert "wrong" not in str(lines)
    assert _taken(lines) == [none] * 3
    with pytest.raises(ConnectionError):
        await _fetch(kafka.client(), _wanted((0, 0)))
    assert _taken(lines) == [("unauthenticated", None, "192.0.2.1", "Fetch", 401)]
    client = await _client_of(kafka, "mallory")
    (key,) = kafka.log.state.access.keys.values()
    other = await _authenticate(client, "admin", ADMIN_KEY)
    assert other.error_message == "a connection cannot change its principal"
    assert _taken(lines) == [
        ("unauthenticated", "User:mallory", "192.0.2.1", "SaslAuthenticate", 401)
    ]
    await kafka.log.access.change(DeleteKey(key.key_id))
    with pytest.raises(ConnectionError):
        await _fetch(client, _wanted((0, 0)))
    assert _taken(lines) == [("unauthenticated", "User:mallory", "192.0.2.1", "Fetch", 401)]


async def test_changes_of_groups(
    secured: tuple[Kafka, Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka, lines = secured
    client = await _admin(kafka)

    def change(api: str) -> tuple[Any, ...]:
        return ("change", "User:admin", "192.0.2.1", f"{api} g", 0)

    assert (await committed(client, 5))[0] == 0
    assert (await committed(client, 6))[0] == 0
    assert _taken(lines) == [change("OffsetCommit")], "one line for repeated commits"
    monkeypatch.setattr(group_offsets, "AUDITED_S", 0.0)
    assert (await committed(client, 7))[0] == 0
    assert _taken(lines) == [change("OffsetCommit")]
    deleting = messages.OffsetDeleteRequest(
        group_id="g",
        topics=[
            messages.OffsetDeleteRequestTopic(
                name="t", partitions=[messages.OffsetDeleteRequestPartition(partition_index=0)]
            )
        ],
    )
    assert (await client.ask(deleting, messages.OffsetDeleteResponse, 0)).error_code == 0
    assert _taken(lines) == [change("OffsetDelete")]
    assert (await committed(client, 8))[0] == 0
    deletion = groups.DeleteGroupsRequest(groups_names=["g", "none"])
    response = await client.ask(deletion, groups.DeleteGroupsResponse, 2)
    assert [result.error_code for result in response.results] == [0, Code.GROUP_ID_NOT_FOUND]
    assert _taken(lines) == [change("OffsetCommit"), change("DeleteGroups")]
    me, generation = await member(client)
    assert (await committed(client, 9, me, generation))[0] == 0
    assert _taken(lines) == [], "the commits of members are no changes by an administrator"


async def test_commits_to_many_groups_have_few_lines(
    secured: tuple[Kafka, Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group has a line, but groups above a number are only counted.

    A request that commits nothing has no line.
    """
    monkeypatch.setattr(group_offsets, "AUDITED_GROUPS", 2)
    monkeypatch.setattr(group_offsets, "LEFT_OUT_S", 0.05)
    kafka, lines = secured
    client = await _admin(kafka)
    await client.ask(COMMIT, messages.OffsetCommitResponse, 7)
    assert not lines
    for number in range(6):
        for _ in range(2):
            assert (await committed(client, 5, group=f"g{number}"))[0] == 0
    counts: list[int] = []
    while sum(counts) < 8:
        await asyncio.sleep(0.01)
        counts = [int(line["request"].split()[1]) for line in lines[2:]]
    assert sum(counts) == 8
    assert {line["request"].partition(" times ")[2] for line in lines[2:]} == {"to other groups"}
    assert [line["request"] for line in lines[:2]] == ["OffsetCommit g0", "OffsetCommit g1"]
    assert {line["principal"] for line in lines} == {"User:admin"}


async def test_a_topic_that_metadata_creates(secured: tuple[Kafka, Lines]) -> None:
    kafka, lines = secured
    wanted = [metadata.MetadataRequestTopic(name="new.t")]
    request = metadata.MetadataRequest(topics=wanted)
    await allow(kafka.log, "User:bob", "DESCRIBE", name="new.", pattern="PREFIXED")
    client = await _client_of(kafka, "bob")
    refused = await client.ask(request, metadata.MetadataResponse, 9)
    assert refused.topics[0].error_code == Code.TOPIC_AUTHORIZATION_FAILED
    assert _taken(lines) == [("denied", "User:bob", "192.0.2.1", "Metadata", 403)]
    created = await (await _admin(kafka)).ask(request, metadata.MetadataResponse, 9)
    assert created.topics[0].error_code == 0
    assert _taken(lines) == [("change", "User:admin", "192.0.2.1", "Metadata new.t", 0)]


async def test_a_flood_of_refusals_is_left_out_and_counted(
    secured: tuple[Kafka, Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LINES_PER_S", 0.01)
    kafka, _ = secured
    lines: Lines = []
    kafka.context.audit = audit.Audit(kafka.log, kafka.counters, lines.append)
    client = await _client_of(kafka, "mallory")
    for _ in range(50):
        await _fetch(client, _wanted((0, 0)))
    assert kafka.counters.audited["denied"] == 50
    assert len(lines) + kafka.counters.audit_lost["flood"] == 50
    assert kafka.counters.audit_lost["flood"] > 40
