"""Outages of the store, on virtual time: what was acked is there, what was refused is not, and the
broker is at full speed again within seconds."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import Call, Fault, Plan, Seeded
from tests.support.logs import append, closing, made, opened, read_values, store_of, with_topic
from tests.support.vloop import run
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import CommitUnknown, LogError, Unavailable
from tidelog.storage.core.model import Acks
from tidelog.storage.store.memory import MemoryStore

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
        await log.create_topic("t", 1, {})
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
        before = load.rate(began_s - 10, began_s - 1)
        after = load.rate(end_s + FULL_SPEED_S, end_s + FULL_SPEED_S + 10)
        assert before > 0
        assert after >= 0.95 * before, (before, after)
        await load.end()
        assert log.writer.buffered_bytes == 0
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
        await brokers[0].create_topic("t", 1, {})
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
        before = load.rate(began_s - 10, began_s - 1)
        after = load.rate(end_s + FULL_SPEED_S, end_s + FULL_SPEED_S + 10)
        assert after >= 0.8 * before, (before, after)
        await load.end()
    await load.check(cluster.store)


async def test_slow_down_of_one_call_in_twenty_for_an_hour_fails_no_request() -> None:
    """S3 answers 503 SlowDown: a create has no known outcome, reads are repeated by the SDK."""

    inner = MemoryStore()
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
        assert log.wal.counters.unknown > 0.04 * log.wal.counters.entries_committed
    await load.check(inner)


def full_disk() -> Plan:
    def plan(call: Call) -> Fault | None:
        if call.verb == "put":
            return Fault.UNAVAILABLE
        return Fault.REFUSED if call.verb == "create" else None

    return plan


@pytest.mark.parametrize("heal_s", [5.0, 300.0])
async def test_a_full_disk_refuses_writes_serves_reads_and_keeps_what_is_on_the_local_disk(
    inner: MemoryStore, tmp_path: Path, heal_s: float
) -> None:
    async with closing(await made(inner, hot_dir=tmp_path).open("c0ffee")) as log:
        await log.create_topic("t", 1, {})
        await append(log, "before")
        store_of(log).plan = full_disk()
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
