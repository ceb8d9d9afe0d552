"""Permissions of a principal: topics, groups, transactions, creation; and quotas."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.service.conftest import JSON, Broker, append
from tests.service.keyed import (
    ADMIN,
    JSON_TYPE,
    RECORDS,
    SETTINGS,
    allow,
    assert_denied,
    assert_unknown,
    key_of,
    secured,
)
from tidelog.service.peers.forwarding import Forwarder
from tidelog.service.security.token_bucket import BURST_S, Bucket
from tidelog.storage.core.acls import DEFAULT
from tidelog.storage.core.actions import SetQuotas
from tidelog.storage.groups.coordinator_choice import Rendezvous
from tidelog.storage.store.memory import MemoryStore

READ_T = "/topics/t/partitions/0/records"
V2 = {"content-type": "application/vnd.kafka.v2+json"}


pytestmark = pytest.mark.broker(topics={"t": 1, "u": 1}, records=[b"1"], **SETTINGS)


@pytest.fixture
async def alice(broker: Broker) -> dict[str, str]:
    return await key_of(broker.log, "User:alice")


async def produce(broker: Broker, topic: str, who: dict[str, str]) -> httpx.Response:
    return await broker.http.post(f"/topics/{topic}", content=RECORDS, headers=JSON_TYPE | who)


async def test_produce_and_fetch_each_need_their_own(broker: Broker, alice: dict[str, str]) -> None:
    message = assert_denied(await produce(broker, "t", alice))
    assert message == "not authorized: User:alice may not WRITE topic 't'"
    await allow(broker.log, "User:alice", "WRITE")
    assert (await produce(broker, "t", alice)).status_code == 200
    assert_denied(await produce(broker, "u", alice))
    assert_denied(await produce(broker, "not-there", alice))  # its absence is not revealed
    assert_denied(await broker.http.get(READ_T, headers=alice))
    await allow(broker.log, "User:alice", "READ", name="*")
    assert len((await broker.http.get(READ_T, headers=alice)).json()) == 2
    await allow(broker.log, "User:*", "ALL", permission="DENY")
    assert_denied(await produce(broker, "t", alice))
    assert (await produce(broker, "t", ADMIN)).status_code == 200  # no ACL applies to it
    text = (await broker.http.get("/metrics", headers=ADMIN)).text
    assert 'tidelog_denied_total{resource="TOPIC"} 5.0' in text
    assert 'tidelog_errors_total{kind="Forbidden"} 5.0' in text


async def test_listings_show_what_may_be_described(broker: Broker, alice: dict[str, str]) -> None:
    await allow(broker.log, "User:alice", "WRITE", name="t")
    cluster = f"{broker.v3}"

    async def names(path: str, field: str) -> list[str]:
        said = (await broker.http.get(path, headers=alice)).json()
        return [row[field] for row in (said["data"] if isinstance(said, dict) else said)]

    assert (await broker.http.get("/topics", headers=alice)).json() == ["t"]
    assert await names(f"{cluster}/topics", "topic_name") == ["t"]
    assert await names("/tidelog/v1/topics", "topic_name") == ["t"]
    assert await names(f"{cluster}/brokers/1/partition-replicas", "topic_name") == ["t"]
    assert await names(f"{cluster}/topics/-/configs", "topic_name") == []
    assert (await broker.http.get("/topics/t", headers=alice)).json()["configs"] == {}
    await allow(broker.log, "User:alice", "ALTER_CONFIGS")
    assert set(await names(f"{cluster}/topics/-/configs", "topic_name")) == {"t"}
    path = f"{cluster}/topics?include_authorized_operations=true"
    (shown,) = (await broker.http.get(path, headers=alice)).json()["data"]
    operations = ["WRITE", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"]
    assert shown["authorized_operations"] == operations
    assert_denied(await broker.http.get(f"{cluster}/topics/u", headers=alice))


@pytest.mark.broker(topics={}, records=[], auto_create_topics=True)
async def test_what_produce_creates_must_be_allowed_to_be_created(broker: Broker) -> None:
    alice = await key_of(broker.log, "User:alice")
    await allow(broker.log, "User:alice", "WRITE", name="*")
    assert_denied(await produce(broker, "new", alice))
    assert not broker.log.state.topics
    await allow(broker.log, "User:alice", "CREATE", name="new")
    assert (await produce(broker, "new", alice)).status_code == 200


async def test_transaction_needs_all_of_it(broker: Broker, alice: dict[str, str]) -> None:
    path = f"{broker.v3}/transactions"
    body = {
        "topics": [{"topic_name": "u", "records": [{"value": {"type": "JSON", "data": 1}}]}],
        "consumer_groups": [
            {
                "consumer_group_id": "g",
                "offsets": [{"topic_name": "t", "partition_id": 0, "offset": 1}],
            }
        ],
    }
    rights = [("WRITE", "TOPIC", "u"), ("READ", "GROUP", "g"), ("READ", "TOPIC", "t")]
    for operation, kind, name in rights:
        before = broker.log.state.partition("u", 0).high_watermark
        answer = await broker.http.post(path, json=body, headers=alice)
        assert f"{operation} {kind.lower()} '{name}'" in assert_denied(answer)
        assert broker.log.state.partition("u", 0).high_watermark == before
        await allow(broker.log, "User:alice", operation, kind, name)
    assert (await broker.http.post(path, json=body, headers=alice)).status_code == 200


async def test_stream_of_records_ends_with_right_to_write_them(
    broker: Broker, alice: dict[str, str]
) -> None:
    await allow(broker.log, "User:alice", "WRITE")
    path = f"{broker.v3}/topics/t/records"
    record = json.dumps({"value": {"type": "JSON", "data": 1}}).encode()
    sent = 0

    async def records() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 4:
            sent += 1
            if sent == 3:
                await allow(broker.log, "User:alice", "WRITE", permission="DENY")
            yield record

    answer = await broker.http.post(path, content=records(), headers=alice)
    codes = [json.loads(line)["error_code"] for line in answer.text.splitlines()]
    assert codes[0] == 200, answer.text
    assert codes[2:] == [40301, 40301], answer.text
    assert broker.log.state.partition("t", 0).high_watermark == 1 + codes.count(200)


# -- consumer instances


async def created(broker: Broker, who: dict[str, str], group: str = "g") -> str:
    body = {"format": "json", "auto.offset.reset": "earliest", "name": "c"}
    answer = await broker.http.post(f"/consumers/{group}", json=body, headers=V2 | who)
    assert answer.status_code == 200, answer.text
    return f"/consumers/{group}/instances/c"


async def test_instance_needs_its_group_and_its_topics(
    broker: Broker, alice: dict[str, str]
) -> None:
    await produce(broker, "u", ADMIN)
    assert_denied(await broker.http.post("/consumers/g", json={}, headers=V2 | alice))
    await allow(broker.log, "User:alice", "READ", "GROUP", "g")
    path = await created(broker, alice)
    headers = V2 | alice
    partitions = {"partitions": [{"topic": "t", "partition": 0}]}
    offsets = {"offsets": [{"topic": "t", "partition": 0, "offset": 0}]}
    for what, body in (
        ("subscription", {"topics": ["t"]}),
        ("assignments", partitions),
        ("offsets", offsets),
        ("positions", offsets),
        ("positions/beginning", partitions),
    ):
        assert_denied(await broker.http.post(f"{path}/{what}", json=body, headers=headers))
    await allow(broker.log, "User:alice", "READ", "TOPIC", "t")
    done = await broker.http.post(f"{path}/subscription", json={"topics": ["t"]}, headers=headers)
    assert done.status_code == 204
    read = await broker.http.get(f"{path}/records?timeout=0", headers=alice | {"accept": JSON})
    assert [record["value"] for record in read.json()] == [1]
    await allow(broker.log, "User:alice", "READ", "TOPIC", "t", permission="DENY")
    await append(broker.log, b"2")
    read = await broker.http.get(f"{path}/records?timeout=0", headers=alice | {"accept": JSON})
    assert_denied(read)


async def test_pattern_finds_what_its_owner_may_see(broker: Broker, alice: dict[str, str]) -> None:
    await produce(broker, "u", ADMIN)
    await allow(broker.log, "User:alice", "READ", "GROUP", "g")
    path = await created(broker, alice)
    body = {"topic_pattern": "u.*"}
    answer = await broker.http.post(f"{path}/subscription", json=body, headers=V2 | alice)
    assert answer.status_code == 204

    async def read() -> httpx.Response:
        await broker.consumers.do_duties()  # as each second
        return await broker.http.get(f"{path}/records?timeout=0", headers=alice | {"accept": JSON})

    assert (await read()).json() == []
    await allow(broker.log, "User:alice", "DESCRIBE", "TOPIC", "u")
    assert "READ topic 'u'" in assert_denied(await read())
    await allow(broker.log, "User:alice", "READ", "TOPIC", "u")
    assert [record["topic"] for record in (await read()).json()] == ["u"]
    await produce(broker, "u", ADMIN)
    await allow(broker.log, "User:alice", "ALL", "TOPIC", "u", permission="DENY")
    denied = await broker.http.get(f"{path}/records?timeout=0", headers=alice | {"accept": JSON})
    assert "'u'" not in assert_denied(denied)  # before the next look
    assert (await read()).json() == []


async def test_groups_are_seen_and_reset_by_whom_they_may(
    broker: Broker, alice: dict[str, str]
) -> None:
    cluster = f"{broker.v3}/consumer-groups"
    for topic in "tu":
        body = {"to": "EARLIEST", "topic_name": topic}
        reset = await broker.http.post(f"{cluster}/g/offsets:reset", json=body, headers=ADMIN)
        assert reset.status_code == 200
    await allow(broker.log, "User:alice", "READ", "GROUP", "g")
    await allow(broker.log, "User:alice", "READ", "TOPIC", "t")
    listed = (await broker.http.get(cluster, headers=alice)).json()["data"]
    assert [group["consumer_group_id"] for group in listed] == ["g"]
    for path in ("offsets", "lags"):
        shown = (await broker.http.get(f"{cluster}/g/{path}", headers=alice)).json()["data"]
        assert [partition["topic_name"] for partition in shown] == ["t"]
    (summary,) = (await broker.http.get("/tidelog/v1/groups", headers=alice)).json()["data"]
    assert summary["topics"] == ["t"]
    for body, is_allowed in (
        ({"to": "LATEST", "topic_name": "t"}, True),
        ({"to": "LATEST", "topic_name": "u"}, False),
        ({"to": "LATEST"}, False),
    ):
        reset = await broker.http.post(f"{cluster}/g/offsets:reset", json=body, headers=alice)
        assert reset.status_code == (200 if is_allowed else 403), reset.text
    assert_denied(await broker.http.delete(f"{cluster}/g", headers=alice))
    await allow(broker.log, "User:alice", "DELETE", "GROUP", "g")
    assert (await broker.http.delete(f"{cluster}/g", headers=alice)).status_code == 204


class Between:
    """The way from one broker to the group's coordinator; what is said on it."""

    def __init__(self, coordinator: Broker) -> None:
        self.coordinator = coordinator
        self.said: list[bytes] = []

    async def request(self, coordinator: str, message: bytes, room: Any) -> bytes:
        self.said.append(message)
        return await self.coordinator.app.forwarded.take(
            message, b"%d" % len(self.said), is_trusted=True
        )

    async def settle(self, coordinator: str, ticket: bytes, *, has_arrived: bool) -> None:
        self.coordinator.app.forwarded.settle(ticket, has_arrived=has_arrived)


async def test_request_that_is_handed_over_keeps_its_rights_and_not_its_secret(
    store: MemoryStore,
) -> None:
    async with AsyncExitStack() as stack:
        far = await stack.enter_async_context(secured(store, "far"))
        near = await stack.enter_async_context(secured(store, "near"))
        between = Between(far)
        routes = near.app.consumers
        routes._forwarder = Forwarder(between)
        routes._consumers.coordinator.coordinators = Rendezvous(
            "near", lambda: [far.consumers.coordinator.coordinators.me]
        )
        group = next(
            name for name in map("g{}".format, range(99)) if routes._elsewhere(name) is not None
        )
        await far.log.topics.create("t", 1, {})
        await append(far.log, b"1")
        alice = await key_of(far.log, "User:alice")
        await allow(far.log, "User:alice", "READ", "GROUP", group)
        path = await created(near, alice, group)
        body = {"topics": ["t"]}
        denied = await near.http.post(f"{path}/subscription", json=body, headers=V2 | alice)
        assert "User:alice may not READ topic 't'" in assert_denied(denied)
        await allow(far.log, "User:alice", "READ", "TOPIC", "t")
        done = await near.http.post(f"{path}/subscription", json=body, headers=V2 | alice)
        assert done.status_code == 204
        read = await near.http.get(f"{path}/records?timeout=0", headers=alice | {"accept": JSON})
        assert [record["value"] for record in read.json()] == [1]
        assert_unknown(await near.http.get(f"{path}/records"))
        secret = alice["authorization"].removeprefix("Bearer ").encode()
        assert len(between.said) == 4
        assert not any(secret in message for message in between.said)


# -- quotas


async def set_quota(broker: Broker, who: str, **rates: Any) -> None:
    await broker.log.access.change(SetQuotas(who, rates))


@pytest.mark.parametrize("who", ["User:alice", DEFAULT])
async def test_producer_over_its_quota_waits_before_anything_is_accepted(
    broker: Broker, alice: dict[str, str], who: str
) -> None:
    await allow(broker.log, "User:alice", "WRITE")
    await set_quota(broker, who, producer_byte_rate=1)
    assert (await produce(broker, "t", alice)).status_code == 200  # 25 bytes: 24 seconds
    before = broker.log.state.encode()
    answer = await produce(broker, "t", alice)
    assert (answer.status_code, answer.json()["error_code"]) == (429, 42901), answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 24
    assert broker.log.state.encode() == before
    cluster = broker.log.identity.cluster_id
    record = json.dumps({"value": {"type": "JSON", "data": 1}})
    path = f"/v3/clusters/{cluster}/topics/t/records"
    assert (await broker.http.post(path, content=record, headers=alice)).status_code == 429
    bob = await key_of(broker.log, "User:bob")
    await allow(broker.log, "User:bob", "WRITE")
    assert (await produce(broker, "t", bob)).status_code == 200
    text = (await broker.http.get("/metrics", headers=ADMIN)).text
    assert 'tidelog_quota_throttled_total{quota="producer_byte_rate"} 2.0' in text
    await set_quota(broker, who, producer_byte_rate=None)
    assert (await produce(broker, "t", alice)).status_code == 200


async def test_reader_over_its_quota_waits(broker: Broker, alice: dict[str, str]) -> None:
    await allow(broker.log, "User:alice", "READ")
    await allow(broker.log, "User:alice", "READ", "GROUP", "g")
    await set_quota(broker, "User:alice", consumer_byte_rate=1)
    instance_path = await created(broker, alice)
    assert (await broker.http.get(READ_T, headers=alice)).status_code == 200
    for path in (READ_T, f"{instance_path}/records"):
        answer = await broker.http.get(path, headers=alice | {"accept": JSON})
        assert (answer.status_code, answer.json()["error_code"]) == (429, 42901), answer.text
        assert int(answer.headers["retry-after"]) >= 1


async def test_quotas_over_http(broker: Broker, alice: dict[str, str]) -> None:
    path = "/tidelog/v1/quotas"
    body = {"producer_byte_rate": 1000}
    said = await broker.http.put(f"{path}/User:alice", json=body, headers=ADMIN)
    fields = {name: value for name, value in said.json().items() if value is not None}
    assert fields == {"principal": "User:alice", "producer_byte_rate": 1000}
    said = await broker.http.put(
        f"{path}/%3Cdefault%3E", json={"consumer_byte_rate": 7}, headers=ADMIN
    )
    listed = (await broker.http.get(path, headers=ADMIN)).json()["data"]
    assert [quota["principal"] for quota in listed] == [DEFAULT, "User:alice"]
    for bad in ({"producer_byte_rate": 0}, {"connection_rate": 1}, {"producer_byte_rate": "x"}):
        answer = await broker.http.put(f"{path}/User:alice", json=bad, headers=ADMIN)
        assert answer.status_code in (400, 422)
    assert (await broker.http.delete(f"{path}/User:alice", headers=ADMIN)).status_code == 204
    assert (await broker.http.delete(f"{path}/User:alice", headers=ADMIN)).status_code == 404
    assert_denied(await broker.http.put(f"{path}/User:alice", json=body, headers=alice))


def test_bucket_lets_through_its_rate_whatever_pieces() -> None:
    now_s, sent = 100.0, 0
    bucket = Bucket(1000, now_s)
    for step in range(10_000):
        now_s += 0.01
        if bucket.throttle_s(now_s) == 0:
            size = (step * 7919) % 400
            bucket.charge(size)
            sent += size
    assert sent == pytest.approx(1000 * (100 + BURST_S), rel=0.02)


def test_bucket_says_how_long_it_takes() -> None:
    bucket = Bucket(100, 0.0)
    bucket.charge(350)
    assert bucket.throttle_s(0.0) == pytest.approx(2.5)
    assert bucket.throttle_s(1.0) == pytest.approx(1.5)
    assert bucket.throttle_s(0.5) == pytest.approx(1.5)  # a clock that goes back gives nothing
    assert bucket.throttle_s(2.5) == 0
    assert bucket.throttle_s(1000.0) == 0
    bucket.charge(100)
    assert bucket.throttle_s(1000.0) == 0
    bucket.charge(1)
    assert bucket.throttle_s(1000.0) > 0
