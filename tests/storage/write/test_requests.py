"""Kafka producers on whole logs, through any crash (I1, I2, I4).

A batch is stored once and in order.
"""

import asyncio
import random
from functools import partial

import pytest

from tests.support import logs
from tests.support.logs import (
    CHECKPOINTING,
    COLD,
    append,
    closing,
    kill,
    opened,
    read_values,
    spoil,
    store_of,
)
from tests.support.record_batches import checked
from tests.support.records import rows
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import (
    CommitUnknown,
    InvalidRequest,
    OutOfOrderSequence,
    ProducerFenced,
    Unavailable,
    UnknownPartition,
)
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.state.producers import ProducerEpoch
from tidelog.storage.store.memory import MemoryStore

with_topic = partial(logs.with_topic, partitions=2)


async def send(
    log: Broker, producer: ProducerEpoch, base: int, *values: str, partition: int = 0
) -> AppendedRange:
    batch = checked(rows(*values), (*producer, base))
    (placed,) = await log.kafka.append(log.state.topic("t"), partition, batch)
    return placed


async def test_a_retried_batch_gets_its_offsets(inner: MemoryStore) -> None:
    """In the same flush, in a later one, on another broker, after a restart."""
    log, other = await with_topic(inner), await opened(inner)
    async with closing(other):
        async with closing(log):
            producer = await log.records.init_producer()
            assert producer == ProducerEpoch(0, 0)
            seq = log.state.seq
            both = await asyncio.gather(
                send(log, producer, 0, "a", "b"),
                append(log, "plain"),
                send(log, producer, 0, "a", "b"),
                send(log, producer, 2, "c"),
            )
            assert log.state.seq == seq + 1
            assert both[0] == both[2] == AppendedRange("t", 0, 0, 2)
            assert both[3].base_offset == 3
            # Own appends are read from memory: what was repeated must not be there twice.
            assert await read_values(log) == ["a", "b", "plain", "c"]
            assert await send(log, producer, 2, "c") == both[3]
            assert await send(other, producer, 0, "a", "b") == both[0]
            await log._log.wal.checkpoint()
        async with closing(await opened(inner, COLD)) as heir:
            assert await send(heir, producer, 2, "c") == both[3]
            assert await send(heir, producer, 3, "d") == AppendedRange("t", 0, 4, 1)
            assert await read_values(heir) == ["a", "b", "plain", "c", "d"]


async def test_what_is_refused_is_not_there() -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        producer = await log.records.init_producer()
        await send(log, producer, 0, "a")
        results = await asyncio.gather(
            send(log, producer, 2, "early"),
            append(log, "plain"),
            send(log, producer, 1, "b"),
            return_exceptions=True,
        )
        assert isinstance(results[0], OutOfOrderSequence)
        assert await read_values(log) == ["a", "plain", "b"]
        with pytest.raises(UnknownPartition):
            await send(log, producer, 0, "x", partition=2)
        with pytest.raises(InvalidRequest):
            await send(log, producer, 2)
        assert await read_values(log) == ["a", "plain", "b"]


async def test_a_new_instance_fences_the_old_one_on_every_broker(inner: MemoryStore) -> None:
    log, other = await with_topic(inner), await opened(inner)
    async with closing(log, other):
        old = await log.records.init_producer()
        await send(log, old, 0, "a")
        await send(log, old, 0, "b", partition=1)
        new = await other.records.init_producer(old.producer_id, old.epoch)
        assert new == ProducerEpoch(old.producer_id, 1)
        for partition in (0, 1):
            with pytest.raises(ProducerFenced):
                await send(log, old, 1, "zombie", partition=partition)
        await send(other, new, 0, "c")
        assert await read_values(log) == ["a", "c"]
        # A lost answer, then a third instance: who asks by the epoch before is gone for good.
        assert await log.records.init_producer(*old) == new
        assert (await log.records.init_producer(old.producer_id)).epoch == 2
        with pytest.raises(ProducerFenced):
            await log.records.init_producer(*old)
        assert await log.records.init_producer() == ProducerEpoch(1, 0)


class Client:
    """As Kafka's: up to five batches under way by one connection.

    A batch without an answer is sent again, in order, to any broker.
    """

    def __init__(self, brokers: list[Broker], producer: ProducerEpoch, draw: random.Random) -> None:
        self._brokers = brokers
        self._who = producer
        self._draw = draw
        self.batches: list[tuple[int, list[str]]] = []
        self.answers: dict[int, AppendedRange] = {}
        self.again = 0
        base = 0
        for number in range(40):
            values = [f"{number}-{n}" for n in range(draw.randint(1, 3))]
            self.batches.append((base, values))
            base += len(values)

    async def run(self) -> None:
        while (first := len(self.answers)) < len(self.batches):
            log = self._draw.choice(self._brokers)
            numbers = range(first, min(first + 5, len(self.batches)))
            results = await asyncio.gather(
                *(self._send(log, number) for number in numbers), return_exceptions=True
            )
            for number, answer in zip(numbers, results, strict=True):
                if isinstance(answer, AppendedRange):
                    assert self.answers.setdefault(number, answer) == answer
                    continue
                refusals = Unavailable, CommitUnknown, OutOfOrderSequence, TimeoutError
                assert isinstance(answer, refusals), answer
                self.again += 1
                break  # the batches after it are retried: they are answered, or stored
            await asyncio.sleep(self._draw.choice([0, 0.02, 0.2]))

    async def _send(self, log: Broker, number: int) -> AppendedRange:
        base, values = self.batches[number]
        return await asyncio.wait_for(send(log, self._who, base, *values), 3.0)


@pytest.mark.parametrize("seed", range(10))
async def test_every_batch_is_there_once_and_in_order(inner: MemoryStore, seed: int) -> None:
    draw = random.Random(seed)
    await (await with_topic(inner)).close()
    brokers = [await opened(inner, CHECKPOINTING) for _ in range(2)]
    producer = await brokers[0].records.init_producer()
    client = Client(brokers, producer, draw)
    sending = asyncio.create_task(client.run())
    for broker in brokers:
        spoil(broker, draw)
    deaths = 0
    while not sending.done():
        await asyncio.sleep(draw.random())
        victim = draw.randrange(2)
        heir = await opened(inner, CHECKPOINTING)
        spoil(heir, draw)
        dying, brokers[victim] = brokers[victim], heir
        await kill(dying)
        deaths += 1
        assert deaths < 1000, "no progress"
    await sending
    for broker in brokers:
        store_of(broker).plan = lambda _: None
        await store_of(broker).land()
    async with closing(*brokers):
        await brokers[0]._log.wal.refresh()
        expected = [value for _, values in client.batches for value in values]
        assert await read_values(brokers[0]) == expected
        for (base, values), number in zip(client.batches, range(40), strict=True):
            assert client.answers[number] == AppendedRange("t", 0, base, len(values))
    assert client.again
