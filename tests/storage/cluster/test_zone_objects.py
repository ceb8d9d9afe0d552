"""A reader at another broker, also in another zone, costs one GET for each object and zone."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support import logs
from tests.support.cluster import SETTINGS, Broken, Cluster
from tests.support.faults import Call
from tests.support.records import rows
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.messages import (
    EntryAnnouncement,
    ObjectRange,
    decode_object_range,
    encode_object_range,
)
from tidelog.storage.cluster.zone_objects import PAUSE_S
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.wal.tail_objects import PART_BYTES

PARTITIONS = 100
FLUSH_S = 0.25
RECORD_BYTES = 1000
QUIET = SETTINGS._replace(
    membership=SETTINGS.membership._replace(heartbeat_interval_s=20.0, member_timeout_s=60.0),
    sequencer=SETTINGS.sequencer._replace(handover_timeout_s=5.0),
    poll_interval_s=60.0,
)


def latency() -> Callable[[Call], float]:
    draws = random.Random(1)

    def latency_of(call: Call) -> float:
        return draws.lognormvariate(-3.5 if call.verb.startswith("get") else -2.8, 0.4)

    return latency_of


def gets(*brokers: Broker) -> Counter[str]:
    """The GETs of tails' objects so far, by the folder of the object."""
    counts = Counter[str]()
    for broker in brokers:
        for folder in (object_keys.WAL, object_keys.DATA):
            counts[folder] += logs.store_of(broker).count("get_range", folder)
    return counts


def creates(*brokers: Broker) -> int:
    """How many entries and uploads the brokers have written so far."""
    return sum(
        logs.store_of(broker).count("create", folder)
        for broker in brokers
        for folder in (object_keys.WAL, object_keys.DATA)
    )


class Readers:
    """A producer at one broker, and a reader of all partitions at each of some others."""

    def __init__(self, producer: Broker, readers: list[Broker]) -> None:
        self.producer = producer
        self.readers = readers
        self.sent_s: list[float] = []
        self.lags_s: list[float] = []
        self.objects = 0

    async def produce(self, seconds: float, partitions: int) -> None:
        loop = asyncio.get_running_loop()
        topic = self.producer.state.topic("t")
        value = "x" * RECORD_BYTES
        for _ in range(int(seconds / FLUSH_S)):
            self.sent_s.append(loop.time())
            parts = [(number, rows(value)) for number in range(partitions)]
            size = RECORD_BYTES * partitions
            await self.producer.records.append(topic, parts, size=size, is_json=False)
            self.objects += 1
            await asyncio.sleep(max(0.0, self.sent_s[-1] + FLUSH_S - loop.time()))

    async def read(self, reader: Broker, records: int, partitions: int) -> None:
        loop = asyncio.get_running_loop()
        offsets = [0] * partitions
        changes = reader.records.changes_of("t")

        async def read_partition(number: int) -> None:
            if offsets[number] == reader.state.partition("t", number).high_watermark:
                return
            fetched = await reader.records.fetch("t", number, offsets[number], bytes_max=1 << 20)
            for offset in range(offsets[number], fetched.next_offset):
                self.lags_s.append(loop.time() - self.sent_s[offset])
            offsets[number] = fetched.next_offset

        while sum(offsets) < records * partitions:
            count = changes.count
            await asyncio.gather(*(read_partition(number) for number in range(partitions)))
            await reader.records.wait_for_changes("t", changes, count, 1.0)

    async def run(self, seconds: float, partitions: int = PARTITIONS) -> None:
        records = int(seconds / FLUSH_S)
        async with asyncio.TaskGroup() as group:
            for reader in self.readers:
                group.create_task(self.read(reader, records, partitions))
            group.create_task(self.produce(seconds, partitions))

    def lag_s(self, quantile: float) -> float:
        return sorted(self.lags_s)[int(quantile * (len(self.lags_s) - 1))]


async def with_topic(cluster: Cluster, zones: str, partitions: int = PARTITIONS) -> list[Broker]:
    brokers = [await cluster.start(zone=zone) for zone in zones]
    for broker in brokers:
        await broker._membership.look()
    await brokers[0].topics.create("t", partitions, {})
    for broker in brokers:
        await broker.refresh()
    return brokers


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(QUIET, latency=latency()) as cluster:
        yield cluster


@pytest.mark.parametrize("partitions", [30, 300])
async def test_one_get_for_an_object_and_a_zone(cluster: Cluster, partitions: int) -> None:
    brokers = await with_topic(cluster, "abbcc", partitions)
    old_gets, old_creates = gets(*brokers), creates(*brokers)
    readers = Readers(brokers[0], brokers[1:])
    await readers.run(2.5, partitions)
    spent, objects = gets(*brokers) - old_gets, creates(*brokers) - old_creates
    assert readers.objects == 10
    # The zone of the sequencer gets the chunks of small entries with the announcement.
    assert readers.objects <= spent.total() <= 1.1 * objects * 2, spent
    assert readers.lag_s(0.99) <= 1.0
    counters = [broker.stats().tail_objects for broker in brokers[1:]]
    assert sum(counter.zone_reads for counter in counters) >= readers.objects
    assert sum(counter.wrong for counter in counters) == 0


async def test_without_zones_all_brokers_share_each_object(cluster: Cluster) -> None:
    brokers = await with_topic(cluster, "aaa")
    old_gets = gets(*brokers)
    readers = Readers(brokers[0], brokers[1:])
    await readers.run(2.5)
    assert (gets(*brokers) - old_gets).total() <= 11


@pytest.mark.parametrize("broken", [Broken.REFUSED, Broken.LOST, Broken.RESET])
async def test_an_owner_that_fails_costs_gets_and_no_records(
    cluster: Cluster, broken: Broken
) -> None:
    brokers = await with_topic(cluster, "abb")
    cluster.net.plan = lambda verb, _: broken if verb == "read" else None
    old_gets = gets(*brokers)
    readers = Readers(brokers[0], brokers[1:])
    await readers.run(5.0)
    assert (gets(*brokers) - old_gets).total() <= 2 * 1.1 * readers.objects
    asked = sum(verb == "read" for verb, _ in cluster.net.messages)
    assert asked <= 4 * (1 + 5.0 / PAUSE_S), "each owner is paused after the first failure"


async def test_wrong_bytes_of_an_owner_do_not_reach_a_reader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = await with_topic(cluster, "abb")
    for broker in brokers:
        whole = broker.cluster.read_object

        async def read_object(message: bytes, whole: object = whole) -> bytes:
            body = bytearray(await whole(message))  # type: ignore[operator]
            for position in range(0, len(body), 500):
                body[position] ^= 1
            return bytes(body)

        monkeypatch.setattr(broker.cluster, "read_object", read_object)
    readers = Readers(brokers[0], brokers[1:])
    await readers.run(5.0)
    assert len(readers.lags_s) == 2 * PARTITIONS * readers.objects
    assert sum(broker.stats().tail_objects.wrong for broker in brokers) >= 1


async def test_a_lone_number_is_read_once_and_not_twice(cluster: Cluster) -> None:
    """An entry whose header is too large to announce costs its GET, and no probe of the next."""
    brokers = await with_topic(cluster, "ab", 300)
    old_gets = gets(*brokers)
    topic = brokers[0].state.topic("t")
    for _ in range(4):
        parts = [(number, rows("x")) for number in range(300)]
        await brokers[0].records.append(topic, parts, size=300, is_json=False)
        await asyncio.sleep(0.5)
    assert brokers[1].state.seq == brokers[0].state.seq
    assert (gets(*brokers) - old_gets).total() <= 4


async def test_an_announced_entry_that_is_damaged_is_read_from_the_store(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = await with_topic(cluster, "abb", 300)
    for broker in brokers:

        async def read_object(message: bytes) -> bytes:
            return b"\0" * decode_object_range(message).length

        monkeypatch.setattr(broker.cluster, "read_object", read_object)
    topic = brokers[0].state.topic("t")
    for _ in range(6):
        parts = [(number, rows("x")) for number in range(300)]
        await brokers[0].records.append(topic, parts, size=300, is_json=False)
        await asyncio.sleep(0.5)
    assert {broker.state.seq for broker in brokers} == {brokers[0].state.seq}


def test_far_announcements_are_small() -> None:
    small = EntryAnnouncement(1, b"h" * 10_000, b"b" * 10_000)
    assert small.to_zone(is_near=False) is small
    large = EntryAnnouncement(1, b"h" * 10_000, b"b" * 10_001)
    assert large.to_zone(is_near=True) is large
    assert large.to_zone(is_near=False) == EntryAnnouncement(1, large.header)
    assert EntryAnnouncement(1, b"h" * 20_001).to_zone(is_near=False) == EntryAnnouncement(1)


@pytest.mark.parametrize(
    ("key", "start", "length"),
    [
        ("secret.json", 0, 10),
        ("wal/1", 0, 10),
        ("wal/../secret.json", 0, 10),
        ("data/aa/bb-1", 0, 10),
        (object_keys.wal(1), -1, 10),
        (object_keys.wal(1), 0, 0),
        (object_keys.wal(1), 0, PART_BYTES + 1),
    ],
)
def test_only_parts_of_entries_and_uploads_can_be_asked_for(
    key: str, start: int, length: int
) -> None:
    with pytest.raises(Corrupt, match="asks for"):
        decode_object_range(encode_object_range(ObjectRange(key, start, length)))


def test_questions_decode() -> None:
    for key in (object_keys.wal(7), object_keys.data("ab12", 99)):
        question = ObjectRange(key, 5, PART_BYTES)
        assert decode_object_range(encode_object_range(question)) == question
    for message in (b"", b"x", b"\x93\x01\x02\x03"):
        with pytest.raises(Corrupt, match="does not decode"):
            decode_object_range(message)
