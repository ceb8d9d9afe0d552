"""An exception in `apply`, or in a subscriber: no caller gets a state that is half applied."""

import asyncio

import pytest

from tests.support.faults import Fault
from tests.support.logs import append, closing, opened, read_values, store_of, with_topic
from tests.support.records import rows
from tidelog.storage.cluster.sequencer import Sequencer
from tidelog.storage.core.errors import CommitUnknown, Unavailable
from tidelog.storage.log import Log
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore


class Panic(BaseException):
    """A panic of a Rust library comes to Python as such an exception."""


def fail_once(patch: pytest.MonkeyPatch, owner: type, name: str, error: type[BaseException]):
    real, left = getattr(owner, name), [error("once")]

    def call(*given):
        if left:
            raise left.pop()
        return real(*given)

    patch.setattr(owner, name, call)


@pytest.mark.parametrize("error", [MemoryError, Panic])
async def test_i3_another_brokers_entry_that_fails_to_apply_is_read_again(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    log_a, log_b = await opened(inner), await opened(inner)
    async with closing(log_a, log_b):
        await log_a.create_topic("t", 1, {})
        await log_b.refresh()
        await append(log_a, "a")
        fail_once(monkeypatch, ClusterState, "_append", error)
        with pytest.raises(Unavailable):
            await log_b.refresh()
        assert log_b.state.encode() == log_a.state.encode()
        assert await read_values(log_b) == ["a"]
        await append(log_b, "b")
        assert await read_values(log_a) == ["a", "b"]


async def test_i3_a_half_applied_state_is_not_served_while_the_store_is_dark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        fail_once(monkeypatch, ClusterState, "_append", RuntimeError)
        store_of(log).plan = lambda call: None if call.verb == "create" else Fault.UNAVAILABLE
        topic = log.state.topic("t")
        with pytest.raises(CommitUnknown):
            await log.append(topic, [(0, rows("a"))], size=1, is_json=False)
        with pytest.raises(Unavailable):
            _ = log.state
        store_of(log).plan = lambda call: None
        await asyncio.sleep(2 * log.settings.poll_interval_s)
        assert await read_values(log) == ["a"]


@pytest.mark.parametrize("owner", [Log, Sequencer])
async def test_a_commit_is_acked_although_a_subscriber_fails(
    monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    """Its entry is applied; the view is loaded again for the subscriber's sake."""

    async with closing(await with_topic(MemoryStore())) as log:
        loads = log.wal.counters.void
        fail_once(monkeypatch, owner, "on_applied", RuntimeError)
        assert await append(log, "a") is not None
        await log.refresh()
        assert log.wal.counters.void > loads
        assert await read_values(log) == ["a"]
