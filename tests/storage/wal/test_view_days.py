"""A WAL over days in virtual time: brokers that are suspended in any call, checkpoints, collection.

Nothing is held by hand here. Each call to the store may fail, or take hours, as if its machine had
been suspended in it; meanwhile others commit, checkpoint, and collect what is an hour old. Against
it stands the archive: what was first stored under each number, which is the log by definition (I5).
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest

from tests.support.faults import Call, Seeded
from tests.support.records import TOPIC_ID, fold, tail_values
from tests.support.views import CLUSTER_ID, HOUR_S, one, opened, store_of, with_topic
from tests.support.vloop import run
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import CommitUnknown, StoreRefused, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created
from tidelog.storage.wal.wal_objects import WalSettings

DAYS = 4
BROKERS = 5
SLEEPERS = {2, 3, 4}
SETTINGS = WalSettings(checkpoint_entries=25, checkpoint_interval_s=60.0)


class Archive(MemoryStore):
    """A store whose clock is the loop's, and that remembers what was first under each number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MemoryStore()
        self.second_times: list[str] = []

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        self.now_ms = int(asyncio.get_running_loop().time() * 1000)
        outcome = await super().create(key, parts)
        if outcome is Created.DONE and await self.first.create(key, parts) is Created.EXISTS:
            self.second_times.append(key)
        return outcome

    async def collect(self) -> None:
        """WAL entries that a checkpoint covers, an hour after they were made; the newest stays."""
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        covered = [info.key async for info in self.list(object_keys.CHECKPOINTS)]
        entries = [info async for info in self.list(object_keys.WAL)]
        if covered:
            await self.delete(
                info.key
                for info in entries[:-1]
                if object_keys.seq_of(info.key) <= object_keys.seq_of(covered[-1])  # type: ignore[operator]
                and info.modified_ms < now_ms - HOUR_S * 1000
            )
            await self.delete(covered[:-1])


@pytest.mark.parametrize("seed", range(2))
def test_i1_i5_days_of_suspensions_and_collection_lose_and_double_nothing(seed: int) -> None:
    async def main() -> int:
        draws = random.Random(seed)
        inner = Archive()
        await with_topic(inner)
        end_s = DAYS * 24 * HOUR_S
        loop = asyncio.get_running_loop()
        acked: list[str] = []
        never: list[str] = []
        unknown: list[str] = []

        def awake(_: Call) -> float:
            return draws.uniform(0.01, 1.0)

        def sleepy(call: Call) -> float:
            """Asked once for each way."""
            kind = draws.random() * (1 if call.verb == "create" else 10)
            if kind < 0.05:
                return draws.uniform(2.5 * HOUR_S, 12 * HOUR_S)
            return draws.uniform(600, 3000) if kind < 0.1 else draws.uniform(0.01, 1.0)

        async def collector() -> None:
            while True:
                await asyncio.sleep(600)
                await inner.collect()

        async def broker(number: int) -> None:
            wal = await opened(inner, settings=SETTINGS)
            store = store_of(wal)
            store.plan = Seeded(seed * 10 + number, 0.05)
            store.latency = sleepy if number in SLEEPERS else awake
            store.late_s = draws.choice([1.0, 100.0])
            count = 0
            while loop.time() < end_s:
                await asyncio.sleep(draws.choice([0, 1, 60, 600, 1800]))
                if draws.random() < 0.3:
                    with contextlib.suppress(Unavailable):
                        await wal.refresh()
                    continue
                label = f"{number}-{count}"
                count += 1
                try:
                    (outcome,) = await wal.commit(one(wal, label))
                except (StoreRefused, Unavailable):
                    never.append(label)
                except CommitUnknown:
                    unknown.append(label)
                else:
                    assert outcome.refusal is None
                    acked.append(label)
            store.plan, store.latency = (lambda _: None), None
            await store.land()
            await wal.refresh()
            truth, _ = await fold(inner.first, CLUSTER_ID)
            assert wal.state.seq <= truth.seq
            await wal.close()

        collecting = asyncio.create_task(collector())
        await asyncio.gather(*map(broker, range(BROKERS)))
        collecting.cancel()
        last = await opened(inner)
        truth, _ = await fold(inner.first, CLUSTER_ID)
        assert last.state.encode() == truth.encode()
        assert truth.topics["t"].topic_id == TOPIC_ID
        values = [str(v, "ascii") for v in await tail_values(inner.first, truth, "t", 0) if v]
        assert len(values) == len(set(values))
        assert set(acked) <= set(values)
        assert not set(never) & set(values)
        assert len(acked) > 200
        assert len([info async for info in inner.list(object_keys.WAL)]) < truth.seq / 2
        return len(inner.second_times)

    # The schedule is effective: suspended brokers created collected numbers again, without harm.
    assert run(main) > 0
