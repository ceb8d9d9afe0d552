"""Listings of the v3 dialect in pages."""

import asyncio
import base64

import httpx
import pytest

from tests.service.conftest import Broker, assert_refused
from tidelog.service.http.paging import Slices

TOPICS = ["a", "b", "c", "d", "e"]


@pytest.fixture
async def base(broker: Broker) -> str:
    for name in TOPICS:
        await broker.log.create_topic(name, 2, {})
    return f"/v3/clusters/{broker.log.identity.cluster_id}"


async def pages(http: httpx.AsyncClient, path: str) -> list[list[str]]:
    """The names of the resources of each page."""
    names = []
    url: str | None = path
    while url:
        answer = (await http.get(url)).json()
        names.append([resource["metadata"]["resource_name"] for resource in answer["data"]])
        url = answer["metadata"]["next"]
    return names


@pytest.mark.parametrize(
    ("path", "count"),
    [("topics", 5), ("topics/a/partitions", 2), ("brokers/1/partition-replicas", 10)],
)
async def test_pages_have_every_item_once(broker: Broker, base: str, path: str, count: int) -> None:
    whole = await pages(broker.http, f"{base}/{path}")
    assert [len(page) for page in whole] == [count]
    for size in range(1, count + 1):
        parts = await pages(broker.http, f"{base}/{path}?page_size={size}")
        assert [len(page) for page in parts[:-1]] == [size] * (len(parts) - 1)
        assert [name for page in parts for name in page] == whole[0]


async def test_the_next_page_keeps_the_other_parameters(broker: Broker, base: str) -> None:
    path = f"{base}/topics?include_authorized_operations=true&page_size=1"
    answer = (await broker.http.get(path)).json()
    following = (await broker.http.get(answer["metadata"]["next"])).json()
    (topic,) = following["data"]
    assert topic["topic_name"] == "b"
    assert "DESCRIBE" in topic["authorized_operations"]


async def test_topics_that_change_between_two_pages(broker: Broker, base: str) -> None:
    answer = (await broker.http.get(f"{base}/topics?page_size=2")).json()
    await broker.log.delete_topic("b")
    await broker.log.create_topic("bb", 1, {})
    following = (await broker.http.get(answer["metadata"]["next"])).json()
    assert [topic["topic_name"] for topic in following["data"]] == ["bb", "c"]


@pytest.mark.parametrize(
    "token",
    ["!", "AA", base64.b64encode(b"[").decode(), base64.b64encode(b"[" * 3000).decode()],
    ids=["no base64", "no padding", "no JSON", "deep"],
)
async def test_a_token_that_is_none(broker: Broker, base: str, token: str) -> None:
    answer = await broker.http.get(f"{base}/topics", params={"page_token": token})
    assert "page_token" in assert_refused(answer, 400, 40002, "application/json")


@pytest.mark.parametrize("text", [b"1", b'["a",true]', b"null", b'{"a":1}', b'["a","b"]'])
async def test_a_token_of_another_listing(broker: Broker, base: str, text: bytes) -> None:
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


async def test_a_handler_that_is_cancelled_loses_its_turn() -> None:
    async def work() -> None:
        slices = Slices()
        slices._end_s = 0.0
        await slices.pause()

    first, second = asyncio.create_task(work()), asyncio.create_task(work())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 20)
    assert first.cancelled()
