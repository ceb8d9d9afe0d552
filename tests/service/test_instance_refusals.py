"""Requests of a consumer instance that are refused change nothing."""

from typing import Any

import pytest

from tests.service.conftest import JSON, V2, Broker, assert_refused
from tests.service.instances import created, subscribed

WHERE = {"topic": "t", "partition": 0}
OFFSETS = [WHERE | {"offset": 1}]
pytestmark = pytest.mark.broker(topics={"t": 1}, records=[b"0", b"1", b"2"])


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/subscription", {"topics": ["t"], "topicPattern": "t.*"}),
        ("/assignments", {"partitions": OFFSETS}),
        ("/assignments", {"partitions": [WHERE], "topics": ["t"]}),
        ("/offsets", {"ofsets": [WHERE | {"offset": 0}]}),
        ("/offsets", {"Offsets": [WHERE | {"offset": 0}]}),
        ("/offsets", {"offsets": [WHERE | {"offset": 1, "metdata": "x"}]}),
        ("/offsets", {"offsets": OFFSETS, "more": 1}),
        *(("/positions", {name: OFFSETS}) for name in ("ofsets", "Offsets", "timestamp")),
        ("/positions", {"offsets": [WHERE | {"offset": 1, "ofset": 2}]}),
        ("/positions", {"offsets": OFFSETS, "time": 1}),
        ("/positions/end", {"partitions": [WHERE | {"Topic": "u"}]}),
    ],
    ids=str,
)
async def test_unknown_field_is_refused(broker: Broker, route: str, body: Any) -> None:
    is_new = route in ("/subscription", "/assignments")
    instance = await (created(broker) if is_new else subscribed(broker, auto_commit_enable=False))
    if not is_new:
        assert await instance.read() == [0, 1, 2]
    answer = await instance("POST", route, body)
    assert answer.status_code in (400, 422), (answer.status_code, answer.text)
    assert "Unrecognized field" in answer.json()["message"]
    if not is_new:
        assert (await instance.committed()).get(0, -1) == -1


@pytest.mark.parametrize("seek", ["", "/beginning", "/end"])
async def test_seek_in_unassigned_partition_is_refused(broker: Broker, seek: str) -> None:
    instance = await subscribed(broker)
    await instance.read()
    partition = {"topic": "faulty", "partition": 0}
    body = {"partitions": [partition]} if seek else {"offsets": [partition | {"offset": 0}]}
    assert_refused(await instance("POST", f"/positions{seek}", body), 409, 40903)


@pytest.mark.parametrize("accept", ["application/xml", "garbage"])
@pytest.mark.parametrize(("method", "route"), [("DELETE", ""), ("POST", "/subscription")])
async def test_request_whose_answer_is_not_wanted_does_nothing(
    broker: Broker, method: str, route: str, accept: str
) -> None:
    instance = await (subscribed(broker) if method == "DELETE" else created(broker))
    before = await instance.ok("GET", "/subscription")
    body = {"topics": ["t"]} if route else None
    assert_refused(await instance(method, route, body, accept=accept), 406, 40601)
    assert await instance.ok("GET", "/subscription") == before
    assert before == {"topics": ["t"] if method == "DELETE" else []}


async def test_name_is_checked_before_body(broker: Broker) -> None:
    path = "/consumers/my%03group/instances/a/subscription"
    answer = await broker.http.post(path, headers={"content-type": V2})
    assert answer.status_code == 400
    assert "my\u2403group" in answer.json()["message"]


async def test_empty_body_is_called_empty(broker: Broker) -> None:
    instance = await created(broker)
    answer = await broker.http.post(f"{instance.path}/subscription", headers={"content-type": V2})
    assert answer.status_code in (400, 422)
    assert answer.json()["message"] == "the body is empty"


async def test_instance_needs_no_content_type_and_keeps_to_its_format(broker: Broker) -> None:
    made = await broker.http.post("/consumers/g", content=b'{"name":"i","format":"binary"}')
    assert made.status_code == 200, made.text
    path = "/consumers/g/instances/i"
    done = await broker.http.post(f"{path}/subscription", content=b'{"topics":["t"]}')
    assert (done.status_code, done.content) == (204, b"")
    assert "content-type" not in done.headers
    answer = await broker.http.get(f"{path}/records", headers={"accept": JSON})
    assert_refused(answer, 406, 40601)
