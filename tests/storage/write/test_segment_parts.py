"""Uploads in parts that begin while the segment is open (I1, I2, I4, I6, I9, I10).

Brokers are real, on virtual time. Their bounds are small: a part has 10,000 bytes.
"""

import asyncio
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.faults import Call, Fault
from tests.support.maintenance import assert_clean, caring
from tests.support.properties import examples
from tests.support.records import rows
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.garbage import Grace
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.sequencer import TOO_OLD
from tidelog.storage.codec.entry import Draft
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import Chunk
from tidelog.storage.core.errors import CommitUnknown, Throttled, Unavailable
from tidelog.storage.core.log_settings import LogSettings, PaceSettings
from tidelog.storage.core.model import Acks
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.wal import merged_drafts
from tidelog.storage.write.segment_parts import CHUNKS_MAX

PART_BYTES = 10_000
VALUE_BYTES = 1000
PUT_S = 0.02
INTERVAL_S = 10.0
UPLOADS = SETTINGS._replace(
    writer=SETTINGS.writer._replace(codec=""),
    pace=PaceSettings(flush_interval_ms=int(INTERVAL_S * 1000)),
    sequencer=SETTINGS.sequencer._replace(
        handover_bytes_max=2000, alone_bytes_max=20_000, upload_bytes=PART_BYTES
    ),
)


async def begun(
    cluster: Cluster, brokers: int = 3, *, partitions: int = 1, hot_dir: Path | None = None
) -> Broker:
    """A broker whose next flush waits for the interval; it is not the sequencer if it has peers."""
    for _ in range(brokers):
        await cluster.start(hot_dir=hot_dir)
    if brokers > 1:
        await cluster.settled()
    await cluster.logs[0].topics.create("t", partitions, {})
    for log in cluster.logs:
        await log.refresh()
    broker = cluster.others()[0] if brokers > 1 else cluster.logs[0]
    await logs.append(broker, "first")
    return broker


def value(number: int) -> str:
    return f"{number:04}".ljust(VALUE_BYTES, "x")


async def sent(
    broker: Broker, numbers: range, *, acks: Acks = Acks.ALL, partitions: int = 1
) -> "list[asyncio.Task[object]]":
    """A request for each number, in this order."""
    tasks = []
    for number in numbers:
        append = logs.append(broker, value(number), acks=acks, partition=number % partitions)
        tasks.append(asyncio.create_task(append))
        await asyncio.sleep(0)
    return tasks


def uploads(broker: Broker, outcome: str | None = "done") -> int:
    return logs.store_of(broker).count("create", object_keys.DATA, outcome)


def objects_of_tail(broker: Broker) -> list[str]:
    """The object of each chunk in `t`-0, in order, without repetitions."""
    return list(dict.fromkeys(run.object_key for run in broker.state.topic("t").partitions[0].tail))


async def everywhere(cluster: Cluster) -> list[str]:
    """`t`-0, equal at all brokers and in the store, and no damage in it."""
    for log in cluster.logs:
        await log.refresh()
    values = [await logs.read_values(log) for log in cluster.logs]
    async with logs.closing(await logs.opened(cluster.store, logs.COLD)) as cold:
        values.append(await logs.read_values(cold))
    assert all(other_values == values[0] for other_values in values)
    await assert_clean(cluster.store, Grace())
    return values[0]


def on_uploads(fault: Fault | None, times: int = 10**9) -> Callable[[Call], Fault | None]:
    """A plan: so many uploads go wrong."""
    left_faults = [fault] * min(times, 1000)

    def planned(call: Call) -> Fault | None:
        is_upload = call.verb == "create" and call.key.startswith(object_keys.DATA)
        return left_faults.pop() if is_upload and left_faults else None

    return planned


async def test_parts_are_uploaded_while_the_segment_waits() -> None:
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster)
        seq, loop = broker.state.seq, asyncio.get_running_loop()
        requests = await sent(broker, range(25))
        await asyncio.sleep(1.0)
        assert uploads(broker) == 2
        assert broker.state.seq == seq, "no entry yet"
        started_s = loop.time()
        await asyncio.gather(*requests)
        assert loop.time() - started_s > 5.0
        assert broker.state.seq == seq + 1, "one entry has all"
        assert uploads(broker) == 3
        assert len(objects_of_tail(broker)) == 1 + 3
        assert await everywhere(cluster) == ["first", *map(value, range(25))]


async def test_few_bytes_are_uploaded_once() -> None:
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster)
        await asyncio.gather(*await sent(broker, range(9)))
        assert uploads(broker) == 1
        await asyncio.gather(*await sent(broker, range(9, 10)))
        assert uploads(broker) == 1, "small drafts are forwarded"
        assert await everywhere(cluster) == ["first", *map(value, range(10))]


async def test_a_broker_alone_uploads_only_while_a_flush_is_under_way() -> None:
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, 1)
        store = logs.store_of(broker)
        await asyncio.gather(*await sent(broker, range(18)))
        assert uploads(broker) == 0
        gate = store.hold("create", object_keys.wal(broker.state.seq + 1))
        requests = await sent(broker, range(18, 19))
        await gate.reached.wait()
        requests += await sent(broker, range(19, 55))
        await asyncio.sleep(1.0)
        assert uploads(broker) == 3
        gate.opened.set()
        await asyncio.gather(*requests)
        assert uploads(broker) == 3, "the last 6,000 bytes are in the entry"
        assert objects_of_tail(broker)[-1].startswith(object_keys.WAL)
        assert await everywhere(cluster) == ["first", *map(value, range(55))]


async def test_a_large_flush_of_a_broker_alone_goes_in_parts() -> None:
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, 1, partitions=4)
        seq = broker.state.seq
        await asyncio.gather(*await sent(broker, range(40), partitions=4))
        assert broker.state.seq == seq + 1
        assert uploads(broker) == 4
        assert await everywhere(cluster) == ["first", *map(value, range(0, 40, 4))]


async def test_as_many_uploads_at_a_time_as_the_bound() -> None:
    settings = UPLOADS._replace(sequencer=UPLOADS.sequencer._replace(uploads_max=2))

    def latency(call: Call) -> float:
        return 1.0 if call.key.startswith(object_keys.DATA) else PUT_S

    async with Cluster(settings, latency=latency) as cluster:
        broker = await begun(cluster)
        requests = await sent(broker, range(50))
        counts = []
        for _ in range(4):
            await asyncio.sleep(1.0)
            counts.append(uploads(broker))
        assert counts == [2, 4, 5, 5]
        await asyncio.gather(*requests)
        assert await everywhere(cluster) == ["first", *map(value, range(50))]


async def test_marks_of_the_hot_log_stay_in_order(tmp_path: Path) -> None:
    """`apply` skips a mark that comes after a higher one: its record would be lost."""
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, 1, hot_dir=tmp_path)
        gate = logs.store_of(broker).hold("create", object_keys.wal(broker.state.seq + 1))
        requests = await sent(broker, range(1))
        await gate.reached.wait()
        requests += await sent(broker, range(1, 40), acks=Acks.LOCAL)
        await asyncio.gather(*requests[1:])
        await asyncio.sleep(1.0)
        assert uploads(broker) > 1
        gate.opened.set()
        await asyncio.gather(*requests)
        await asyncio.sleep(2 * INTERVAL_S)
        values = await everywhere(cluster)
        assert sorted(values) == sorted(["first", *map(value, range(40))])
        assert len(objects_of_tail(broker)) > 2


@pytest.mark.parametrize("fault", [Fault.ABSENT, Fault.STORED, Fault.LATE, Fault.OWN_412])
async def test_an_upload_without_an_answer_is_repeated(fault: Fault) -> None:
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster)
        logs.store_of(broker).plan = on_uploads(fault, 5)
        await asyncio.gather(*await sent(broker, range(35)))
        assert await everywhere(cluster) == ["first", *map(value, range(35))]


@pytest.mark.parametrize("brokers", [1, 3])
@pytest.mark.parametrize("times", [1, 6])
async def test_a_refused_part_goes_again_or_with_the_entry(brokers: int, times: int) -> None:
    """Six refusals are all attempts for two parts; at the flush, the store takes uploads again."""
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, brokers)
        logs.store_of(broker).plan = on_uploads(Fault.REFUSED, times)
        await asyncio.gather(*await sent(broker, range(35)))
        assert await everywhere(cluster) == ["first", *map(value, range(35))]


async def test_a_broker_alone_does_without_uploads() -> None:
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, 1)
        logs.store_of(broker).plan = on_uploads(Fault.REFUSED)
        await asyncio.gather(*await sent(broker, range(45)))
        assert uploads(broker) == 0
        assert await everywhere(cluster) == ["first", *map(value, range(45))]


async def test_i6_request_that_times_out_in_a_part_is_not_written() -> None:
    writer = UPLOADS.writer._replace(answer_timeout_s=4.0)
    settings = UPLOADS._replace(writer=writer, pace=PaceSettings())
    async with Cluster(settings, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, 1)
        gate = logs.store_of(broker).hold("create", object_keys.wal(broker.state.seq + 1))
        early = await sent(broker, range(1))
        await gate.reached.wait()
        early += await sent(broker, range(1, 13))
        await asyncio.sleep(3.0)
        assert uploads(broker) == 1
        late = await sent(broker, range(13, 25))
        in_flight, *withdrawn = await asyncio.gather(*early, return_exceptions=True)
        assert isinstance(in_flight, CommitUnknown)
        assert all(isinstance(answer, Unavailable) for answer in withdrawn)
        gate.opened.set()
        await asyncio.gather(*late)
        assert await everywhere(cluster) == ["first", value(0), *map(value, range(13, 25))]
        assert broker._log.writer._parts.bytes == 0


async def test_i10_encoded_parts_count_in_the_write_buffer() -> None:
    writer = UPLOADS.writer._replace(buffer_bytes_max=60_000)
    async with Cluster(UPLOADS._replace(writer=writer), latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster)
        requests = await sent(broker, range(100))
        answers = await asyncio.gather(*requests, return_exceptions=True)
        throttled = [answer for answer in answers if isinstance(answer, Throttled)]
        # Each request takes 1,000 bytes and overhead, and 1,000 again while it is in a part.
        assert 20 <= len(answers) - len(throttled) <= 30
        assert broker._log.writer._parts.bytes == 0
        assert broker._log.writer.buffered_bytes == 0
        await asyncio.gather(*await sent(broker, range(100, 110)))
        assert len(await everywhere(cluster)) == 1 + len(answers) - len(throttled) + 10


async def test_many_partitions_make_no_small_chunks() -> None:
    """A part waits until its chunks have `PART_BYTES / CHUNKS_MAX` bytes on average."""
    async with Cluster(UPLOADS, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, partitions=2 * CHUNKS_MAX)
        places = [(number, partition) for number in range(9) for partition in range(3 * CHUNKS_MAX)]
        appends = [
            logs.append(broker, "x" * 10, partition=partition % (2 * CHUNKS_MAX))
            for _, partition in places
        ]
        requests = [asyncio.create_task(append) for append in appends[: 9 * CHUNKS_MAX]]
        await asyncio.sleep(1.0)
        parts = broker._log.writer._parts
        assert not parts._begun, "a part of 11,520 bytes would have 256 chunks"
        requests += [asyncio.create_task(append) for append in appends[9 * CHUNKS_MAX :]]
        await asyncio.sleep(1.0)
        assert [part.size for part in parts._begun] == [20_000]
        await asyncio.gather(*requests)


AGING: LogSettings = UPLOADS._replace(
    wal=UPLOADS.wal._replace(bounds=Bounds(30_000, 120_000)),
    writer=UPLOADS.writer._replace(answer_timeout_s=10_000.0),
    pace=PaceSettings(commits_per_minute=int(60 / INTERVAL_S), commits_burst=1),
)
"""An upload may wait for its entry for a minute; after half of it, it is made again."""


async def test_i9_part_that_became_old_is_uploaded_again() -> None:
    async with Cluster(AGING, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster)
        requests = await sent(broker, range(25))
        await asyncio.sleep(1.0)
        assert uploads(broker) == 2
        cluster.sequencer().clock.skew_ms = 60_000  # elapsed time follows it
        sequencer = cluster.sequencer()
        await sequencer.records.append(
            sequencer.state.topic("t"), [(0, rows("other"))], size=5, is_json=False, linger_s=0.0
        )
        await asyncio.gather(*requests)
        assert uploads(broker) > 3
        async with caring(cluster.store) as care:
            await asyncio.sleep(200.0)
            await collect(care, await plan(care, Grace(wal_ms=120_000)))
        assert sorted(await everywhere(cluster)) == sorted(
            ["first", "other", *map(value, range(25))]
        )


async def test_i9_broker_alone_does_not_commit_an_old_upload() -> None:
    async with Cluster(AGING, latency=lambda _: PUT_S) as cluster:
        broker = await begun(cluster, 1)
        chunk = Chunk("a" * 32, 0, 0, 1, 0, 1, 0, 0, False, "", 1, object_keys.data("aa01", 0))
        await asyncio.sleep(1.0)
        await logs.append(broker, "second")  # elapsed time is above 0 now
        with pytest.raises(Unavailable, match=TOO_OLD):
            await broker._sequencer.commit(Draft([], [chunk], []))


async def test_a_crash_between_parts_leaves_objects_that_are_collected() -> None:
    def latency(call: Call) -> float:
        return 5.0 if call.key.startswith(object_keys.DATA) else PUT_S

    async with Cluster(AGING, latency=latency) as cluster:
        broker = await begun(cluster)
        requests = await sent(broker, range(12))
        await asyncio.sleep(2.0)
        requests += await sent(broker, range(12, 24))  # their part is on its way at the crash
        await asyncio.sleep(2.0)
        assert uploads(broker) == 1
        await cluster.kill(broker)
        for request in requests:
            request.cancel()
        for minute in range(10):
            await logs.append(cluster.logs[0], str(minute))
            async with caring(cluster.store) as care:
                await collect(care, await plan(care, Grace(wal_ms=120_000)))
            await asyncio.sleep(60.0)
        assert [info async for info in cluster.store.list(object_keys.DATA)] == []
        assert await everywhere(cluster) == ["first", *map(str, range(10))]


@given(sizes=st.lists(st.integers(0, 50), max_size=30), part_bytes=st.integers(1, 100))
@examples(200)
def test_parts_have_all_bodies_in_order(sizes: list[int], part_bytes: int) -> None:
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    starts = [*accumulate(sizes, initial=0)]
    chunks = [
        Chunk("t", 0, start, size, 0, 1, 0, 0, False, "", size)
        for start, size in zip(starts, sizes, strict=False)
    ]
    draft = Draft([], chunks, list(bodies))
    objects = merged_drafts.parts(draft, part_bytes)
    assert [body for parts in objects for body in parts] == bodies
    assert all(objects) or not sizes
    assert sum(1 for parts in objects if any(parts)) <= max(round(sum(sizes) / part_bytes), 1)
    largest = max(sum(map(len, parts)) for parts in objects)
    assert largest <= 2 * part_bytes + max(sizes, default=0)
    stored = {f"o{number}": b"".join(parts) for number, parts in enumerate(objects)}
    referred = merged_drafts.refer(draft, list(zip(stored, objects, strict=True)))
    assert not referred.bodies
    for chunk, body in zip(referred.chunks, bodies, strict=True):
        assert stored[chunk.data][chunk.position : chunk.position + chunk.size] == body
