"""Quotas count the bytes of refused bodies, and what a body unpacks to."""

import pyarrow as pa
import pytest

from tests.service.conftest import ARROW, JSON, Broker, arrow
from tests.service.keyed import ACLS_OF_ALICE, ALICE, JSON_TYPE, RECORDS, SETTINGS, key_of
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.core.actions import SetQuotas

RATE = 100_000
"""Bytes a second. Each case costs at least ten times as much: it is not paid within the test."""
ROWS = 100


pytestmark = pytest.mark.broker(topics={"t": 1}, acls=ACLS_OF_ALICE, **SETTINGS)


def named(size: int) -> bytes:
    """A word of a dictionary, named by each row."""
    indices = pa.array([0] * ROWS, pa.int8())
    return arrow(value=pa.DictionaryArray.from_arrays(indices, pa.array([b"v" * size])))


async def after(broker: Broker, body: bytes, media_type: str, times: int = 1) -> tuple[int, int]:
    """The status of so many requests with a body, and of one small record after them."""
    await broker.log.access.change(SetQuotas(ALICE, {"producer_byte_rate": RATE}))
    header = await key_of(broker.log, ALICE)
    for _ in range(times):
        headers = header | {"content-type": media_type}
        answer = await broker.http.post("/topics/t", content=body, headers=headers)
    last = await broker.http.post("/topics/t", content=RECORDS, headers=header | JSON_TYPE)
    return answer.status_code, last.status_code


async def test_body_costs_what_it_unpacks_to(broker: Broker) -> None:
    body = named(RATE // 10)
    assert len(body) < RATE // 5  # its packed bytes alone use up no quota, however slow this is
    assert await after(broker, body, ARROW) == (200, 429)


async def test_records_of_nothing_cost_something(broker: Broker) -> None:
    assert await after(broker, arrow(value=pa.nulls(RECORDS_MAX)), ARROW) == (200, 429)


async def test_refused_body_costs_its_bytes(broker: Broker) -> None:
    body = b"x" * (10 * RATE)
    assert await after(broker, body, JSON, times=10) in {(400, 429), (429, 429)}
