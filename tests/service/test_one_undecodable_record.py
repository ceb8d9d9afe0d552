"""One record is no JSON. Readers of JSON get the records around it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.service.conftest import JSON, Broker, append, broker_on
from tests.service.instances import subscribed
from tidelog.storage.store.memory import MemoryStore

READS = 10


@pytest.fixture
async def poisoned() -> AsyncIterator[Broker]:
    """Topic `t` of two partitions; the second record of the first partition is no JSON."""
    async with broker_on(MemoryStore()) as broker:
        await broker.log.create_topic("t", 2, {})
        await append(broker.log, b"1", b"\xff", b"2", partition=0)
        await append(broker.log, b"10", b"20", partition=1)
        yield broker


async def get(broker: Broker, offset: int) -> httpx.Response:
    path = f"/topics/t/partitions/0/records?offset={offset}"
    return await broker.http.get(path, headers={"accept": JSON})


async def test_a_reader_gets_the_records_before_one_that_is_no_json(poisoned: Broker) -> None:
    assert (await get(poisoned, 2)).json()[0]["value"] == 2
    answer = await get(poisoned, 0)
    assert answer.status_code == 200, answer.text
    assert answer.json()[0]["value"] == 1


async def test_the_error_names_partition_offset_and_field(poisoned: Broker) -> None:
    answer = await get(poisoned, 1)
    if answer.status_code != 200:
        message = answer.json()["message"]
        assert "offset 1" in message
        assert "t-0" in message
        assert "value" in message


async def test_a_member_gets_the_records_of_its_other_partitions(poisoned: Broker) -> None:
    member = await subscribed(poisoned, auto_commit_enable=False)
    values, statuses = set(), []
    for number in range(READS):
        answer = await member("GET", "/records?timeout=0", accept=JSON)
        statuses.append(answer.status_code)
        if answer.status_code == 200:
            values |= {
                record["value"] for record in answer.json() if isinstance(record["value"], int)
            }
        if number == READS // 2:
            await append(poisoned.log, b"30", partition=1)
    assert {1, 10, 20, 30} <= values, statuses
