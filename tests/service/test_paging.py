"""Listings of the v3 dialect in pages."""

import asyncio
import base64
from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker, assert_refused
from tests.service.keyed import ADMIN, SETTINGS
from tidelog.service.slices import Slices
from tidelog.storage.state.committed_offsets import CommittedOffset

TOPICS = ["a", "b", "c", "d", "e"]


@pytest.fixture
async def base(broker: Broker) -> str:
    for name in TOPICS:
        await broker.log.topics.create(name, 2, {})
    return f"{broker.v3}"


async def pages(http: httpx.AsyncClient, path: str) -> list[list[Any]]:
    items = []
    url: str | None = path
    while url:
        answer = (await http.get(url)).json()
        items.append(answer["data"])
        url = answer["metadata"]["next"]
    return items


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("{base}/topics", 5),
        ("{base}/topics/a/partitions", 2),
        ("{base}/brokers/1/partition-replicas", 10),
        *((f"/tidelog/v1/{name}", 5) for name in ("keys", "quotas", "topics", "groups")),
    ],
)
@pytest.mark.broker(**SETTINGS)
async def test_pages_have_every_item_once(broker: Broker, base: str, path: str, count: int) -> None:
    state = broker.log.state
    for name in TOPICS:
        await broker.log.access.create_key(f"User:{name}")
        state.access.quotas[f"User:{name}"] = {"members": 5}
        topic_id = state.topic(name).topic_id
        state.committed_offsets._keep(f"g{name}", topic_id, CommittedOffset(0, 0, -1, "", 0))
    broker.http.headers.update(ADMIN)
    path = path.format(base=base)
    (whole,) = await pages(broker.http, path)
    assert len(whole) == count
    said = (await broker.http.get(path)).json()
    assert said["metadata"] == {"self": f"http://tide:8082{path}", "next": None}
    for size in range(1, count + 3):
        parts = await pages(broker.http, f"{path}?page_size={size}")
        assert [len(page) for page in parts[:-1]] == [size] * (len(parts) - 1)
        assert [item for page in parts for item in page] == whole


async def test_next_page_keeps_other_parameters(broker: Broker, base: str) -> None:
    path = f"{base}/topics?include_authorized_operations=true&page_size=1"
    answer = (await broker.http.get(path)).json()
    following = (await broker.http.get(answer["metadata"]["next"])).json()
    (topic,) = following["data"]
    assert topic["topic_name"] == "b"
    assert "DESCRIBE" in topic["authorized_operations"]


async def test_topics_that_change_between_two_pages(broker: Broker, base: str) -> None:
    answer = (await broker.http.get(f"{base}/topics?page_size=2")).json()
    await broker.log.topics.delete("b")
    await broker.log.topics.create("bb", 1, {})
    following = (await broker.http.get(answer["metadata"]["next"])).json()
    assert [topic["topic_name"] for topic in following["data"]] == ["bb", "c"]


@pytest.mark.parametrize(
    "token",
    ["!", "AA", base64.b64encode(b"[").decode(), base64.b64encode(b"[" * 3000).decode()],
    ids=["no base64", "no padding", "no JSON", "deep"],
)
async def test_token_that_is_none(broker: Broker, base: str, token: str) -> None:
    answer = await broker.http.get(f"{base}/topics", params={"page_token": token})
    assert "page_token" in assert_refused(answer, 400, 40002, "application/json")


@pytest.mark.parametrize("text", [b"1", b'["a",true]', b"null", b'{"a":1}', b'["a","b"]'])
async def test_token_of_another_listing(broker: Broker, base: str, text: bytes) -> None:
    token = base64.urlsafe_b64encode(text).decode()
    path = f"{base}/brokers/1/partition-replicas"
    answer = await broker.http.get(path, params={"page_token": token})
    assert answer.status_code == (200 if text == b"null" else 400)


async def test_v2_has_no_pages(broker: Broker, base: str) -> None:
    assert (await broker.http.get("/topics")).json() == TOPICS
    partitions = (await broker.http.get("/topics/a/partitions")).json()
    assert [partition["partition"] for partition in partitions] == [0, 1]
    assert (await broker.http.get("/topics/a")).json()["partitions"] == partitions


async def test_many_handlers_have_slices_in_turn() -> None:
    order = list[int]()

    async def work(number: int) -> None:
        slices = Slices()
        for _ in range(3):
            slices._end_s = 0.0  # as if the slice had taken its time
            await slices.pause()
            order.append(number)

    async def others() -> None:
        for _ in range(12):
            await asyncio.sleep(0)
            order.append(-1)

    await asyncio.gather(*map(work, range(4)), others())
    assert sorted(order) == [-1] * 12 + [number for number in range(4) for _ in range(3)]
    text = "".join("." if number < 0 else "w" for number in order)
    assert "ww" not in text[: text.rindex(".")], "one slice between two turns of the loop"


async def test_handler_that_is_cancelled_loses_its_turn() -> None:
    async def work() -> None:
        slices = Slices()
        slices._end_s = 0.0
        await slices.pause()

    first, second = asyncio.create_task(work()), asyncio.create_task(work())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 20)
    assert first.cancelled()
