"""Processes that end anywhere: what was acked is there, what is begun is finished by others.

A killed broker's calls have no effect any more; those that reached the store have had theirs (I1,
I4, I7). The store is in memory, time is virtual, every schedule is seeded.
"""

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.faults import Call, Fault, Script, Seeded
from tests.support.hotlogs import let_go, names
from tests.support.logs import (
    CHECKPOINTING,
    COLD,
    MANUAL,
    append,
    closing,
    kill,
    made,
    opened,
    read_values,
    store_of,
)
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import CommitUnknown, Unavailable
from tidelog.storage.core.model import Acks, SegmentFile
from tidelog.storage.log import Log
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import ManifestVersion, SegmentIndex, Table
from tidelog.storage.write import hot_log_file
from tidelog.storage.write.hot_log_file import Recovered


async def with_topic(inner: MemoryStore, partitions: int = 2) -> Log:
    log = await opened(inner)
    await log.create_topic("t", partitions, {})
    return log


# -- the steps of a seal


class StoppingTable:
    """A manifest whose next `add` never returns: it stops before its commit, or after."""

    def __init__(self, inner: Table, *, is_after: bool) -> None:
        self._inner = inner
        self._is_after = is_after
        self.reached = asyncio.Event()

    @property
    def version(self) -> int:
        return self._inner.version

    async def segments(self, partition: int) -> SegmentIndex:
        return await self._inner.segments(partition)

    async def newest(self) -> ManifestVersion:
        return await self._inner.newest()

    async def refresh(self) -> None:
        await self._inner.refresh()

    async def transaction_version(self, app_id: str) -> int | None:
        return await self._inner.transaction_version(app_id)

    async def transaction_versions(self, app_ids: Sequence[str]) -> Mapping[str, int | None]:
        return await self._inner.transaction_versions(app_ids)

    async def add(self, files: Sequence[SegmentFile], transactions: Mapping[str, int]) -> None:
        if self._is_after:
            await self._inner.add(files, transactions)
        self.reached.set()
        await asyncio.Event().wait()


async def hold(log: Log, step: str, seq: int) -> asyncio.Event:
    """Stop the log's seal at this step; the event is set when it gets there."""
    topic = log.state.topic("t")
    when = "after" in step
    if "commit" in step:
        table = StoppingTable(await log.tables.of(topic), is_after=when)
        log.tables._open[topic.topic_id].table = table
        return table.reached
    if "entry" in step:
        return store_of(log).hold("create", object_keys.wal(seq), is_after=when).reached
    reached = asyncio.Event()
    count = 1 if "first" in step else 2

    def plan(call: Call) -> Fault | None:
        nonlocal count
        if call.verb == "create" and call.key.startswith(object_keys.TOPICS):
            count -= 1
            if count == 0:
                store_of(log).hold("create", call.key, is_after=when)
                reached.set()
        return None

    store_of(log).plan = plan
    return reached


STEPS = [
    "before the first upload",
    "after the first upload",
    "before the second upload",
    "after the second upload",
    "before the commit",
    "after the commit",
    "before the entry",
    "after the entry",
]


@pytest.mark.parametrize("step", STEPS)
async def test_i7_next_seal_finishes_one_that_crashed_at_any_step(step: str) -> None:
    inner = MemoryStore()
    log = await with_topic(inner)
    model: list[list[str]] = [[], []]
    for i in range(4):
        for number in (0, 1):
            await append(log, f"{number}-{i}", partition=number)
            model[number].append(f"{number}-{i}")
        if i == 1:
            await log.seal("t")
    reached = await hold(log, step, log.state.seq + 1)
    seal = asyncio.create_task(log.seal("t"))
    await reached.wait()
    await asyncio.sleep(0.1)
    assert not seal.done()
    # Readers do not mind while it stands there, nor when it is dead.
    reader = await opened(inner, COLD)
    for number in (0, 1):
        assert await read_values(reader, partition=number) == model[number]
    await kill(log)
    seal.cancel()
    await asyncio.gather(seal, return_exceptions=True)
    heir = await opened(inner, COLD)
    async with closing(reader, heir):
        for number in (0, 1):
            assert await read_values(heir, partition=number) == model[number]
        await append(heir, "late", partition=1)
        model[1].append("late")
        await heir.seal("t")
        # A table that was ahead is caught up with first; what is left goes the next time.
        await heir.seal("t")
        for number in (0, 1):
            partition = heir.state.partition("t", number)
            assert (partition.sealed_end, partition.tail) == (partition.high_watermark, [])
            for broker in (heir, reader):
                await broker.wal.refresh()
                assert await read_values(broker, partition=number) == model[number]
            table = await heir.tables.of(heir.state.topic("t"))
            files = list(await table.segments(number))
            assert sum(file.rows for file in files) == len(model[number])


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ABSENT, Fault.STORED, Fault.OWN_412])
@pytest.mark.parametrize("what", [object_keys.TOPICS, object_keys.WAL])
async def test_i7_a_seal_on_a_store_that_fails_is_done_or_tried_again(
    inner: MemoryStore, what: str, fault: Fault
) -> None:
    async with closing(await with_topic(inner)) as log:
        await append(log, "a", "b")
        store_of(log).plan = Script("create", what, [fault])
        if fault is Fault.REFUSED:
            with pytest.raises(Unavailable):
                await log.seal("t")
            assert await read_values(log) == ["a", "b"]
        await log.seal("t")
        assert log.state.partition("t", 0).tail == []
        async with closing(await opened(inner, COLD)) as cold:
            assert await read_values(cold) == ["a", "b"]


# -- whole processes


@pytest.mark.parametrize("seed", range(4))
async def test_i1_killed_at_any_point_a_log_opens_again_as_it_was(seed: int) -> None:
    """Writers, sealers and checkpoints on brokers that are killed one after the other; whatever was
    acked keeps its offset, nothing is there twice, and what was not acked is there once or not."""

    draws = random.Random(seed)
    inner = MemoryStore()
    await (await with_topic(inner)).close()
    acked: dict[tuple[int, int], str] = {}
    tried: list[str] = []
    for life in range(6):
        log = await opened(inner, draws.choice([CHECKPOINTING, COLD]))
        store = store_of(log)
        store.plan = Seeded(seed * 10 + life, 0.1)
        store.latency = lambda _: draws.choice([0.001, 0.02, 0.1])
        end_s = asyncio.get_running_loop().time() + draws.uniform(0.1, 3.0)

        async def write(client: int, log: Log = log, end_s: float = end_s) -> None:
            count = 0
            while asyncio.get_running_loop().time() < end_s:
                number = draws.randrange(2)
                label = f"{asyncio.get_running_loop().time():.3f}/{client}/{count}"
                count += 1
                tried.append(label)
                try:
                    placed = await append(log, label, partition=number)
                except Unavailable:
                    tried.remove(label)
                    continue
                except CommitUnknown:
                    continue
                assert placed is not None
                acked[number, placed[0].base_offset] = label

        async def seal(log: Log = log) -> None:
            while True:
                await asyncio.sleep(draws.uniform(0.1, 0.7))
                with contextlib.suppress(Unavailable, CommitUnknown):
                    await log.seal("t")

        tasks = [asyncio.create_task(write(client)) for client in range(3)]
        tasks.append(asyncio.create_task(seal()))
        await asyncio.sleep(end_s - asyncio.get_running_loop().time())
        await kill(log)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError), ended
        await store.land()
    first, second = await opened(inner), await opened(inner, COLD)
    async with closing(first, second):
        assert first.state.encode() == second.state.encode()
        values_of_partitions = [await read_values(second, partition=number) for number in (0, 1)]
        assert [
            await read_values(first, partition=number) for number in (0, 1)
        ] == values_of_partitions
        for (number, offset), label in acked.items():
            assert values_of_partitions[number][offset] == label
        everything = [*values_of_partitions[0], *values_of_partitions[1]]
        assert len(everything) == len(set(everything))
        assert set(everything) <= set(tried)
        await first.seal("t")
        await first.seal("t")
        await second.wal.refresh()
        assert [
            await read_values(second, partition=number) for number in (0, 1)
        ] == values_of_partitions
    assert len(acked) > 20


@pytest.mark.parametrize("seed", range(3))
async def test_i4_acks_1_records_are_stored_once_through_any_crash(
    inner: MemoryStore, seed: int, tmp_path: Path
) -> None:
    draws = random.Random(seed)
    await (await with_topic(inner)).close()
    acked: list[str] = []
    for life in range(5):
        log = await opened(inner, hot_dir=tmp_path)
        store = store_of(log)
        store.plan = Seeded(seed * 10 + life, 0.3)
        store.latency = lambda _: draws.choice([0.001, 0.05])
        for i in range(draws.randrange(1, 40)):
            label = f"{life}-{i}"
            await append(log, label, acks=Acks.LOCAL)
            acked.append(label)
            await asyncio.sleep(draws.choice([0, 0, 0, 0.03]))
        await kill(log)
        if draws.random() < 0.3:
            # The next broker crashes too, while it recovers.
            heir = await asyncio.wait_for(opened(inner, hot_dir=tmp_path), 60)
            await kill(heir)
    async with closing(await opened(inner, hot_dir=tmp_path)) as log:
        assert await read_values(log) == acked
    assert names(tmp_path, "*") == []


async def test_i4_a_recovery_that_is_killed_at_every_step_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovered_logs: list[Recovered] = []
    real = hot_log_file.recover

    def recover(directory: Path, cluster_id: str) -> list[Recovered]:
        # The system releases the locks of a crashed process; this one is simulated.
        let_go(recovered_logs)
        recovered_logs[:] = real(directory, cluster_id)
        return recovered_logs

    monkeypatch.setattr("tidelog.storage.write.hot_log_file.recover", recover)

    inner = MemoryStore()
    log = await with_topic(inner)
    await log.close()
    log = await opened(inner, hot_dir=tmp_path)
    gate = store_of(log).hold("create", object_keys.wal(log.state.seq + 1))
    for i in range(5):
        await append(log, str(i), acks=Acks.LOCAL)
    await gate.reached.wait()
    await kill(log)
    seq = ClusterState.decode((await checkpointed(inner)), "x").seq
    for step in range(4):  # before and after its commit, then before and after it is known
        await stopped_recovery(inner, tmp_path, seq + 1 + step // 2, is_after=step % 2 == 1)
    assert names(tmp_path) != []
    async with closing(await opened(inner, hot_dir=tmp_path)) as log:
        assert await read_values(log) == ["0", "1", "2", "3", "4"]


async def checkpointed(inner: MemoryStore) -> bytes:
    """The state of the WAL as it is."""
    async with closing(await opened(inner, MANUAL)) as log:
        return log.state.encode()


async def stopped_recovery(inner: MemoryStore, hot_dir: Path, seq: int, *, is_after: bool) -> None:
    """A process that crashes before or after the PUT of that entry, or after its recovery."""
    log = made(inner, hot_dir=hot_dir)
    gate = store_of(log).hold("create", object_keys.wal(seq), is_after=is_after)
    opening = asyncio.create_task(log.open("c0ffee"))
    reached = asyncio.create_task(gate.reached.wait())
    await asyncio.wait([opening, reached], return_when=asyncio.FIRST_COMPLETED)
    store_of(log).kill()
    for task in (opening, reached):
        task.cancel()
    await asyncio.gather(opening, reached, return_exceptions=True)
    if not opening.cancelled():
        await kill(opening.result())
