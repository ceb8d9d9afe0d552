"""A copy of a broker whose drafts the sequencer commits (DESIGN 11): the copy forwards nothing."""

from typing import Any

import pytest

from tests.storage.cluster.test_cloned_machine import three_brokers
from tests.support.cluster import Cluster
from tests.support.logs import append, read_values
from tidelog.storage.core.errors import CommitUnknown, Fenced
from tidelog.storage.state.cluster_state import ClusterState


async def test_i1_a_fenced_broker_forwards_no_draft() -> None:
    """Its number may be taken: `apply` would pass over the draft, and the records would be lost."""

    async with Cluster(latency=lambda _: 0.02) as cluster:
        broker_a, broker_b = await three_brokers(cluster)
        await append(broker_a, "before")
        end = broker_a.state.partition("t", 0).high_watermark
        broker_a.wal.copy_fence.fence(broker_a.state.seq)
        with pytest.raises(CommitUnknown, match="a copy of the process runs"):
            await append(broker_a, "X")
        assert (await broker_b.offsets("t", 0)).high_watermark == end


async def test_a_view_that_passed_over_drafts_of_a_copy_is_fenced() -> None:
    async with Cluster(latency=lambda _: 0.02) as cluster:
        broker_a, _ = await three_brokers(cluster)
        for value in ("before", "after"):
            await append(broker_a, value)
        broker_a.sequencer._number -= 1  # a snapshot of before the second draft
        broker_a.wal._freshness.expire()
        await broker_a.wal.ensure_view()
        with pytest.raises(Fenced):
            broker_a.wal.copy_fence.check_fence()


async def test_a_draft_that_this_process_commits_after_a_refusal_is_no_copys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sequencer refuses the draft, so its broker commits it. The entry is in the WAL, but
    `apply` fails: the view is loaded again, with a draft number that this process has used."""
    real = ClusterState._append
    errors = [MemoryError("a bug")]

    def fails_once(self: ClusterState, *given: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(self, *given)

    async with Cluster(latency=lambda _: 0.02) as cluster:
        broker_a, broker_b = await three_brokers(cluster)
        await append(broker_a, "before")
        for other in cluster.logs:
            other.sequencer._is_closing = other is not broker_a
        monkeypatch.setattr(ClusterState, "_append", fails_once)
        with pytest.raises(CommitUnknown):
            await append(broker_a, "X")
        assert not errors
        broker_a.wal.copy_fence.check_fence()
        await append(broker_a, "after")
        assert await read_values(broker_b) == ["before", "X", "after"]
