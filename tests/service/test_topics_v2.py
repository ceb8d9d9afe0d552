"""The v2 dialect of topics, partitions and offsets, Strimzi's creation, and our seal."""

import httpx
import pytest

from tests.service.conftest import QUIET, V2, broker_on
from tests.service.conftest import Broker as Served
from tests.support.logs import append
from tidelog.storage.broker import Broker
from tidelog.storage.core.topic_configs import CONFIGS
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore


def partition_info(number: int) -> dict[str, object]:
    replica = {"broker": 1, "leader": True, "in_sync": True}
    return {"partition": number, "leader": 1, "replicas": [replica]}


async def test_topics_are_listed_by_name(client: httpx.AsyncClient, log: Broker) -> None:
    assert (await client.get("/topics")).json() == []
    await log.topics.create("b", 1, {})
    await log.topics.create("a", 1, {})
    answer = await client.get("/topics")
    assert (answer.status_code, answer.json()) == (200, ["a", "b"])
    assert answer.headers["content-type"] == V2


async def test_topic_has_effective_configs_and_partitions(
    client: httpx.AsyncClient, log: Broker
) -> None:
    await log.topics.create("t", 2, {"segment.ms": "5000"})
    said = (await client.get("/topics/t")).json()
    assert said["name"] == "t"
    assert said["configs"] == {k: v.default for k, v in CONFIGS.items()} | {"segment.ms": "5000"}
    assert said["partitions"] == [partition_info(0), partition_info(1)]
    assert (await client.get("/topics/t/partitions")).json() == said["partitions"]
    assert (await client.get("/topics/t/partitions/1")).json() == partition_info(1)


@pytest.mark.parametrize(
    ("query", "by_time"),
    [
        ("", {}),
        *(
            (f"?timestamp={stamp}", {"timestamp_offset": offset})
            for stamp, offset in ((0, 0), (10, 0), (11, 1), (30, 2), (31, None))
        ),
    ],
)
async def test_offsets_by_timestamp(
    client: httpx.AsyncClient, log: Broker, query: str, by_time: dict[str, int | None]
) -> None:
    await log.topics.create("t", 2, {})
    await append(log, *"vvv", partition=1, timestamps=[10, 20, 30])
    answer = await client.get(f"/topics/t/partitions/1/offsets{query}")
    assert answer.json() == {"beginning_offset": 0, "end_offset": 3, **by_time}
    assert answer.headers["content-type"] == V2


@pytest.mark.parametrize("stamp", ["", "x", "-1", "1.5", "9" * 30, "9" * 5000])
async def test_bad_timestamp_is_refused(client: httpx.AsyncClient, log: Broker, stamp: str) -> None:
    await log.topics.create("t", 1, {})
    answer = await client.get("/topics/t/partitions/0/offsets", params={"timestamp": stamp})
    assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/topics/none", 40403),
        ("/topics/none/partitions", 40401),
        ("/topics/none/partitions/0", 40401),
        ("/topics/none/partitions/0/offsets", 40401),
        ("/topics/t/partitions/1", 40402),
        ("/topics/t/partitions/-1", 404),
        ("/topics/t/partitions/x", 404),
        ("/topics/t/partitions/1_0", 404),
        ("/topics/t/partitions/%D9%A1", 404),
        (f"/topics/t/partitions/{'9' * 5000}", 40402),
        ("/topics/t/partitions/1/offsets", 40402),
        ("/topics/t/partitions/foo/offsets", 404),
    ],
)
async def test_what_is_not_there_is_404(
    client: httpx.AsyncClient, log: Broker, path: str, code: int
) -> None:
    await log.topics.create("t", 1, {})
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["error_code"]) == (404, code)
    assert answer.headers["content-type"] == V2
    if path == "/topics/none/partitions/0/offsets":  # in Karapace's words
        assert "Topic none not found" in answer.json()["message"]


async def test_there_is_one_logical_broker(client: httpx.AsyncClient) -> None:
    assert (await client.get("/brokers")).json() == {"brokers": [1]}


async def test_control_characters_in_names_are_named(broker: Served) -> None:
    client = broker.http
    answer = await client.get("/topics/my%0Dtopic%7F/partitions")
    message = "Invalid parameter 'topic_name' got 'my\u240dtopic\u2421'"
    assert (answer.status_code, answer.json()) == (400, {"error_code": 40002, "message": message})
    answer = await client.post("/admin/topics", json={"topic_name": "my\rtopic"})
    message = "Parameter contained invalid control characters: my\u240dtopic"
    assert (answer.status_code, answer.json()) == (400, {"error_code": 40002, "message": message})


# -- creation


async def test_strimzi_creates_topics(client: httpx.AsyncClient, log: Broker) -> None:
    body = {"topic_name": "t", "partitions_count": "3", "replication_factor": 2}
    answer = await client.post("/admin/topics", json=body, headers={"content-type": V2})
    assert (answer.status_code, answer.json()) == (201, {})
    assert len(log.state.topic("t").partitions) == 3


@pytest.mark.parametrize("count", [{}, {"partitions_count": None}, {"partitions_count": -1}])
async def test_number_of_partitions_has_default(
    store: MemoryStore, count: dict[str, object]
) -> None:
    async with broker_on(store, default_partitions=4) as broker:
        answer = await broker.http.post("/admin/topics", json={"topic_name": "t", **count})
        assert answer.status_code == 201
        assert len(broker.log.state.topic("t").partitions) == 4


async def test_creation_takes_configs_of_any_json_type(
    client: httpx.AsyncClient, log: Broker
) -> None:
    body = {"topic_name": "t", "configs": {"segment.ms": 5000, "retention.ms": None}}
    assert (await client.post("/admin/topics", json=body)).status_code == 201
    assert log.state.topic("t").configs == {"segment.ms": "5000"}


@pytest.mark.parametrize(
    ("body", "status", "code", "word"),
    [
        ({"topic_name": "t"}, 400, 40002, "already exists"),
        ({"topic_name": ""}, 400, 40002, "illegal"),
        ({"topic_name": "a/b"}, 400, 40002, "illegal"),
        ({"topic_name": "x" * 250}, 400, 40002, "illegal"),
        ({"topic_name": "u", "partitions_count": 0}, 400, 40002, "partitions"),
        ({"topic_name": "u", "partitions_count": 10**30}, 400, 40002, "partitions"),
        ({"topic_name": "u", "configs": {"no.such": "1"}}, 400, 40002, "no.such"),
        ({"topic_name": "u", "configs": {"segment.ms": "x"}}, 400, 40002, "segment.ms"),
        ({"topic_name": "u", "partitions_count": "x"}, 422, 422, "partitions_count"),
        ({"topic_name": "u", "partitions_count": True}, 422, 422, "partitions_count"),
        ({"topic_name": "u", "replication_factor": False}, 422, 422, "replication_factor"),
        ({"topic_name": 5}, 422, 422, "topic_name"),
        ({"partitions_count": 5}, 422, 422, "topic_name"),
        ({"topic_name": "u", "partitions": 5}, 422, 422, "Unrecognized field: partitions"),
        ([], 422, 422, "body"),
        (None, 422, 422, "body"),
    ],
)
async def test_bad_creation_is_refused(
    client: httpx.AsyncClient, log: Broker, body: object, status: int, code: int, word: str
) -> None:
    await log.topics.create("t", 1, {})
    answer = await client.post("/admin/topics", json=body)
    said = answer.json()
    assert (answer.status_code, said["error_code"]) == (status, code)
    assert word in said["message"]
    assert list(log.state.topics) == ["t"]


# -- what other brokers did (I3)


async def test_what_another_broker_created_is_seen_at_once(
    client: httpx.AsyncClient, store: MemoryStore
) -> None:
    other = await Broker.open(store, QUIET, clock=SystemClock(), name="broker-2")
    await other.topics.create("t", 1, {})
    assert (await client.get("/topics")).json() == ["t"]
    await append(other, "v", timestamps=[10])
    assert (await client.get("/topics/t/partitions/0/offsets")).json()["end_offset"] == 1
    await other.topics.delete("t")
    assert (await client.post("/admin/topics", json={"topic_name": "t"})).status_code == 201
    await other.close()


# -- seal


async def test_seal_moves_tail_into_table(client: httpx.AsyncClient, log: Broker) -> None:
    await log.topics.create("t", 2, {})
    await append(log, *"vv", timestamps=[10, 20])
    await append(log, "v", partition=1, timestamps=[30])
    answer = await client.post("/admin/topics/t/seal")
    assert (answer.status_code, answer.json()) == (200, {"sealed_records": 3})
    assert [p.sealed_end for p in log.state.topic("t").partitions] == [2, 1]
    assert (await client.post("/admin/topics/t/seal")).json() == {"sealed_records": 0}
    assert (await client.post("/admin/topics/none/seal")).json()["error_code"] == 40401
