"""A draft whose outcome its broker cannot know any more is not committed a second time (I6)."""

import asyncio

import pytest

from tests.storage.cluster.test_sequencer import three
from tests.support import logs
from tests.support.cluster import SETTINGS, Broken, Cluster
from tidelog.storage.cluster.sequencer import SKIPPED
from tidelog.storage.core.errors import CommitUnknown
from tidelog.storage.state.deduplication import ORIGIN_WINDOW_MS

PATIENT = SETTINGS._replace(
    writer=SETTINGS.writer._replace(answer_timeout_s=1e6),
    membership=SETTINGS.membership._replace(heartbeat_interval_s=20.0, member_timeout_s=60.0),
    poll_interval_s=60.0,
)
"""A caller waits for the outcome, however long it takes. An idle hour is a few events."""


async def test_i6_a_draft_in_doubt_after_its_mark_was_dropped_is_not_committed_again() -> None:
    """The sequencer commits the draft, and its answer is lost. The draft's broker is cut off until
    the state has dropped the draft's mark, so `apply` would append a second copy."""

    async with Cluster(PATIENT, latency=lambda _: 0.02) as cluster:
        first, broker_a, broker_b = await three(cluster)
        cluster.net.plan = lambda verb, to: (
            Broken.ANSWER_LOST if verb == "hand_over" else Broken.LOST
        )
        sent = asyncio.create_task(logs.append(broker_a, "in doubt"))
        while not broker_a.sequencer.counters.handed_over:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)
        logs.store_of(broker_a).freeze()
        await asyncio.sleep(0.2)
        await first.wal.refresh()
        assert first.state.origins.number(broker_a.membership.me.id) == 1
        count = ORIGIN_WINDOW_MS // 300_000 + 1
        for number in range(count):
            await asyncio.sleep(300.0)
            await logs.append(first, str(number))
        cluster.net.plan = lambda verb, to: None
        await logs.append(broker_b, "forwarded")  # `see` drops old marks
        assert first.state.origins.number(broker_a.membership.me.id) == 0
        await first.wal.checkpoint()
        logs.store_of(broker_a).thaw()
        with pytest.raises(CommitUnknown, match=SKIPPED):
            await sent
        values = await logs.read_values(broker_b)
        assert values == ["in doubt", *map(str, range(count)), "forwarded"]
