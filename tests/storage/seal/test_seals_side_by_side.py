"""Many topics and many partitions on a store with 60 ms a request, in virtual time."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from tests.support.faults import Call
from tests.support.logs import closing, opened, store_of
from tests.support.records import TIME_MS
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.seal.sealer import TOPICS_MAX, SealerSettings
from tidelog.storage.seal.uploads import UPLOADS_MAX
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.memory import MemoryManifest

REQUEST_S = 0.06
SEALING = LogSettings(sealer=SealerSettings(check_interval_s=1.0, sealed_wait_s=0.0))


@pytest.fixture(autouse=True)
def slow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh of a table takes two requests, a commit five."""
    refresh, add = MemoryManifest.refresh, MemoryManifest.add

    async def slow_refresh(table: MemoryManifest) -> None:
        await asyncio.sleep(2 * REQUEST_S)
        await refresh(table)

    async def slow_add(
        table: MemoryManifest, files: Sequence[SegmentFile], transactions: Mapping[str, int]
    ) -> None:
        await asyncio.sleep(5 * REQUEST_S)
        await add(table, files, transactions)

    monkeypatch.setattr(MemoryManifest, "refresh", slow_refresh)
    monkeypatch.setattr(MemoryManifest, "add", slow_add)


async def fill(log: Broker, topic: str) -> None:
    """Two records for each partition of the topic."""
    topic_state = log.state.topic(topic)
    count = 2 * len(topic_state.partitions)
    places = [number // 2 for number in range(count)]
    rows = Rows([TIME_MS] * count, [None] * count, [b"v"] * count)
    await log.records.append(topic_state, [(places, rows)], size=count, is_json=False)


def slow_down(log: Broker) -> None:
    store_of(log).latency = lambda _: REQUEST_S


async def all_sealed_s(log: Broker) -> float:
    """Wait until no tail is left; return the time that it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while any(partition.tail for _, _, partition in log.state.partitions()):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return loop.time() - began_s


async def test_topics_are_sealed_side_by_side() -> None:
    topics = 4 * TOPICS_MAX
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        for number in range(topics):
            await log.topics.create(f"t{number}", 1, {"segment.ms": "5000"})
        for number in range(topics):
            await fill(log, f"t{number}")
        slow_down(log)
        await asyncio.sleep(4.0)
        # One topic alone takes ten requests: refresh, upload, commit, and the WAL.
        assert await all_sealed_s(log) <= 2.0 + 4 * 12 * REQUEST_S
        assert log._log.sealer.counters.segments == topics


async def test_partitions_of_a_topic_are_uploaded_side_by_side_in_one_commit() -> None:
    partitions = 20 * UPLOADS_MAX
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        await log.topics.create("t", partitions, {"segment.ms": "5000"})
        await fill(log, "t")
        slow_down(log)
        await asyncio.sleep(4.0)
        assert await all_sealed_s(log) <= 2.0 + (20 + 12) * REQUEST_S
        table = await log._log.tables.of(log.state.topic("t"))
        assert [len(commit.added) for commit in await table.commits(9)] == [partitions]


async def test_a_topic_whose_store_hangs_keeps_no_other_from_its_seal() -> None:
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        for name in ("t", "u"):
            await log.topics.create(name, 1, {"segment.ms": "1000"})
            await fill(log, name)
        hanging = log.state.topic("t").prefix

        def latency(call: Call) -> float:
            return 500.0 if call.key.startswith(hanging) else 0.0

        store_of(log).latency = latency
        for _ in range(5):
            await asyncio.sleep(3.0)
            assert log.state.partition("u", 0).tail == []
            await fill(log, "u")
        assert log.state.partition("t", 0).sealed_end == 0
        store_of(log).latency = None
        await asyncio.sleep(600.0)
        assert log.state.partition("t", 0).sealed_end == 2
