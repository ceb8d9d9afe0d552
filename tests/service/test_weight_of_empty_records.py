"""Records without keys and values have a weight, and headers count."""

import base64
import json
from collections.abc import AsyncIterator

import pyarrow as pa
import pytest

from tests.service.conftest import ARROW, JSON, Broker, arrow, broker_on
from tidelog.storage.store.memory import MemoryStore

KIB = 1024
ROWS = 1000
HEADER = base64.b64encode(bytes(40 * KIB)).decode()
RECORDS = "/topics/t/partitions/0/records"
EMPTY = {
    "nulls in Arrow": (ARROW, arrow(value=pa.nulls(ROWS))),
    "objects in JSON": (JSON, b'{"records":[' + b",".join([b"{}"] * ROWS) + b"]}"),
}


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_on(MemoryStore()) as broker:
        yield broker


@pytest.mark.parametrize("way", EMPTY)
async def test_max_bytes_bounds_an_answer_of_empty_records(broker: Broker, way: str) -> None:
    await broker.log.create_topic("t", 1, {})
    media_type, body = EMPTY[way]
    sent = await broker.http.post("/topics/t", content=body, headers={"content-type": media_type})
    sent.raise_for_status()
    answer = await broker.http.get(RECORDS, params={"offset": 0, "max_bytes": 1})
    assert len(answer.json()) == 1
    answer = await broker.http.get(RECORDS, params={"offset": 0, "max_bytes": 10_000})
    assert 1 < len(answer.json()) < ROWS


async def test_max_bytes_counts_headers(broker: Broker) -> None:
    await broker.log.create_topic("t", 1, {})
    for _ in range(4):
        body = {"records": [{"value": 1, "headers": [{"key": "h", "value": HEADER}]}]}
        sent = await broker.http.post(
            "/topics/t", content=json.dumps(body), headers={"content-type": JSON}
        )
        sent.raise_for_status()
    answer = await broker.http.get(RECORDS, params={"offset": 0, "max_bytes": 1000})
    assert len(answer.json()) == 1


async def test_max_message_bytes_counts_headers(broker: Broker) -> None:
    await broker.log.create_topic("t", 1, {"max.message.bytes": str(20 * KIB)})
    body = {"records": [{"value": 1, "headers": [{"key": "h", "value": HEADER}]}]}
    sent = await broker.http.post(
        "/topics/t", content=json.dumps(body), headers={"content-type": JSON}
    )
    assert sent.status_code == 413
