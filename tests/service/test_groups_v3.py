"""Consumer groups in the v3 dialect: members, assignments, lag, reset and deletion."""

import json
from typing import Any

import httpx
import pytest

from tests.service.conftest import V2, Broker, append, assert_refused
from tests.service.instances import Instance, created, put, subscribed
from tests.support.records import rows
from tidelog.service.telemetry import group_lags
from tidelog.service.telemetry import metrics as metrics_text
from tidelog.storage.groups.join_backoff import PAUSE_S, SHORT_LIVES_MAX

V3_JSON = "application/json"


class Groups:
    """The v3 routes of groups."""

    def __init__(self, broker: Broker, mount: str = "/v3") -> None:
        self.http = broker.http
        self.base = f"{mount}/clusters/{broker.log.identity.cluster_id}/consumer-groups"

    async def get(self, path: str = "") -> Any:
        answer = await self.http.get(self.base + path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def reset(self, group: str = "g", **body: Any) -> httpx.Response:
        return await self.http.post(
            f"{self.base}/{group}/offsets:reset",
            content=json.dumps(body),
            headers={"content-type": "application/json"},
        )

    async def positions(self, **body: Any) -> dict[int, int]:
        answer = await self.reset(**body)
        assert answer.status_code == 200, answer.text
        data = answer.json()["data"]
        if not body.get("validate_only"):
            assert (await self.get("/g/offsets"))["data"] == data
        return {partition["partition_id"]: partition["offset"] for partition in data}


@pytest.fixture
def groups(broker: Broker) -> Groups:
    return Groups(broker)


async def behind(broker: Broker) -> Instance:
    """A member that has committed 1 of 3 and 1 of 1."""
    consumer = await subscribed(broker, name="c1", client_id="me", group_instance_id="pod")
    await put(broker, 1, 2, 3)
    await put(broker, 4, partition=1)
    for number in (0, 1):
        body = {"offsets": [{"topic": "t", "partition": number, "offset": 0}]}
        await consumer.ok("POST", "/offsets", body)
    return consumer


async def test_groups_and_their_members(broker: Broker, topic: str, groups: Groups) -> None:
    assert (await groups.get())["data"] == []
    await behind(broker)
    (listed,) = (await groups.get())["data"]
    assert listed | {"held_members": []} == await groups.get("/g")
    base = "http://tide:8082" + groups.base
    assert listed | {"metadata": None} == {
        "kind": "KafkaConsumerGroup",
        "metadata": None,
        "cluster_id": broker.log.identity.cluster_id,
        "consumer_group_id": "g",
        "is_simple": False,
        "partition_assignor": "sticky",
        "state": "STABLE",
        "type": "CLASSIC",
        "is_mixed_consumer_group": False,
        "assigned_by": "LOG",
        "generation": 1,
        "coordinator": {"related": base.replace("consumer-groups", "brokers/1")},
        "consumers": {"related": f"{base}/g/consumers"},
        "lag_summary": {"related": f"{base}/g/lag-summary"},
    }
    (consumer,) = (await groups.get("/g/consumers"))["data"]
    assert consumer == await groups.get("/g/consumers/c1")
    assert (consumer["consumer_id"], consumer["instance_id"], consumer["client_id"]) == (
        "c1",
        "pod",
        "me",
    )
    assigned = (await groups.get("/g/consumers/c1/assignments"))["data"]
    assert [partition["partition_id"] for partition in assigned] == [0, 1, 2]
    assignment = await groups.get("/g/consumers/c1/assignments/t/partitions/2")
    assert assignment == assigned[2]
    assert assignment["lag"]["related"] == f"{base}/g/lags/t/partitions/2"


async def test_lag(broker: Broker, topic: str, groups: Groups) -> None:
    consumer = await behind(broker)
    listed = (await groups.get("/g/lags"))["data"]
    assert [
        (
            partition["partition_id"],
            partition["current_offset"],
            partition["log_end_offset"],
            partition["lag"],
        )
        for partition in listed
    ] == [(0, 1, 3, 2), (1, 1, 1, 0), (2, 0, 0, 0)]
    assert [partition["is_committed"] for partition in listed] == [True, True, False]
    alone = await groups.get("/g/lags/t/partitions/0")
    assert alone.pop("lag_seconds") >= listed[0].pop("lag_seconds") >= 0
    assert alone == listed[0]
    assert listed[0]["consumer_id"] == "c1"
    summary = await groups.get("/g/lag-summary")
    assert (summary["max_lag"], summary["total_lag"], summary["max_lag_partition_id"]) == (2, 2, 0)
    assert (summary["max_lag_consumer_id"], summary["max_lag_topic_name"]) == ("c1", "t")
    metrics = (await broker.http.get("/metrics")).text
    assert 'tidelog_group_lag{group="g",partition="0",topic="t"} 2.0' in metrics
    await consumer.ok("DELETE")
    assert (await groups.get("/g"))["state"] == "EMPTY"
    assert (await groups.get("/g/lags/t/partitions/0"))["consumer_id"] == ""
    assert (await Groups(broker, "/kafka/v3").get("/g"))["is_simple"] is True


async def test_i10_lag_has_so_many_series_and_says_what_it_leaves_out(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_lags, "SERIES_MAX", 3)
    for group in ("g", "h"):
        consumer = await subscribed(broker, group=group, auto_commit_enable=False)
        said = [{"topic": "t", "partition": number, "offset": 0} for number in range(3)]
        await consumer.ok("POST", "/offsets", {"offsets": said[: 2 if group == "g" else 3]})
    metrics = (await broker.http.get("/metrics")).text
    assert metrics.count("tidelog_group_lag{") == 3
    assert "tidelog_group_series_omitted 3.0" in metrics
    assert 'tidelog_group_lag_records{group="h"} 0.0' in metrics


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/nope/consumers",
        "/nope/lags",
        "/nope/lag-summary",
        "/nope/offsets",
        "/g/consumers/nope",
        "/g/consumers/nope/assignments",
        "/g/consumers/c1/assignments/t/partitions/9",
        "/g/lags/t/partitions/3",
        "/idle/lag-summary",
    ],
)
async def test_what_is_not_there(broker: Broker, topic: str, groups: Groups, path: str) -> None:
    await behind(broker)
    await created(broker, group="idle")
    assert_refused(await groups.http.get(groups.base + path), 404, 404, V3_JSON)


async def test_a_group_is_deleted_when_it_is_empty(
    broker: Broker, topic: str, groups: Groups
) -> None:
    consumer = await behind(broker)
    path = f"{groups.base}/g"
    assert_refused(await groups.http.delete(path), 409, 40903, V3_JSON)
    await consumer.ok("DELETE")
    assert (await groups.http.delete(path)).status_code == 204
    assert_refused(await groups.http.delete(path), 404, 404, V3_JSON)
    assert (await groups.get())["data"] == []


async def test_reset(broker: Broker, topic: str, groups: Groups) -> None:
    now = broker.log.clock.now_ms()
    for back_ms in (20_000_000, 10_000_000, 1000):
        await append(broker.log, b"v", timestamp_ms=now - back_ms)
    assert await groups.positions(to="LATEST", topic_name="t") == {0: 3, 1: 0, 2: 0}
    assert await groups.positions(to="EARLIEST") == {0: 0, 1: 0, 2: 0}
    only = {"topic_name": "t", "partition_ids": [0]}
    for said, offset in (
        ({"to": "OFFSET", "offset": 2}, 2),
        ({"to": "OFFSET", "offset": 99}, 3),
        ({"to": "TIMESTAMP", "timestamp": "2020-01-01T00:00:00Z"}, 0),
        ({"to": "TIMESTAMP", "timestamp": "2120-01-01T00:00:00Z"}, 3),
        ({"to": "DURATION", "duration_ms": 15_000_000}, 1),
    ):
        answer = await groups.reset(**said, **only)
        assert [partition["offset"] for partition in answer.json()["data"]] == [offset], said
    assert await groups.positions(to="EARLIEST", validate_only=True) == {0: 0, 1: 0, 2: 0}
    assert broker.log.groups.committed_offsets("g")["t", 0].offset == 1  # type: ignore[index]


async def test_reset_refused(broker: Broker, topic: str, groups: Groups) -> None:
    for body, status, code in (
        ({"to": "LATEST"}, 404, 404),
        ({"to": "LATEST", "topic_name": "nope"}, 404, 40401),
        ({"to": "LATEST", "topic_name": "t", "partition_ids": [7]}, 404, 40402),
        ({"to": "LATEST", "partition_ids": [0]}, 422, 422),
        ({"to": "OFFSET", "topic_name": "t"}, 422, 422),
        ({"to": "TIMESTAMP", "topic_name": "t"}, 422, 422),
        ({"to": "TIMESTAMP", "topic_name": "t", "timestamp": "noon"}, 400, 400),
        ({"to": "DURATION", "topic_name": "t"}, 422, 422),
        ({"to": "MIDDLE", "topic_name": "t"}, 422, 422),
        ({}, 422, 422),
    ):
        assert_refused(await groups.reset(**body), status, code, V3_JSON)
    await behind(broker)
    assert_refused(await groups.reset(to="LATEST", topic_name="t"), 409, 40903, V3_JSON)


async def test_a_client_that_comes_and_goes_is_held_and_named(
    broker: Broker, topic: str, groups: Groups
) -> None:
    await subscribed(broker, name="steady")
    generation = (await groups.get("/g"))["generation"]
    for number in range(SHORT_LIVES_MAX):
        loop = await subscribed(broker, name=f"m{number}", client_id="etl")
        await loop.ok("DELETE")
    assert (await groups.get("/g"))["held_members"] == []
    answer = await broker.http.post(
        "/consumers/g", json={"name": "m9", "client.id": "etl"}, headers={"content-type": V2}
    )
    assert_refused(answer, 429, 42901, V2)
    message = answer.json()["message"]
    assert "(client.id 'etl') joined and left 5 times in 300 s" in message
    assert "its member 'm9' must wait" in message
    assert 0 < int(answer.headers["retry-after"]) <= PAUSE_S
    described = await groups.get("/g")
    (member,) = described["held_members"]
    assert (member["consumer_id"], member["client_id"], member["short_lives"]) == ("m9", "etl", 5)
    assert 0 < member["retry_after_ms"] <= PAUSE_S * 1000
    assert described["generation"] == generation + 2 * SHORT_LIVES_MAX
    await subscribed(broker, name="other", client_id="another")
    metrics = (await broker.http.get("/metrics")).text
    for line in (
        'tidelog_group_joins_held_total{group="g"} 1.0',
        'tidelog_group_rebalances_total{group="g",reason="join"} 7.0',
        'tidelog_group_rebalances_total{group="g",reason="leave"} 5.0',
        f'tidelog_group_generation{{group="g"}} {generation + 2 * SHORT_LIVES_MAX + 1}.0',
        'tidelog_group_size{group="g"} 2.0',
    ):
        assert line in metrics, line
    assert 'tidelog_group_rebalance_seconds{group="g"}' in metrics


async def test_lag_of_partitions_without_a_commit_counts_from_where_the_reader_starts(
    broker: Broker, topic: str, groups: Groups
) -> None:
    await put(broker, 1, 2, 3)
    earliest = await subscribed(broker, name="c1")
    latest = await subscribed(broker, group="h", name="c1", auto_offset_reset="latest")
    await put(broker, 4)
    await put(broker, 5, partition=1)
    for group, lag in (("g", [4, 1, 0]), ("h", [1, 1, 0])):
        listed = (await groups.get(f"/{group}/lags"))["data"]
        assert [partition["lag"] for partition in listed] == lag, group
        assert (await groups.get(f"/{group}/lag-summary"))["total_lag"] == sum(lag)
    await earliest.ok(
        "POST", "/positions", {"offsets": [{"topic": "t", "partition": 0, "offset": 2}]}
    )
    assert (await groups.get("/g/lags/t/partitions/0"))["current_offset"] == 2
    await latest.ok("DELETE")
    assert (await groups.get("/g/lag-summary"))["max_lag"] == 2


async def test_i10_groups_beyond_the_bound_share_one_series(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_lags, "METRIC_GROUPS_MAX", 1)
    await put(broker, 1, 2)
    for group in "abc":
        await subscribed(broker, group=group, name="c1")
    metrics = (await broker.http.get("/metrics")).text
    for line in (
        'tidelog_group_lag_records{group="a"} 2.0',
        'tidelog_group_lag_records{group="(other)"} 4.0',
        'tidelog_group_lag_max{group="(other)"} 2.0',
        'tidelog_group_size{group="(other)"} 2.0',
        'tidelog_group_rebalances_total{group="(other)",reason="join"} 2.0',
    ):
        assert line in metrics, line


async def test_lags_of_many_partitions_are_all_counted(
    broker: Broker, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than have a series; the fixture checks that the loop is not held."""
    monkeypatch.setattr(metrics_text, "LAGS_WAIT_S", 30.0)
    await broker.log.topics.create("wide", 5_000, {})
    consumer = await created(broker, group="w")
    await consumer.ok("POST", "/subscription", {"topics": ["wide"]})
    wide = broker.log.state.topic("wide")
    await broker.log.records.append(wide, [(4_999, rows(b"v"))], size=1, is_json=False)
    summary = await groups.get("/w/lag-summary")
    assert (summary["total_lag"], summary["max_lag_partition_id"]) == (1, 4_999)
    metrics = (await broker.http.get("/metrics")).text
    assert 'tidelog_group_lag_records{group="w"} 1.0' in metrics
    assert "tidelog_group_series_omitted 3000.0" in metrics
    page = await groups.get("/w/lags?page_size=2")
    assert [partition["partition_id"] for partition in page["data"]] == [0, 1]
