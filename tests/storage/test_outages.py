"""Outages of the store, on virtual time: acked records are there, refused ones are not.

The broker is at full speed again within seconds.
"""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cluster import SETTINGS, Cluster
from tests.support.faults import Call, Fault, Plan, Seeded
from tests.support.logs import append, closing, made, opened, read_values, store_of, with_topic
from tests.support.vloop import run
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import CommitUnknown, LogError, StoreRefused, Unavailable
from tidelog.storage.core.model import Acks
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.writer import FAILED_FLUSHES_MAX, TRIAL_S

LATENCY_S = 0.02
BEFORE_S = 12.0
FULL_SPEED_S = 10.0
PRODUCERS = 5


class Load:
    """Producers that send one record after the other, each value once."""

    def __init__(self, *logs: Broker, pause_s: float = 0.0, producers: int = PRODUCERS) -> None:
        self.acked: list[str] = []
        self.refused: set[str] = set()
        self.unknown: set[str] = set()
        self.by_second: Counter[int] = Counter()
        self._pause_s = pause_s
        self._tasks = [
            asyncio.create_task(self._produce(logs[number % len(logs)], number))
            for number in range(producers)
        ]

    async def _produce(self, log: Broker, number: int) -> None:
        loop, sent = asyncio.get_running_loop(), 0
        while True:
            sent += 1
            value = f"{number}-{sent}"
            try:
                await append(log, value)
            except CommitUnknown:
                self.unknown.add(value)
            except LogError:
                self.refused.add(value)
                await asyncio.sleep(0.2)
            else:
                self.acked.append(value)
                self.by_second[int(loop.time())] += 1
            await asyncio.sleep(self._pause_s)

    def rate(self, first_s: float, end_s: float) -> float:
        seconds = range(int(first_s), int(end_s))
        return sum(self.by_second[second] for second in seconds) / len(seconds)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(60.0)  # what is on its way arrives

    async def check(self, inner: MemoryStore) -> None:
        """Read the log as a new broker does: dense, and each producer got a true answer."""
        async with closing(await opened(inner)) as log:
            counts = Counter(await read_values(log))
        assert max(counts.values()) == 1
        assert not set(self.acked) - counts.keys(), "acked and lost"
        assert not self.refused & counts.keys(), "refused and there"


def during(first_s: float, end_s: float, plan: Plan) -> Plan:
    """The plan, from one time of the loop to another."""
    now_s = asyncio.get_running_loop().time
    return lambda call: plan(call) if first_s <= now_s() < end_s else None


def dark(call: Call) -> Fault | None:
    return Fault.ABSENT if call.verb == "create" else Fault.UNAVAILABLE


def forbidden(call: Call) -> Fault | None:
    return Fault.REFUSED if call.verb == "create" else Fault.UNAVAILABLE


async def outage(seconds: float, plan: Plan, *, call_s: float) -> Load:
    """One broker under load before, during and after an outage; `call_s`: a call in it."""
    inner = MemoryStore()
    log = await opened(inner)
    loop = asyncio.get_running_loop()
    async with closing(log):
        await log.topics.create("t", 1, {})
        began_s = loop.time() + BEFORE_S
        end_s = began_s + seconds
        store = store_of(log)
        store.latency = lambda _: call_s if began_s <= loop.time() < end_s else LATENCY_S
        store.plan = during(began_s, end_s, plan)
        load = Load(log)
        await asyncio.sleep(BEFORE_S + seconds)
        with pytest.raises(Unavailable):
            await log.check_ready()
        await asyncio.sleep(FULL_SPEED_S)
        await log.check_ready()
        await asyncio.sleep(10.0)
        old_rate = load.rate(began_s - 10, began_s - 1)
        new_rate = load.rate(end_s + FULL_SPEED_S, end_s + FULL_SPEED_S + 10)
        assert old_rate > 0
        assert new_rate >= 0.95 * old_rate, (old_rate, new_rate)
        await load.end()
        assert log._log.writer.buffered_bytes == 0
    await load.check(inner)
    return load


@pytest.mark.parametrize("call_s", [LATENCY_S, 3.0])
def test_full_speed_within_ten_seconds_after_ten_minutes_dark(call_s: float) -> None:
    """The view of the WAL expires meanwhile; calls fail at once, or after a connect timeout."""
    run(lambda: outage(615.0, dark, call_s=call_s))


def test_refusals_in_mid_flight_are_definite_and_pass() -> None:
    """403 for everything, for 45 s: rights were taken away and given back."""
    load = run(lambda: outage(45.0, forbidden, call_s=LATENCY_S))
    assert load.refused


async def test_three_brokers_are_at_full_speed_within_ten_seconds() -> None:
    async with Cluster() as cluster:
        brokers = [await cluster.start() for _ in range(3)]
        await cluster.settled()
        await brokers[0].topics.create("t", 1, {})
        for log in brokers:
            await log.refresh()
        loop = asyncio.get_running_loop()
        began_s = loop.time() + BEFORE_S
        end_s = began_s + 615.0
        for log in brokers:
            store = store_of(log)
            store.latency = lambda _: 1.0 if began_s <= loop.time() < end_s else LATENCY_S
            store.plan = during(began_s, end_s, dark)
        load = Load(*brokers)
        await asyncio.sleep(end_s + FULL_SPEED_S + 15.0 - loop.time())
        old_rate = load.rate(began_s - 10, began_s - 1)
        new_rate = load.rate(end_s + FULL_SPEED_S, end_s + FULL_SPEED_S + 10)
        assert new_rate >= 0.8 * old_rate, (old_rate, new_rate)
        await load.end()
    await load.check(cluster.store)


async def test_slow_down_of_one_call_in_twenty_fails_no_request(inner: MemoryStore) -> None:
    """S3 answers 503 SlowDown: a create has no known outcome, reads are repeated by the SDK."""
    async with closing(await with_topic(inner)) as log:
        drawn = Seeded(7, 0.05, creates=[Fault.ABSENT])
        store_of(log).plan = lambda call: drawn(call) if call.verb == "create" else None
        store_of(log).latency = lambda _: LATENCY_S
        load = Load(log, pause_s=4.0, producers=2)
        for _ in range(60):
            await asyncio.sleep(60.0)
            await log.check_ready()
        await load.end()
        assert not load.refused
        assert not load.unknown
        assert len(load.acked) > 2 * 3600 / 4.5
        assert log._log.wal.counters.unknown > 0.04 * log._log.wal.counters.entries_committed
    await load.check(inner)


@pytest.mark.parametrize("heal_s", [5.0, 300.0])
async def test_full_disk_keeps_acks_1(inner: MemoryStore, tmp_path: Path, heal_s: float) -> None:
    async with closing(await made(inner, hot_dir=tmp_path).open("c0ffee")) as log:
        await log.topics.create("t", 1, {})
        await append(log, "before")
        store_of(log).plan = full
        await append(log, "local", acks=Acks.LOCAL)
        await asyncio.sleep(heal_s)
        with pytest.raises(Unavailable, match="no space"):
            await append(log, "refused")
        assert await read_values(log) == ["before"]
        with pytest.raises(Unavailable, match="the store does not accept writes: no space"):
            await log.check_ready()
        store_of(log).plan = lambda _: None
        await asyncio.sleep(2.5)
        await log.check_ready()
        await append(log, "after")
        assert await read_values(log) == ["before", "local", "after"]


async def test_a_load_of_the_view_is_not_hurt_by_one_failed_read(inner: MemoryStore) -> None:
    """After a long outage the view is loaded again, while some calls still fail."""
    async with closing(await with_topic(inner)) as log:
        for number in range(50):
            await append(log, str(number))
        log.clock.advance(700.0)  # type: ignore[attr-defined]
        store_of(log).plan = Seeded(3, 0.02, creates=[Fault.ABSENT])
        deadline_s = asyncio.get_running_loop().time() + FULL_SPEED_S
        while True:
            try:
                await append(log, "after")
                break
            except Unavailable:
                assert asyncio.get_running_loop().time() < deadline_s
                await asyncio.sleep(0.2)
        store_of(log).plan = lambda _: None
        assert (await read_values(log))[-1] == "after"


# -- readiness


REASON = "the store does not accept writes: no space for wal/"


def full(call: Call) -> Fault | None:
    """A disk without space: it can be read."""
    if call.verb == "put":
        return Fault.UNAVAILABLE
    return Fault.REFUSED if call.verb == "create" else None


async def is_ready(log: Broker) -> bool:
    try:
        await log.check_ready()
    except Unavailable:
        return False
    return True


async def refused(log: Broker, times: int) -> None:
    for _ in range(times):
        with pytest.raises(StoreRefused):
            await append(log, "refused")


async def ready_after_s(log: Broker) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not await is_ready(log):  # noqa: ASYNC110 - virtual time: polling is free
        await asyncio.sleep(0.1)
    return loop.time() - began_s


async def test_idle_broker_learns_that_writes_succeed_again(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner)) as log:
        await append(log, "before")
        store_of(log).plan = full
        await refused(log, FAILED_FLUSHES_MAX)
        with pytest.raises(Unavailable, match=REASON):
            await log.check_ready()
        began = store_of(log).count("create")
        await asyncio.sleep(100 * TRIAL_S)
        with pytest.raises(Unavailable, match=REASON):
            await log.check_ready()
        assert 0 < store_of(log).count("create") - began <= 100, "one small PUT a trial"
        store_of(log).plan = lambda _: None
        assert await ready_after_s(log) <= TRIAL_S + 0.2
        last = log.state.seq
        await asyncio.sleep(100 * TRIAL_S)
        assert log.state.seq == last, "trials end with the failure"
        await append(log, "after")
        assert log._log.writer.buffered_bytes == 0
    async with closing(await opened(inner)) as again:
        assert await read_values(again) == ["before", "after"]


async def test_one_refused_flush_says_nothing_of_the_next() -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        for _ in range(10):
            store_of(log).plan = full
            await refused(log, FAILED_FLUSHES_MAX - 1)
            assert await is_ready(log)
            store_of(log).plan = lambda _: None
            await append(log, "good")


async def test_requests_that_are_refused_for_their_size_leave_a_broker_ready() -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        store_of(log).plan = full
        await refused(log, FAILED_FLUSHES_MAX)
        store_of(log).plan = lambda _: None  # a small entry is accepted
        assert await ready_after_s(log) <= TRIAL_S + 0.2


async def test_a_flush_without_an_outcome_is_no_write() -> None:
    unopened = made(MemoryStore())
    async with closing(await unopened.open("c0ffee")) as log:
        await log.topics.create("t", 1, {})
        store_of(log).plan = lambda call: Fault.ABSENT if call.verb == "create" else None
        timeout_s = log._settings.writer.answer_timeout_s
        with pytest.raises(CommitUnknown):
            await append(log, "late")
        await asyncio.sleep(1.0)
        with pytest.raises(Unavailable, match=r"a flush has had no outcome for 3[0-9] s"):
            await log.check_ready()
        assert asyncio.get_running_loop().time() < timeout_s + 10.0
        store_of(log).plan = lambda _: None
        assert await ready_after_s(log) <= 2.5, "the longest pause between two PUTs is 2 s"
        assert await read_values(log) == ["late"]


async def test_a_broker_that_was_never_written_to_is_not_ready_when_its_heartbeats_fail() -> None:
    settings = SETTINGS.membership._replace(quiet_interval_s=0.0)
    async with Cluster(SETTINGS._replace(membership=settings)) as cluster:
        broker, other = await cluster.start(), await cluster.start()
        await cluster.settled()
        store_of(broker).plan = full
        await asyncio.sleep(settings.member_timeout_s - settings.heartbeat_interval_s)
        assert await is_ready(broker), "its peers still count it as live"
        await asyncio.sleep(2 * settings.heartbeat_interval_s + 0.1)
        with pytest.raises(Unavailable, match=r"no heartbeat was written for .*: put brokers"):
            await broker.check_ready()
        assert await is_ready(other)
        store_of(broker).plan = lambda _: None
        assert await ready_after_s(broker) <= settings.heartbeat_interval_s + 0.2


async def test_a_process_that_was_suspended_is_ready_at_once() -> None:
    """It wrote no heartbeat, but none has failed."""
    async with Cluster() as cluster:
        log = await cluster.start()
        await cluster.settled()
        log.clock.advance(100.0)  # type: ignore[attr-defined]
        cluster.store.suspended_ms = 100_000
        assert await is_ready(log)


async def test_a_broker_that_shuts_down_does_not_wait_for_a_trial() -> None:
    log = await with_topic(MemoryStore())
    store_of(log).plan = full
    await refused(log, FAILED_FLUSHES_MAX)
    began_s = asyncio.get_running_loop().time()
    await log.close()
    assert asyncio.get_running_loop().time() - began_s < 1.0
    with pytest.raises(LogError, match="shutting down"):
        await append(log, "late")
