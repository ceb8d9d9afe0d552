"""AsyncConsumer: nothing is missing, what is committed, records that do not decode, rebalances."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.service.client.faults import (
    BUSY,
    HELD,
    LOST,
    OK,
    REFUSED,
    UNKNOWN,
    Choice,
    FaultyTransport,
    at_random,
    script,
)
from tests.service.conftest import Broker, post, until
from tidelog.client import (
    AsyncConsumer,
    AsyncProducer,
    BadArgument,
    DeadLetters,
    NotFound,
    NotReachable,
    Record,
    Refused,
    UndecodableRecord,
)
from tidelog.service.client.connection import Connection

RECORDS = 60


def connection(broker: Broker, choose: Choice = lambda _: OK, retry_s: float = 60) -> Connection:
    transport = FaultyTransport(broker.app, choose)
    return Connection("a:1,b:2", transport=transport, retry_s=retry_s)


@pytest.fixture
async def filled(broker: Broker, topic: str) -> str:
    """The topic's three partitions with the values 0 to 59 in turn."""
    records = [{"value": n, "partition": n % 3} for n in range(RECORDS)]
    assert (await post(broker.http, records)).status_code == 200
    return topic


def committed(broker: Broker, group: str = "g") -> dict[int, int]:
    offsets_by_topic = broker.log.state.committed_offsets.of_group(group)
    return {
        p: committed_offset.offset
        for offsets in offsets_by_topic.values()
        for p, committed_offset in offsets.items()
    }


async def read(consumer: AsyncConsumer, count: int) -> list[Record]:
    records: list[Record] = []
    async with asyncio.timeout(60):
        while len(records) < count:
            records += await consumer.poll(0.2)
    return records


def values(records: list[Record]) -> list[int]:
    return sorted(int(record.value) for record in records)


# -- nothing is missing, nothing twice


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("seed", range(3))
async def test_under_faults_each_record_is_delivered_once(
    broker: Broker, filled: str, group: str | None, seed: int
) -> None:
    faults = at_random(seed, 0.3, REFUSED, LOST, BUSY, UNKNOWN)
    async with connection(broker, faults) as client:
        async with AsyncConsumer(client, filled, group, fetch_bytes=100) as consumer:
            records = await read(consumer, RECORDS)
    assert values(records) == list(range(RECORDS))
    for partition in range(3):
        offsets = [record.offset for record in records if record.partition == partition]
        assert offsets == list(range(20))


async def test_a_response_that_is_lost_is_read_again(broker: Broker, filled: str) -> None:
    faults = script(LOST, LOST, of="/records")
    async with connection(broker, faults) as client:
        async with AsyncConsumer(client, filled, "g", fetch_bytes=100) as consumer:
            assert values(await read(consumer, RECORDS)) == list(range(RECORDS))


@pytest.mark.parametrize("path", ["/records", "/assignments"])
async def test_a_read_that_the_caller_cancels_loses_nothing(
    broker: Broker, filled: str, path: str
) -> None:
    """At /assignments, the records have arrived, and the client asks for its new assignment."""
    faults = script(*([OK] if path == "/assignments" else []), HELD, of=path)
    async with connection(broker, faults) as client, AsyncConsumer(client, filled, "g") as consumer:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consumer.poll(5), 0.1)
        assert values(await read(consumer, RECORDS)) == list(range(RECORDS))


async def test_an_instance_that_has_expired_joins_again(broker: Broker, filled: str) -> None:
    async with connection(broker) as client, AsyncConsumer(client, filled, "g") as consumer:
        first = await read(consumer, RECORDS)
        await consumer.commit()
        await post(broker.http, [{"value": 60 + n, "partition": n % 3} for n in range(6)])
        await broker.consumers.leave("g", consumer._reader.name)  # type: ignore[union-attr]
        more = await read(consumer, 6)
    assert values(first + more) == list(range(66))


async def test_after_an_expiry_failures_are_retried_as_before(broker: Broker, filled: str) -> None:
    faults = {"fault": OK}
    async with connection(broker, lambda _: faults["fault"]) as client:
        async with AsyncConsumer(client, filled, "g") as consumer:
            await read(consumer, RECORDS)
            await consumer.commit()
            await broker.consumers.leave("g", consumer._reader.name)  # type: ignore[union-attr]
            await consumer.poll(0.1)
            await post(broker.http, [{"value": 60 + n, "partition": n % 3} for n in range(6)])
            faults["fault"] = REFUSED
            reading = asyncio.create_task(read(consumer, 6))
            await until(lambda: client.retries > 1)
            faults["fault"] = OK
            assert values(await reading) == list(range(60, 66))


async def test_an_instance_that_expires_while_it_joins(broker: Broker, filled: str) -> None:
    class Expiring(FaultyTransport):
        async def handle_async_request(self, request: Any) -> Any:
            is_first = not any(
                "/subscription" in seen_request.url.path for seen_request in self.seen
            )
            if request.url.path.endswith("/subscription") and is_first:
                await broker.consumers.leave("g", request.url.path.split("/")[-2])
            return await super().handle_async_request(request)

    async with Connection("a:1", transport=Expiring(broker.app), retry_s=60) as client:
        async with AsyncConsumer(client, filled, "g") as consumer:
            assert values(await read(consumer, RECORDS)) == list(range(RECORDS))


async def test_a_commit_after_the_expiry_commits_nothing(broker: Broker, filled: str) -> None:
    async with connection(broker) as client, AsyncConsumer(client, filled, "g") as consumer:
        await read(consumer, RECORDS)
        await broker.consumers.leave("g", consumer._reader.name)  # type: ignore[union-attr]
        assert values(await read(consumer, RECORDS)) == list(range(RECORDS)), "at least once"


async def test_members_come_and_go_and_nothing_is_missing(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        seen: list[Record] = []
        async with AsyncConsumer(client, filled, "g", fetch_bytes=60) as first:
            seen += await first.poll(0.2)
            async with AsyncConsumer(client, filled, "g", fetch_bytes=60) as second:
                # The first member commits partitions that the second one may have by now.
                for _ in range(12):
                    seen += await first.poll(0.05)
                    seen += await second.poll(0.05)
            await post(broker.http, [{"value": 60 + n, "partition": n % 3} for n in range(6)])
            while {int(record.value) for record in seen} != set(range(66)):
                seen += await first.poll(0.2)
        assert committed(broker) == {0: 22, 1: 22, 2: 22}


async def test_a_commit_after_a_rebalance_keeps_the_partitions_of_the_member(
    broker: Broker, filled: str
) -> None:
    """The first member commits records of partitions that the second one has by now (409)."""
    async with connection(broker) as client:
        async with AsyncConsumer(client, filled, "g", auto_commit=False) as first:
            await read(first, RECORDS)
            async with AsyncConsumer(client, filled, "g", auto_commit=False) as second:
                seen = await read(second, 1)
                await first.commit()
                moved = {record.partition for record in seen}
                assert committed(broker) == {p: 20 for p in range(3) if p not in moved}
                assert {key.partition for key in first.positions()} == set(range(3)) - moved
            await post(broker.http, [{"value": 60 + n, "partition": n % 3} for n in range(3)])
            later = await read(first, 3 + 20 * len(moved))
    assert set(values(later)) >= {60, 61, 62}


async def test_a_read_of_an_old_generation_is_read_again(broker: Broker, filled: str) -> None:
    class Rebalancing(FaultyTransport):
        reads = 0

        async def handle_async_request(self, request: Any) -> Any:
            self.reads += request.url.path.endswith("/records")
            if request.url.path.endswith("/records") and self.reads in (2, 4):
                body = {"error_code": 40903, "message": "generation 7 is not that of group 'g'"}
                return httpx.Response(409, json=body, request=request)
            return await super().handle_async_request(request)

    async with Connection("a:1", transport=Rebalancing(broker.app), retry_s=60) as client:
        async with AsyncConsumer(client, filled, "g", fetch_bytes=100) as consumer:
            records = await read(consumer, RECORDS)
    assert values(records) == list(range(RECORDS))


async def test_leaving_frees_the_partitions_at_once(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        async with AsyncConsumer(client, filled, "g") as first:
            await first.poll(0.1)
            assert broker.log.state.members.get("g").members
        assert not broker.log.state.members.get("g").members


async def test_without_a_broker_leaving_is_bounded(broker: Broker, filled: str) -> None:
    faults = {"fault": OK}
    async with connection(broker, lambda _: faults["fault"]) as client:
        consumer = AsyncConsumer(client, filled, "g")
        await read(consumer, RECORDS)
        faults["fault"] = REFUSED
        started_s = asyncio.get_running_loop().time()
        await consumer.close()
        assert asyncio.get_running_loop().time() - started_s < 30


async def test_without_a_broker_poll_fails_after_its_time(broker: Broker, filled: str) -> None:
    faults = {"fault": OK}
    async with connection(broker, lambda _: faults["fault"], retry_s=0.2) as client:
        for group in (None, "g"):
            faults["fault"] = OK
            consumer = AsyncConsumer(client, filled, group)
            await read(consumer, RECORDS)
            faults["fault"] = REFUSED
            with pytest.raises(NotReachable):
                await consumer.poll(60)
            faults["fault"] = OK
            await post(broker.http, [{"value": 1, "partition": 0}])
            assert len(await read(consumer, 1)) == 1, "the consumer goes on"
            await consumer.close()


async def test_an_unknown_topic_is_an_error(broker: Broker) -> None:
    async with connection(broker) as client:
        for group in (None, "g"):
            with pytest.raises(NotFound, match="nowhere"):
                async with AsyncConsumer(client, "nowhere", group):
                    pass


# -- what is committed


async def test_the_next_poll_commits_the_previous_one(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        consumer = AsyncConsumer(client, filled, "g")
        await read(consumer, RECORDS)
        assert committed(broker) == {}
        assert await consumer.poll(0.01) == []
        assert committed(broker) == {0: 20, 1: 20, 2: 20}
        await consumer.close()


async def test_the_iterator_commits_what_the_caller_has_finished(
    broker: Broker, filled: str
) -> None:
    async with connection(broker) as client:
        consumer = AsyncConsumer(client, filled, "g")
        with pytest.raises(ZeroDivisionError):
            await fail_at_tenth(consumer)
        assert sum(committed(broker).values()) == 9
        async with AsyncConsumer(client, filled, "g") as consumer:
            async for _ in consumer:
                break
        assert sum(committed(broker).values()) == 10


async def fail_at_tenth(consumer: AsyncConsumer) -> None:
    async with consumer:
        count = 0
        async for _ in consumer:
            count += 1
            assert 1 / (10 - count)


async def test_without_auto_commit_only_commit_commits(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        async with AsyncConsumer(client, filled, "g", auto_commit=False) as consumer:
            await read(consumer, RECORDS)
            await consumer.poll(0.01)
            assert committed(broker) == {}
            await consumer.commit()
            assert committed(broker) == {0: 20, 1: 20, 2: 20}


async def test_seek_and_positions(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        for group in (None, "g"):
            async with AsyncConsumer(client, filled, group) as consumer:
                await read(consumer, RECORDS)
                await consumer.seek(filled, 1, 18)
                assert consumer.positions()[filled, 1] == 18  # type: ignore[index]
                assert values(await read(consumer, 2)) == [55, 58]
                with pytest.raises(BadArgument, match="t-7"):
                    await consumer.seek(filled, 7, 0)


async def test_positions_choose_partitions_and_offsets(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        async with AsyncConsumer(client, [], positions={(filled, 2): 17}) as consumer:
            assert values(await read(consumer, 3)) == [53, 56, 59]
            consumer.pause(filled, 2)
            await post(broker.http, [{"value": 99, "partition": 2}])
            assert await consumer.poll(0.01) == []
            consumer.resume(filled, 2)
            assert values(await read(consumer, 1)) == [99]
        async with AsyncConsumer(client, [], positions={(filled, 2): 999}) as consumer:
            assert len(await read(consumer, 21)) == 21, "out of range: from the earliest on"
        options = {"auto_offset_reset": "none", "positions": {(filled, 2): 999}}
        async with AsyncConsumer(client, [], **options) as consumer:
            with pytest.raises(Refused, match="999"):
                await consumer.poll(60)


# -- records that do not decode


def odd(value: bytes) -> int:
    number = int(value)
    if number in {7, 58}:
        raise ValueError(f"{number} is odd")
    return number


async def test_stop_names_the_record_and_other_partitions_go_on(
    broker: Broker, filled: str
) -> None:
    async with connection(broker) as client:
        for group in (None, "g"):
            got: list[int] = []
            errors = []
            async with AsyncConsumer(client, filled, group, decode_value=odd) as consumer:
                while len(got) < 42:
                    try:
                        got += [record.value for record in await consumer.poll(0.2)]
                    except UndecodableRecord as error:
                        errors.append(error)
                assert [(e.topic, e.partition, e.offset) for e in errors or [_last(consumer)]] == [
                    (filled, 1, 2)
                ]
                assert sorted(got) == [n for n in range(60) if n % 3 != 1 or n < 7]
                if group:
                    await consumer.commit()
                    assert committed(broker) == {0: 20, 1: 2, 2: 20}
                await consumer.seek(filled, 1, 3)
                await read(consumer, 16)


def _last(consumer: AsyncConsumer) -> UndecodableRecord:
    return consumer._failures[0]


async def test_skip_counts_and_commits(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        options: dict[str, Any] = {"decode_value": odd, "on_error": "skip"}
        async with AsyncConsumer(client, filled, "g", **options) as consumer:
            assert len(await read(consumer, 58)) == 58
            assert (consumer.skipped, consumer.first_skipped) == (2, "t-1@2")
        assert committed(broker) == {0: 20, 1: 20, 2: 20}


async def test_keys_decode_by_their_own_function(broker: Broker) -> None:
    await broker.log.topics.create("k", 1, {})
    async with connection(broker) as client:
        async with AsyncProducer(client) as producer:
            await producer.send("k", b"v", key=b"7")
            await producer.send("k", b"w")
        async with AsyncConsumer(client, "k", decode_key=int) as consumer:
            assert [(record.key, record.value) for record in await read(consumer, 2)] == [
                (7, b"v"),
                (None, b"w"),
            ]


async def test_dead_letters_are_in_their_topic_before_the_commit(
    broker: Broker, filled: str
) -> None:
    await broker.log.topics.create("dead", 1, {})
    async with connection(broker) as client, AsyncProducer(client) as producer:
        dead_letters = DeadLetters(producer, "dead")
        options: dict[str, Any] = {"decode_value": odd, "on_error": dead_letters}
        async with AsyncConsumer(client, filled, "g", **options) as consumer:
            assert len(await read(consumer, 58)) == 58
        async with AsyncConsumer(client, "dead") as consumer:
            records = await read(consumer, 2)
    assert [record.value for record in records] == [b"7", b"58"]
    headers = {header.key: header.value for header in records[0].headers}
    assert headers == {"tidelog.source": b"t-1@2", "tidelog.error": b"ValueError: 7 is odd"}


async def test_an_error_of_the_function_keeps_the_records(broker: Broker, filled: str) -> None:
    tries = []

    def fails_once(record: Record, _: UndecodableRecord) -> None:
        tries.append(record.offset)
        if len(tries) == 1:
            raise OSError("the disk is full")

    async with connection(broker) as client:
        options: dict[str, Any] = {"decode_value": odd, "on_error": fails_once}
        async with AsyncConsumer(client, filled, "g", **options) as consumer:
            with pytest.raises(OSError, match="full"):
                await read(consumer, 58)
            assert sorted(record.value for record in await read(consumer, 58)) == [
                n for n in range(60) if n not in {7, 58}
            ]
    assert committed(broker) == {0: 20, 1: 20, 2: 20}


# -- transactions


async def test_records_and_positions_are_committed_together(broker: Broker, filled: str) -> None:
    await broker.log.topics.create("out", 1, {})
    faults = script(LOST, UNKNOWN, of="/transactions")
    async with connection(broker, faults) as client, AsyncProducer(client) as producer:
        async with AsyncConsumer(client, filled, "g", auto_commit=False) as consumer:
            records = await read(consumer, RECORDS)
            async with producer.transaction() as transaction:
                transaction.send("out", str(sum(values(records))))
                transaction.commit_positions(consumer)
            await consumer.commit()  # nothing is left to commit
        async with AsyncConsumer(client, "out") as consumer:
            assert values(await read(consumer, 1)) == [sum(range(RECORDS))]
    assert committed(broker) == {0: 20, 1: 20, 2: 20}


async def test_a_transaction_of_an_old_generation_is_refused(broker: Broker, filled: str) -> None:
    async with connection(broker) as client, AsyncProducer(client) as producer:
        first = AsyncConsumer(client, filled, "g", auto_commit=False)
        await read(first, RECORDS)
        async with AsyncConsumer(client, filled, "g") as second:
            await second.poll(0.01)
            transaction = producer.transaction()
            transaction.commit_positions(first)
            with pytest.raises(Refused, match="generation"):
                await transaction.commit()
            assert committed(broker) == {}
        await first.close()


async def test_arrow(broker: Broker, filled: str) -> None:
    async with connection(broker) as client:
        async with AsyncConsumer(client, filled, "g", fetch_bytes=100) as consumer:
            rows: list[dict[str, Any]] = []
            while len(rows) < RECORDS:
                table = await consumer.poll_arrow(0.2)
                rows += [] if table is None else table.to_pylist()
            assert await consumer.poll_arrow(0.01) is None
    assert sorted(int(row["value"]) for row in rows) == list(range(RECORDS))
    assert committed(broker) == {0: 20, 1: 20, 2: 20}
