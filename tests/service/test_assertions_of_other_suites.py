"""Smaller assertions of other products' suites that should hold."""

import asyncio
import json
from typing import Any

import pytest

from tests.service.conftest import Broker, append, assert_refused, listening
from tests.service.instances import subscribed

AVRO = "application/vnd.kafka.avro.v2+json"


@pytest.mark.parametrize("how", ["", "/beginning", "/end"])
async def test_a_seek_in_what_is_not_assigned(topic_broker: Broker, how: str) -> None:
    await append(topic_broker.log, b"1")
    instance = await subscribed(topic_broker)
    await instance.read()
    partition = {"topic": "faulty", "partition": 0}
    body = {"partitions": [partition]} if how else {"offsets": [partition | {"offset": 0}]}
    assert_refused(await instance("POST", f"/positions{how}", body), 409, 40903)


async def test_a_key_only_lacks_the_schema_of_a_key(topic_broker: Broker) -> None:
    body = b'{"records":[{"key":{"a":1}}]}'
    answer = await topic_broker.http.post("/topics/t", content=body, headers={"content-type": AVRO})
    assert_refused(answer, 422, 42201)


async def test_an_unknown_topic_in_karapaces_words(topic_broker: Broker) -> None:
    answer = await topic_broker.http.get("/topics/fooo/partitions/0/offsets")
    assert "Topic fooo not found" in assert_refused(answer, 404, 40401)


async def test_a_partition_that_is_no_number(topic_broker: Broker) -> None:
    assert_refused(await topic_broker.http.get("/topics/t/partitions/foo/offsets"), 404, 404)


@pytest.mark.parametrize("path", ["broker-configs/c", "brokers/1/configs/c"])
async def test_a_config_of_brokers_that_is_not_there(topic_broker: Broker, path: str) -> None:
    answer = await topic_broker.http.get(
        f"/v3/clusters/{topic_broker.log.wal.cluster.cluster_id}/{path}"
    )
    assert answer.status_code == 404
    assert answer.json()["message"] != "HTTP 404 Not Found"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "brokers/1/configs/c", {"value": "1"}),
        ("DELETE", "brokers/1/configs/c", None),
        ("POST", "brokers/1/configs:alter", {"data": [{"name": "c", "value": "1"}]}),
    ],
)
async def test_configs_of_brokers_are_read_only(
    topic_broker: Broker, method: str, path: str, body: Any
) -> None:
    url = f"/v3/clusters/{topic_broker.log.wal.cluster.cluster_id}/{path}"
    answer = await topic_broker.http.request(method, url, json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (400, 40002), answer.text
    assert "read-only" in answer.json()["message"]


async def test_configs_of_all_brokers_are_listed(topic_broker: Broker) -> None:
    url = f"/v3/clusters/{topic_broker.log.wal.cluster.cluster_id}/brokers/-/configs"
    answer = await topic_broker.http.get(url)
    assert answer.status_code == 200, answer.text
    assert "num.partitions" in {config["name"] for config in answer.json()["data"]}


@pytest.mark.parametrize("path", ["/openapi", "/openapi/v3"])
async def test_the_document_where_strimzi_has_it(topic_broker: Broker, path: str) -> None:
    answer = await topic_broker.http.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.json()["openapi"].startswith("3.")


async def test_what_is_not_http_is_refused_by_an_error_object(topic_broker: Broker) -> None:
    async with listening(topic_broker.app) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"not HTTP\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 400 ")
    try:
        said = json.loads(body)
    except ValueError as error:
        raise AssertionError(f"no JSON: {body!r}") from error
    assert said.keys() == {"error_code", "message"}


@pytest.mark.parametrize("field", [{"partitions_count": True}, {"replication_factor": False}])
async def test_a_boolean_is_no_number(topic_broker: Broker, field: dict[str, bool]) -> None:
    body = {"topic_name": "u", "partitions_count": 1} | field
    answer = await topic_broker.http.post("/admin/topics", json=body)
    assert answer.status_code in (400, 422), answer.text
    assert "u" not in topic_broker.log.state.topics


@pytest.mark.parametrize("value", [True, "x", 1.5, None])
async def test_a_boolean_is_no_number_in_v3(topic_broker: Broker, value: Any) -> None:
    url = f"/v3/clusters/{topic_broker.log.wal.cluster.cluster_id}/topics"
    body = {"topic_name": "u", "partitions_count": value}
    if value is not None:
        answer = await topic_broker.http.post(url, json=body)
        assert answer.status_code in (400, 422), answer.text
        assert "u" not in topic_broker.log.state.topics
    answer = await topic_broker.http.patch(f"{url}/t", json={"partitions_count": value})
    assert answer.status_code in (400, 422), answer.text
    assert len(topic_broker.log.state.topic("t").partitions) == 1


# -- deviations that were chosen: the table in DIALECTS.md


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/topics/nope/partitions/0/records?offset=0&timeout=0", {}, 404, 40401),
        ("/topics/nope/partitions/0/records?offset=", {}, 404, 40401),
        ("/topics/t/partitions/9/records?offset=0", {}, 404, 40402),
        ("/topics/t/partitions/0/records?offset=", {}, 400, 40002),
        ("/topics//partitions/0/records?offset=0", {}, 404, 404),
        ("/topics/t/partitions/0/records", {"accept": "image/png"}, 406, 406),
        ("/consumers/g/instances/i/topics/t", {}, 404, 404),  # of v1
    ],
)
async def test_a_read_that_is_refused_otherwise_than_at_redpanda(
    topic_broker: Broker, path: str, headers: dict[str, str], status: int, code: int
) -> None:
    answer = await topic_broker.http.get(path, headers=headers)
    said = answer.json()["error_code"]
    assert (answer.status_code, said // 100 if code == 406 else said) == (status, code), answer.text


@pytest.mark.parametrize("accept", [None, "*/*", "application/vnd.kafka.v2+json"])
async def test_a_fetch_without_a_format_is_binary(topic_broker: Broker, accept: str | None) -> None:
    await append(topic_broker.log, b"\x00\xff")
    headers = {"accept": accept or "*/*"}
    request = topic_broker.http.build_request(
        "GET", "/topics/t/partitions/0/records?offset=0&max_bytes=1&timeout=0", headers=headers
    )
    if accept is None:
        del request.headers["accept"]
    answer = await topic_broker.http.send(request)
    assert answer.status_code == 200, answer.text
    assert answer.json()[0]["value"] == "AP8="


async def test_a_produce_to_an_unknown_topic_writes_nothing(topic_broker: Broker) -> None:
    body = b'{"records":[{"value":"dmVjdG9yaXplZA==","partition":0}]}'
    headers = {"content-type": "application/vnd.kafka.binary.v2+json"}
    answer = await topic_broker.http.post("/topics/nope", content=body, headers=headers)
    assert_refused(answer, 404, 40401)
    assert "nope" not in topic_broker.log.state.topics


async def test_no_content_type_is_taken_as_binary_or_json(topic_broker: Broker) -> None:
    body = b'{"records":[{"value":"dmVjdG9yaXplZA==","partition":0}]}'
    answer = await topic_broker.http.post("/topics/t", content=body)
    assert answer.status_code == 200, answer.text
    made = await topic_broker.http.post("/consumers/g", content=b'{"name":"i","format":"binary"}')
    assert made.status_code == 200, made.text
    path = "/consumers/g/instances/i"
    done = await topic_broker.http.post(f"{path}/subscription", content=b'{"topics":["t"]}')
    assert (done.status_code, done.content) == (204, b"")
    assert "content-type" not in done.headers
    answer = await topic_broker.http.get(
        f"{path}/records", headers={"accept": "application/vnd.kafka.json.v2+json"}
    )
    assert_refused(answer, 406, 40601)  # the instance's format is binary
