"""A topic name of 223 characters on a folder ended every broker at the first seal.

The folder of a topic is its name, a dash and 32 characters; a file system takes 255. A name that
does not fit is refused when the topic is created, on every store alike. A cluster that has such a
topic already keeps its brokers: that one topic stays unsealed, and all else goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.service.conftest import assert_refused, broker_on, until
from tests.support.logs import MANUAL, append, closing, opened, read_values
from tests.support.vloop import run
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.retention import retain
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker
from tidelog.storage.core.actions import CreateTopic
from tidelog.storage.core.errors import Corrupt, InvalidRequest, StoreRefused
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.seal.sealer import ROUNDS_MAX, SealerSettings
from tidelog.storage.state.topic import Topic
from tidelog.storage.state.topic_checks import TOPIC_NAME_MAX
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.manifest import Table

LONGEST = "n" * TOPIC_NAME_MAX
LONG = "n" * 223
"""One more than fits: an older broker took it."""
SEALING = LogSettings(sealer=SealerSettings(check_interval_s=0.02))
SEALED_AT_ONCE = {"segment.ms": "100"}
WAIT_S = 60.0
"""Bounds a wait for what comes within a second on an idle machine."""


@asynccontextmanager
async def log_on(root: Path, settings: LogSettings = MANUAL) -> AsyncIterator[Broker]:
    store = FolderStore(root)
    log = await Broker.open(store, settings, clock=SystemClock(), name="b1")
    try:
        yield log
    finally:
        await log.close()
        await store.close()


async def create_as_before(log: Broker, name: str = LONG) -> None:
    """As brokers did that checked for Kafka's 249 characters alone."""
    configs = SEALED_AT_ONCE
    await log._log.submit(CreateTopic(name, log.clock.new_id().hex(), 1, configs))


@pytest.mark.parametrize("length", [223, 230, 249, 250])
@pytest.mark.parametrize("open_store", [lambda _: MemoryStore(), FolderStore])
async def test_name_that_no_folder_can_have_is_refused(
    tmp_path: Path, open_store: Callable[[Path], ObjectStore], length: int
) -> None:
    store = open_store(tmp_path)
    log = await Broker.open(store, MANUAL, clock=SystemClock(), name="b1")
    try:
        for validate_only in (True, False):
            with pytest.raises(InvalidRequest, match="1 to 222 characters of a-z"):
                await log.topics.create("n" * length, 1, {}, validate_only=validate_only)
        assert not log.state.topics
    finally:
        await log.close()
        await store.close()


async def test_longest_name_is_sealed_on_folder(tmp_path: Path) -> None:
    async with log_on(tmp_path) as log:
        await log.topics.create(LONGEST, 1, {})
        await append(log, "a", topic=LONGEST)
        assert await log.records.seal(LONGEST) == 1
        assert await read_values(log, topic=LONGEST) == ["a"]


async def test_topic_that_cannot_be_sealed_ends_no_broker(tmp_path: Path) -> None:
    async with log_on(tmp_path) as log:
        await create_as_before(log)
        await log.topics.create("other", 1, SEALED_AT_ONCE)
        for topic in (LONG, "other"):
            await append(log, "0", topic=topic)
    for start in (1, 2):
        await check_life(tmp_path, start)


async def check_life(root: Path, start: int) -> None:
    """A broker starts on what lies there, seals what can be sealed, and serves all of it."""
    async with log_on(root, SEALING) as log:
        running = asyncio.ensure_future(log.run_until_failed())
        counters = log._log.sealer.counters
        for topic in (LONG, "other"):
            await append(log, f"{start}", topic=topic)
        await until(lambda: counters.segments and counters.failures > 1, WAIT_S)
        await until(lambda: not log.state.partition("other", 0).tail, WAIT_S)
        assert not running.done()
        for topic in (LONG, "other"):
            assert await read_values(log, topic=topic) == [f"{n}" for n in range(start + 1)]
        running.cancel()


async def test_topic_that_cannot_be_sealed_stops_no_duty(tmp_path: Path) -> None:
    async with log_on(tmp_path) as log:
        await create_as_before(log)
        await log.topics.create("other", 1, {"retention.ms": "1"})
        for topic in (LONG, "other"):
            await append(log, "a", topic=topic)
        await log.records.seal("other")
        cluster = await MaintenanceSession.open(log._log.store, SystemClock())
        # A session of a cluster with other bounds would collect at once; this one is alone.
        cluster.state.bounds.now = Bounds(wal_retention_ms=4, file_grace_ms=0)
        try:
            assert [result.topic for result in await retain(cluster, None, is_dry=False)] == [
                "other"
            ]
            assert (await scrub(cluster, None, Grace())).is_whole
            await log._log.wal.refresh()
            await log.topics.delete(LONG)
            for _ in range(4):  # it is forgotten when two checkpoints know that it is deleted
                await append(log, "b", topic="other")
                await asyncio.sleep(0.01)
                await collect(cluster, await plan(cluster, Grace(wal_ms=0, table_ms=0)))
                await log._log.wal.refresh()
            assert not log.state.deleted
        finally:
            await cluster.close()


async def test_topic_that_cannot_be_sealed_is_shown_and_deleted(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    async with broker_on(store) as broker:
        await create_as_before(broker.log)
        await append(broker.log, "a", topic=LONG)
        with pytest.raises(StoreRefused, match="longer than a file's name may be"):
            await broker.log.records.seal(LONG)
        shown = await broker.http.get(f"/tidelog/v1/topics/{LONG}")
        assert shown.status_code == 200, shown.text
        assert (await broker.http.post(f"/admin/topics/{LONG}/seal")).status_code == 503
        v3 = f"{broker.v3}"
        assert (await broker.http.delete(f"{v3}/topics/{LONG}")).status_code == 204
    await store.close()


async def test_door_says_how_long_name_may_be(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    async with broker_on(store, auto_create_topics=True) as broker:
        answer = await broker.http.post("/admin/topics", json={"topic_name": LONG})
        assert answer.status_code == 400, answer.text
        assert "1 to 222" in answer.text
        produced = await broker.http.post(f"/topics/{LONG}", json={"records": [{"value": "AA=="}]})
        assert "1 to 222" in assert_refused(produced, 400, 40002)
        assert not broker.log.state.topics
    await store.close()


class Panic(BaseException):
    """As a panic of deltalake in Python: it is no Exception."""


@pytest.mark.parametrize("failure", [ValueError, MemoryError, RuntimeError, Panic, Corrupt])
def test_whatever_seal_raises_others_are_sealed(failure: type[BaseException]) -> None:
    raised = failure("topics/t", "a bug") if failure is Corrupt else failure("a bug")

    async def main() -> None:
        log = await opened(MemoryStore(), LogSettings(sealer=SealerSettings(check_interval_s=1.0)))
        async with closing(log):
            running = asyncio.ensure_future(log.run_until_failed())
            open_table = log._log.tables.of
            is_broken = True

            async def broken(topic: Topic, **more: float) -> Table:
                if is_broken and topic.name == "t":
                    raise raised
                return await open_table(topic, **more)

            log._log.tables.of = broken
            for topic in ("t", "other"):
                await log.topics.create(topic, 1, SEALED_AT_ONCE)
                await append(log, "a", topic=topic)
            await asyncio.sleep(ROUNDS_MAX)
            assert not running.done()
            assert log.state.partition("other", 0).sealed_end == 1
            # The failing topic waits for twice as many rounds each time.
            assert 2 < log._log.sealer.counters.failures < 10
            is_broken = False
            await asyncio.sleep(ROUNDS_MAX + 2)
            assert log.state.partition("t", 0).sealed_end == 1
            running.cancel()

    run(main)
