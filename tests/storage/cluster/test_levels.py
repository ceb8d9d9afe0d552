"""A draft that needs a level that the sequencer has not read yet: it is refused (I2)."""

import asyncio
import logging

import msgspec
import pytest

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.maintenance import caring
from tests.support.vloop import run
from tidelog.compaction.upgrade import LevelChange, upgrade
from tidelog.storage.core import levels, object_keys
from tidelog.storage.wal.wal_objects import ClusterIdentity

OLD = levels.KAFKA - 1


def test_a_sequencer_behind_the_level_refuses_drafts_that_need_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        never = SETTINGS._replace(poll_interval_s=10_000.0)
        async with Cluster(never, latency=lambda _: 0.02) as cluster:
            identity = ClusterIdentity(OLD, "c0ffee", 1)
            await cluster.store.create(object_keys.CLUSTER, [msgspec.json.encode(identity)])
            for _ in range(3):
                await cluster.start()
            await cluster.settled()
            first = cluster.sequencer()
            broker_a, broker_b = cluster.others()
            await first.create_topic("t", 1, {})
            async with caring(cluster.store) as store:
                raised = await upgrade(store, is_dry=False, settings=SETTINGS.membership)
            assert raised == LevelChange(OLD, levels.KAFKA)
            await broker_a.wal.refresh()
            await broker_b.wal.refresh()
            assert [log.state.level for log in (first, broker_a, broker_b)] == [
                OLD,
                *[levels.KAFKA] * 2,
            ]
            # While its PUT is in flight, the sequencer does not know yet that it loses the number.
            gate = logs.store_of(first).hold("create", object_keys.wal(first.state.seq + 1))
            record = asyncio.create_task(logs.append(broker_b, "a record"))
            try:
                await gate.reached.wait()
                assert first.state.level == OLD
                reserved = await broker_a.kafka.reserve_producer_id()
                assert first.sequencer.counters.not_taken == 1
                assert broker_a.sequencer.counters.refused == 1
                assert broker_a.sequencer.counters.own_commits == 1
            finally:
                gate.opened.set()
            assert await record, "the draft of another broker keeps its outcome"
            assert first.state.level == levels.KAFKA
            taken_count = first.sequencer.counters.taken
            broker_a.sequencer.announcer.suspects.clear()
            assert await broker_a.kafka.reserve_producer_id() == reserved + 1
            await logs.append(broker_a, "another")
            assert first.sequencer.counters.taken == taken_count + 2
            assert await logs.read_values(broker_b) == ["a record", "another"]

    run(main)
    assert not [line for line in caplog.records if line.levelno >= logging.CRITICAL]
