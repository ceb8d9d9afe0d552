"""Records that no route of produce takes, and the weight of records without content.

No route takes a record without a key for a topic that is compacted by key, or one stamped a year
ahead.
"""

import time
from base64 import b64encode
from typing import Any

import pyarrow as pa
import pytest

from tests.service.conftest import ARROW, JSON, Broker, arrow, ends, post, send

YEAR_MS = 365 * 86_400_000
KIB = 1024
ROWS = 1000
PATH = "/topics/t/partitions/0/records"
WAYS = ("v2", "arrow", "v3")
EMPTY = {
    ARROW: arrow(value=pa.nulls(ROWS)),
    JSON: b'{"records":[' + b",".join([b"{}"] * ROWS) + b"]}",
}
WITH_HEADER = [
    {"value": 1, "headers": [{"key": "h", "value": b64encode(bytes(40 * KIB)).decode()}]}
]


async def sent(broker: Broker, way: str, *records: dict[str, Any]) -> tuple[int, str]:
    """Produce by one of the routes. Return the error code, or 200, and the message."""
    if way == "v2":
        answer = await post(broker.http, list(records))
    elif way == "arrow":
        columns = {
            name: [record.get(name) for record in records]
            for name in ("key", "value", "timestamp")
            if name == "value" or any(name in record for record in records)
        }
        types = {"key": pa.string(), "timestamp": pa.int64()}
        body = arrow(
            **{
                name: pa.array(cells, types[name])
                if name in types
                else pa.array([None if cell is None else str(cell) for cell in cells], pa.string())
                for name, cells in columns.items()
            }
        )
        answer = await send(broker.http, body, ARROW)
    else:
        (record,) = records
        typed: dict[str, Any] = {}
        if "value" in record:
            typed["value"] = {"type": "JSON", "data": record["value"]}
        if "key" in record:
            typed["key"] = {"type": "STRING", "data": record["key"]}
        if "timestamp" in record:
            instant = time.gmtime(record["timestamp"] / 1000)
            typed["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", instant)
        answer = await broker.http.post(f"{broker.v3}/topics/t/records", json=typed)
    said = answer.json()
    return said.get("error_code", 200), said.get("message", "")


@pytest.mark.parametrize(
    ("way", "records", "status"),
    [
        ("v2", [{"key": "a", "value": 1}, {"value": 2}], 40002),
        ("v2", [{"value": 1}], 40002),
        ("v2", [{"key": None, "value": 1}], 40002),
        ("arrow", [{"key": "a", "value": 1}, {"key": None, "value": 2}], 40002),
        ("arrow", [{"value": 1}, {"value": 2}], 40002),
        ("v3", [{"value": 1}], 40002),
        ("v3", [{}], 40002),
    ],
)
async def test_compacted_topic_takes_no_record_without_key(
    broker: Broker, way: str, records: list[dict[str, Any]], status: int
) -> None:
    await broker.log.topics.create("t", 1, {"cleanup.policy": "delete, compact"})
    code, message = await sent(broker, way, *records)
    assert code == status
    assert "has no key" in message
    assert way != "v2" or f"record {len(records) - 1} has no key" in message
    assert ends(broker.log) == [0]
    assert (await sent(broker, way, {"key": "a", "value": None}))[0] == 200, "a tombstone has a key"
    assert (await sent(broker, way, {"key": "a", "value": 1}))[0] == 200
    assert ends(broker.log) == [2]
    await broker.log.topics.alter("t", {"cleanup.policy": "delete"})
    assert (await sent(broker, way, *records))[0] == 200


@pytest.mark.broker(topics={"t": 1})
@pytest.mark.parametrize("way", WAYS)
async def test_record_of_next_year_is_refused_unless_allowed(broker: Broker, way: str) -> None:
    record = {"value": 1, "timestamp": int(time.time() * 1000) + YEAR_MS}
    code, message = await sent(broker, way, record)
    assert code == 422
    assert message.startswith("record 0 for topic 't' has timestamp")
    assert "message.timestamp.after.max.ms is 3600000" in message
    assert ends(broker.log) == [0]
    await broker.log.topics.alter("t", {"message.timestamp.after.max.ms": str(2 * YEAR_MS)})
    assert (await sent(broker, way, record))[0] == 200


@pytest.mark.broker(topics={"t": 1})
@pytest.mark.parametrize("media_type", EMPTY)
async def test_max_bytes_bounds_answer_of_empty_records(broker: Broker, media_type: str) -> None:
    made = await send(broker.http, EMPTY[media_type], media_type)
    made.raise_for_status()
    answer = await broker.http.get(PATH, params={"offset": 0, "max_bytes": 1})
    assert len(answer.json()) == 1
    answer = await broker.http.get(PATH, params={"offset": 0, "max_bytes": 10_000})
    assert 1 < len(answer.json()) < ROWS


@pytest.mark.broker(topics={"t": 1})
async def test_headers_count_for_max_bytes_and_max_message_bytes(broker: Broker) -> None:
    for _ in range(4):
        (await post(broker.http, WITH_HEADER)).raise_for_status()
    answer = await broker.http.get(PATH, params={"offset": 0, "max_bytes": 1000})
    assert len(answer.json()) == 1
    await broker.log.topics.alter("t", {"max.message.bytes": str(20 * KIB)})
    assert (await post(broker.http, WITH_HEADER)).status_code == 413
