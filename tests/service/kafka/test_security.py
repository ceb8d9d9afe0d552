"""SASL PLAIN, ACLs and quotas over the wire."""

import asyncio
from typing import Any

import pytest

from tests.service.kafka.conftest import Client, Kafka, batch, init_producer
from tests.service.kafka.test_fetch import _fetch, _wanted
from tests.service.kafka.test_produce import _produce, _request
from tests.service.keyed import ADMIN_KEY, allow, refill_nothing
from tidelog.service.kafka.connections import connection
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import group_offsets, groups
from tidelog.service.kafka.messages.handshake import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tidelog.service.kafka.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from tidelog.service.kafka.messages.produce import ProduceResponse
from tidelog.storage.core.actions import DeleteKey, SetQuotas
from tidelog.storage.runtime.request_context import PRINCIPAL

JOINING = groups.JoinGroupRequest(
    group_id="g",
    session_timeout_ms=10_000,
    rebalance_timeout_ms=10_000,
    member_id="",
    protocol_type="consumer",
    protocols=[groups.JoinGroupRequestProtocol(name="range", metadata=b"")],
)


async def _authenticate(
    client: Client, user: str, secret: str, authzid: str = "", version: int = 2
) -> SaslAuthenticateResponse:
    shaken = await client.ask(SaslHandshakeRequest(mechanism="PLAIN"), SaslHandshakeResponse, 1)
    assert (shaken.error_code, shaken.mechanisms) == (0, ["PLAIN"])
    message = f"{authzid}\0{user}\0{secret}".encode()
    request = SaslAuthenticateRequest(auth_bytes=message)
    return await client.ask(request, SaslAuthenticateResponse, version)


async def _client_of(kafka: Kafka, user: str, **more: Any) -> Client:
    _, secret = await kafka.log.access.create_key(f"User:{user}", **more)
    client = kafka.client()
    assert (await _authenticate(client, user, secret)).error_code == 0
    return client


async def test_the_administrator_authenticates_and_writes(secured: Kafka) -> None:
    for authzid, version in (("", 0), ("", 1), ("admin", 2)):
        client = secured.client()
        said = ApiVersionsRequest(client_software_name="a", client_software_version="1")
        assert (await client.ask(said, ApiVersionsResponse, 3)).error_code == 0
        response = await _authenticate(client, "admin", ADMIN_KEY, authzid, version)
        assert (response.error_code, response.session_lifetime_ms) == (0, 0)
        (part,) = await _produce(client, _request((0, batch(b"x"))))
        assert part.error_code == 0
    assert PRINCIPAL.get() == ""


@pytest.mark.parametrize(
    ("user", "secret", "authzid"),
    [
        ("admin", "wrong", ""),
        ("alice", ADMIN_KEY, ""),
        ("admin", ADMIN_KEY, "alice"),
        ("", ADMIN_KEY, ""),
        ("admin", "x" * 3000, ""),
    ],
)
async def test_wrong_credentials(secured: Kafka, user: str, secret: str, authzid: str) -> None:
    client = secured.client()
    response = await _authenticate(client, user, secret, authzid)
    assert response.error_code == Code.SASL_AUTHENTICATION_FAILED
    assert response.error_message
    assert ADMIN_KEY not in response.error_message
    with pytest.raises(ConnectionError):
        await _produce(client, _request((0, batch(b"x"))))


async def test_a_request_before_authentication_closes(secured: Kafka) -> None:
    client = secured.client()
    with pytest.raises(ConnectionError):
        await client.ask(MetadataRequest(topics=None), MetadataResponse, 9)
    assert secured.counters.kafka.closed["unauthenticated"] == 1


async def test_another_mechanism_and_a_missing_handshake(secured: Kafka) -> None:
    client = secured.client()
    request = SaslHandshakeRequest(mechanism="GSSAPI")
    response = await client.ask(request, SaslHandshakeResponse, 1)
    assert (response.error_code, response.mechanisms) == (
        Code.UNSUPPORTED_SASL_MECHANISM,
        ["PLAIN"],
    )
    asked = SaslAuthenticateRequest(auth_bytes=f"\0admin\0{ADMIN_KEY}".encode())
    refused = await client.ask(asked, SaslAuthenticateResponse, 2)
    assert refused.error_code == Code.ILLEGAL_SASL_STATE


async def test_acls_by_topic(secured: Kafka) -> None:
    await secured.log.topics.create("secret", 1, {})
    await allow(secured.log, "User:alice", "WRITE", name="t")
    client = await _client_of(secured, "alice")
    (part,) = await _produce(client, _request((0, batch(b"x"))))
    assert part.error_code == 0
    (part,) = await _produce(client, _request((0, batch(b"x")), topic="secret"))
    assert part.error_code == Code.TOPIC_AUTHORIZATION_FAILED
    (read,) = await _fetch(client, _wanted((0, 0)))
    assert read.error_code == Code.TOPIC_AUTHORIZATION_FAILED
    everything = await client.ask(MetadataRequest(topics=None), MetadataResponse, 9)
    assert [topic.name for topic in everything.topics] == ["t"]
    named = MetadataRequest(
        topics=[MetadataRequestTopic(name="secret"), MetadataRequestTopic(name="none")]
    )
    response = await client.ask(named, MetadataResponse, 9)
    assert [topic.error_code for topic in response.topics] == [Code.TOPIC_AUTHORIZATION_FAILED] * 2
    assert (await init_producer(client)).error_code == 0
    other = await _client_of(secured, "bob")
    assert (await init_producer(other)).error_code == Code.CLUSTER_AUTHORIZATION_FAILED


async def test_a_permission_applies_to_the_next_request(secured: Kafka) -> None:
    client = await _client_of(secured, "alice")
    request = _request((0, batch(b"x")))
    assert (await _produce(client, request))[0].error_code == Code.TOPIC_AUTHORIZATION_FAILED
    await allow(secured.log, "User:alice", "WRITE", name="t")
    assert (await _produce(client, request))[0].error_code == 0


async def test_a_revoked_key_ends_its_connections(secured: Kafka) -> None:
    await allow(secured.log, "User:alice", "ALL", name="t")
    client = await _client_of(secured, "alice")
    (key,) = secured.log.state.access.keys.values()
    await secured.log.access.change(DeleteKey(key.key_id))
    with pytest.raises(ConnectionError):
        await _produce(client, _request((0, batch(b"x"))))
    assert secured.counters.kafka.closed["revoked"] == 1


async def test_expiring_key_gives_lifetime_and_is_proved_again(secured: Kafka) -> None:
    expires_ms = secured.log.clock.now_ms() + 60_000
    _, secret = await secured.log.access.create_key("User:alice", expires_ms=expires_ms)
    client = secured.client()
    for _ in range(2):
        response = await _authenticate(client, "alice", secret)
        assert 0 < response.session_lifetime_ms <= 60_000
    refused = await _authenticate(client, "admin", ADMIN_KEY)
    assert refused.error_code == Code.SASL_AUTHENTICATION_FAILED


async def test_a_quota_of_bytes_is_in_the_answer_and_mutes(secured: Kafka) -> None:
    await allow(secured.log, "User:alice", "ALL", name="t")
    await secured.log.access.change(SetQuotas("User:alice", {"producer_byte_rate": 2000.0}))
    client = await _client_of(secured, "alice")
    request = _request((0, batch(b"x" * 3000)))
    response = await client.ask(request, ProduceResponse, 9)
    assert response.responses[0].partition_responses[0].error_code == 0
    assert 300 < response.throttle_time_ms < 2000
    assert client.transport.is_paused
    assert not secured.client().transport.is_paused


async def test_connections_without_a_principal_are_the_first_to_go(secured: Kafka) -> None:
    admission = secured.server.listener.server.admission
    proved = await _client_of(secured, "alice")
    for _ in range(admission.limits.connections_max - 1):
        secured.client()
    before = admission.connections
    secured.client()
    assert admission.connections == before
    assert not admission.is_spare(proved.connection)
    await asyncio.sleep(0)


async def test_a_principal_with_all_connections_gives_one_to_another(secured: Kafka) -> None:
    admission = secured.server.listener.server.admission
    most = 3
    admission.limits = admission.limits._replace(connections_max=most, address_max=most)
    strangers = [await _client_of(secured, "stranger") for _ in range(most)]
    await _client_of(secured, "alice")
    is_counted = [client.connection in admission._seen for client in strangers]
    assert is_counted == [False, True, True]


def _reset(group_id: str, offset: int) -> group_offsets.OffsetCommitRequest:
    partition = group_offsets.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=offset, committed_metadata=None
    )
    topic = group_offsets.OffsetCommitRequestTopic(name="t", partitions=[partition])
    return group_offsets.OffsetCommitRequest(group_id=group_id, member_id="", topics=[topic])


async def test_group_changes_use_quota(secured: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MUTE_S_MAX", 0.001)
    for operation, kind, name in (("READ", "TOPIC", "t"), ("ALL", "GROUP", "*")):
        await allow(secured.log, "User:gina", operation, kind, name)
    client = await _client_of(secured, "gina")

    async def commits(offset: int) -> list[int]:
        responses = [
            await client.ask(_reset(f"g{number}", offset), group_offsets.OffsetCommitResponse, 7)
            for number in range(4)
        ]
        throttled.extend(
            response.throttle_time_ms for response in responses if response.throttle_time_ms
        )
        return [response.topics[0].partitions[0].error_code for response in responses]

    async def allow_two() -> None:
        """Begin with a new bucket, for two changes."""
        quotas["mutation_rate"] += 0.001
        await secured.log.access.change(SetQuotas("User:gina", quotas))

    throttled: list[int] = []
    quotas = {"mutation_rate": 1.0}
    refill_nothing(monkeypatch)
    await allow_two()
    none, refused = Code.NONE, Code.THROTTLING_QUOTA_EXCEEDED
    assert await commits(1) == [none] * 4  # a commit is no mutation
    assert not throttled
    assert await commits(-1) == [none] * 2 + [Code.COORDINATOR_NOT_AVAILABLE] * 2
    assert len(throttled) == 2
    await allow_two()
    parts = [group_offsets.OffsetDeleteRequestPartition(partition_index=0)]
    topic = group_offsets.OffsetDeleteRequestTopic(name="t", partitions=parts)
    request = group_offsets.OffsetDeleteRequest(group_id="g2", topics=[topic])
    responses = [await client.ask(request, group_offsets.OffsetDeleteResponse, 0) for _ in range(3)]
    assert [response.error_code for response in responses] == [
        none,
        Code.GROUP_ID_NOT_FOUND,
        refused,
    ]
    assert responses[-1].throttle_time_ms > 0
    await allow_two()
    deletion = groups.DeleteGroupsRequest(groups_names=["none", "g3", "g4", "g5"])
    deleted = await client.ask(deletion, groups.DeleteGroupsResponse, 2)
    codes = [result.error_code for result in deleted.results]
    assert codes == [Code.GROUP_ID_NOT_FOUND, none, refused, refused]
    assert deleted.throttle_time_ms > 0


async def test_acls_of_groups(secured: Kafka) -> None:
    client = await _client_of(secured, "gina")
    committing = _reset("g", 1)
    fetching = group_offsets.OffsetFetchRequest(group_id="g", topics=None)
    describing = groups.DescribeGroupsRequest(groups=["g"], include_authorized_operations=True)
    deleting = groups.DeleteGroupsRequest(groups_names=["g"])

    async def codes() -> list[int]:
        committed = await client.ask(committing, group_offsets.OffsetCommitResponse, 7)
        fetched = await client.ask(fetching, group_offsets.OffsetFetchResponse, 7)
        described = await client.ask(describing, groups.DescribeGroupsResponse, 5)
        deleted = await client.ask(deleting, groups.DeleteGroupsResponse, 2)
        return [
            committed.topics[0].partitions[0].error_code,
            fetched.error_code,
            described.groups[0].error_code,
            deleted.results[0].error_code,
        ]

    group, topic = Code.GROUP_AUTHORIZATION_FAILED, Code.TOPIC_AUTHORIZATION_FAILED
    joined = await client.ask(JOINING, groups.JoinGroupResponse, 3)
    assert [joined.error_code, *await codes()] == [group] * 5
    await allow(secured.log, "User:gina", "READ", "GROUP", "g")
    joined = await client.ask(JOINING, groups.JoinGroupResponse, 3)
    assert [joined.error_code, *await codes()] == [Code.NONE, topic, Code.NONE, Code.NONE, group]
    await allow(secured.log, "User:gina", "READ", "TOPIC", "t")
    await allow(secured.log, "User:gina", "DELETE", "GROUP", "g")
    none = Code.NONE
    assert await codes() == [Code.UNKNOWN_MEMBER_ID, none, none, Code.NON_EMPTY_GROUP]
