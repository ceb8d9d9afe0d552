"""A round of retention opens the tables in which something is due, and no others."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.conftest import QUIET, append
from tests.service.test_health import MovedClock
from tidelog.service.server.maintenance import maintain_once
from tidelog.service.server.retention_looks import LOOK_S, OTHERS_LOOK_S, RetentionLooks
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import TableInDoubt
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.metered import DELTALAKE, MeteredStore

DAY_MS = 86_400_000


class Round:
    """Rounds of retention of one broker, with the requests of Delta's client."""

    def __init__(self, broker: Broker, clock: MovedClock, folder: Path) -> None:
        self.broker = broker
        self.clock = clock
        self.looks = RetentionLooks(broker)
        self._settings = Settings(store=folder.as_uri())

    async def opened(self) -> bool:
        """Run a round; return whether it opened a table."""
        counters = self.broker.stats().store
        assert counters is not None
        before = sum(count for key, count in counters.requests.items() if key.client == DELTALAKE)
        await maintain_once(
            self._settings,
            self.broker,
            MaintenanceCounters(),
            is_collecting=False,
            looks=self.looks,
        )
        after = sum(count for key, count in counters.requests.items() if key.client == DELTALAKE)
        return after > before

    async def add_segment(self) -> None:
        await append(self.broker, b"v", timestamp_ms=self.clock.now_ms())
        await self.broker.records.seal("t")


@pytest.fixture
async def rounds(tmp_path: Path) -> AsyncIterator[Round]:
    clock, folder = MovedClock(), tmp_path / "store"
    store = MeteredStore(FolderStore(folder), clock)
    broker = await Broker.open(store, QUIET, clock=clock, name="broker-1")
    await broker.topics.create("t", 1, {"retention.ms": str(7 * DAY_MS)})
    yield Round(broker, clock, folder)
    await broker.close()
    await store.close()


async def test_topic_without_segments_has_no_table_to_open(rounds: Round) -> None:
    assert not await rounds.opened()
    await append(rounds.broker, b"v")
    assert not await rounds.opened()


async def test_table_is_opened_once_until_its_oldest_segment_expires(rounds: Round) -> None:
    await rounds.add_segment()
    assert await rounds.opened()
    assert not await rounds.opened()
    await rounds.add_segment()  # the newest: nothing is due earlier
    assert not await rounds.opened()
    rounds.clock.skipped_s = 8 * DAY_MS / 1000
    await rounds.broker.refresh()
    assert await rounds.opened()


async def test_change_of_config_or_log_start_is_a_reason(rounds: Round) -> None:
    await rounds.add_segment()
    await rounds.add_segment()
    assert await rounds.opened()
    assert not await rounds.opened()
    await rounds.broker.topics.alter("t", {"retention.bytes": "1"})
    assert await rounds.opened()
    assert rounds.broker.state.partition("t", 0).log_start_offset > 0, "it was due by its bytes"
    assert await rounds.opened(), "the log start moved"
    assert not await rounds.opened()
    await rounds.add_segment()
    assert await rounds.opened(), "a limit of bytes depends on each segment"


async def test_deleted_records_leave_the_table_after_their_seal(rounds: Round) -> None:
    await rounds.add_segment()
    await append(rounds.broker, b"v", b"w", timestamp_ms=rounds.clock.now_ms())
    await rounds.broker.topics.delete_records("t", 0, 2)
    assert await rounds.opened(), "the log start moved"
    assert await rounds.opened(), "a segment was removed"
    assert not await rounds.opened()
    await rounds.broker.records.seal("t")
    assert await rounds.opened(), "the new segment has a deleted record"


async def test_first_segment_of_topic_without_limit_is_a_reason(rounds: Round) -> None:
    await rounds.broker.topics.alter("t", {"retention.ms": "-1"})
    await rounds.add_segment()
    assert await rounds.opened()
    assert not await rounds.opened()
    rounds.clock.skipped_s = LOOK_S + 1
    await rounds.broker.refresh()
    assert await rounds.opened(), "another program may have changed the table"


async def test_table_in_doubt_is_looked_at_by_each_broker(
    rounds: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rounds.add_segment()
    monkeypatch.setattr(rounds.broker.cluster, "owns", lambda _: False)
    assert not await rounds.opened(), "another broker looks at it"
    topic = rounds.broker.state.topic("t")
    rounds.broker.stored.note_doubt(topic, TableInDoubt(topic.prefix, 1, "why"))
    assert await rounds.opened()
    assert not rounds.broker.stored.doubts(), "its doubt is over"
    assert not await rounds.opened()


async def test_other_brokers_look_where_own_broker_does_not(
    rounds: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds.broker.cluster, "owns", lambda _: False)
    await rounds.add_segment()
    assert not await rounds.opened()
    rounds.clock.skipped_s = OTHERS_LOOK_S + 1
    await rounds.broker.refresh()
    assert await rounds.opened()
    assert not await rounds.opened()


async def test_deleted_topics_are_forgotten(rounds: Round) -> None:
    await rounds.add_segment()
    assert await rounds.opened()
    assert rounds.looks._looks
    await rounds.broker.topics.delete("t")
    assert not await rounds.opened()
    assert not rounds.looks._looks
