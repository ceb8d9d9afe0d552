"""A view that is loaded again: what a broker derived from the old view is dropped."""

from tests.support.clock import ManualClock
from tests.support.logs import append, closing, opened, read_table, read_values
from tests.support.views import AGE_S
from tidelog.storage.core.actions import LoseRecords
from tidelog.storage.store.memory import MemoryStore


async def test_i1_records_lost_in_skipped_entries_are_not_served_from_the_tail_cache() -> None:
    """An operator gives the records up while this broker is suspended. The broker loads the state
    after that, and applies no entry that has the action."""

    inner = MemoryStore()
    log, other = await opened(inner), await opened(inner)
    async with closing(log, other):
        await log.create_topic("t", 1, {})
        await append(log, "a", "b")
        await append(log, "c")
        assert await read_values(log) == ["a", "b", "c"]
        assert log.tail.bytes > 0
        await other.refresh()
        await other.submit(LoseRecords(other.state.topic("t").topic_id, 0, 0, 2))
        await other.wal.checkpoint()
        assert isinstance(log.clock, ManualClock)
        log.clock.advance(AGE_S + 1)
        for broker in (other, log):
            table = await read_table(broker)
            assert table.column("offset").to_pylist() == [2]
            assert table.column("value").to_pylist() == [b"c"]
