"""A topic that is compacted by key takes no record without one, by any route."""

import json

import pyarrow as pa
import pytest

from tests.service.conftest import ARROW, Broker, arrow, assert_refused, ends, placed, post


@pytest.fixture
async def compacted(broker: Broker) -> Broker:
    await broker.log.create_topic("t", 1, {"cleanup.policy": "delete, compact"})
    return broker


async def test_v2_records_without_a_key_are_refused(compacted: Broker) -> None:
    both = [{"key": "a", "value": 1}, {"value": 2}]
    for records in (both, [{"value": 1}], [{"key": None, "value": 1}]):
        message = assert_refused(await post(compacted.http, records), 400, 40002)
        assert f"record {len(records) - 1} has no key" in message
    assert ends(compacted.log) == [0]
    assert placed(await post(compacted.http, both[:1])) == [(0, 0)]
    await compacted.log.alter_topic("t", {"cleanup.policy": "delete"})
    assert placed(await post(compacted.http, both)) == [(0, 1), (0, 2)]


async def test_arrow_records_without_a_key_are_refused(compacted: Broker) -> None:
    values = pa.array([b"1", b"2"], pa.binary())
    some = arrow(key=pa.array([b"a", None], pa.binary()), value=values)
    for body in (some, arrow(value=values)):
        answer = await compacted.http.post(
            "/topics/t", content=body, headers={"content-type": ARROW}
        )
        assert "has no key" in answer.json()["message"]
        assert answer.status_code == 400
    assert ends(compacted.log) == [0]
    body = arrow(key=values, value=pa.array([None, b"2"], pa.binary()))
    headers = {"content-type": ARROW}
    answer = await compacted.http.post("/topics/t", content=body, headers=headers)
    assert answer.status_code == 200
    assert ends(compacted.log) == [2], "a tombstone has a key"


async def test_v3_records_without_a_key_are_refused(compacted: Broker, v3: str) -> None:
    path = f"{v3}/topics/t/records"
    for record in ({"value": {"type": "JSON", "data": 1}}, {}):
        answer = await compacted.http.post(
            path, content=json.dumps(record), headers={"content-type": "application/json"}
        )
        said = answer.json()
        assert said["error_code"] >= 400, said
        assert "has no key" in said["message"]
    assert ends(compacted.log) == [0]
    record = {"key": {"type": "STRING", "data": "a"}, "value": {"type": "JSON", "data": 1}}
    answer = await compacted.http.post(
        path, content=json.dumps(record), headers={"content-type": "application/json"}
    )
    assert answer.json()["error_code"] == 200
    assert ends(compacted.log) == [1]
