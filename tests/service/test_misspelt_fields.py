"""A consumer's body with an unknown field is refused, and changes nothing."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.service.conftest import Broker, append, broker_on
from tests.service.instances import Instance, created, subscribed
from tidelog.storage.store.memory import MemoryStore

WHERE = {"topic": "t", "partition": 0}


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    """A broker with three records in topic `t`."""
    store = MemoryStore()
    async with broker_on(store) as broker:
        await broker.log.create_topic("t", 1, {})
        await append(broker.log, b"0", b"1", b"2")
        yield broker
    await store.close()


async def refused(instance: Instance, what: str, body: Any) -> None:
    answer = await instance("POST", what, body)
    assert answer.status_code in (400, 422), (answer.status_code, answer.text)
    assert "Unrecognized field" in answer.json()["message"]


@pytest.mark.parametrize("name", ["ofsets", "Offsets"])
async def test_a_misspelt_commit_commits_nothing(broker: Broker, name: str) -> None:
    instance = await subscribed(broker, auto_commit_enable=False)
    assert await instance.read() == [0, 1, 2]
    await refused(instance, "/offsets", {name: [WHERE | {"offset": 0}]})
    assert (await instance.committed()).get(0, -1) == -1


@pytest.mark.parametrize("name", ["ofsets", "Offsets", "timestamp"])
async def test_a_misspelt_seek_is_refused(broker: Broker, name: str) -> None:
    instance = await subscribed(broker, auto_commit_enable=False)
    await refused(instance, "/positions", {name: [WHERE | {"offset": 1}]})


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("/subscription", {"topics": ["t"], "topicPattern": "t.*"}),
        ("/assignments", {"partitions": [WHERE | {"offset": 1}]}),
        ("/assignments", {"partitions": [WHERE], "topics": ["t"]}),
    ],
    ids=str,
)
async def test_an_unknown_field_is_refused(broker: Broker, what: str, body: Any) -> None:
    await refused(await created(broker), what, body)


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("/offsets", {"offsets": [WHERE | {"offset": 1, "metdata": "x"}]}),
        ("/offsets", {"offsets": [WHERE | {"offset": 1}], "more": 1}),
        ("/positions", {"offsets": [WHERE | {"offset": 1, "ofset": 2}]}),
        ("/positions", {"offsets": [WHERE | {"offset": 1}], "time": 1}),
        ("/positions/end", {"partitions": [WHERE | {"Topic": "u"}]}),
    ],
    ids=str,
)
async def test_an_unknown_field_of_an_entry_is_refused(
    broker: Broker, what: str, body: Any
) -> None:
    instance = await subscribed(broker, auto_commit_enable=False)
    await refused(instance, what, body)
